"""Reasoning and tool calls in the text of answers: what a family's template writes is read back, however the
text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from parsed_answers import NEEDS, parser_of, parts, raw_parts, read, schema_of
from slow_cases import slow_rows_but
from text_harness import (
    APERTUS,
    COHERE2,
    FAMILIES,
    GEMMA3,
    GEMMA4,
    GLM4,
    GLM45,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    OLMO3,
    PHI4,
    QWEN3_CODER,
    SEED_OSS,
    SMOLLM3,
    TURN_ENDS,
    TURN_STARTS,
)

from cluster.text.chat_template import (
    CalledTool,
    Chat,
    ChatTemplate,
    ChatTurn,
    Rendered,
    RenderOrder,
    render,
)
from cluster.text.output_parsers.choose import OutputParsers
from cluster.text.output_parsers.pieces import ToolCallDelta

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,10}", fullmatch=True)
words = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | words
    | st.sampled_from(['a "b" {', "}]", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
# Of each function once, so that its schema is that of its arguments.
calls = st.lists(
    st.tuples(names, st.dictionaries(words, values, max_size=3)), max_size=3, unique_by=lambda call: call[0]
)
# What stands beside calls has neither marks nor line breaks at its ends.
contents = st.text("abc .<[{t", max_size=15).map(str.strip)


def answer(template: str, turn: ChatTurn) -> str:
    """The text that the model has to write for this turn."""
    before = (ChatTurn("user", "ask"),) if template is GEMMA3 else ()
    rendered = render(RenderOrder(ChatTemplate(template, {}), Chat((*before, turn)), 0.0, 1 << 20))
    assert isinstance(rendered, Rendered), rendered
    text = rendered.text
    start = "<start_of_turn>user\nask<end_of_turn>\n" if template is GEMMA3 else ""
    text = text.removeprefix(start)
    text = text.removeprefix(next((it for it in TURN_STARTS if text.startswith(it)), ""))
    text = text.removesuffix(next((it for it in TURN_ENDS if text.endswith(it)), ""))
    # A further call is a further turn there.
    return text.replace("<|assistant|>", "") if template is GLM4 else text


# Families whose answers with calls have no other text.
CALLS_ALONE = ("llama3", "glm4", "harmony")
# Names of reasoning in a turn.
REASONING = ("reasoning_content", ".thinking")
_WORD = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def _keys(value: Any) -> Iterator[str]:
    """All keys of a value of JSON."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inner)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), wanted=calls, content=contents, thought=contents)
def test_what_a_template_writes_is_read_back(
    family: str, data: st.DataObject, wanted: list[tuple[str, dict[str, Any]]], content: str, thought: str
) -> None:
    template = FAMILIES[family]
    if family in CALLS_ALONE and (wanted or content.startswith("{")):
        content = ""
    if family == "mistral" and "[" in content + thought:
        content = thought = ""
    if family in ("qwen3 coder", "seed_oss", "glm45"):  # whose parameters have names that stand in a tag
        assume(not any(char in key for _, arguments in wanted for key in arguments for char in "<>"))
    if family == "glm45":  # whose models may write a line break around a name
        assume(all(key == key.strip() for _, arguments in wanted for key in arguments))
    if family in ("olmo3", "gemma3"):
        assume(all(_WORD.fullmatch(key) for _, arguments in wanted for key in arguments))
    if family == "harmony":  # whose markers, which Hypothesis finds in our sources, are tokens of no text
        assume("<|" not in json.dumps([arguments for _, arguments in wanted]))
    if family == "gemma4":  # which has no quotation marks around keys
        assume(all(_WORD.fullmatch(key) for _, arguments in wanted for key in _keys(arguments)))
    reasons = any(name in template for name in REASONING)
    turn = ChatTurn(
        "assistant",
        content,
        reasoning=thought if reasons else "",
        tool_calls=tuple(CalledTool("x", name, json.dumps(it)) for name, it in wanted),
    )
    text = answer(template, turn)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    called = {name: schema_of(arguments) for name, arguments in wanted}
    found = read(parser_of(template, tools=called), pieces)
    assert parts(found) == (content, thought if reasons else "", wanted)
    assert read(parser_of(template, tools=called), list(text)) == found


TEXTS = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]"),
            *(
                "[/THINK]",
                "<|python_tag|>",
                '{"name": "f"',
                '{"name": "other"',
                '{"arguments": {"a": 1}, "name": "other"}',
                ', "arguments": {',
                '"a": "}"',
                "}",
                "}}",
                "[",
                "]",
            ),
            *(" ", "\n", "x", '"', ",", ";", "<", '{"name": "f", "arguments": {"a": 1}}'),
            *(" " * 40, "\n" * 70, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]f[ARGS]{}"),
            '<tool_call>{"name": "f"}</tool_call>',
            *("<function=f>", "<parameter=a>", "</parameter>", "\n</parameter>", "</function>", "</para"),
            "<tool_call><function=f><parameter=b>\n12\n</parameter>",
            *("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
            *("<tool_call>f\n", "<arg_key>a</arg_key>", "<arg_value>", "12</arg_value>", "<arg_key>"),
            *("f\n", "find \n{", "<|tool_call|>", "<|/tool_call|>", '<|tool_call|>[{"name": "f"}'),
            *("<|tools_prefix|>", '[{"f": {"a": [1]}}', "<|tools_suffix|>", "<|inner_prefix|>"),
            *("<|inner_suffix|>", "<function_calls>", "</function_calls>", "f(", "a='b", "'''x", ")", "="),
            *("```tool_code\n", "```", "<|tool_call>", "call:f{", "a:", '<|"|>', "<tool_call|>", "null"),
            *("<|channel>thought\n", "<channel|>", "(", "'", "\\", "<response>", "</response>", "find"),
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS, data=st.data())
def test_how_the_text_is_cut_changes_nothing(family: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(parser_of(FAMILIES[family]), [text])
    assert read(parser_of(FAMILIES[family]), pieces) == whole
    assert read(parser_of(FAMILIES[family]), list(text)) == whole


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "qwen3 coder"])
@given(text=st.text('ab {}[]\n<>/:"', max_size=30))
def test_text_without_marks_is_content(family: str, text: str) -> None:
    content, thought, found = parts(read(parser_of(FAMILIES[family]), list(text)))
    assert (content, thought, found) == (text, "", [])


# What comes again and again behind a beginning, while the parser waits for something else.
ENDLESS = {
    "white space": (HERMES, "x", " \n"),
    "white space first": (LLAMA3, "", " "),
    "white space in reasoning": (HERMES, "<think>x", "\n"),
    "white space before reasoning": (HERMES, "", "\n"),
    "white space in a marker's place": (HERMES, '<tool_call>{"name": "f"}', " "),
    "white space behind a token": (MISTRAL, "[TOOL_CALLS]", " "),
    "white space in a list": (MISTRAL, '[TOOL_CALLS][{"name": "f"},', " "),
    "a name": (MISTRAL, "[TOOL_CALLS]f", "f"),
    "an id": (MISTRAL, "[TOOL_CALLS]f[CALL_ID]", "1"),
    "white space before a function": (QWEN3_CODER, "<tool_call>", "\n"),
    "the name of a function": (QWEN3_CODER, "<tool_call><function=", "f"),
    "white space between parameters": (QWEN3_CODER, "<tool_call><function=f>", " "),
    "the name of a parameter": (QWEN3_CODER, "<tool_call><function=f><parameter=", "f"),
    "the name of a tagged call": (GLM45, "<tool_call>", "f"),
    "white space behind the name of a tagged call": (GLM45, "<tool_call>f", " "),
    "white space behind a key": (GLM45, "<tool_call>f\n<arg_key>a</arg_key>", "\n"),
    "a key": (GLM45, "<tool_call>f\n<arg_key>", "a"),
    "white space behind a name": (GLM4, "find\n", " "),
    "white space behind a list": (PHI4, '<|tool_call|>[{"name": "f"}]', "\n"),
    "white space behind a marker": (GRANITE, "<|tool_call|>", " "),
    "white space before Python": (OLMO3, "<function_calls>", "\n"),
    "separators": (OLMO3, "<function_calls>f()", ",\n"),
    "a name in Python": (OLMO3, "<function_calls>", "f"),
    "white space before a parenthesis": (OLMO3, "<function_calls>f", " "),
    "a name in braces": (GEMMA4, "<|tool_call>call:", "f"),
    "white space in braces": (GEMMA4, "<|tool_call>call:f{", " "),
    "a word in braces": (GEMMA4, "<|tool_call>call:f{", "a"),
    "white space before an answer": (GRANITE, "<think>a</think>", "\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_little_text_waits_whatever_comes(what: str) -> None:
    template, beginning, again = ENDLESS[what]
    parser = parser_of(template)
    parser.push(beginning)
    for _ in range(1000):
        parser.push(again)
    readers = [parser, getattr(parser, "_inner", parser)]
    readers += [call for reader in readers if (call := getattr(reader, "_call", None)) is not None]
    assert max(len(getattr(it, name, "")) for it in readers for name in ("_held", "_header")) < 400


MALFORMED: dict[str, Callable[[], tuple[str, str]]] = {
    "no object": lambda: (HERMES, "a <tool_call>[1]</tool_call>"),
    "no name": lambda: (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "another key": lambda: (HERMES, '<tool_call>{"x": 1}</tool_call> b'),
    "no arguments": lambda: (HERMES, '<tool_call>{"name": 3}</tool_call>'),
    "JSON that is no call": lambda: (LLAMA3, '{"answer": 42}'),
    "JSON with the name of no tool": lambda: (LLAMA3, '{"name": "Ada", "parameters": {"born": 1815}} so'),
    "JSON whose name comes last": lambda: (LLAMA3, '{"parameters": {"born": 1815}, "name": "Ada"}'),
    "code": lambda: (LLAMA3, "<|python_tag|>print(1)"),
    "no list": lambda: (MISTRAL, "[TOOL_CALLS] ()"),
    "an empty list": lambda: (MISTRAL, "[TOOL_CALLS][]"),
    "a list of numbers": lambda: (MISTRAL, "[TOOL_CALLS][1]"),
    "an id without a name": lambda: (MISTRAL, "[TOOL_CALLS]<;[CALL_ID]x"),
    "JSON in place of a function": lambda: (QWEN3_CODER, '<tool_call>{"name": "f"}</tool_call>'),
    "a function without a name": lambda: (QWEN3_CODER, "<tool_call><function=></function></tool_call>"),
    "JSON in place of tags": lambda: (GLM45, '<tool_call>{"name": "f"}</tool_call>'),
    "a sentence in place of tags": lambda: (GLM45, "<tool_call>so it is</tool_call>"),
    "a line that is the name of no tool": lambda: (GLM4, 'other\n{"a": 1}'),
    "a name without arguments": lambda: (GLM4, "find\nit"),
    "a name in a sentence": lambda: (GLM4, "find {it}"),
    "no list behind the marker": lambda: (GRANITE, "I write <|tool_call|> so"),
    "a list of text": lambda: (PHI4, '<|tool_call|>["f"]<|/tool_call|>'),
    "no object behind a name": lambda: (APERTUS, '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'),
    "prose in place of Python": lambda: (OLMO3, "<function_calls>so it is</function_calls>"),
    "no calls": lambda: (OLMO3, "<function_calls></function_calls>"),
    "an assignment": lambda: (GEMMA3, "```tool_code\nx = f(1)\n```"),
    "other code": lambda: (GEMMA3, "```python\nf(1)\n```"),
    "no name in braces": lambda: (GEMMA4, "<|tool_call>call:{a:1}<tool_call|>"),
    "a sentence in place of braces": lambda: (GEMMA4, "<|tool_call>so it is<tool_call|>"),
    "JSON in place of braces": lambda: (GEMMA4, '<|tool_call>{"name": "f"}<tool_call|>'),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_no_call_is_content(what: str) -> None:
    template, text = MALFORMED[what]()
    content, _, found = parts(read(parser_of(template), list(text)))
    assert not found
    assert content.replace(" ", "") == text.replace(" ", "")


UNFINISHED = {
    "an end in the middle": (HERMES, '<tool_call>{"na'),
    "a list that only begins": (MISTRAL, "[TOOL_CALLS]["),
    "the token alone": (MISTRAL, "[TOOL_CALLS]"),
    "a name that only begins": (MISTRAL, "[TOOL_CALLS]fin"),
    "a tag that only begins": (QWEN3_CODER, "<tool_call><function=f"),
    "the tag of Llama 3": (LLAMA3, "<|python_tag|>"),
    "a tagged object": (LLAMA3, '<|python_tag|>{"na'),
    "a list behind Granite's marker": (GRANITE, '<|tool_call|>[{"na'),
    "a name that may end": (GLM45, "<tool_call>f"),
    "a name in Python": (OLMO3, "<function_calls>fi"),
    "a name in braces": (GEMMA4, "<|tool_call>call:f"),
}


@pytest.mark.parametrize("what", UNFINISHED)
def test_a_marker_and_what_follows_is_no_content(what: str) -> None:
    """Also where the model itself ends there."""
    template, text = UNFINISHED[what]
    assert read(parser_of(template), list(text)) == []


THOUGHT, SAID = "Let me\nsee.", "Well,  then: "
CUT_CALLS = (
    CalledTool("call00000", "find", '{"a": "x < y", "b": [1, {}]}'),
    CalledTool("call00001", "f", "{}"),
)
CUT_ANSWERS = [
    (family, content, num_calls, reasons)
    for family in FAMILIES
    for content in ("", SAID + "so ", "a <b> [T <")
    for num_calls in (0, 1, 2)
    for reasons in (False, True)
    if (content or num_calls) and not (family in CALLS_ALONE and content and num_calls)
    if not reasons or any(name in FAMILIES[family] for name in REASONING)
]


# Of each family text before two calls, or calls alone, and text that looks like a marker.
FAST_CUTS = [
    (family, content, num_calls, reasons)
    for family, content, num_calls, reasons in CUT_ANSWERS
    if (content, num_calls) == ("a <b> [T <", 0)
    or (num_calls == 2 and content == ("" if family in CALLS_ALONE else SAID + "so "))
]


@pytest.mark.parametrize(
    ("family", "content", "num_calls", "reasons"), slow_rows_but(CUT_ANSWERS, *FAST_CUTS)
)
def test_a_cut_answer_is_the_beginning_of_the_whole(
    family: str, content: str, num_calls: int, reasons: bool
) -> None:
    """Wherever it is cut: what a marker begins is never content, nor thought."""
    turn = ChatTurn("assistant", content, THOUGHT if reasons else "", CUT_CALLS[:num_calls])
    text = answer(FAMILIES[family], turn)
    tools = {"find": schema_of({"a": "", "b": []})}
    for opening in ("", "<think>\n"):
        is_open = bool(opening) and text.startswith(opening)
        said = text.removeprefix(opening)
        make = partial(parser_of, FAMILIES[family], opens_reasoning=is_open, tools=tools)
        whole = raw_parts(read(make(), [said]))
        for length in range(len(said) + 1):
            parser = make()
            pieces = [it for char in said[:length] for it in parser.push(char)]
            found = raw_parts([*pieces, *parser.flush(is_cut=True)])
            assert whole[0].startswith(found[0]), said[:length]
            assert whole[1].startswith(found[1]), said[:length]
            for (name, arguments), (whole_name, whole_arguments) in zip(found[2], whole[2], strict=False):
                assert (name, whole_arguments[: len(arguments)]) == (whole_name, arguments)
            at_once = make()
            assert raw_parts([*at_once.push(said[:length]), *at_once.flush(is_cut=True)]) == found


def test_a_marked_call_is_one_whatever_its_name() -> None:
    """The caller says to the model that there is no such tool. What is marked is no answer for a user."""
    for template, text in (
        (HERMES, '<tool_call>{"name": "x", "arguments": {}}</tool_call>'),
        (LLAMA3, '<|python_tag|>{"name": "x", "parameters": {}}; {"name": "y", "parameters": {}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "x", "arguments": {}}]'),
    ):
        content, _, found = parts(read(parser_of(template), list(text)))
        assert not content
        assert found[0] == ("x", {})
    mixed = '{"name": "f", "parameters": {}}; {"name": "Ada", "parameters": {}}'
    assert parts(read(parser_of(LLAMA3), list(mixed))) == (mixed[31:], "", [("f", {})])


def test_arguments_come_while_they_are_written() -> None:
    parser = parser_of(HERMES)
    assert parser.push('<tool_call>\n{"name": "find", "argu') == [ToolCallDelta(0, parser_id(), "find")]
    assert parser.push('ments": {"q": "a') == [ToolCallDelta(0, arguments='{"q": "a')]
    assert parser.push(' b"}') == [ToolCallDelta(0, arguments=' b"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.flush() == []


TYPED = json.dumps(
    {
        "properties": {
            "text": {"type": "string"},
            "count": {"$ref": "#/$defs/Count"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "yes": {"type": "boolean"},
            "shape": {"enum": ["1", "round", 2]},
            "list": {"allOf": [{"type": ["array", "object"]}]},
        },
        "$defs": {"Count": {"type": "integer"}},
    }
)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", '\n two "lines"\n and more \n', '\n two "lines"\n and more \n'),
        ("text", "", ""),
        ("text", "a </para> b", "a </para> b"),
        ("count", " 12 ", 12),
        ("count", "123456789012345678901234567890", 123456789012345678901234567890),
        ("count", "1.5", "1.5"),
        ("count", "many", "many"),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "nobody", "nobody"),
        ("maybe", "12", "12"),
        ("yes", "True", True),
        ("yes", "false", False),
        ("shape", "2", 2),
        ("shape", "round", "round"),
        ("list", '[1, {"a": "</b>"}]', [1, {"a": "</b>"}]),
        ("list", "[1, ", "[1, "),
        ("other", "00123", "00123"),
        ("other", "NaN", "NaN"),
        ("other", "[" * 10_000, "[" * 10_000),
        ("other", '{"a": 1}', {"a": 1}),
    ],
)
def test_text_in_tags_is_read_by_the_schema(name: str, text: str, value: Any) -> None:
    said = f"<tool_call>\n<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = parser_of(QWEN3_CODER, tools={"f": TYPED})
    assert parts(read(parser, list(said))) == ("", "", [("f", {name: value})])


def test_text_in_tags_comes_while_it_is_written() -> None:
    parser = parser_of(QWEN3_CODER, tools={"f": TYPED})
    (call,) = parser.push("<tool_call>\n<function=f>\n")
    assert isinstance(call, ToolCallDelta)
    assert call.name == "f"
    assert parser.push("<parameter=text>\na") == [ToolCallDelta(0, arguments='{"text": "a')]
    assert parser.push(' "b"\n</') == [ToolCallDelta(0, arguments=' \\"b\\"')]
    assert parser.push("x") == [ToolCallDelta(0, arguments="\\n</x")]
    assert parser.push("\n</parameter>\n<parameter=count>\n1") == [ToolCallDelta(0, arguments='", "count": ')]
    assert parser.push("2\n</parameter>\n</function>") == [ToolCallDelta(0, arguments="12}")]
    assert parser.push("\n</tool_call>") == parser.flush() == []


def test_a_call_in_tags_ends_where_no_tag_comes() -> None:
    for end in ("</tool_call>", "\n</tool_call> so", " so"):
        found = read(parser_of(QWEN3_CODER), [f"<tool_call><function=f><parameter=a>1</parameter>{end}"])
        content, _, calls = parts(found)
        assert calls == [("f", {"a": 1})]
        assert content.strip() == ("so" if "so" in end else "")


ONE_CALL = {"hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "llama3": '{"name": "f"}'}


@pytest.mark.parametrize("family", ONE_CALL)
def test_a_model_that_makes_one_call_makes_one(family: Literal["hermes", "llama3"]) -> None:
    """Its template would refuse an answer with two."""
    parsers = replace(OutputParsers.choose(FAMILIES[family], "auto", "auto"), allows_several=False)
    call = ONE_CALL[family]
    between = ";" if family == "hermes" else ""
    for text, content in (
        (call, ""),
        (f"{call}\n", ""),
        (f"{call}; {call}", between),
        (f"{call}; {call} and so on {call}", between),
        (f"{call}; so", "; so"),
    ):
        for pieces in ([text], list(text)):
            parser = parsers.make(NEEDS, "r", 0, opens_reasoning=False)
            assert parser is not None
            assert parts(read(parser, pieces)) == (content, "", [("f", {})])


def parser_id() -> str:
    """The id of the first call of the first sample of request r."""
    (piece,) = parser_of(HERMES).push('<tool_call>{"name": "f"')
    assert isinstance(piece, ToolCallDelta)
    return piece.id


def test_ids_belong_to_request_sample_and_call() -> None:
    def first(request_id: str, sample: int, template: str = HERMES) -> str:
        parser = OutputParsers.choose(template, "auto", "auto").make(
            NEEDS, request_id, sample, opens_reasoning=False
        )
        assert parser is not None
        text = "<tool_call>" if template is HERMES else "[TOOL_CALLS]["
        (piece, *_) = parser.push(text + '{"name": "f"')
        assert isinstance(piece, ToolCallDelta)
        return piece.id

    assert first("r", 0) == first("r", 0) == parser_id()
    assert len({first("r", 0), first("r", 1), first("s", 0)}) == 3
    assert len(first("r", 0, MISTRAL)) == 9


def test_a_prompt_may_open_the_reasoning() -> None:
    parsers = OutputParsers.choose(HERMES, "auto", "auto")
    assert parsers.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not parsers.opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert parsers.opens_reasoning("<|im_start|>assistant\n<think>\nso", "<think>\nso")
    assert not parsers.opens_reasoning("a<think>\nso</think>yes", "<think>\nso</think>yes")
    assert not parsers.opens_reasoning("what is <think>?\n<|im_start|>assistant\nA mark", "A mark")
    parser = parser_of(HERMES, opens_reasoning=True)
    assert parser.is_reasoning
    assert parts(read(parser, list("so\n</think>\n\nyes"))) == ("yes", "so", [])
    assert parts(read(parser_of(HERMES, opens_reasoning=True), ["never ends\n"])) == ("", "never ends", [])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", "think"),
        (LLAMA3, "llama3", "none"),
        (MISTRAL, "mistral", "mistral"),
        (QWEN3_CODER, "qwen3_coder", "none"),
        (SEED_OSS, "seed_oss", "seed_oss"),
        (GLM45, "glm45", "think"),
        (GLM4, "glm4", "none"),
        (GRANITE, "granite", "granite"),
        (SMOLLM3, "hermes", "none"),
        (GEMMA3, "gemma3", "none"),
        (PHI4, "phi4", "none"),
        (APERTUS, "apertus", "apertus"),
        (OLMO3, "olmo3", "think"),
        (GEMMA4, "gemma4", "gemma4"),
        (COHERE2, "cohere2", "cohere2"),
        (HARMONY, "harmony", "harmony"),
        ("write after 'Here is my thought process:'", "none", "granite32"),
        ("{{ messages }}", "none", "none"),
        (None, "none", "none"),
    ],
)
def test_parsers_are_those_of_the_template(template: str | None, tools: str, reasoning: str) -> None:
    assert OutputParsers.choose(template, "auto", "auto") == OutputParsers(tools, reasoning)
    assert OutputParsers.choose(template, "llama3", "none") == OutputParsers("llama3", "none")
