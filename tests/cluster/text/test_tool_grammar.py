"""Grammars of answers with tool calls: they allow each family's calls of the given tools, what they allow is
read back as such calls, and schemas that make none are refused by name."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from call_texts import FIND, FIND_ALL, NOTATIONS, TEXTS, WRONG
from gateway_harness import write_model
from grammar_models import END, MODELS, VOCAB, allowed_tokens, random_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from msgspec import structs
from slow_cases import examples, slow_rows_but

from cluster.errors import InvalidRequestError, InvalidToolsError, bad_fields, to_grpc_status
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.chat_checks import MAX_JSON_BYTES, MAX_TOOLS, chat_violations
from cluster.text.constraints import output_constraint
from cluster.text.grammar_orders import OutputConstraint
from cluster.text.grammar_text import grammar_text
from cluster.text.grammars import GrammarCompiler, Vocabulary
from cluster.text.output_parsers.callable_tools import CallableTool
from cluster.text.output_parsers.choose import OutputParsers, ParserNeeds
from cluster.text.output_parsers.pieces import Content, ToolCallDelta
from cluster.text.output_parsers.tool_grammar import CallNotation, CallRules, ReasoningRules
from cluster.text.tag_grammar import Tag
from workers.grammar_limits import parser_limits

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", 'a"}'], "type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (CallableTool("find", json.dumps(SCHEMA), True), CallableTool("find_all"))
THINKS = ReasoningRules("<think>", "</think>", is_open=False)
IS_THINKING = ReasoningRules("<think>", "</think>", is_open=True)


def rules(notation: CallNotation, mode: str, tools: tuple[CallableTool, ...] = TOOLS) -> CallRules:
    return CallRules(notation, tools, is_required=mode == "required", allows_several=mode != "one")


# Markers that are tokens in every mode, and markers that are text in one.
@pytest.mark.parametrize(
    ("mode", "markers"),
    slow_rows_but(
        itertools.product(["required", "text", "one"], MODELS),
        *(("required", "tokens"), ("text", "tokens"), ("one", "tokens"), ("text", "text")),
    ),
)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_calls_of_each_family_are_allowed_and_others_are_not(
    notation: CallNotation, mode: str, markers: str
) -> None:
    model = MODELS[markers]
    for reasoning, before in (
        (None, ""),
        (THINKS, ""),
        (THINKS, "<think>\nso I\n</think>\n\n"),
        (IS_THINKING, "so I\n</think>\n\n"),
    ):
        order = OutputConstraint("anything", calls=rules(notation, mode), reasoning=reasoning)
        for text, modes in TEXTS[notation]:
            assert model.takes(order, before + text) == (mode in modes.split()), before + text


@pytest.mark.parametrize("notation", ["hermes", "mistral", "mistral_args", "qwen3_coder"])
def test_a_marker_in_other_tokens_than_its_own_begins_a_call_too(notation: CallNotation) -> None:
    model = MODELS["tokens"]
    order = OutputConstraint("anything", calls=rules(notation, "text"))
    right, wrong = TEXTS[notation][0][0], TEXTS[notation][4][0]
    marker = "[TOOL_CALLS]" if notation.startswith("mistral") else "<tool_call>"
    spelled = model.spell(marker)
    assert model.special_token(marker) not in spelled
    for text, is_right in ((right, True), (wrong, False)):
        ids = [*model.spell("so "), *spelled, *model.tokenizer.encode(text.partition(marker)[2]).ids]
        assert model.takes(order, ids) == is_right


@pytest.mark.parametrize("markers", MODELS)
def test_no_call_begins_while_the_model_reasons(markers: str) -> None:
    order = OutputConstraint("anything", calls=rules("hermes", "text"), reasoning=IS_THINKING)
    call = f"<tool_call>{FIND}</tool_call>"
    assert MODELS[markers].takes(order, f"so</think>{call}")
    assert not MODELS[markers].takes(order, f"so {call}</think>")


TAGS = OutputConstraint(
    "structural_tags",
    tags=(
        Tag('<tool_call>{"f": ', json.dumps({"type": "integer"}), "}</tool_call>"),
        Tag("say [ARGS]<b>", json.dumps({"type": "boolean"}), ""),
    ),
    triggers=("<tool_call>", "say [ARGS]"),
)


@pytest.mark.parametrize("trigger", ["<tool_call>", "<tool", '<tool_call>{"f'])
@pytest.mark.parametrize("markers", MODELS)
def test_a_tag_begins_with_the_token_or_with_its_text(markers: str, trigger: str) -> None:
    model = MODELS[markers]
    order = structs.replace(TAGS, triggers=(trigger, "say [ARGS]"))
    assert (model.special_token("<tool_call>") is None) == (markers == "text")
    call = '<tool_call>{"f": 12}</tool_call>'
    for text, is_right in (
        ("free text", True),
        (f"so {call} and {call}say [ARGS]<b>true", True),
        ("so [ARGS] is a word", markers == "text"),  # the token alone begins nothing
        (call.replace("12", '"x"'), False),
        (call.replace("</tool_call>", ""), False),
        ("say [ARGS]<b>12", False),
    ):
        assert model.takes(order, text) == is_right, text
    end = model.tokenizer.encode("</tool_call>").ids
    spelled = [*model.spell('so <tool_call>{"f": 12}'), *end]
    assert model.takes(order, spelled)
    assert not model.takes(order, [*model.spell('so <tool_call>{"f": "x"}'), *end])


CONTENT = OutputConstraint("json_schema", json.dumps({"type": "object", "required": ["answer"]}))


@pytest.mark.parametrize("markers", MODELS)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_constraint_is_one_of_the_content_beside_calls_and_reasoning(
    notation: CallNotation, markers: str
) -> None:
    model = MODELS[markers]
    for mode, takes_content in (("text", True), ("required", False)):
        order = OutputConstraint("json_schema", CONTENT.text, calls=rules(notation, mode), reasoning=THINKS)
        call = TEXTS[notation][0][0]
        for before in ("", "<think>hm</think>\n"):
            assert model.takes(order, f"{before}{call}")
            assert model.takes(order, f'{before}{{"answer": 42}}') == takes_content
            assert not model.takes(order, f"{before}text")
            assert not model.takes(order, f"{before}{{}}")
    alone = OutputConstraint("json_schema", CONTENT.text, reasoning=IS_THINKING)
    assert model.takes(alone, 'so</think>\n\n{"answer": 42}')
    assert not model.takes(alone, '{"answer": 42}')


def test_a_content_of_several_grammars_stays_what_it_is() -> None:
    parts = [{"lark_grammar": 'start: "a" @b'}, {"name": "b", "lark_grammar": 'start: "b"'}]
    order = OutputConstraint("grammar", json.dumps({"grammars": parts}), reasoning=IS_THINKING)
    assert MODELS["text"].takes(order, "x</think>ab")
    assert not MODELS["text"].takes(order, "x</think>a")
    with pytest.raises(ValueError, match="neither"):
        grammar_text(OutputConstraint("grammar", '{"x": 1}', reasoning=THINKS), lambda marker: None)


def read_calls(notation: CallNotation, text: str, *, is_open: bool) -> list[tuple[str, Any]]:
    needs = ParserNeeds({tool.name: tool.schema_json for tool in TOOLS}, True)
    parser = NOTATIONS[notation].make(needs, "r", 0, opens_reasoning=is_open)
    assert parser is not None
    found: dict[int, list[str]] = {}
    for piece in (*parser.push(text), *parser.flush()):
        if isinstance(piece, ToolCallDelta):
            name, arguments = found.setdefault(piece.index, ["", ""])
            found[piece.index] = [name + piece.name, arguments + piece.arguments]
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def is_call(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the call is one of the tools, with arguments by its schema."""
    if name == "find_all":
        return True
    number = arguments.get("n", 0)
    return (
        name == "find"
        and arguments["city"] in ("Ulm", 'a"}')
        and arguments.keys() <= {"city", "n"}
        and isinstance(number, int)
        and not isinstance(number, bool)
    )


@pytest.mark.parametrize("markers", MODELS)
@pytest.mark.parametrize("notation", NOTATIONS)
@settings(max_examples=examples(75), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["required", "text", "one"]),
    is_open=st.booleans(),
    begins_call=st.booleans(),
)
def test_what_a_grammar_allows_is_read_as_calls_of_the_tools(
    notation: CallNotation, markers: str, seed: int, mode: str, is_open: bool, begins_call: bool
) -> None:
    model = MODELS[markers]
    # Free objects are without end in random answers.
    tools = (TOOLS[0], CallableTool("find_all", '{"additionalProperties": false}'))
    order = OutputConstraint(
        "anything", calls=rules(notation, mode, tools), reasoning=IS_THINKING if is_open else THINKS
    )
    start = "so</think>" if is_open else ""
    if begins_call:
        call = TEXTS[notation][0][0]
        start += call.partition("find")[0] or call.partition("city")[0]
    text = random_answer(model, order, random.Random(seed), start)
    if text is None:
        return
    calls = read_calls(notation, text, is_open=is_open)
    assert [call for call in calls if not is_call(*call)] == [], text
    assert calls or not (begins_call or mode == "required"), text
    assert len(calls) <= 1 or mode != "one", text


PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"$ref": "#/$defs/Count"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Count"}},
        "shape": {"enum": ["round", 2]},
        "fixed": {"const": "x"},
    },
    "required": ["text", "count"],
    "$defs": {"Count": {"type": "integer", "minimum": 1}},
}


@pytest.mark.parametrize(
    ("values", "is_right"),
    [
        ({"text": 'any\n"thing" <b>\n', "count": "12"}, True),
        ({"text": "", "count": "1", "maybe": "null", "list": "[1, 2]", "shape": "2", "fixed": "x"}, True),
        ({"text": "a", "count": "0"}, False),
        ({"text": "a</parameter>b", "count": "1"}, False),
        ({"text": "a"}, False),
        ({"count": "1", "text": "a"}, False),
        ({"text": "a", "count": "1", "list": '["a"]'}, False),
        ({"text": "a", "count": "1", "shape": '"round"'}, False),
        ({"text": "a", "count": "1", "other": "1"}, False),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_values_in_tags_are_those_of_the_schema(
    is_strict: bool, values: dict[str, str], is_right: bool
) -> None:
    tools = (CallableTool("f", json.dumps(PARAMETERS), is_strict),)
    order = OutputConstraint("anything", calls=rules("qwen3_coder", "required", tools))
    tags = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"
    assert MODELS["text"].takes(order, text) == is_right


UNTAGGED: dict[str, tuple[dict[str, Any], str]] = {
    "a name with the end of its tag": ({"a>": {}}, "cannot stand in a tag"),
    "a value with the end of its tag": ({"a": {"enum": ["x</parameter>"]}}, "the tag that ends it"),
    "a pattern of text": (
        {"a": {"type": "string", "pattern": "x", "maxLength": 3}},
        "maxLength, pattern: not",
    ),
    "no schema": ({"a": {"type": "integer", "not": {}}}, "not"),
}


@pytest.mark.parametrize("what", UNTAGGED)
async def test_what_cannot_stand_in_tags_is_refused_by_name(compiler: GrammarCompiler, what: str) -> None:
    properties, reason = UNTAGGED[what]
    tools = (CallableTool("broken", json.dumps({"type": "object", "properties": properties}), True),)
    with pytest.raises(InvalidToolsError, match=f"'broken'.*{reason}"):
        await compiler.make(OutputConstraint("anything", calls=rules("qwen3_coder", "required", tools)))


@pytest.fixture
async def compiler(tmp_path: Path) -> AsyncIterator[GrammarCompiler]:
    folder = write_model(tmp_path / "model")
    made = GrammarCompiler(Vocabulary(folder / "tokenizer.json", VOCAB, (END,)), timeout_s=20.0)
    yield made
    await made.close()


BAD_SCHEMAS = {
    "no object": ({"type": "array"}, "arguments are an object"),
    "not supported": ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
    "a reference elsewhere": ({"$ref": "http://127.0.0.1:1/x"}, "not present"),
}


@pytest.mark.parametrize("what", BAD_SCHEMAS)
async def test_a_refused_schema_is_named_by_its_tool(compiler: GrammarCompiler, what: str) -> None:
    schema, reason = BAD_SCHEMAS[what]
    tools = (TOOLS[0], CallableTool("broken", json.dumps(schema), True))
    with pytest.raises(InvalidToolsError, match=f"'broken'.*{reason}") as caught:
        await compiler.make(OutputConstraint("anything", calls=rules("hermes", "text", tools)))
    assert caught.value.logged == "the constraint was refused"
    (violation,) = bad_fields(to_grpc_status(caught.value).trailing_metadata)
    assert violation.field == "chat.tools"


def described(num_bytes: int) -> str:
    """A schema most of which is words to readers."""
    text = {"description": "x" * num_bytes, "title": "y", "examples": ["z"]}
    inner = {**text, "type": "string", "enum": ["title", "description"]}
    properties = {"title": inner, "deep": {"type": "array", "items": {"anyOf": [inner]}}}
    return json.dumps({**text, "type": "object", "properties": properties, "required": ["title"]})


async def test_as_many_tools_as_a_chat_may_have_can_be_required(compiler: GrammarCompiler) -> None:
    """128 of 2 KiB each: their definitions are the most that a chat may bring. What is said to readers alone
    is in no grammar."""
    tools = [pb.Tool(name=f"tool_{index}", parameters_json=described(530)) for index in range(MAX_TOOLS)]
    request = request_of(tools=tools, tool_choice=REQUIRED)
    assert sum(tool.ByteSize() for tool in tools) > 0.9 * MAX_JSON_BYTES
    assert list(chat_violations(request.chat, 1 << 30)) == []
    order = found(request)
    assert order is not None
    model = MODELS["text"]
    grammar = await compiler.make(structs.replace(order, reasoning=None))
    assert "xxx" not in grammar.text
    arguments = '{"title": "title", "deep": ["description"]}'
    call = f'<tool_call>{{"name": "tool_127", "arguments": {arguments}}}</tool_call>'
    for text, is_right in ((call, True), (call.replace('"title": "title"', '"title": "x"'), False)):
        matcher = LLMatcher(model.library, grammar.text, log_level=0, limits=parser_limits())
        ids = model.tokenizer.encode(text).ids
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_right


async def test_tools_whose_schemas_are_too_long_together_are_named(compiler: GrammarCompiler) -> None:
    for length in (900, 1100):  # of the grammar, and of the order already
        names = [f"{index}{'a' * length}" for index in range(128)]
        schemas = [json.dumps({"properties": {name: {"enum": ["b" * 1000]}}}) for name in names]
        tools = tuple(CallableTool(f"tool_{index}", schema) for index, schema in enumerate(schemas))
        with pytest.raises(InvalidToolsError, match=r"128 tools together.*bytes.*fewer"):
            await compiler.make(OutputConstraint("anything", calls=rules("hermes", "required", tools)))


async def test_a_schema_is_held_strictly_where_that_is_asked_for(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"not": {}}}})
    lax = rules("hermes", "required", (CallableTool("lax", schema),))
    assert await compiler.make(OutputConstraint("anything", calls=lax))


def request_of(**chat: Any) -> pb.GenerateRequest:
    message = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="x")])
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message], **chat))


HERMES, NO_CALLS = OutputParsers("hermes", "think"), OutputParsers("none", "think")


def found(request: pb.GenerateRequest, parsers: OutputParsers = HERMES) -> OutputConstraint | None:
    return output_constraint(request, parsers, THINKS)


STRICT, LOOSE = (
    pb.Tool(name="a", parameters_json='{"x": 1}', strict=True),
    pb.Tool(name="b", parameters_json='{"y": 1}'),
)
REQUIRED = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)


def test_a_chat_that_demands_nothing_has_no_grammar() -> None:
    assert found(request_of()) is None
    assert found(request_of(tools=[LOOSE])) is None
    assert found(request_of(tools=[LOOSE], parallel_tool_calls=True)) is None
    nothing = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    assert found(request_of(tools=[STRICT], tool_choice=nothing, parallel_tool_calls=False)) is None
    assert found(pb.GenerateRequest(text="x")) is None


def test_a_chat_says_which_calls_it_may_have() -> None:
    strict, loose = CallableTool("a", '{"x": 1}', True), CallableTool("b", '{"y": 1}')
    free = CallableTool("b")
    both = [STRICT, LOOSE]
    cases = {
        "a strict tool": (request_of(tools=both), CallRules("hermes", (strict, free), False, True)),
        "one call": (
            request_of(tools=[LOOSE], parallel_tool_calls=False),
            CallRules("hermes", (free,), False, False),
        ),
        "required": (
            request_of(tools=both, tool_choice=REQUIRED),
            CallRules("hermes", (strict, loose), True, True),
        ),
        "a name": (
            request_of(tools=both, tool_choice=pb.ToolChoice(name="b")),
            CallRules("hermes", (loose,), True, False),
        ),
    }
    for what, (request, calls) in cases.items():
        assert found(request) == OutputConstraint("anything", calls=calls, reasoning=THINKS), what


def test_a_model_that_makes_one_call_at_a_time_is_held_to_one() -> None:
    parsers = OutputParsers("llama3", "none", allows_several=False)
    order = found(request_of(tools=[LOOSE], tool_choice=REQUIRED), parsers)
    assert order is not None
    assert order.calls == CallRules("llama3", (CallableTool("b", '{"y": 1}'),), True, False)
    assert found(request_of(tools=[LOOSE], parallel_tool_calls=True), parsers) is None, "no demand"


def test_a_constraint_goes_with_reasoning_and_calls() -> None:
    request = request_of(tools=[LOOSE])
    request.constraint.json_schema = "{}"
    calls = CallRules("hermes", (CallableTool("b"),), False, True)
    assert found(request) == OutputConstraint("json_schema", "{}", calls=calls, reasoning=THINKS)
    assert found(request, NO_CALLS) == OutputConstraint("json_schema", "{}", reasoning=THINKS)
    text = pb.GenerateRequest(text="x", constraint=pb.Constraint(regex="a"))
    assert output_constraint(text, HERMES, None) == OutputConstraint("regex", "a")


def test_calls_are_demanded_in_json_of_a_model_that_has_no_notation() -> None:
    assert found(request_of(tools=[STRICT]), NO_CALLS) is None
    wanted = found(request_of(tools=[STRICT], tool_choice=REQUIRED), NO_CALLS)
    assert wanted is not None
    assert wanted.calls == CallRules("json", (CallableTool("a", '{"x": 1}', True),), True, True)
    order = OutputConstraint("anything", calls=rules("json", "required"), reasoning=THINKS)
    parser = NO_CALLS.demanded().make(
        ParserNeeds({"find": "", "find_all": ""}, True), "r", 0, opens_reasoning=False
    )
    assert parser is not None
    for model in MODELS.values():
        for text in (FIND, f"{FIND}\n{FIND_ALL}", f"<think>so</think>{FIND}"):
            assert model.takes(order, text)
        for text in ("text", f"so {FIND}", WRONG, f"{FIND}\n", f"[{FIND}]"):
            assert not model.takes(order, text)
    pieces = [*parser.push(f"<think>so</think>{FIND}\n{FIND_ALL}"), *parser.flush()]
    assert [it.name for it in pieces if isinstance(it, ToolCallDelta) and it.name] == ["find", "find_all"]
    assert not [it for it in pieces if isinstance(it, Content)]


def test_a_tool_without_parameters_takes_none() -> None:
    for chat in (
        request_of(tools=[pb.Tool(name="now")], tool_choice=REQUIRED),
        request_of(tools=[pb.Tool(name="now")], parallel_tool_calls=False),
        request_of(tools=[pb.Tool(name="now", strict=True)]),
    ):
        for parsers in (*NOTATIONS.values(), NO_CALLS):
            order = found(chat, parsers)
            if order is None or order.calls is None:
                assert parsers is NO_CALLS
                continue
            says = {
                "hermes": '<tool_call>{"name": "now", "arguments": %s}</tool_call>',
                "llama3": '{"name": "now", "parameters": %s}',
                "mistral": '[TOOL_CALLS][{"name": "now", "arguments": %s}]',
                "mistral_args": "[TOOL_CALLS]now[ARGS]%s",
                "qwen3_coder": "<tool_call>\n<function=now>\n%s</function>\n</tool_call>",
                "seed_oss": "<seed:tool_call>\n<function=now>\n%s</function>\n</seed:tool_call>",
                "granite": '<|tool_call|>[{"name": "now", "arguments": %s}]',
                "phi4": '<|tool_call|>[{"name": "now", "arguments": %s}]<|/tool_call|>',
                "apertus": '<|tools_prefix|>[{"now": %s}]<|tools_suffix|>',
                "json": '{"name": "now", "arguments": %s}',
                "glm4": "now\n%s",
                "cohere2": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": %s}]'
                "<|END_ACTION|>",
                "glm45": "<tool_call>now\n%s</tool_call>",
                "olmo3": "<function_calls>now(%s)</function_calls>",
                "gemma3": "```tool_code\nnow(%s)\n```",
                "gemma4": "<|tool_call>call:now%s<tool_call|>",
            }[order.calls.notation]
            nothing, something = {
                "qwen3_coder": ("", "<parameter=a>\n1\n</parameter>\n"),
                "seed_oss": ("", "<parameter=a>1</parameter>\n"),
                "glm45": ("", "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"),
                "olmo3": ("", "a=1"),
                "gemma3": ("", "a=1"),
                "gemma4": ("{}", "{a:1}"),
            }.get(order.calls.notation, ("{}", '{"time": 1}'))
            assert MODELS["text"].takes(order, says % nothing)
            assert not MODELS["text"].takes(order, says % something)


def test_a_prompt_says_what_reasoning_may_follow_it() -> None:
    parsers = NOTATIONS["hermes"]
    assert parsers.reasoning_rules("assistant\n") == THINKS
    assert parsers.reasoning_rules("assistant\n<think>\n") == IS_THINKING
    assert parsers.reasoning_rules("assistant\n<think>\n\n</think>\n\n") is None
    assert OutputParsers("hermes", "none").reasoning_rules("<think>") is None


@pytest.mark.parametrize("markers", MODELS)
def test_white_space_does_not_lead_to_reasoning_where_calls_are_required(markers: str) -> None:
    matcher = MODELS[markers].matcher(
        OutputConstraint("anything", calls=rules("hermes", "required"), reasoning=THINKS)
    )
    allowed = allowed_tokens(matcher)
    first = {MODELS[markers].tokenizer.decode([index], skip_special_tokens=False)[0] for index in allowed}
    assert first == {"<"}


def test_an_answer_without_an_end_has_no_calls() -> None:
    request = request_of(tools=[STRICT])
    request.ignore_eos = True
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        found(request)
