"""Answers in harmony, as gpt-oss writes them: each message is taken for what its header says, however the
text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import NEEDS, parser_of, parts, raw_parts, read
from text_harness import HARMONY

from cluster.text.output_parsers.choose import OutputParsers, ParserNeeds
from cluster.text.output_parsers.harmony import HARMONY_MARKS, harmony_place
from cluster.text.output_parsers.pieces import Content, OutputParser, Reasoning, ToolCallDelta

NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>I think."
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "}<"}'
OTHER = ' to=functions.find<|channel|>commentary json<|message|>{"b": [1]}'
FOUND, ANOTHER = ("f", {"a": "}<"}), ("find", {"b": [1]})
Parts = tuple[str, str, list[tuple[str, Any]]]

ANSWERS: dict[str, tuple[str, Parts]] = {
    "final": (f"{FINAL}Hello.<|return|>", ("Hello.", "", [])),
    "final, cut at its end token": (f"{FINAL}Hello.", ("Hello.", "", [])),
    "thought": (f"{THOUGHT}{NEXT}{FINAL}Hello.", ("Hello.", "I think.", [])),
    "two thoughts": (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}So.", ("So.", "I think.\nI think.", [])),
    "JSON": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', ('{"a": 1}', "", [])),
    "call": (f"{THOUGHT}{NEXT}{CALL}<|call|>", ("", "I think.", [FOUND])),
    "call, recipient first": (f"{THOUGHT}{NEXT}{OTHER}<|call|>", ("", "I think.", [ANOTHER])),
    "call without a kind": (CALL.replace(" <|constrain|>json", ""), ("", "", [FOUND])),
    "call without a space": (CALL.replace(" <|constrain|>", "<|constrain|>"), ("", "", [FOUND])),
    "call in a thought": (CALL.replace("commentary", "analysis"), ("", "", [FOUND])),
    "preamble": (
        f"<|channel|>commentary<|message|>First I look.{NEXT}{CALL}<|call|>",
        ("First I look.", "", [FOUND]),
    ),
    "preamble and final": (
        f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Hello.",
        ("I look.\nHello.", "", []),
    ),
    "several calls": (f"{CALL}{NEXT}{THOUGHT}{NEXT}{OTHER}", ("", "I think.", [FOUND, ANOTHER])),
    "calls, each with its token": (f"{CALL}<|call|><|start|>assistant{OTHER}", ("", "", [FOUND, ANOTHER])),
    "call of a tool that is none": (CALL.replace(".f ", ".g "), ("", "", [("g", FOUND[1])])),
    "call of a tool alone": (CALL.replace("functions.f", "find"), ("", "", [("find", FOUND[1])])),
    "call without arguments": (
        "<|channel|>commentary to=functions.f<|message|><|call|>",
        ("", "", [("f", {})]),
    ),
    "text behind arguments": (f"{CALL}\n so{NEXT}{FINAL}Yes", ("Yes", "", [FOUND])),
    "built-in tool": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        ("", "print(1)", []),
    ),
    "for the user": ("<|channel|>commentary to=user<|message|>Hello", ("Hello", "", [])),
    "no channel": ("<|message|>Hello.", ("Hello.", "", [])),
    "unknown channel": ("<|channel|>aside<|message|>Hello.", ("Hello.", "", [])),
    "no frame": ("Hello, to you", ("Hello, to you", "", [])),
    "a role alone": ("assistant", ("assistant", "", [])),
    "words of a header": ("assistant to=", ("assistant to=", "", [])),
    "next turn": (f"{FINAL}Yes<|end|><|start|>user<|message|>And?<|end|>", ("Yes", "", [])),
    "made up result": (
        f"{CALL}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|>",
        ("", "", [FOUND]),
    ),
    "behind the end": (f"{FINAL}Yes<|return|>{FINAL}No", ("Yes", "", [])),
    "missing end": (f"{THOUGHT}<|start|>assistant{FINAL}Yes", ("Yes", "I think.", [])),
    "missing end and start": (f"{THOUGHT}{FINAL}Yes", ("Yes", "I think.", [])),
    "missing start": (f"{THOUGHT}<|end|>{FINAL}Yes", ("Yes", "I think.", [])),
    "missing header": (f"{THOUGHT}<|end|>Yes", ("Yes", "I think.", [])),
    "line breaks between": (f"{THOUGHT}<|end|>\n<|start|>assistant{FINAL}Yes", ("Yes", "I think.", [])),
    "header alone": (f"{FINAL}Yes<|end|><|start|>assistant<|channel|>comm", ("Yes", "", [])),
    "header without text": (f"<|channel|>analysis{NEXT}{FINAL}Yes", ("Yes", "", [])),
    "marks in a text": (f"{FINAL}a<|message|>b<|constrain|>c", ("abc", "", [])),
    "half a mark": (f"{FINAL}a <|en and <|", ("a <|en and <|", "", [])),
    "endless header": (f"<|channel|>final{' ' * 496}Yes<|end|>", ("Yes", "", [])),
    "nothing": ("", ("", "", [])),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_messages_are_what_their_headers_say(what: str) -> None:
    text, wanted = ANSWERS[what]
    assert parts(read(parser_of(HARMONY), [text])) == wanted
    assert parts(read(parser_of(HARMONY), list(text))) == wanted


TEXTS = st.lists(
    st.sampled_from(
        [
            *HARMONY_MARKS,
            *("assistant", "user", "analysis", "commentary", "final", " to=functions.f", "to=", "json", " "),
            *(
                "<|",
                "|>",
                "<",
                "x",
                "\n",
                "{",
                '"',
                "}",
                '{"a": 1}',
                "functions.find",
                "to=python ",
                "t",
                "as",
            ),
            *(THOUGHT, NEXT, FINAL, CALL, OTHER, "<|channel|>commentary<|message|>", "y" * 600),
        ]
    ),
    max_size=14,
).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 300), max_size=8))
def test_any_text_is_read_the_same_however_it_is_cut(text: str, cuts: list[int]) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    whole = read(parser_of(HARMONY), [text])
    assert read(parser_of(HARMONY), pieces) == whole
    assert read(parser_of(HARMONY), list(text)) == whole


@given(TEXTS)
def test_what_was_given_is_a_beginning_of_the_whole(text: str) -> None:
    content, reasoning, calls = raw_parts(read(parser_of(HARMONY), [text]))
    assert not [mark for mark in HARMONY_MARKS if mark in content + reasoning]
    for length in range(0, len(text), 7):
        parser = parser_of(HARMONY)
        found = raw_parts([*parser.push(text[:length]), *parser.flush(is_cut=True)])
        assert content.startswith(found[0])
        assert reasoning.startswith(found[1])
        for (name, arguments), (whole_name, whole_arguments) in zip(found[2], calls, strict=False):
            assert (name, whole_arguments[: len(arguments)]) == (whole_name, arguments)


words = st.text("ab {<|\n\"'é", max_size=12)
arguments = st.dictionaries(words, words | st.integers() | st.lists(words, max_size=2), max_size=3)
messages = st.lists(
    st.one_of(
        st.tuples(st.just("analysis"), words),
        st.tuples(st.just("commentary"), words),
        st.tuples(st.just("final"), words),
        st.tuples(st.sampled_from(["f", "find", "get_weather-2"]), arguments),
    ),
    max_size=6,
)


def written(message: tuple[str, Any], style: int) -> str:
    """A message without its role and its end."""
    name, said = message
    if isinstance(said, str):
        return f"<|channel|>{name}<|message|>{said}"
    headers = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json",
        f"<|channel|>commentary to=functions.{name}<|constrain|>json",
        f" to=functions.{name}<|channel|>commentary json",
        f" to=functions.{name}<|channel|>commentary <|constrain|>json",
        f"<|channel|>commentary to=functions.{name}",
    )
    return f"{headers[style]}<|message|>{json.dumps(said, indent=style or None)}"


@given(said=messages, styles=st.lists(st.integers(0, 4), min_size=6, max_size=6), cut=st.integers(1, 9))
def test_messages_are_put_together_by_their_kind(
    said: list[tuple[str, Any]], styles: Sequence[int], cut: int
) -> None:
    text = NEXT.join(written(message, style) for message, style in zip(said, styles, strict=False))
    pieces = [text[place : place + cut] for place in range(0, len(text), cut)]
    thoughts = [text for name, text in said if name == "analysis" and text]
    contents = [text for name, text in said if name in ("commentary", "final") and text]
    calls = [(name, it) for name, it in said if not isinstance(it, str)]
    assert parts(read(parser_of(HARMONY), pieces)) == ("\n".join(contents), "\n".join(thoughts), calls)


def test_a_call_comes_while_it_is_written() -> None:
    parser = parser_of(HARMONY)
    assert parser.push("<|channel|>commentary to=functions.f") == []
    assert parser.push(" <|constrain|>json") == []
    (named,) = parser.push("<|message|>")
    assert isinstance(named, ToolCallDelta)
    assert (named.index, named.name, named.id[:5], named.arguments) == (0, "f", "call_", "")
    assert parser.push('{"a": ') == [ToolCallDelta(0, arguments='{"a": ')]
    assert parser.push('"x<|') == [ToolCallDelta(0, arguments='"x')]
    assert parser.push('y"}') == [ToolCallDelta(0, arguments='<|y"}')]
    assert parser.push("<|call|>") == parser.flush() == []


def test_text_comes_while_it_is_written() -> None:
    parser = parser_of(HARMONY)
    assert parser.push(f"{THOUGHT} S") == [Reasoning("I think. S")]
    assert parser.is_reasoning
    assert parser.push(f"o{NEXT}") == [Reasoning("o")]
    assert not parser.is_reasoning
    assert parser.push(f"{FINAL}Y") == [Content("Y")]
    assert not parser.is_reasoning
    assert parser_of(HARMONY).push("No frame") == [Content("No frame")]


def made(needs: ParserNeeds, parsers: OutputParsers | None = None) -> OutputParser:
    found = (parsers or OutputParsers("harmony", "harmony")).make(needs, "r", 0, opens_reasoning=False)
    assert found is not None
    return found


def test_what_nobody_wants_apart_is_content_without_its_frame() -> None:
    text = f"{THOUGHT}{NEXT}{CALL}"
    assert parts(read(made(ParserNeeds({}, True)), [text])) == ('{"a": "}<"}', "I think.", [])
    assert parts(read(made(ParserNeeds(NEEDS.tools, False)), [text])) == ("I think.", "", [FOUND])
    assert parts(read(made(ParserNeeds({}, False)), [text])) == ('I think.\n{"a": "}<"}', "", [])
    assert not made(ParserNeeds({}, False)).is_reasoning


def test_a_text_that_goes_on_is_left_alone() -> None:
    parsers, needs = OutputParsers("harmony", "harmony"), ParserNeeds({}, False, is_turn=False)
    assert parsers.make(needs, "r", 0, opens_reasoning=False) is None
    assert parsers.kept_tokens(needs) == frozenset()
    assert parsers.kept_tokens(needs._replace(is_turn=True)) == frozenset(HARMONY_MARKS)


def test_either_name_means_the_frame() -> None:
    text = f"{THOUGHT}{NEXT}{CALL}"
    for parsers, wanted in (
        (OutputParsers("harmony", "none"), ("I think.", "", [FOUND])),
        (OutputParsers("none", "harmony"), ('{"a": "}<"}', "I think.", [])),
        (OutputParsers("json", "harmony"), ("", "I think.", [FOUND])),
    ):
        assert parts(read(made(NEEDS, parsers), list(text))) == wanted
    assert OutputParsers("none", "harmony").demanded().call_notation == "harmony"


def test_a_model_that_makes_one_call_makes_one() -> None:
    parsers = OutputParsers("harmony", "harmony", allows_several=False)
    assert parts(read(made(NEEDS, parsers), [f"{CALL}{NEXT}{OTHER}{NEXT}{FINAL}x"])) == ("", "", [FOUND])


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("<|start|>user<|message|>x<|end|><|start|>assistant", "header"),
        ("<|start|>assistant<|channel|>analysis<|message|>I th", "analysis"),
        ("<|start|>assistant<|channel|>analysis<|message|>x<|end|>", "header"),
        ("<|start|>assistant<|channel|>final<|message|>It is", "final"),
        ("<|start|>assistant<|channel|>analysis", "header"),
        ("plain", "header"),
    ],
)
def test_a_prompt_may_end_within_a_message(prompt: str, place: str) -> None:
    parsers = OutputParsers("harmony", "harmony")
    assert harmony_place(prompt) == place
    assert parsers.opens_reasoning(prompt) == (place == "analysis")
    rules = parsers.reasoning_rules(prompt)
    assert rules is not None
    assert rules.harmony == place


def test_an_open_message_goes_on() -> None:
    parser = parser_of(HARMONY, opens_reasoning=True)
    assert parser.is_reasoning
    assert parts(read(parser, list(f"ink.{NEXT}{FINAL}Yes"))) == ("Yes", "ink.", [])
    for said in (" sunny.", "assistant", "t", ""):  # of a final message
        for end in ("", "<|return|>"):
            assert parts(read(parser_of(HARMONY), list(said + end))) == (said, "", [])
