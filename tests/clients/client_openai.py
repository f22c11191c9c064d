"""OpenAI's own client against a gateway: each feature without asyncio and with it, and each answer and event
checked on the wire (`openai_wire`)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import client_cases
import httpx2
import openai
from openai_wire import Exchange, RecordedAsyncTransport, RecordedTransport, Wire, check_exchange
from pydantic import BaseModel, ValidationError

BASE = sys.argv[1]
# Of the gateway that asks for keys: its URL, and keys by tenant.
GUARDED: dict[str, Any] = json.loads(os.environ["TANDEM_GUARDED"])
USER = {"role": "user", "content": "hello"}
WEATHER = {"role": "user", "content": "how is the weather in Paris?"}
BOTH = {"role": "user", "content": "the weather in both cities?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": PARAMETERS,
    "strict": False,
}
HELLO = "Hello there, my friend."
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome"}'


class Person(BaseModel):
    name: str
    age: int


class Blocking:
    """A client with asyncio, or a part of it, used as one without."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return self._wrapped(getattr(self._target, name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._wrapped(self._target(*arguments, **options))

    def __enter__(self) -> Any:
        return self._wrapped(self._target.__aenter__())

    def __exit__(self, *error: object) -> None:
        self._wrapped(self._target.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        items = aiter(self._target)
        end = object()
        while (item := self._wrapped(anext(items, end))) is not end:
            yield item

    def _wrapped(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._runner.run(_awaited(value))
        is_own = not isinstance(value, BaseModel) and type(value).__module__.startswith("openai")
        return Blocking(value, self._runner) if is_own or inspect.isroutine(value) else value


async def _awaited(value: Any) -> Any:
    return await value


# ------------------------------------------------------------------------------------------------- chats


def chats(client: Any) -> None:
    done = client.chat.completions.create(
        model="m", messages=[USER], logprobs=True, top_logprobs=2, n=2, user="u", seed=1, temperature=0.5
    )
    assert [choice.message.content for choice in done.choices] == [HELLO] * 2
    assert [choice.finish_reason for choice in done.choices] == ["stop"] * 2
    entries = done.choices[1].logprobs.content
    assert "".join(entry.token for entry in entries).startswith(HELLO)
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    assert done._request_id
    thought = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "think"}])
    assert thought.choices[0].message.content.strip() == "Four."
    assert "Hm." in thought.choices[0].message.reasoning_content
    short = client.chat.completions.create(model="m", messages=[USER], max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 2


def streams(client: Any) -> None:
    asked: tuple[dict[str, Any], ...] = (
        {},
        {"stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 1, "n": 3, "stream_options": {"include_usage": True}},
        {
            "extra_body": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        },
    )
    for options in asked:
        stream = client.chat.completions.create(model="m", messages=[USER], stream=True, **options)
        texts: dict[int, str] = {}
        num_logprobs = 0
        usage = None
        for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                num_logprobs += len(choice.logprobs.content) if choice.logprobs else 0
        assert texts == dict.fromkeys(range(options.get("n", 1)), HELLO), texts
        assert (usage is not None) == bool(options)
        assert (num_logprobs > 0) == ("logprobs" in options)
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "think"}]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content.strip() == "Four."


def stops(client: Any) -> None:
    for options in ({"stop": "friend"}, {"stop": ["nothing", "friend"]}):
        done = client.chat.completions.create(model="m", messages=[USER], **options)
        assert done.choices[0].message.content == "Hello there, my "
        assert (done.choices[0].finish_reason, done.choices[0].stop_reason) == ("stop", "friend")
        parts = list(client.chat.completions.create(model="m", messages=[USER], stream=True, **options))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello there, my "
    kept = client.completions.create(
        model="m", prompt="hello", stop="friend", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "Hello there, my friend"


def tools(client: Any) -> None:
    messages: list[Any] = [BOTH]
    done = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    calls = done.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == [PARIS, ROME], calls
    assert len({call.id for call in calls}) == 2
    assert (done.choices[0].finish_reason, done.choices[0].message.content) == ("tool_calls", None)
    messages.append(done.choices[0].message)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    after = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    assert after.choices[0].message.content == "It is sunny."
    with client.chat.completions.stream(model="m", messages=[BOTH], tools=[TOOL]) as stream:
        ended = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.arguments for event in ended] == [PARIS, ROME]
    assert [call.function.arguments for call in final.choices[0].message.tool_calls] == [PARIS, ROME]


def tool_choices(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    closed = {**PARAMETERS, "additionalProperties": False}
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True, "parameters": closed}}
    for options in (
        {"tool_choice": "auto"},
        {"tool_choice": "required"},
        {"tool_choice": named},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"tool_choice": "auto", "tools": [strict]},
    ):
        asked = {"model": "m", "messages": [WEATHER], "tools": [TOOL], **options}
        done = client.chat.completions.create(**asked)
        (call,) = done.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", PARIS), options
        parts = [
            part
            for chunk in client.chat.completions.create(**asked, stream=True)
            for part in chunk.choices[0].delta.tool_calls or ()
        ]
        assert parts[0].function.name == "get_weather"
        assert "".join(part.function.arguments for part in parts) == PARIS
    done = client.chat.completions.create(model="m", messages=[WEATHER], tools=[TOOL], tool_choice="none")
    assert (done.choices[0].message.content, done.choices[0].message.tool_calls) == (HELLO, None)


def parsing(client: Any) -> None:
    asked = [{"role": "user", "content": "a person"}]
    ada = Person(name="Ada", age=36)
    parsed = client.chat.completions.parse(model="m", messages=asked, response_format=Person)
    assert parsed.choices[0].message.parsed == ada
    with client.chat.completions.stream(model="m", messages=asked, response_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == ada
    response = client.responses.parse(model="m", input="a person", text_format=Person)
    assert response.output_parsed == ada
    with client.responses.stream(model="m", input="a person", text_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == ada
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    called = client.chat.completions.parse(model="m", messages=[WEATHER], tools=[tool])
    (call,) = called.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Paris")
    for form in ({"type": "json_object"}, {"type": "text"}):
        done = client.chat.completions.create(model="m", messages=asked, response_format=form)
        assert json.loads(done.choices[0].message.content) == {"name": "Ada", "age": 36}


class Weather(BaseModel):
    city: str


# ------------------------------------------------------------------------------------- completions, others


def completions(client: Any) -> None:
    prompts = ["hello", "you"]
    done = client.completions.create(model="m", prompt=prompts, logprobs=1, n=2, max_tokens=50)
    assert [choice.text for choice in done.choices] == [HELLO] * 4
    logprobs = done.choices[0].logprobs
    assert "".join(logprobs.tokens).startswith(HELLO)
    assert len({len(entries) for entries in vars(logprobs).values() if entries}) == 1
    streamed: tuple[dict[str, Any], ...] = (
        {},
        {"n": 2, "logprobs": 1, "stream_options": {"include_usage": True}},
    )
    for options in streamed:
        texts: dict[int, str] = {}
        for part in client.completions.create(model="m", prompt=prompts, stream=True, **options):
            for choice in part.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert texts == dict.fromkeys(range(2 * options.get("n", 1)), HELLO)
    echoed = client.completions.create(model="m", prompt="hello", echo=True)
    assert echoed.choices[0].text == f"hello{HELLO}"
    ids = client.completions.create(model="m", prompt=[5, 6, 7])
    assert (ids.choices[0].text, ids.usage.prompt_tokens) == (HELLO, 3)


def embeddings(client: Any) -> None:
    vectors = client.embeddings.create(model="m", input=["hello", "you"])
    plain = client.embeddings.create(model="m", input=["hello", "you"], encoding_format="float")
    for one, other in zip(vectors.data, plain.data, strict=True):
        assert len(one.embedding) == 8
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-6
    short = client.embeddings.create(model="m", input="hello", dimensions=4)
    assert len(short.data[0].embedding) == 4
    ids = client.embeddings.create(model="m", input=[[5, 6], [7]])
    assert ids.usage.prompt_tokens == 3


def models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("m").id) == ("m", "m")


# ------------------------------------------------------------------------------------------------ responses


def responses(client: Any) -> None:
    done = client.responses.create(
        model="m", input="hello", instructions="be kind", max_output_tokens=100, metadata={"a": "b"}
    )
    assert (done.output_text, done.status, done.metadata) == (HELLO, "completed", {"a": "b"})
    short = client.responses.create(model="m", input="hello", max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    scored = client.responses.create(
        model="m", input="hello", include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert {len(entry.top_logprobs) for entry in scored.output[0].content[0].logprobs} == {2}
    asked: list[Any] = [BOTH]
    called = client.responses.create(model="m", input=asked, tools=[FUNCTION])
    assert [(call.type, call.arguments) for call in called.output] == [
        ("function_call", PARIS),
        ("function_call", ROME),
    ]
    asked += called.output
    asked += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in called.output
    ]
    assert client.responses.create(model="m", input=asked, tools=[FUNCTION]).output_text == "It is sunny."
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        forced = client.responses.create(model="m", input=[WEATHER], tools=[FUNCTION], tool_choice=choice)
        assert forced.output[0].name == "get_weather"
    none = client.responses.create(model="m", input=[WEATHER], tools=[FUNCTION], tool_choice="none")
    assert none.output_text == HELLO


def response_streams(client: Any) -> None:
    asked: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("hello", {}, HELLO),
        ("think", {"reasoning": {"effort": "low"}}, "Four."),
        ("hello", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}, HELLO),
        ("a person", {"text": {"format": {"type": "json_object"}}}, '{"name": "Ada", "age": 36}'),
    )
    for said, options, answer in asked:
        events = list(client.responses.create(model="m", input=said, stream=True, **options))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text.strip() == answer
    events = list(client.responses.create(model="m", input="hello", stream=True, max_output_tokens=2))
    assert events[-1].type == "response.incomplete"
    events = list(client.responses.create(model="m", input=[BOTH], tools=[FUNCTION], stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [PARIS, ROME]
    with client.responses.stream(model="m", input="think") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message"]


# --------------------------------------------------------------------------------------------------- errors


def refused(kind: Any, call: Callable[[], object]) -> Any:
    """The error of this kind that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def errors(client: Any) -> None:
    for fields, kind, param in (
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError, "messages[0].role"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
        ({"stream": True, "max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ):
        asked = {"model": "m", "messages": [USER], **fields}
        error = refused(kind, functools.partial(client.chat.completions.create, **asked))
        assert (error.param, error.type) == (param, "invalid_request_error")
        assert error.code
    refused(openai.NotFoundError, lambda: client.models.retrieve("gpt-9"))
    error = refused(openai.BadRequestError, lambda: client.responses.create(model="m", input="x", store=True))
    assert error.param == "store"
    error = refused(openai.BadRequestError, lambda: client.embeddings.create(model="m", input=[]))
    assert error.param == "input"
    done = client.chat.completions.create(
        model="m", messages=[USER], extra_body={"top_k": 3, "min_p": 0.1, "guided_choice": ["a", "b"]}
    )
    assert done.choices


def callers(client: Any) -> None:
    """Whom the gateway knows, and what his quota is."""
    keys = GUARDED["keys"]

    def known(key: str, **options: Any) -> Any:
        return client.with_options(base_url=GUARDED["url"], api_key=key, **options).chat.completions

    asked: dict[str, Any] = {"model": "m", "messages": [USER]}
    assert known(keys["acme"]).create(**asked).choices[0].message.content == HELLO
    error = refused(openai.AuthenticationError, lambda: known("nonsense").create(**asked))
    assert error.code == "invalid_api_key"
    error = refused(openai.NotFoundError, lambda: known(keys["elsewhere"]).create(**asked))
    assert error.code == "model_not_found"
    limited = known(keys["hasty"])

    def exceed() -> None:
        for _ in range(10):
            limited.create(**asked)

    error = refused(openai.RateLimitError, exceed)
    assert error.code == "rate_limit_exceeded"
    wait_ms = int(error.response.headers["retry-after-ms"])
    assert 0 < wait_ms <= 1000
    # The client waits as long as it is told, and is served then.
    began = time.monotonic()
    patient = known(keys["hasty"], max_retries=3)
    for _ in range(3):
        assert patient.create(**asked).choices
    assert time.monotonic() - began > 0.5


def every_field(client: Any) -> None:
    """Each feature alone, as a whole and streamed; what comes is checked on the wire."""
    for streams in (False, True):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if streams else {}
        for number, case in enumerate(client_cases.CHATS):
            name = f"chat-{type(client).__name__}-{streams}-{number}"
            body = {**options, "messages": [USER], "request_id": name, **case}
            create = client.chat.completions.create
            _read(create(model="m", messages=[], stream=streams, extra_body=body), streams=streams)
        for number, case in enumerate(client_cases.COMPLETIONS):
            name = f"text-{type(client).__name__}-{streams}-{number}"
            body = {**options, "request_id": name, "prompt": "hello", **case}
            create = client.completions.create
            _read(create(model="m", prompt="", stream=streams, extra_body=body), streams=streams)
        for number, case in enumerate(client_cases.RESPONSES):
            name = f"response-{type(client).__name__}-{streams}-{number}"
            body = {"request_id": name, "input": "hello", "stream_options": {}, **case}
            create = client.responses.create
            _read(create(model="m", input="", stream=streams, extra_body=body), streams=streams)
    for number, case in enumerate(client_cases.EMBEDDINGS):
        body = {"request_id": f"vector-{type(client).__name__}-{number}", "input": "hello", **case}
        # The client reads vectors by the format that it has asked for itself.
        assert client.embeddings.with_raw_response.create(model="m", input="", extra_body=body)


def _read(answer: Any, *, streams: bool) -> None:
    if streams:
        assert list(answer)
    else:
        assert answer.usage


def check_every_field(seen: list[Exchange]) -> None:
    """Fail where a field of the documentation was in no request that was answered, whole and streamed."""
    sent: dict[tuple[str, bool], set[str]] = collections.defaultdict(set)
    for exchange in seen:
        if exchange.status == 200 and exchange.request:
            sent[exchange.path, exchange.streams] |= exchange.request.keys()
    fields: dict[str, list[str]] = json.loads(os.environ["TANDEM_FIELDS"])
    for route, names in fields.items():
        for streams in (False, True):
            if (route, streams) in sent:
                only_streams = set() if streams else {"stream_options"}
                missing = set(names) - sent[route, streams] - only_streams
                assert not missing, (route, streams, missing)
    assert len(sent) == 7, sent.keys()


def closing(client: Any) -> None:
    """A stream that is closed ends its request: who runs this looks for the names at the gateway."""
    name = f"closed-openai-{'async' if isinstance(client, Blocking) else 'sync'}"
    slow = {"model": "m", "extra_headers": {"X-Request-Id": f"{name}-chat"}, "stream": True}
    stream = client.chat.completions.create(messages=[{"role": "user", "content": "slow"}], **slow)
    assert next(iter(stream)).choices
    stream.close()
    slow["extra_headers"] = {"X-Request-Id": f"{name}-response"}
    stream = client.responses.create(input="slow", **slow)
    assert next(iter(stream)).type == "response.created"
    stream.close()


# ---------------------------------------------------------------------------------------------- all of it


def together(client: Any) -> None:
    """Eight streams at once."""

    async def one(number: int) -> str:
        content = [{"type": "text", "text": f"hello {number}"}]
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(one, range(8)))

    with asyncio.Runner() as runner:
        assert runner.run(all_of_them()) == [HELLO] * 8
        runner.run(client.close())


def _damaged(exchange: Exchange) -> Iterator[Exchange]:
    """The exchange with one thing wrong."""
    text = exchange.body.decode()
    for old, new in (
        ('"object":"', '"colour":1,"object":"'),
        ('"created":', '"created":"1","made":'),
        ('"created_at":', '"created_at":"1","made":'),
        ('"index":0', '"index":"0"'),
        ('"id":', '"name_of_it":'),
        ('"total_tokens":', '"total_tokens":1'),
        ('"sequence_number":2', '"sequence_number":3'),
        ('"delta":"', '"delta":"x'),
        ('"role":"assistant",', ""),
        ("event: response.output_item.done", "event: response.output_item.added"),
        ("data: [DONE]\n\n", ""),
    ):
        if old in text:
            body = bytearray(text.replace(old, new, 1).encode())
            yield dataclasses.replace(exchange, body=body, is_whole=True)


def check_the_checks(seen: list[Exchange]) -> int:
    """Fail where a damaged answer passes; return how many did not."""
    num_noticed, passed = 0, []
    for path in sorted({exchange.path for exchange in seen}):
        for streams in (False, True):
            some = [it for it in seen if (it.path, it.status, it.streams) == (path, 200, streams)]
            for damaged in _damaged(some[0]) if some else ():
                try:
                    check_exchange(damaged)
                except (AssertionError, ValidationError, KeyError):
                    num_noticed += 1
                else:
                    passed.append((path, streams, bytes(damaged.body[:2000])))
    assert not passed, f"damaged answers passed: {passed}"
    return num_noticed


PARTS = (
    chats,
    streams,
    stops,
    tools,
    tool_choices,
    parsing,
    completions,
    embeddings,
    models,
    responses,
    response_streams,
    errors,
    callers,
    every_field,
    closing,
)


def examples() -> None:
    """Run those of the pages, as they stand there but for the address and the name of the model."""
    root = Path(__file__).parents[2]
    found = [
        example
        for page in ("README.md", "docs/api.md")
        for example in re.findall(r"```py(?:thon)?\n(.*?)```", (root / page).read_text(), re.DOTALL)
        if "from openai import" in example
    ]
    assert len(found) == 2
    for example in found:
        own = example.replace("http://127.0.0.1:8784/v1", BASE).replace('"tiny"', '"m"')
        assert own.count(BASE) == own.count('"m"') == 1
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(own, "example", "exec"), {})
        assert said.getvalue()
        assert HELLO.startswith(said.getvalue())


def main() -> None:
    print(f"openai {openai.__version__}")
    options: dict[str, Any] = {"base_url": BASE, "api_key": "none", "max_retries": 0}
    wire = Wire()
    seen: list[Exchange] = []
    client = openai.OpenAI(**options, http_client=httpx2.Client(transport=RecordedTransport(wire)))
    runner = asyncio.Runner()
    transport = RecordedAsyncTransport(wire)
    with_asyncio = openai.AsyncOpenAI(**options, http_client=httpx2.AsyncClient(transport=transport))
    for each in (client, Blocking(with_asyncio, runner)):
        for part in PARTS:
            part(each)
            seen += wire.check()
            print(f"{part.__name__}: well")
    runner.run(with_asyncio.close())
    runner.close()
    client.close()
    examples()
    check_every_field(seen)
    together(openai.AsyncOpenAI(**options))
    print(f"{wire.num_checked} answers checked, {check_the_checks(seen)} damaged ones noticed")


if __name__ == "__main__":
    main()
