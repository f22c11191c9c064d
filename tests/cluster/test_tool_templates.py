"""Tools over HTTP with templates as model families have them: one for chats with tools alone, one that
refuses an answer with two calls, one that writes calls in tags."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import TEMPLATE, GatewayHarness, decode, encode, write_model
from http_harness import HttpFrontHarness

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "find it"}],
    "tools": [TOOL],
    "max_tokens": 200,
}
_SHOWN = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
_TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{% for call in m.tool_calls or [] %}"
HERMES = f"{_SHOWN}{_TURN}{_CALLS}<tool_call>{{{{ call.function | tojson }}}}</tool_call>{{% endfor %}}{_END}"
ONE_CALL = (
    f"{_SHOWN}{_TURN}{_CALLS}"
    "{% if not loop.last %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    f"{{% endfor %}}{_END}"
)
TAGGED = (
    f"{_SHOWN}{_TURN}{_CALLS}<tool_call>\n<function={{{{ call.function.name }}}}>\n"
    "{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    f"{{% endfor %}}</function>\n</tool_call>{{% endfor %}}{_END}"
)


@asynccontextmanager
async def front_of(folder: Path) -> AsyncIterator[HttpFrontHarness]:
    harness = GatewayHarness(folder)
    try:
        async with HttpFrontHarness(harness) as front:
            yield front
    finally:
        await harness.close()


async def answer(front: HttpFrontHarness, said: str, **fields: Any) -> Any:
    """The message that a model makes of these words, and why it ended."""
    ids = encode(said)
    for replica in front.harness.replicas.values():
        replica.script.tokens, replica.script.eos_at = [*ids, 0], len(ids)
    reply = await front.post("/v1/chat/completions", {**ASKED, **fields})
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return choice["message"], choice["finish_reason"]


def prompt(front: HttpFrontHarness) -> str:
    ids = memoryview(front.harness.replicas["p0"].submissions[-1].prompt).cast("I").tolist()
    return decode(ids)


def arguments(message: Any) -> list[Any]:
    return [json.loads(it["function"]["arguments"]) for it in message.get("tool_calls", [])]


async def test_a_template_for_chats_with_tools_shows_them_and_says_how_they_are_called(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "m", None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": HERMES},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    call = '<tool_call>{"name": "find", "arguments": {"city": "Ulm", "days": 2}}</tool_call>'
    async with front_of(folder) as front:
        for choice in ("auto", "required"):
            message, finish = await answer(front, call, tool_choice=choice)
            assert (arguments(message), finish) == ([{"city": "Ulm", "days": 2}], "tool_calls")
            assert prompt(front).startswith("[find]")
        message, finish = await answer(front, call, tools=None)
        assert (message["content"], finish) == (call, "stop")
        assert not prompt(front).startswith("[find]")


@pytest.mark.parametrize("wants_several", [True, None])
async def test_what_a_model_with_one_call_an_answer_says_can_be_sent_back(
    tmp_path: Path, wants_several: bool | None
) -> None:
    call = '{"name": "find", "parameters": {"city": "Ulm", "days": 2}}'
    async with front_of(write_model(tmp_path / "m", ONE_CALL)) as front:
        message, finish = await answer(front, f"{call}; {call}", parallel_tool_calls=wants_several)
        assert (arguments(message), finish) == ([{"city": "Ulm", "days": 2}], "tool_calls")
        assert message["content"] == f"; {call}"
        (made,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "sunny"}
        message, _ = await answer(front, "Sunny.", messages=[*ASKED["messages"], message, result])
        assert message["content"] == "Sunny."


async def test_calls_in_tags_are_read_by_their_schema_and_written_back(tmp_path: Path) -> None:
    call = (
        "<tool_call>\n<function=find>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n\
</function>\n</tool_call>"
    )
    async with front_of(write_model(tmp_path / "m", TAGGED)) as front:
        for choice in ("auto", "required"):
            message, finish = await answer(front, f"{call}\n{call}", tool_choice=choice, max_tokens=300)
            assert (arguments(message), finish) == ([{"city": "12", "days": 12}] * 2, "tool_calls")
            assert not message["content"]
        results = [
            {"role": "tool", "tool_call_id": it["id"], "content": "sunny"} for it in message["tool_calls"]
        ]
        await answer(front, "Sunny.", messages=[*ASKED["messages"], message, *results])
        assert prompt(front).count(call) == 2
