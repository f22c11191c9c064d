"""OpenAI's own client against a gateway: every answer and event is checked against its models, with no field
that they do not know."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from openai.types import CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

BASE = sys.argv[1]
USER = {"role": "user", "content": "hello"}
WEATHER = {"role": "user", "content": "how is the weather in Paris?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
HELLO = "Hello there, my friend."
# Fields of vLLM's and of ours that OpenAI's models do not have, and where.
EXTENSIONS = {"max_model_len", "stop_reason", "reasoning_content", "prompt_logprobs"}


class Person(BaseModel):
    name: str
    age: int


def check(kind: Any, value: BaseModel) -> None:
    """Fail where the value is not what its model says, or has a field that the model lacks."""
    fields = value.model_dump(mode="json", exclude_unset=True)
    TypeAdapter(kind).validate_python(fields, strict=False)
    _check_known(value, type(value).__name__)


def _check_known(value: object, place: str) -> None:
    if isinstance(value, BaseModel):
        unknown = set(value.model_extra or ()) - EXTENSIONS
        assert not unknown, f"{place}: {sorted(unknown)}"
        for name in type(value).model_fields:
            _check_known(getattr(value, name, None), f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            _check_known(item, f"{place}[]")


def chats(client: Any) -> None:
    done = client.chat.completions.create(
        model="m", messages=[USER], logprobs=True, top_logprobs=2, n=2, user="u"
    )
    check(ChatCompletion, done)
    assert [choice.message.content for choice in done.choices] == [HELLO] * 2
    assert done.choices[0].finish_reason == "stop"
    assert done._request_id
    stream = client.chat.completions.create(
        model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
    assert "".join(it.choices[0].delta.content or "" for it in chunks if it.choices) == HELLO
    assert chunks[-1].usage.completion_tokens > 0
    thought = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "think"}])
    check(ChatCompletion, thought)
    assert thought.choices[0].message.content.strip() == "Four."
    assert "Hm." in thought.choices[0].message.reasoning_content


def tools(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "the weather in both cities?"}]
    done = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    check(ChatCompletion, done)
    calls = done.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"city": "Paris"}', '{"city": "Rome"}'], calls
    assert done.choices[0].finish_reason == "tool_calls"
    messages.append(done.choices[0].message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    after = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "It is sunny."
    with client.chat.completions.stream(model="m", messages=[WEATHER], tools=[TOOL]) as stream:
        for event in stream:
            if event.type == "chunk":
                check(ChatCompletionChunk, event.chunk)
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')


def parsing(client: Any) -> None:
    asked = [{"role": "user", "content": "a person"}]
    parsed = client.chat.completions.parse(model="m", messages=asked, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)
    response = client.responses.parse(model="m", input="a person", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)


def others(client: Any) -> None:
    done = client.completions.create(model="m", prompt=["hello", "you"], logprobs=1, max_tokens=50)
    check(Completion, done)
    assert [choice.text for choice in done.choices] == [HELLO] * 2
    parts = list(client.completions.create(model="m", prompt="hello", stream=True))
    assert "".join(part.choices[0].text for part in parts) == HELLO
    vectors = client.embeddings.create(model="m", input=["hello", "you"])
    check(CreateEmbeddingResponse, vectors)
    plain = client.embeddings.create(model="m", input=["hello", "you"], encoding_format="float")
    for one, other in zip(vectors.data, plain.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6
    (model,) = client.models.list().data
    check(Model, model)
    assert client.models.retrieve("m").id == "m"


def responses(client: Any) -> None:
    done = client.responses.create(model="m", input="hello", instructions="be kind", max_output_tokens=100)
    check(Response, done)
    assert done.output_text == HELLO
    events = list(client.responses.create(model="m", input="think", stream=True))
    for event in events:
        check(ResponseStreamEvent, event)
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text.strip() == "Four."
    function = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
    asked: list[Any] = [{"role": "user", "content": "how is the weather?"}]
    called = client.responses.create(model="m", input=asked, tools=[function])
    check(Response, called)
    (call,) = called.output
    assert (call.type, call.arguments) == ("function_call", '{"city": "Paris"}')
    asked += [*called.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert client.responses.create(model="m", input=asked, tools=[function]).output_text == "It is sunny."
    with client.responses.stream(model="m", input="hello") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == HELLO


def errors(client: Any) -> None:
    for fields, kind, param in (
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
    ):
        refused: openai.APIStatusError | None = None
        try:
            client.chat.completions.create(**{"model": "m", "messages": [USER], **fields})
        except kind as error:
            refused = error
        assert refused is not None, f"{fields} was taken"
        assert refused.param == param
    done = client.chat.completions.create(
        model="m", messages=[USER], extra_body={"top_k": 3, "min_p": 0.1, "guided_choice": ["a", "b"]}
    )
    assert done.choices


async def with_asyncio(client: Any) -> None:
    async def one(number: int) -> str:
        content = [{"type": "text", "text": f"hello {number}"}]
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*map(one, range(8))) == [HELLO] * 8
    await client.close()


def main() -> None:
    print(f"openai {openai.__version__}")
    client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
    for part in (chats, tools, parsing, others, responses, errors):
        part(client)
        print(f"{part.__name__}: well")
    asyncio.run(with_asyncio(openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)))
    client.close()


if __name__ == "__main__":
    main()
