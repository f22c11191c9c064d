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

from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import inference_pb2 as pb

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "description": "finds", "parameters": SCHEMA},
}
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
        assert message["content"] is None  # a second call is none
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


CALL = '{"name": "find", "arguments": {"city": "Ulm", "days": 2}}'
FOUND = {"city": "Ulm", "days": 2}


def write(front: HttpFrontHarness, said: str, *, ends: bool = True) -> None:
    """Let the model say these words."""
    ids = encode(said)
    for replica in front.harness.replicas.values():
        replica.script.tokens, replica.script.eos_at = [*ids, 0], len(ids) if ends else None


@pytest.mark.parametrize("choice", ["required", "find"])
async def test_a_call_can_be_demanded_of_a_model_whose_template_knows_no_tools(
    tmp_path: Path, choice: str
) -> None:
    """Over every API, as a whole and as a stream."""
    flat = {"type": "function", **TOOL["function"]}
    said = [{"role": "user", "content": "find it"}]
    is_named = choice == "find"
    chats: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            **ASKED,
            "max_tokens": 70,
            "tool_choice": {"type": "function", "function": {"name": "find"}} if is_named else choice,
        },
        "/v1/responses": {
            "input": said,
            "max_output_tokens": 70,
            "tools": [flat],
            "tool_choice": {"type": "function", "name": "find"} if is_named else choice,
        },
        "/v1/messages": {
            "messages": said,
            "max_tokens": 70,
            "tools": [{"name": "find", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "find"} if is_named else {"type": "any"},
        },
    }
    async with front_of(write_model(tmp_path / "m", TEMPLATE)) as front:
        write(front, CALL)
        for path, body in chats.items():
            reply = await front.post(path, body)
            assert reply.status == 200, reply.body
            assert front.harness.replicas["p0"].submissions[-1].grammar is not None
            shown = prompt(front)
            assert "find" in shown.partition("find it")[0]
            assert "city" in shown
            streamed = await front.post(path, {**body, "stream": True})
            assert streamed.status == 200, streamed.body
            text = json.dumps([event for _, event in streamed.events])
            match path:
                case "/v1/chat/completions":
                    (made,) = reply.json["choices"]
                    assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
                    assert arguments(made["message"]) == [FOUND]
                    assert '"content": "{' not in text
                case "/v1/responses":
                    (item,) = reply.json["output"]
                    assert (item["type"], json.loads(item["arguments"])) == ("function_call", FOUND)
                case _:
                    (block,) = reply.json["content"]
                    assert (block["type"], block["input"]) == ("tool_use", FOUND)
                    assert reply.json["stop_reason"] == "tool_use"
            assert '"find"' in text
        chat = pb.ChatPrompt(
            messages=[pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="find it")])],
            tools=[pb.Tool(name="find", parameters_json=json.dumps(SCHEMA))],
            tool_choice=pb.ToolChoice(name="find")
            if is_named
            else pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED),
        )
        done = await front.harness.client(front.grpc_address).complete(chat, GenerateOptions(max_tokens=70))
        ((call,),) = done.tool_calls
        assert (call.name, json.loads(call.arguments), done.texts) == ("find", FOUND, ("",))
        counted = {**chats["/v1/messages"]}
        del counted["max_tokens"]
        reply = await front.post("/v1/messages/count_tokens", counted)
        await front.post("/v1/messages", chats["/v1/messages"])
        assert reply.json["input_tokens"] == len(front.harness.replicas["p0"].submissions[-1].prompt) // 4
        message, finish = await answer(front, CALL)  # auto: the tools are not shown, and this is text
        assert (message["content"], finish) == (CALL, "stop")
        assert prompt(front).count("find") == 1


async def test_a_cut_call_is_no_text(tmp_path: Path) -> None:
    """As a whole and as a stream, wherever the limit is."""
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    said = f"Well. {call}\n{call}"
    num_tokens = len(encode(said))
    async with front_of(write_model(tmp_path / "m", HERMES)) as front:
        write(front, said, ends=False)
        for limit in range(1, num_tokens, 7):
            body = {**ASKED, "max_tokens": limit}
            reply = await front.post("/v1/chat/completions", body)
            (choice,) = reply.json["choices"]
            message = choice["message"]
            assert choice["finish_reason"] == "length"
            assert "Well.".startswith(message["content"] or "")
            calls = message.get("tool_calls", [])
            assert all(it["function"]["name"] == "find" for it in calls)
            streamed = await front.post("/v1/chat/completions", {**body, "stream": True})
            deltas = [it["choices"][0]["delta"] for _, it in streamed.events if it != "[DONE]"]
            assert "".join(it.get("content", "") for it in deltas) == (message["content"] or "")
            grown: dict[int, str] = {}
            for part in [part for it in deltas for part in it.get("tool_calls", [])]:
                grown[part["index"]] = grown.get(part["index"], "") + part["function"]["arguments"]
            assert list(grown.values()) == [it["function"]["arguments"] for it in calls]


@pytest.mark.parametrize("template", [HERMES, TAGGED, "{{ messages }}"])
async def test_a_history_with_cut_arguments_goes_on(tmp_path: Path, template: str) -> None:
    cut = '{"city": "Ul'
    call = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": cut}}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "cut"},
    ]
    async with front_of(write_model(tmp_path / "m", template)) as front:
        for arguments_text in (cut, "[1]", "no JSON"):
            call["function"]["arguments"] = arguments_text  # type: ignore[index]
            message, _ = await answer(front, "Sunny.", messages=turns)
            assert message["content"] == "Sunny."
            shown = prompt(front)
            assert arguments_text in shown or json.dumps(arguments_text)[1:-1] in shown
        items = [
            {"role": "user", "content": "find it"},
            {"type": "function_call", "call_id": "call00000", "name": "find", "arguments": cut},
            {"type": "function_call_output", "call_id": "call00000", "output": "cut"},
        ]
        reply = await front.post("/v1/responses", {"input": items})
        assert reply.status == 200, reply.body
