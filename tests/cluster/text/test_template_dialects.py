"""Chats with tools in the templates that show them in a family's own way: nothing of the chat is lost, and
what is not the template's own stays text."""

from __future__ import annotations

import json
import re

import pytest
from text_harness import FAMILIES, GEMMA3, GLM4, GRANITE, PHI4, SMOLLM3

from cluster.text.chat_template import (
    CalledTool,
    Chat,
    ChatTemplate,
    ChatTool,
    ChatTurn,
    Rendered,
    RenderOrder,
    render,
)
from cluster.text.output_parsers.choose import OutputParsers
from cluster.text.special_text import SpecialText

TOOL = ChatTool("get_weather", "the weather", json.dumps({"properties": {"city": {"type": "string"}}}))
SYSTEM, QUESTION = ChatTurn("system", "Be brief."), ChatTurn("user", "How is it?")
CALL = CalledTool("c1", "get_weather", '{"city": "Ulm", "wet": true}')
LOOP = (
    QUESTION,
    ChatTurn("assistant", "I look.", tool_calls=(CALL,)),
    ChatTurn("tool", "sunny", tool_call_id="c1"),
)


def rendered(template: str, *turns: ChatTurn, tools: tuple[ChatTool, ...] = (TOOL,)) -> str:
    result = render(RenderOrder(ChatTemplate(template, {}), Chat(turns, tools), 0.0, 1 << 16))
    assert isinstance(result, Rendered), result
    return result.text


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_a_call_and_its_result_is_lost(family: str) -> None:
    if family in ("llama3", "glm4"):  # whose calls have no text beside them
        turns = (QUESTION, ChatTurn("assistant", "", tool_calls=(CALL,)), LOOP[2])
    else:
        turns = LOOP
    text = rendered(FAMILIES[family], *turns)
    for part in ("How is it?", *(["I look."] if turns is LOOP else []), "get_weather", "Ulm", "sunny"):
        assert part in text, part


def test_tools_stand_in_the_system_s_turn_of_phi_4() -> None:
    shown = re.escape(
        '[{"name": "get_weather", "description": "the weather", "parameters": '
        '{"properties": {"city": {"type": "string"}}}}]'
    )
    assert re.match(
        rf"<\|system\|>Be brief\.<\|tool\|>{shown}<\|/tool\|><\|end\|>", rendered(PHI4, SYSTEM, *LOOP)
    )
    assert re.match(
        rf"<\|system\|>You are .*<\|tool\|>{shown}<\|/tool\|><\|end\|><\|user", rendered(PHI4, *LOOP)
    )
    assert rendered(PHI4, SYSTEM, tools=()) == "<|system|>Be brief.<|end|>"
    assert (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Ulm", "wet": true}}]<|/tool_call|>'
        in (rendered(PHI4, *LOOP))
    )


def test_calls_of_glm_4_are_turns_with_a_name() -> None:
    assert rendered(GLM4, *LOOP, tools=()) == (
        "<|user|>\nHow is it?<|assistant|>\nI look."
        '<|assistant|>get_weather \n{"city": "Ulm", "wet": true}<|observation|>\nsunny'
    )


def test_calls_of_granite_and_smollm3_are_text() -> None:
    called = '{"name": "get_weather", "arguments": {"city": "Ulm", "wet": true}}'
    assert f"I look.<|tool_call|>[{called}]<|end_of_text|>" in rendered(GRANITE, *LOOP)
    assert f"I look.\n<tool_call>\n{called}\n</tool_call><|im_end|>" in rendered(SMOLLM3, *LOOP)


def test_gemma_3_is_asked_for_blocks_of_code() -> None:
    text = rendered(GEMMA3, *LOOP, ChatTurn("user", "And so?"))
    first, called, result = text.split("<end_of_turn>\n")[:3]
    assert first.startswith("<start_of_turn>user\nYou can call functions.")
    assert '{"name": "get_weather", "description": "the weather"' in first
    assert first.endswith("\n\nHow is it?")
    assert called.endswith("I look.\n```tool_code\nget_weather(city='Ulm', wet=True)\n```")
    assert result == "<start_of_turn>user\n```tool_output\nsunny\n```\nAnd so?"
    assert rendered(GEMMA3, QUESTION, tools=()) == "<start_of_turn>user\nHow is it?<end_of_turn>\n"


def test_cut_arguments_stay_as_they_are() -> None:
    cut = ChatTurn("assistant", "", tool_calls=(CalledTool("c1", "get_weather", '{"city": "U'),))
    for template in (GLM4, GRANITE, SMOLLM3, PHI4, GEMMA3):
        assert '{"city": "U' in rendered(template, QUESTION, cut)


def test_a_template_that_shows_calls_is_left_alone() -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}<|tool_call|>"
    assert rendered(template, LOOP[2]) == "toolsunny<|tool_call|>"


@pytest.mark.parametrize("template", [GLM4, GRANITE, SMOLLM3, PHI4, GEMMA3])
def test_special_tokens_in_users_text_are_text(template: str) -> None:
    """Also where the text is put into another turn; those of a call are the model's own."""
    marks = ("<|user|>", "<|tool_call|>", "<|/tool|>", "<start_of_turn>", "<tool_call>")
    special = SpecialText.of(marks, OutputParsers.choose(template, "auto", "auto").markers)
    assert special is not None
    spelled = "".join(marks)
    tool = ChatTool("f", spelled)
    turns = (
        ChatTurn("user", spelled),
        ChatTurn("assistant", "", tool_calls=(CALL,)),
        ChatTurn("tool", spelled),
    )
    result = render(RenderOrder(ChatTemplate(template, {}), Chat(turns, (tool,)), 0.0, 1 << 16, special))
    assert isinstance(result, Rendered), result
    places = [match.start() for match in re.finditer(re.escape(spelled), result.text)]
    assert len(places) == (2 if template is GLM4 else 3)
    offsets = [sum(map(len, marks[:number])) for number in range(len(marks))]
    assert {place + offset for place in places for offset in offsets} <= set(result.plain_at)
