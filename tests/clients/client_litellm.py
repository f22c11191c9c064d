"""LiteLLM against a gateway, as a server of OpenAI's API."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
HELLO = "Hello there, my friend."


def main() -> None:
    print(f"litellm {importlib.metadata.version('litellm')}")
    server: dict[str, Any] = {
        "model": "openai/m",
        "api_base": sys.argv[1],
        "api_key": "none",
        "num_retries": 0,
    }
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    done = litellm.completion(**server, messages=asked, temperature=0.5, max_tokens=50)
    assert done.choices[0].message.content == HELLO
    parts = litellm.completion(**server, messages=asked, stream=True, stream_options={"include_usage": True})
    chunks = list(parts)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    weather: list[Any] = [{"role": "user", "content": "how is the weather?"}]
    called = litellm.completion(**server, messages=weather, tools=[TOOL], tool_choice="auto")
    message = called.choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    weather += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    assert (
        litellm.completion(**server, messages=weather, tools=[TOOL]).choices[0].message.content
        == "It is sunny."
    )
    vectors = litellm.embedding(**server, input=["hello"], encoding_format="float")
    assert len(vectors.data[0]["embedding"]) == 8
    assert asyncio.run(litellm.acompletion(**server, messages=asked)).choices[0].message.content == HELLO
    refused = None
    try:
        litellm.completion(**{**server, "model": "openai/gpt-9"}, messages=asked)
    except litellm.NotFoundError as error:
        refused = error
    assert "not served here" in str(refused)


if __name__ == "__main__":
    main()
