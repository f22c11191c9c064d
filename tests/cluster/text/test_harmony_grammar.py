"""Grammars of answers in harmony: they let the model think, and hold it to the frame of messages, to the
calls of the given tools and to the form of the content; what they allow is read back as that."""

from __future__ import annotations

import json
import random
from typing import Any, get_args

import pytest
from grammar_models import Model, allowed_tokens, random_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from parsed_answers import parts, read
from slow_cases import examples

from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.constraints import output_constraint
from cluster.text.grammar_orders import OutputConstraint
from cluster.text.output_parsers.callable_tools import CallableTool
from cluster.text.output_parsers.choose import OutputParsers, ParserNeeds
from cluster.text.output_parsers.harmony import HARMONY_MARKS, HarmonyPlace
from cluster.text.output_parsers.tool_grammar import CallRules, ReasoningRules

ENDS = ("<|return|>", "<|call|>")
MODELS = {
    "tokens": Model(has_tokens=True, ends=ENDS),
    "text": Model(has_tokens=False, ends=("<|pad|>",)),
}
PARSERS = OutputParsers("harmony", "harmony")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", 'a"}'], "type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (CallableTool("find", json.dumps(SCHEMA), True), CallableTool("find_all"))
PLACES: tuple[HarmonyPlace, ...] = get_args(HarmonyPlace)

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>so I{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>"
FIND = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"city": "Ulm"}'
FIND_ALL = '<|channel|>commentary to=functions.find_all<|constrain|>json<|message|>{"q": [1]}'
FIRST = ' to=functions.find<|channel|>commentary json<|message|>{"city": "Ulm", "n": 1}'
# Texts, and where they are complete: with calls "required", allowed in "text", and there with "one" at most.
TEXTS = (
    (FIND, "required text one"),
    (FIRST, "required text one"),
    (FIRST.replace(" json", " <|constrain|>json"), "required text one"),
    (FIND.replace(" <|constrain|>json", ""), "required text one"),
    (f"{FIND}{NEXT}{FIND_ALL}", "required text"),
    (f"{FIND}{NEXT}{THOUGHT}{FIRST}", "required text"),
    (f"{FINAL}just < text", "text one"),
    (f"{PREAMBLE}{FINAL}just text", "text one"),
    (f"{PREAMBLE}{FIND}", "text one"),
    (f"{PREAMBLE}{THOUGHT}{FIND}", "text one"),
    ("just text", ""),
    (f"{FINAL}a{NEXT}{FIND}", ""),
    (f"{FINAL}a<|start|>b", ""),
    (FIND.replace("Ulm", "Rome"), ""),
    (FIND.replace(".find", ".delete"), ""),
    (FIND.replace("functions.", ""), ""),
    (FIND.replace("commentary", "analysis"), ""),
    (FIND[:-1], ""),
    (f"{FIND}.", ""),
    (FINAL[:-1], ""),
    (PREAMBLE, ""),
)


def rules(mode: str, tools: tuple[CallableTool, ...] = TOOLS) -> CallRules:
    return CallRules("harmony", tools, is_required=mode == "required", allows_several=mode != "one")


def order_of(mode: str, place: HarmonyPlace = "header", **fields: Any) -> OutputConstraint:
    reasoning = ReasoningRules.of_harmony(place)
    return OutputConstraint(
        **{"kind": "anything", "calls": rules(mode) if mode else None, "reasoning": reasoning, **fields}
    )


@pytest.mark.parametrize("markers", MODELS)
@pytest.mark.parametrize("mode", ["required", "text", "one"])
def test_calls_in_their_frame_are_allowed_and_others_are_not(mode: str, markers: str) -> None:
    model = MODELS[markers]
    for order, before in (
        (order_of(mode, reasoning=None), ""),
        (order_of(mode), ""),
        (order_of(mode), THOUGHT),
        (order_of(mode), THOUGHT * 2),
        (order_of(mode, "analysis"), f"so I{NEXT}"),
        (order_of(mode, "analysis"), f"{NEXT}{THOUGHT}"),
    ):
        for text, modes in TEXTS:
            assert model.takes(order, before + text) == (mode in modes.split()), before + text
    assert not model.takes(order_of(mode), THOUGHT.removesuffix("<|start|>assistant") + FIND)
    assert not model.takes(order_of(mode), THOUGHT.replace("so", "so <|call|>") + FIND)


@pytest.mark.parametrize("markers", MODELS)
def test_a_constraint_is_one_of_the_final_message(markers: str) -> None:
    model = MODELS[markers]
    schema = json.dumps({"type": "object", "required": ["answer"]})
    said, kind = '{"answer": 42}', FINAL.replace("<|message|>", " <|constrain|>json<|message|>")
    for mode, takes_content in (("", True), ("text", True), ("required", False)):
        order = order_of(mode, kind="json_schema", text=schema)
        for before in ("", THOUGHT):
            assert model.takes(order, f"{before}{FINAL}{said}") == takes_content
            assert model.takes(order, f"{before}{kind}{said}") == takes_content
            assert model.takes(order, f"{before}{FIND}") == bool(mode)
            for text in (f"{FINAL}{{}}", f"{FINAL}text", said, f"{PREAMBLE}{FINAL}{said}", THOUGHT):
                assert not model.takes(order, before + text)


@pytest.mark.parametrize("markers", MODELS)
def test_a_final_message_that_is_begun_goes_on(markers: str) -> None:
    model = MODELS[markers]
    assert model.takes(order_of("text", "final"), " and so on")
    assert not model.takes(order_of("text", "final"), f" and so on{NEXT}")
    schema = order_of("", "final", kind="regex", text="[0-9]+")
    assert model.takes(schema, "12")
    assert not model.takes(schema, f"{FINAL}12")
    assert model.takes(order_of("required", "final"), f"{NEXT}{THOUGHT}{FIND}")
    assert not model.takes(order_of("required", "final"), FIND)


def test_the_model_s_end_tokens_end_an_answer() -> None:
    model = MODELS["tokens"]
    matcher: LLMatcher = model.matcher(order_of("required"))
    assert matcher.consume_tokens(model.tokenizer.encode(FIND).ids)
    allowed = allowed_tokens(matcher)
    assert {model.tokenizer.id_to_token(token) for token in allowed} == {*ENDS, "<|end|>"}
    first = {model.tokenizer.id_to_token(it) for it in allowed_tokens(model.matcher(order_of("required")))}
    assert "<|channel|>" in first
    assert first.isdisjoint({*HARMONY_MARKS} - {"<|channel|>"})


@pytest.mark.parametrize("markers", MODELS)
@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["required", "text", "one"]),
    place=st.sampled_from(["header", "analysis"]),
    opening=st.sampled_from(["", "<|channel|>", "<|channel|>commentary to=functions.find", " to=", FINAL]),
)
def test_what_a_grammar_allows_is_read_as_calls_of_the_tools(
    markers: str, seed: int, mode: str, place: HarmonyPlace, opening: str
) -> None:
    model = MODELS[markers]
    # Free objects are without end in random answers.
    tools = (TOOLS[0], CallableTool("find_all", '{"additionalProperties": false}'))
    if mode == "required" and opening == FINAL:
        opening = FIND.partition("city")[0]
    start = (f"so{NEXT}" if place == "analysis" else "") + opening
    text = random_answer(model, order_of(mode, place, calls=rules(mode, tools)), random.Random(seed), start)
    if text is None:
        return
    needs = ParserNeeds({tool.name: tool.schema_json for tool in TOOLS}, True)
    parser = PARSERS.make(needs, "r", 0, opens_reasoning=place == "analysis")
    assert parser is not None
    content, reasoning, calls = parts(read(parser, [text]))
    assert not [mark for mark in HARMONY_MARKS if mark in content + reasoning], text
    for name, arguments in calls:
        assert (name == "find" and arguments["city"] in ("Ulm", 'a"}')) or (name == "find_all"), text
        assert arguments.keys() <= {"city", "n"}, text
    assert (calls and not content) or mode != "required", text
    assert len(calls) <= 1 or mode != "one", text


def test_a_chat_s_demands_are_those_of_harmony() -> None:
    tool = pb.Tool(name="now")
    chat = pb.ChatPrompt(tools=[tool], tool_choice=pb.ToolChoice(name="now"))
    rules_of_prompt = PARSERS.reasoning_rules("<|start|>assistant")
    for parsers in (PARSERS, OutputParsers("none", "harmony"), OutputParsers("harmony", "none")):
        order = output_constraint(pb.GenerateRequest(chat=chat), parsers, rules_of_prompt)
        assert order is not None
        assert order.calls is not None
        assert (order.calls.notation, order.calls.is_required) == ("harmony", True)
        said = "<|channel|>commentary to=functions.now<|message|>%s"
        for model in MODELS.values():
            assert model.takes(order, said % "{}")
            assert not model.takes(order, said % '{"time": 1}')
