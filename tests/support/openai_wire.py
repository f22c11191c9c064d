"""What a server sends to OpenAI's own client, recorded as it comes and checked against the models of the
`openai` package in strict mode: required fields are there, types are not coerced, and no field is unknown but
those of `EXTENSIONS`. Streams are checked for their order too. Runs in the environment of the client."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai.types import CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

# Fields that OpenAI's models do not have, by the model that they are in.
EXTENSIONS = {
    # vLLM's: the context of a model, what the model thought, what ended the output, the prompt's tokens.
    ("Model", "max_model_len"),
    ("ChatCompletionMessage", "reasoning_content"),
    ("ChoiceDelta", "reasoning_content"),
    ("Choice", "stop_reason"),
    ("CompletionChoice", "stop_reason"),
    ("ChatCompletion", "prompt_logprobs"),
    ("ChatCompletionChunk", "prompt_logprobs"),
    ("CompletionChoice", "prompt_logprobs"),
    # Required by the models of the package's versions before 3.
    ("ResponseFunctionCallArgumentsDoneEvent", "name"),
}
_TERMINAL = {"response.completed": "completed", "response.incomplete": "incomplete"}


@dataclass
class Exchange:
    """One request, and what answered it."""

    path: str
    request: Any
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    # Whether the client has read all of it.
    is_whole: bool = False

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


class Wire:
    """All exchanges of a client, until they are checked."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.num_checked = 0

    def begin(self, request: httpx2.Request, content: bytes) -> Exchange:
        exchange = Exchange(request.url.path, json.loads(content) if content else None)
        self.exchanges.append(exchange)
        return exchange

    def check(self) -> list[Exchange]:
        """Check all, and forget them."""
        checked, self.exchanges = self.exchanges, []
        for exchange in checked:
            check_exchange(exchange)
        self.num_checked += len(checked)
        return checked


class RecordedTransport(httpx2.HTTPTransport):
    """The transport of a client without asyncio."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = self._wire.begin(request, request.read())
        response = super().handle_request(request)
        exchange.status, exchange.headers = response.status_code, dict(response.headers)
        response.stream = _Recorded(response.stream, exchange)
        return response


class RecordedAsyncTransport(httpx2.AsyncHTTPTransport):
    """The transport of a client with asyncio."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = self._wire.begin(request, await request.aread())
        response = await super().handle_async_request(request)
        exchange.status, exchange.headers = response.status_code, dict(response.headers)
        response.stream = _AsyncRecorded(response.stream, exchange)
        return response


class _Recorded(httpx2.SyncByteStream):
    def __init__(self, stream: Any, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._exchange.body += part
            yield part
        self._exchange.is_whole = True

    def close(self) -> None:
        self._stream.close()


class _AsyncRecorded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._exchange.body += part
            yield part
        self._exchange.is_whole = True

    async def aclose(self) -> None:
        await self._stream.aclose()


# ------------------------------------------------------------------------------------------------ checks


def strict(kind: Any, fields: Any) -> Any:
    """Return the value as its model; fail where it is not of the model's type, or has a field that the model
    lacks."""
    value = TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    _check_known(value, type(value).__name__)
    return value


def _check_known(value: object, place: str) -> None:
    if isinstance(value, BaseModel):
        names = {(type(value).__name__, name) for name in value.model_extra or ()}
        assert names <= EXTENSIONS, f"{place}: {sorted(names - EXTENSIONS)}"
        for name in type(value).model_fields:
            _check_known(getattr(value, name, None), f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            _check_known(item, f"{place}[]")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_known(item, f"{place}.{name}")


def check_exchange(exchange: Exchange) -> None:
    """Fail where the answer is not one of OpenAI's API to this request."""
    route = exchange.path.partition("/v1/")[2]
    if exchange.streams:
        events = _events(bytes(exchange.body), is_whole=exchange.is_whole)
        # Behind the last event, the client reads no further.
        is_whole = exchange.is_whole or events[-1][1] == "[DONE]" or events[-1][0] in _TERMINAL
        {
            "chat/completions": check_chat_events,
            "completions": check_completion_events,
            "responses": check_response_events,
        }[route](events, exchange.request, is_whole=is_whole)
        return
    assert exchange.is_whole, f"{route}: the answer was not read to its end"
    fields = json.loads(exchange.body)
    if exchange.status != 200:
        assert fields.keys() == {"error"}, fields
        assert fields["error"].keys() == {"message", "type", "param", "code"}, fields
        strict(ErrorObject, fields["error"])
    elif route == "models":
        assert fields.keys() == {"object", "data"}, fields
        assert fields["object"] == "list"
        strict(list[Model], fields["data"])
    elif route.startswith("models/"):
        strict(Model, fields)
    elif route == "embeddings":
        check_embeddings(fields, exchange.request)
    else:
        kind: Any = {"chat/completions": ChatCompletion, "completions": Completion, "responses": Response}[
            route
        ]
        value = strict(kind, _without_nulls(fields, exchange.request) if kind is Completion else fields)
        if kind is Response:
            check_response(value)
        else:
            _check_choices(value, exchange.request)


def check_embeddings(fields: Any, request: Any) -> None:
    """As they are asked for: the model knows numbers alone."""
    for item in fields["data"]:
        if request.get("encoding_format") == "base64":
            assert isinstance(item["embedding"], str)
            num_bytes = len(base64.b64decode(item["embedding"], validate=True))
            assert num_bytes % 4 == 0
            item["embedding"] = [0.5] * (num_bytes // 4)
    value = strict(CreateEmbeddingResponse, fields)
    assert [item.index for item in value.data] == list(range(len(value.data)))
    assert value.usage.total_tokens == value.usage.prompt_tokens


def _check_choices(value: Any, request: Any) -> None:
    prompts = request.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], str | list) else 1
    assert [choice.index for choice in value.choices] == list(range((request.get("n") or 1) * num_prompts))
    usage = value.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    wanted = request.get("logprobs")  # 0: of the tokens themselves
    for choice in value.choices:
        assert (choice.logprobs is not None) == (wanted is not None and wanted is not False), request


def check_response(value: Any) -> None:
    """Check an answer of /v1/responses that has ended."""
    assert value.status in ("completed", "incomplete", "failed"), value.status
    assert (value.incomplete_details is not None) == (value.status == "incomplete")
    assert (value.error is not None) == (value.status == "failed")
    usage = value.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert len({item.id for item in value.output}) == len(value.output)
    statuses = [item.status for item in value.output]
    assert statuses == ["completed"] * (len(statuses) - 1) + [value.status] or not statuses, statuses


def _without_nulls(fields: Any, request: Any, *, is_chunk: bool = False) -> Any:
    """Return the answer without nulls that OpenAI sends too, though its models forbid them: a chunk's
    `finish_reason`, and the logprobs of the first token of an echoed prompt."""
    for choice in fields["choices"]:
        if is_chunk and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        if request.get("echo") and choice["logprobs"]:
            logprobs = choice["logprobs"]
            if logprobs["text_offset"][:1] == [0]:
                assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
                logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    return fields


# ---------------------------------------------------------------------------------------------- streams


def _events(body: bytes, *, is_whole: bool) -> list[tuple[str, Any]]:
    """Return names and data; of a stream that was not read to its end, the events that have come whole."""
    *blocks, rest = body.decode().split("\n\n")
    assert not (is_whole and rest), rest
    events = []
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields.keys() <= {"event", "data"}, fields
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def check_chat_events(events: list[tuple[str, Any]], request: Any, *, is_whole: bool) -> None:
    """Check the chunks of a chat."""
    chunks = _chunks(events, is_whole=is_whole)
    values = [strict(ChatCompletionChunk, chunk) for chunk in chunks]
    _check_chunks(chunks, values, request, is_whole=is_whole)
    begun: set[int] = set()
    num_calls: dict[int, int] = {}
    for value in values:
        for choice in value.choices:
            is_first = choice.index not in begun
            begun.add(choice.index)
            assert choice.delta.role == ("assistant" if is_first else None)
            for call in choice.delta.tool_calls or ():
                num_before = num_calls.get(choice.index, 0)
                if call.id is not None:
                    assert call.index == num_before
                    assert call.type == "function"
                    assert call.function.name
                    num_calls[choice.index] = num_before + 1
                else:
                    assert call.index == num_before - 1
                    assert (call.type, call.function.name) == (None, None)


def check_completion_events(events: list[tuple[str, Any]], request: Any, *, is_whole: bool) -> None:
    """Check the chunks of completions."""
    chunks = _chunks(events, is_whole=is_whole)
    # The nulls that the model forbids are taken out behind the other checks.
    values = [
        strict(Completion, _without_nulls(json.loads(json.dumps(chunk)), request, is_chunk=True))
        for chunk in chunks
    ]
    _check_chunks(chunks, values, request, is_whole=is_whole)


def _chunks(events: list[tuple[str, Any]], *, is_whole: bool) -> list[Any]:
    assert not any(name for name, _ in events)
    datas = [data for _, data in events]
    if is_whole:
        assert datas.pop() == "[DONE]"
    assert "[DONE]" not in datas
    return datas


def _check_chunks(chunks: list[Any], values: list[Any], request: Any, *, is_whole: bool) -> None:
    assert len({(value.id, value.created, value.model) for value in values}) == 1
    options = request.get("stream_options") or {}
    if options.get("include_usage"):
        assert all("usage" in chunk for chunk in chunks)
        if is_whole:
            assert (chunks[-1]["choices"], chunks[-1]["usage"] is None) == ([], False)
            chunks = chunks[:-1]
        is_each = bool(options.get("continuous_usage_stats"))
        assert all(is_each or chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    ended = set()
    for chunk in chunks:
        assert chunk["choices"]
        for choice in chunk["choices"]:
            assert choice["index"] not in ended, "a choice goes on behind its end"
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
    prompts = request.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) and isinstance(prompts[0], str | list) else 1
    if is_whole:
        assert ended == set(range((request.get("n") or 1) * num_prompts))


def check_response_events(events: list[tuple[str, Any]], request: Any, *, is_whole: bool) -> None:
    """Check the events of /v1/responses: their names, numbers, order, and that each finished item is the one
    that was streamed."""
    for number, (name, data) in enumerate(events):
        strict(ResponseStreamEvent, data)
        assert (data["type"], data["sequence_number"]) == (name, number)
    kinds = [name for name, _ in events]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    for _, data in events[:2]:
        assert (data["response"]["status"], data["response"]["output"]) == ("in_progress", [])
        assert data["response"]["usage"] is None
    if not is_whole:
        return
    kind, last = events[-1]
    done = _check_items([data for _, data in events[2:-1]])
    final = strict(Response, last["response"])
    check_response(final)
    assert final.status == _TERMINAL[kind]
    assert last["response"]["output"] == done


def _check_items(events: list[Any]) -> list[Any]:
    """Return the items that the events have built, each of which ends before the next begins."""
    items: list[Any] = []
    while events:
        added = events.pop(0)
        assert (added["type"], added["output_index"]) == ("response.output_item.added", len(items)), added
        item = added["item"]
        assert item["status"] == "in_progress"
        place = {"item_id": item["id"], "output_index": len(items)}
        family, has_part = {
            "message": ("output_text", True),
            "reasoning": ("reasoning_text", True),
            "function_call": ("function_call_arguments", False),
        }[item["type"]]
        if has_part:
            place["content_index"] = 0
            part = _next(events, "response.content_part.added", place)["part"]
            assert (item["content"], part["text"]) == ([], "")
        else:
            assert item["arguments"] == ""
        text = ""
        logprobs: list[Any] = []
        while events and events[0]["type"] == f"response.{family}.delta":
            delta = _next(events, f"response.{family}.delta", place)
            text += delta["delta"]
            logprobs += delta.get("logprobs", [])
        done = _next(events, f"response.{family}.done", place)
        assert done["text" if has_part else "arguments"] == text
        assert done.get("logprobs", []) == logprobs
        content = [_next(events, "response.content_part.done", place)["part"]] if has_part else []
        ended = _next(events, "response.output_item.done", {"output_index": len(items)})["item"]
        assert (ended["id"], ended["type"]) == (item["id"], item["type"])
        assert ended["status"] in ("completed", "incomplete")
        assert (ended["content"] if has_part else ended["arguments"]) == (content if has_part else text)
        assert not has_part or content[0]["text"] == text
        items.append(ended)
    return items


def _next(events: list[Any], kind: str, place: dict[str, Any]) -> Any:
    event = events.pop(0)
    assert event["type"] == kind, f"{event['type']} in place of {kind}"
    assert place.items() <= event.items(), event
    return event
