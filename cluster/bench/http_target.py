"""Send the requests of a benchmark over HTTP, to any server with the API of OpenAI."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import msgspec

from cluster.api.channel import ClientCredentials
from cluster.api.generate_options import Turn
from cluster.bench.serving_load import AnswerEnd, BenchPrompt
from cluster.bench.targets import UNKNOWN_VOCABULARY, Target, TargetModel
from cluster.errors import BenchError, CallError

# Of an answer that is no stream, and of a line of one.
_MAX_BODY_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_DATA = b"data:"
_DONE = b"[DONE]"
# OpenAI's names of the classes.
_CLASS_TO_TIER = {"interactive": "priority", "standard": "default", "batch": "flex"}
_STATUS_TO_CODE = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class HttpTarget:
    """Sends to a server that speaks OpenAI's API: token ids to /v1/completions, chats to
    /v1/chat/completions, both as streams."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: TargetModel, who: ClientCredentials
    ) -> None:
        self.model = model
        self._session = session
        self._url = url
        self._who = who

    async def send(
        self, prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        path, body = self._request(prompt, num_tokens)
        if service_class:
            body["service_tier"] = _CLASS_TO_TIER[service_class]
        usage: dict[str, Any] = {}
        has_ended = False
        async with _called(
            self._session.post(f"{self._url}/v1/{path}", json=body, headers=_headers(self._who))
        ) as answer:
            yield 0
            async for data in _events(answer):
                if data.strip() == _DONE:
                    has_ended = True
                    break
                chunk = _chunk(data)
                usage = chunk.usage or usage
                if any(choice.has_output for choice in chunk.choices):
                    yield 1
        if not has_ended:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the stream ended without [DONE]")
        details = usage.get("prompt_tokens_details") or {}
        yield AnswerEnd(
            usage.get("prompt_tokens") or 0,
            details.get("cached_tokens") or 0,
            usage.get("completion_tokens") or 0,
        )

    def _request(self, prompt: BenchPrompt, num_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the path below /v1/, and the body."""
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": num_tokens,
            # Not OpenAI's, but that of vLLM, SGLang and Tandem: answers have the wanted length.
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        messages = [turn._asdict() for turn in prompt if isinstance(turn, Turn)]
        if messages:
            return "chat/completions", {**body, "messages": messages}
        return "completions", {**body, "prompt": list(prompt)}


def http_url(address: str) -> str:
    """Return the URL that `host:port`, or a URL with or without /v1 at its end, names."""
    url = address if address.startswith(("http://", "https://")) else f"http://{address}"
    return url.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def http_target(
    address: str, timeout_s: float, who: ClientCredentials | None, vocab_size: int = 0
) -> AsyncIterator[Target]:
    """Connect to a server."""
    url, credentials = http_url(address), who or ClientCredentials()
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        async with _called(session.get(f"{url}/v1/models", headers=_headers(credentials))) as answer:
            listed = _decoded(await _body(answer), _ModelList)
        if not listed.data:
            raise BenchError(f"{url}/v1/models names no model")
        model = listed.data[0]
        target = TargetModel(
            model.id, vocab_size or model.vocab_size or UNKNOWN_VOCABULARY, model.max_model_len or 0
        )
        yield HttpTarget(session, url, target, credentials)


class _ModelEntry(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class _ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: _ChunkDelta | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta or _ChunkDelta()
        return bool(
            self.text or delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls
        )


class _Chunk(msgspec.Struct):
    """A part of a stream; those that fail have nothing but `error`."""

    choices: list[_ChunkChoice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


@asynccontextmanager
async def _called(call: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """Make a call; `CallError` where it fails, now or while its answer is read."""
    try:
        async with call as answer:
            if answer.status != 200:
                code = _STATUS_TO_CODE.get(answer.status, grpc.StatusCode.INTERNAL)
                raise CallError(code, f"HTTP {answer.status}: {_message(await _body(answer))}")
            yield answer
    except TimeoutError as error:
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise CallError(grpc.StatusCode.UNAVAILABLE, _in_words(error)) from error


def _in_words(error: Exception) -> str:
    """Return why a server could not be reached, or was lost."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
        return f"cannot connect to {error.host}:{error.port}: {reason}"
    return str(error) or type(error).__name__


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each event."""
    rest = b""
    async for part in answer.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise CallError(grpc.StatusCode.INTERNAL, "a line of the stream is too long")
        for line in lines:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA)


def _chunk(data: bytes) -> _Chunk:
    chunk: _Chunk = _decoded(data, _Chunk)
    if chunk.error is not None:
        raise CallError(grpc.StatusCode.INTERNAL, _message(data))
    return chunk


def _decoded(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CallError(
            grpc.StatusCode.INTERNAL, f"the server's answer is not as expected: {error}"
        ) from error


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body, or its beginning where it is long."""
    parts, num_bytes = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MAX_BODY_BYTES:
            break
    return b"".join(parts)


def _message(body: bytes) -> str:
    """Return what an error says in OpenAI's shape, else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _headers(who: ClientCredentials) -> dict[str, str]:
    return dict(who.metadata())
