"""LiteLLM against a gateway: as a server of OpenAI's API, its newer one included, and of Anthropic's."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any

import litellm
from pydantic import BaseModel

GUARDED: dict[str, Any] = json.loads(os.environ["TANDEM_GUARDED"])
SERVER: dict[str, Any] = {"model": "openai/m", "api_base": sys.argv[1], "api_key": "none", "num_retries": 0}
MESSAGES_SERVER: dict[str, Any] = {
    **SERVER,
    "model": "anthropic/m",
    "api_base": sys.argv[1].removesuffix("/v1"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HELLO = "Hello there, my friend."
ASKED: list[Any] = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    name: str
    age: int


def chats(server: dict[str, Any]) -> None:
    done = litellm.completion(**server, messages=ASKED, max_tokens=50, stop=["nothing"])
    assert done.choices[0].message.content == HELLO
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    chunks = list(
        litellm.completion(**server, messages=ASKED, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    assert litellm.stream_chunk_builder(chunks, messages=ASKED).usage.completion_tokens > 0
    short = litellm.completion(**server, messages=ASKED, max_tokens=2)
    assert short.choices[0].finish_reason == "length"
    thought = litellm.completion(**server, messages=[{"role": "user", "content": "think"}])
    assert thought.choices[0].message.content.strip() == "Four."
    assert "Hm." in thought.choices[0].message.reasoning_content


def tools(server: dict[str, Any]) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    weather: list[Any] = [{"role": "user", "content": "how is the weather?"}]
    for choice in ("auto", "required", named):
        called = litellm.completion(**server, messages=weather, tools=[TOOL], tool_choice=choice)
        (call,) = called.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert called.choices[0].finish_reason == "tool_calls"
    both: list[Any] = [{"role": "user", "content": "the weather in both cities?"}]
    chunks = list(litellm.completion(**server, messages=both, tools=[TOOL], stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=both).choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Paris", "Rome"]
    both.append(message)
    both += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    after = litellm.completion(**server, messages=both, tools=[TOOL])
    assert after.choices[0].message.content == "It is sunny."


def parsing(server: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": "a person"}]
    done = litellm.completion(**server, messages=asked, response_format=Person)
    assert Person.model_validate_json(done.choices[0].message.content) == Person(name="Ada", age=36)


def others() -> None:
    vectors = litellm.embedding(**SERVER, input=["hello", "you"], encoding_format="float")
    assert [len(item["embedding"]) for item in vectors.data] == [8, 8]
    done = litellm.text_completion(**{**SERVER, "model": "text-completion-openai/m"}, prompt="hello")
    assert done.choices[0].text == HELLO
    scored = litellm.completion(**SERVER, messages=ASKED, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in scored.choices] == [HELLO] * 2
    assert scored.choices[0].logprobs.content
    answer = litellm.responses(**SERVER, input="hello")
    assert answer.output[0].content[0].text == HELLO
    kinds = [event.type.value for event in litellm.responses(**SERVER, input="think", stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed"), kinds


async def with_asyncio() -> None:
    done = await asyncio.gather(*(litellm.acompletion(**SERVER, messages=ASKED) for _ in range(4)))
    assert [each.choices[0].message.content for each in done] == [HELLO] * 4
    message = await litellm.anthropic.messages.acreate(**MESSAGES_SERVER, messages=ASKED, max_tokens=50)
    assert message["content"][0]["text"] == HELLO
    stream = await litellm.acompletion(
        **SERVER,
        messages=[{"role": "user", "content": "slow"}],
        stream=True,
        extra_headers={"X-Request-Id": "closed-litellm"},
    )
    async for _ in stream:
        break
    await stream.aclose()


def errors() -> None:
    known = {"api_base": GUARDED["url"], "api_key": GUARDED["keys"]["acme"]}
    assert litellm.completion(**{**SERVER, **known}, messages=ASKED).choices
    hasty = {**known, "api_key": GUARDED["keys"]["hasty"], "max_retries": 0}
    for changes, kind, problem in (
        ({"model": "openai/gpt-9"}, litellm.NotFoundError, "not served here"),
        ({"temperature": -1}, litellm.BadRequestError, "temperature"),
        ({**known, "api_key": "nonsense"}, litellm.AuthenticationError, "key"),
        (hasty, litellm.RateLimitError, "try again in"),
    ):
        refused = None
        try:
            for _ in range(5):
                litellm.completion(**{**SERVER, **changes}, messages=ASKED)
        except kind as error:
            refused = error
        assert refused is not None, kind
        assert problem in str(refused), refused


def main() -> None:
    print(f"litellm {importlib.metadata.version('litellm')}")
    for server in (SERVER, MESSAGES_SERVER):
        for part in (chats, tools, parsing):
            part(server)
            print(f"{part.__name__} of {server['model']}: well")
    others()
    errors()
    asyncio.run(with_asyncio())


if __name__ == "__main__":
    main()
