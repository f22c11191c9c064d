"""Anthropic's own client against a gateway: whole and streamed messages, tools, and errors."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
from anthropic.types import Message
from pydantic import BaseModel

TOOL = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HELLO = "Hello there, my friend."


def check(value: Any) -> None:
    """Fail where the value is not what its model says, or has a field that the model lacks."""
    if isinstance(value, Message):
        Message.model_validate(value.model_dump(mode="json"))
    if isinstance(value, BaseModel):
        assert not value.model_extra, value.model_extra
        for name in type(value).model_fields:
            check(getattr(value, name, None))
    elif isinstance(value, list):
        for item in value:
            check(item)


def main() -> None:
    print(f"anthropic {anthropic.__version__}")
    client = anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0)
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    done = client.messages.create(model="m", max_tokens=100, system="be kind", messages=asked)
    check(done)
    assert (done.content[0].text, done.stop_reason) == (HELLO, "end_turn")
    assert client.messages.count_tokens(model="m", messages=asked).input_tokens > 0
    with client.messages.stream(model="m", max_tokens=100, messages=asked) as stream:
        assert "".join(stream.text_stream) == HELLO
        final = stream.get_final_message()
    check(final)
    assert final.usage.output_tokens > 0
    weather: list[Any] = [{"role": "user", "content": "how is the weather?"}]
    for streams in (False, True):
        if streams:
            with client.messages.stream(model="m", max_tokens=100, messages=weather, tools=[TOOL]) as stream:
                called = stream.get_final_message()
        else:
            called = client.messages.create(model="m", max_tokens=100, messages=weather, tools=[TOOL])
        check(called)
        (used,) = [block for block in called.content if block.type == "tool_use"]
        assert (used.name, used.input, called.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    weather += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model="m", max_tokens=100, messages=weather, tools=[TOOL])
    assert after.content[0].text == "It is sunny."
    refused = None
    try:
        client.messages.create(model="m", max_tokens=0, messages=asked)
    except anthropic.BadRequestError as error:
        refused = error
    assert refused is not None, "max_tokens 0 was taken"
    assert refused.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in str(refused)
    client.close()


if __name__ == "__main__":
    main()
