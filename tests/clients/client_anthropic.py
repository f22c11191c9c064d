"""Anthropic's own client against a gateway: whole and streamed messages, tools and errors, with asyncio and
without."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import client_cases
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

BASE = sys.argv[1].removesuffix("/v1")
GUARDED: dict[str, Any] = json.loads(os.environ["TANDEM_GUARDED"])
TOOL = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HELLO = "Hello there, my friend."
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 400}
USER = {"role": "user", "content": "hello"}
WEATHER = {"role": "user", "content": "how is the weather?"}
BOTH = {"role": "user", "content": "the weather in both cities?"}


def check(kind: Any, value: Any) -> None:
    """Fail where the value is not what its model says, or has a field that the model lacks."""
    fields = value.model_dump(mode="json", exclude_unset=True)
    _check_known(TypeAdapter(kind).validate_json(json.dumps(fields), strict=True))


def _check_known(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _check_known(getattr(value, name, None))
    elif isinstance(value, list):
        for item in value:
            _check_known(item)


def messages(client: anthropic.Anthropic) -> None:
    done = client.messages.create(
        **ASKED,
        system="be kind",
        messages=[USER],
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        # Not among the client's own since version 2.
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 20},
    )
    check(Message, done)
    assert (done.content[0].text, done.stop_reason) == (HELLO, "end_turn")
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) > 0
    system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert client.messages.create(**ASKED, system=system, messages=blocks).content[0].text == HELLO
    assert client.messages.count_tokens(model="m", messages=[USER]).input_tokens > 0
    stopped = client.messages.create(**ASKED, messages=[USER], stop_sequences=["nothing", "friend"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "friend")
    assert stopped.content[0].text == "Hello there, my "
    short = client.messages.create(model="m", max_tokens=2, messages=[USER])
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    thought = client.messages.create(
        **ASKED,
        messages=[{"role": "user", "content": "think"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    check(Message, thought)
    assert [block.type for block in thought.content] == ["thinking", "text"]
    (model,) = client.models.list().data
    assert model.id == "m"


class Person(BaseModel):
    name: str
    age: int


def parsing(client: anthropic.Anthropic) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "a person"}]}
    parsed = client.messages.parse(**asked, output_format=Person, output_config={"effort": "low"})
    assert parsed.parsed_output == Person(name="Ada", age=36)
    with client.messages.stream(**asked, output_format=Person) as stream:
        assert stream.get_final_message().parsed_output == Person(name="Ada", age=36)
    counted = client.messages.count_tokens(
        model="m", messages=asked["messages"], output_config={"effort": "low"}
    )
    assert counted.input_tokens == parsed.usage.input_tokens + (parsed.usage.cache_read_input_tokens or 0)


def every_field(client: anthropic.Anthropic) -> None:
    """Each field as a whole and streamed, and what comes on the wire."""
    sent = {"model", "stream"}
    for case in client_cases.MESSAGES:
        body = {"messages": [USER], "max_tokens": 400, **case}
        sent |= body.keys()
        asked: dict[str, Any] = {"model": "m", "max_tokens": 1, "messages": [], "extra_body": body}
        raw = client.messages.with_raw_response.create(**asked)
        message = strict(Message, raw.http_response.read())
        with client.messages.with_streaming_response.create(**asked, stream=True) as streamed:
            blocks = b"".join(streamed.http_response.iter_bytes()).decode().split("\n\n")
        assert blocks.pop() == ""
        check_events(
            [tuple(line.partition(": ")[2] for line in block.split("\n")) for block in blocks], message
        )
    assert sent == set(json.loads(os.environ["TANDEM_FIELDS"])["/v1/messages"])
    for field in set(json.loads(os.environ["TANDEM_FIELDS"])["/v1/messages/count_tokens"]) - {
        "model",
        "messages",
    }:
        value = next(case[field] for case in client_cases.MESSAGES if field in case)
        offered = next(it["tools"] for it in client_cases.MESSAGES if "tools" in it)
        body = {"tools": offered, field: value}
        counted = client.messages.count_tokens(model="m", messages=[USER], extra_body=body)
        assert counted.input_tokens > 0


def strict(kind: Any, text: str | bytes) -> Any:
    """The value that the text is, of this kind in strict mode, without a field that the kind lacks."""
    value = TypeAdapter(kind).validate_json(text, strict=True)
    _check_known(value)
    return value


def check_events(events: list[Any], whole: Message) -> None:
    """Names, order, blocks that open and close one after the other, and what they have together."""
    parsed = []
    for name, data in events:
        event = strict(RawMessageStreamEvent, data)
        assert event.type == name
        parsed.append(event)
    start, *inner, delta, stop = parsed
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    assert start.message.usage.input_tokens > 0
    kinds: list[str] = []
    is_open = False
    for event in inner:
        if event.type == "content_block_start":
            assert not is_open
            kinds.append(event.content_block.type)
        assert event.index == len(kinds) - 1
        is_open = event.type != "content_block_stop"
    assert not is_open
    assert kinds == [block.type for block in whole.content]
    assert (delta.delta.stop_reason, delta.delta.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert delta.usage.output_tokens == whole.usage.output_tokens


def streams(client: anthropic.Anthropic) -> None:
    for said, types in (("hello", ["text"]), ("think", ["thinking", "text"])):
        events = list(
            client.messages.create(**ASKED, messages=[{"role": "user", "content": said}], stream=True)
        )
        for event in events:
            check(RawMessageStreamEvent, event)
        kinds = [event.type for event in events]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        starts = [event for event in events if event.type == "content_block_start"]
        assert [start.content_block.type for start in starts] == types
        assert [start.index for start in starts] == list(range(len(types)))
    with client.messages.stream(**ASKED, messages=[USER], stop_sequences=["friend"]) as stream:
        assert "".join(stream.text_stream) == "Hello there, my "
        final = stream.get_final_message()
    check(Message, final)
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "friend")
    assert final.usage.output_tokens > 0


def tools(client: anthropic.Anthropic) -> None:
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
        asked = {**ASKED, "messages": [WEATHER], "tools": [TOOL], "tool_choice": choice}
        called = client.messages.create(**asked)
        check(Message, called)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (called, streamed):
            (used,) = [block for block in message.content if block.type == "tool_use"]
            assert (used.name, used.input, message.stop_reason) == (
                "get_weather",
                {"city": "Paris"},
                "tool_use",
            )
    none = client.messages.create(**ASKED, messages=[WEATHER], tools=[TOOL], tool_choice={"type": "none"})
    assert none.content[0].text == HELLO
    both: list[Any] = [BOTH]
    called = client.messages.create(**ASKED, messages=both, tools=[TOOL])
    assert [block.input for block in called.content] == [{"city": "Paris"}, {"city": "Rome"}]
    results = [{"type": "tool_result", "tool_use_id": it.id, "content": "sunny"} for it in called.content]
    both += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    assert client.messages.create(**ASKED, messages=both, tools=[TOOL]).content[0].text == "It is sunny."


def refused(kind: Any, call: Callable[[], object]) -> Any:
    """The error of this kind that the call raises."""
    try:
        call()
    except kind as error:
        found = error
    else:
        raise AssertionError(f"{kind.__name__} was expected")
    assert found.body["type"] == "error"
    return found


def errors(client: anthropic.Anthropic) -> None:
    error = refused(
        anthropic.BadRequestError, lambda: client.messages.create(model="m", max_tokens=0, messages=[USER])
    )
    assert error.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in str(error)
    asked = {**ASKED, "messages": [USER]}
    refused(anthropic.NotFoundError, lambda: client.messages.create(**{**asked, "model": "claude"}))
    refused(
        anthropic.BadRequestError,
        lambda: client.messages.create(**asked, extra_body={"temperature": -1}, stream=True),
    )

    def known(tenant: str, **options: Any) -> Any:
        url = GUARDED["url"].removesuffix("/v1")
        return client.with_options(
            base_url=url, api_key=GUARDED["keys"].get(tenant, "nonsense"), **options
        ).messages

    assert known("acme").create(**asked).content[0].text == HELLO
    refused(anthropic.AuthenticationError, lambda: known("nobody").create(**asked))

    def exceed() -> None:
        for _ in range(10):
            known("hasty").create(**asked)

    refused(anthropic.RateLimitError, exceed)
    for _ in range(2):
        assert known("hasty", max_retries=3).create(**asked).content


async def with_asyncio(client: anthropic.AsyncAnthropic) -> None:
    done = await asyncio.gather(*(client.messages.create(**ASKED, messages=[USER]) for _ in range(4)))
    assert [message.content[0].text for message in done] == [HELLO] * 4
    async with client.messages.stream(**ASKED, messages=[BOTH], tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert "input_json" in kinds
    assert [block.input for block in final.content] == [{"city": "Paris"}, {"city": "Rome"}]
    slow = await client.messages.create(
        **{**ASKED, "max_tokens": 3000},
        messages=[{"role": "user", "content": "slow"}],
        stream=True,
        extra_headers={"X-Request-Id": "closed-anthropic-async"},
    )
    async for _ in slow:
        break
    await slow.close()
    await client.close()


def closing(client: anthropic.Anthropic) -> None:
    slow = client.messages.create(
        **{**ASKED, "max_tokens": 3000},
        messages=[{"role": "user", "content": "slow"}],
        stream=True,
        extra_headers={"X-Request-Id": "closed-anthropic-sync"},
    )
    assert next(iter(slow)).type == "message_start"
    slow.close()


def main() -> None:
    print(f"anthropic {anthropic.__version__}")
    options: dict[str, Any] = {"base_url": BASE, "api_key": "none", "max_retries": 0}
    client = anthropic.Anthropic(**options)
    for part in (messages, parsing, every_field, streams, tools, errors, closing):
        part(client)
        print(f"{part.__name__}: well")
    asyncio.run(with_asyncio(anthropic.AsyncAnthropic(**options)))
    client.close()


if __name__ == "__main__":
    main()
