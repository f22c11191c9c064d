"""Calls in braces and in Python's syntax, and answers between marks: what the notations of single families
allow beside what their templates write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import parser_of, parts, raw_parts, read
from text_harness import GEMMA3, GEMMA4, GLM4, GRANITE, OLMO3

BRACES = st.lists(
    st.sampled_from(
        ["a:", "b", "{", "}", "[", "]", ",", ":", '<|"|>', '"', "1", "null", " ", "True", "-", "'"]
    ),
    max_size=20,
).map("".join)


@given(text=BRACES)
def test_arguments_in_braces_are_json_whatever_comes(text: str) -> None:
    parser = parser_of(GEMMA4)
    found = raw_parts([*parser.push(f"<|tool_call>call:f{{{text}"), *parser.push('<|"|>"}]}]}')])
    for _, arguments in found[2]:
        if vars(vars(parser)["_inner"])["_call"] is None:
            json.loads(arguments)


def test_braces_without_quotation_marks_are_objects() -> None:
    text = (
        '<|tool_call>call:find{city:<|"|>the "city"\nof {lights}<|"|>,n:-1.5,yes:True,no:false,none:null,'
        'word:ab,list:[1,<|"|>,<|"|>],in:{"k": "v"},missing:}<tool_call|> so'
    )
    arguments = {
        "city": 'the "city"\nof {lights}',
        "n": -1.5,
        "yes": True,
        "no": False,
        "none": None,
        "word": "ab",
        "list": [1, ","],
        "in": {"k": "v"},
        "missing": None,
    }
    for pieces in ([text], list(text)):
        assert parts(read(parser_of(GEMMA4), pieces)) == ("so", "", [("find", arguments)])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a'", "a"),
        ('"a, (b"', "a, (b"),
        (r"'it\'s'", "it's"),
        ("'''a \"b\", (c' '''", 'a "b", (c\' '),
        ('""', ""),
        ("true", True),
        ("True", True),
        ("None", None),
        ("null", None),
        ("-1", -1),
        ("1e3", 1000.0),
        ("[1, (2, 3)]", [1, [2, 3]]),
        ("{'a': [true, None]}", {"a": [True, None]}),
        ("{1: 2}", "{1: 2}"),
        ("f(x, 1)", "f(x, 1)"),
        ("float('nan')", "float('nan')"),
        ("[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
    ],
)
def test_literals_of_python_are_read(written: str, value: Any) -> None:
    text = f"<function_calls>\nfind(x={written}, y = 1)\nf()\n</function_calls>"
    for pieces in ([text], list(text)):
        content, _, calls = parts(read(parser_of(OLMO3), pieces))
        assert (content, calls) == ("", [("find", {"x": value, "y": 1}), ("f", {})])


def test_arguments_by_position_get_the_names_of_the_schema() -> None:
    schema = json.dumps({"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    text = "Look:\n```tool_code\n[find('Ulm', 2, 3)]\n```\nand so"
    for pieces in ([text], list(text)):
        content, _, calls = parts(read(parser_of(GEMMA3, tools={"find": schema}), pieces))
        assert (content, calls) == ("Look:and so", [("find", {"city": "Ulm", "days": 2, "2": 3})])


@pytest.mark.parametrize("between", ["<|assistant|>", "\n<|assistant|>\n", "\n", ""])
@pytest.mark.parametrize("end", ["", "<|assistant|>"])
def test_a_turn_between_calls_is_no_text(between: str, end: str) -> None:
    text = f'find\n{{"n": 1}}{between}f\n{{}}{end}'
    for pieces in ([text], list(text)):
        assert parts(read(parser_of(GLM4), pieces)) == ("", "", [("find", {"n": 1}), ("f", {})])


def test_the_beginning_of_a_turn_behind_a_call_is_text_where_it_is_none() -> None:
    for pieces in (["f\n{}<|assist"], list("f\n{}<|assist")):
        assert parts(read(parser_of(GLM4), pieces)) == ("<|assist", "", [("f", {})])


@pytest.mark.parametrize(
    ("text", "content", "thought"),
    [
        ("<think>a</think><response>b</response>", "b", "a"),
        ("<think>a\n</think>\n\n<response>b </respo c</response>\n", "b </respo c\n", "a"),
        ("<think>a</think>b <response>", "b <response>", "a"),
        ("<response>b", "b", ""),
        ("<resp", "<resp", ""),
    ],
)
def test_marks_around_an_answer_are_no_part_of_it(text: str, content: str, thought: str) -> None:
    for pieces in ([text], list(text)):
        assert parts(read(parser_of(GRANITE), pieces)) == (content, thought, [])


def test_reasoning_between_sentences_is_read() -> None:
    text = "Here is my thought process:\nhm\n\nHere is my response:\n\nyes"
    template = "After 'Here is my thought process:'"
    for pieces in ([text], list(text)):
        assert parts(read(parser_of(template), pieces)) == ("yes", "hm", [])
