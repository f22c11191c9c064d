"""Calls in the own syntax of a family: whatever arguments a schema allows are written, allowed by the grammar
and read back as they were, and what the grammar allows has arguments by the schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import pytest
from call_texts import NOTATIONS
from grammar_models import MODELS, random_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import parts, read

from cluster.text.grammar_orders import OutputConstraint
from cluster.text.grammar_text import grammar_text
from cluster.text.output_parsers.callable_tools import CallableTool, ToolSchemaError
from cluster.text.output_parsers.choose import ParserNeeds
from cluster.text.output_parsers.tool_grammar import CallNotation, CallRules

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"$ref": "#/$defs/Count"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Count"}, "maxItems": 3},
        "shape": {"enum": ["round", 'a "b"', 2, True, None]},
        "flag": {"type": "boolean"},
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "Name": {"type": "string"}, "in": {"type": "null"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "tree": {"$ref": "#/$defs/Tree"},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {
        "Count": {"type": "integer", "minimum": 1},
        "Tree": {
            "type": "object",
            "properties": {"child": {"$ref": "#/$defs/Tree"}, "leaf": {"type": ["boolean", "string"]}},
            "additionalProperties": False,
        },
    },
}
TOOL = CallableTool("f", json.dumps(SCHEMA), True)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    """A value as Gemma 3 writes it: a word of Python, or JSON."""
    return repr(value) if value is None or isinstance(value, bool) else _json(value)


def _braces(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            members = sorted(value.items(), key=lambda it: it[0].lower())
            return f"{{{','.join(f'{key}:{_braces(it)}' for key, it in members)}}}"
        case list():
            return f"[{','.join(map(_braces, value))}]"
        case None:
            return "None"
        case _:
            return json.dumps(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _tags(arguments: Mapping[str, Any]) -> str:
    return "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )


def _keywords(arguments: Mapping[str, Any], write: Callable[[Any], str]) -> str:
    return ", ".join(f"{key}={write(value)}" for key, value in arguments.items())


WRITERS: dict[CallNotation, Callable[[Mapping[str, Any]], str]] = {
    "glm4": lambda arguments: f"f\n{_json(arguments)}",
    "glm45": lambda arguments: f"<tool_call>f\n{_tags(arguments)}</tool_call>",
    "olmo3": lambda arguments: f"<function_calls>f({_keywords(arguments, _json)})</function_calls>",
    "gemma3": lambda arguments: f"```tool_code\nf({_keywords(arguments, _python)})\n```",
    "gemma4": lambda arguments: f"<|tool_call>call:f{_braces(arguments)}<tool_call|>",
}
# Texts of what the notations give a meaning.
_PIECES = ['"', "'", "\\", "\n", "{", "}", "[", "<", "|", "<|", ",", ":", "(", ")", "=", " ", "```", "</arg"]
TEXTS = st.lists(st.sampled_from([*_PIECES, "a", "é", "😀", "null", "True", "1"]), max_size=6).map("".join)
COUNTS = st.integers(1, 2**53 - 1)
LEAVES = st.booleans() | TEXTS.filter(lambda it: it.strip() != "True")
TREES: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.fixed_dictionaries({}, optional={"leaf": LEAVES}),
    lambda inner: st.fixed_dictionaries({"child": inner}),
    max_leaves=3,
)


def _in_order(values: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in properties if name in values}


OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    # A text that is also the other type is read as that, where texts have no quotation marks.
    "maybe": st.none() | TEXTS.filter(lambda it: it.strip() not in ("null", "None")),
    "list": st.lists(COUNTS, max_size=3),
    "shape": st.sampled_from(["round", 'a "b"', 2, True, None]),
    "flag": st.booleans(),
    "point": st.fixed_dictionaries(
        {"x": st.floats(allow_nan=False, allow_infinity=False)},
        optional={"Name": TEXTS, "in": st.none()},
    ).map(lambda it: _in_order(it, SCHEMA["properties"]["point"]["properties"])),
    "tree": TREES,
}
ARGUMENTS = st.fixed_dictionaries({"text": TEXTS, "count": COUNTS}, optional=OPTIONAL)


def required(notation: CallNotation, *tools: CallableTool) -> OutputConstraint:
    return OutputConstraint("anything", calls=CallRules(notation, tools or (TOOL,), True, False))


def read_back(notation: CallNotation, text: str, pieces: list[str] | None = None) -> Any:
    parser = NOTATIONS[notation].make(
        ParserNeeds({"f": TOOL.schema_json}, False), "r", 0, opens_reasoning=False
    )
    assert parser is not None
    content, _, calls = parts(read(parser, pieces or [text]))
    assert content == "", text
    return calls


@pytest.mark.parametrize("markers", MODELS)
@pytest.mark.parametrize("notation", WRITERS)
@settings(max_examples=25, deadline=None)
@given(arguments=ARGUMENTS)
def test_arguments_are_allowed_and_read_back(
    notation: CallNotation, markers: str, arguments: dict[str, Any]
) -> None:
    text = WRITERS[notation](_in_order(arguments, SCHEMA["properties"]))
    assert MODELS[markers].takes(required(notation), text), text
    assert read_back(notation, text) == [("f", arguments)], text
    assert read_back(notation, text, list(text)) == [("f", arguments)], text


@pytest.mark.parametrize("markers", MODELS)
@pytest.mark.parametrize("notation", WRITERS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_allowed_has_arguments_by_the_schema(notation: CallNotation, markers: str, seed: int) -> None:
    text = random_answer(MODELS[markers], required(notation), random.Random(seed), "")
    if text is None:
        return
    ((name, arguments),) = read_back(notation, text)
    assert name == "f", text
    jsonschema.validate(arguments, SCHEMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", 0),
        ("list", ["a"]),
        ("list", [1, 2, 3, 4]),
        ("shape", "square"),
        ("flag", 1),
        ("point", {}),
        ("point", {"x": 1, "z": 1}),
        ("point", {"x": "1"}),
        ("tree", {"child": {"leaf": 1}}),
        ("other", 1),
    ],
)
@pytest.mark.parametrize("notation", WRITERS)
def test_arguments_against_the_schema_are_not_allowed(notation: CallNotation, key: str, value: Any) -> None:
    right = {"text": "a", "count": 1}
    found = {**right, key: value}
    order = required(notation)
    text = WRITERS[notation](_in_order(found, {**SCHEMA["properties"], key: None}))
    assert MODELS["text"].takes(order, WRITERS[notation](right))
    assert not MODELS["text"].takes(order, text), text
    assert not MODELS["text"].takes(order, WRITERS[notation]({"text": "a"}))


def test_strings_of_python_may_have_either_quotation_mark() -> None:
    text = r"""```tool_code
f(text='it\'s "so"\n', count=2)
```"""
    assert MODELS["text"].takes(required("gemma3"), text)
    assert not MODELS["text"].takes(required("olmo3"), text.replace("```tool_code", "<function_calls>"))
    assert read_back("gemma3", text) == [("f", {"text": 'it\'s "so"\n', "count": 2})]


def test_a_key_that_braces_would_end_stands_in_quotation_marks() -> None:
    properties = {key: {"type": "integer"} for key in ("a:b", "c d", " e", "", "f")}
    tool = CallableTool("f", json.dumps({"type": "object", "properties": properties}))
    text = '<|tool_call>call:f{<|"|><|"|>:1,<|"|> e<|"|>:2,<|"|>a:b<|"|>:3,c d:4,f:5}<tool_call|>'
    for model in MODELS.values():
        assert model.takes(required("gemma4", tool), text)
    assert read_back("gemma4", text) == [("f", {"": 1, " e": 2, "a:b": 3, "c d": 4, "f": 5})]


@pytest.mark.parametrize("notation", WRITERS)
def test_as_many_optional_arguments_as_a_schema_may_have_are_followed(notation: CallNotation) -> None:
    names = [f"key_{number:03}" for number in range(480)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    order = required(notation, CallableTool("f", json.dumps(schema)))
    for chosen in ([], names[:1], names[-1:], names[::100]):
        text = WRITERS[notation](dict.fromkeys(chosen, 1))
        assert MODELS["text"].takes(order, text), text


UNHELD: list[tuple[CallNotation, dict[str, Any], str]] = [
    ("olmo3", {"a-b": {}}, "'a-b' is none of an argument.*letters, digits"),
    ("gemma3", {"a b": {}}, "'a b' is none of an argument"),
    ("glm45", {" a": {}}, "' a' cannot stand in a tag"),
    ("glm45", {"a": {"const": "x</arg_value>"}}, "the tag that ends it"),
    ("gemma4", {"a": {"type": "string", "pattern": "x"}}, "pattern: not supported"),
    ("gemma4", {"a": {"enum": ['x<|"|>']}}, "ends a text"),
    ("gemma4", {"a": {"$ref": "#/$defs/None"}}, "stands for no schema"),
    ("gemma4", {"a": {"$ref": "#", "maxProperties": 2}}, "maxProperties: not supported"),
    ("gemma4", {"a": {"type": "object", "anyOf": [{"required": ["x"]}]}}, "anyOf beside type"),
    ("gemma4", {"a": {"oneOf": [{"type": "integer"}, {"type": ["null", "integer"]}]}}, "overlapping"),
    ("gemma4", {"a": {"allOf": [{}, {}]}}, "allOf: not supported"),
    ("gemma4", {"a": {"type": "array", "minItems": "1"}}, "minItems and maxItems are integers"),
    ("gemma4", {"a": {"type": "text"}}, "the type 'text' is unknown"),
]


@pytest.mark.parametrize(("notation", "properties", "reason"), UNHELD)
def test_what_a_notation_cannot_hold_is_refused_of_a_strict_tool(
    notation: CallNotation, properties: dict[str, Any], reason: str
) -> None:
    tool = CallableTool("f", json.dumps({"type": "object", "properties": properties}), True)
    with pytest.raises(ToolSchemaError, match=reason):
        grammar_text(required(notation, tool), lambda marker: None)


@pytest.mark.parametrize("notation", [it for it in WRITERS if it != "glm4"])
def test_demands_on_all_arguments_are_refused_of_a_strict_tool(notation: CallNotation) -> None:
    schema = json.dumps({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]})
    with pytest.raises(ToolSchemaError, match="anyOf of all arguments"):
        grammar_text(required(notation, CallableTool("f", schema, True)), lambda marker: None)
    assert MODELS["text"].takes(required(notation, CallableTool("f", schema)), WRITERS[notation]({}))


LENIENT: dict[str, tuple[dict[str, Any], str, bool]] = {
    "a pattern": ({"type": "string", "pattern": "x"}, '<|"|>y<|"|>', True),
    "alternatives that narrow": ({"type": "integer", "anyOf": [{"minimum": 3}]}, "1", True),
    "one of all": ({"allOf": [{"type": "integer"}], "maximum": 3}, "4", False),
    "no type but properties": ({"properties": {"b": {"type": "integer"}}}, "{b:1}", True),
    "no type but items": ({"items": {"type": "integer"}, "minItems": 2}, "[1]", False),
    "no items": ({"type": "array", "maxItems": 0}, "[]", True),
    "a required name": ({"type": "object", "required": ["b"]}, "{}", False),
    "a listed value": ({"enum": [{"b": [1, "c"]}]}, '{b:[1,<|"|>c<|"|>]}', True),
    "a map": ({"type": "object", "additionalProperties": {"type": "integer"}}, "{b:1,c:2}", True),
    "a map of others": ({"type": "object", "additionalProperties": {"type": "integer"}}, "{b:None}", False),
}


@pytest.mark.parametrize("what", LENIENT)
def test_values_in_braces_are_those_of_the_schema(what: str) -> None:
    schema, value, is_right = LENIENT[what]
    tool = CallableTool("f", json.dumps({"type": "object", "properties": {"a": schema}}))
    text = f"<|tool_call>call:f{{a:{value}}}<tool_call|>"
    assert MODELS["text"].takes(required("gemma4", tool), text) == is_right
