"""The handlers of the routes: read the body, make the calls of `tandem.v1.Inference`, write the answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

from aiohttp import web

from cluster.admission import read_budget
from cluster.api.authentication import caller_identity
from cluster.api.prompt_calls import part_id
from cluster.api.servicer import InferenceServicer
from cluster.errors import InternalError, UnknownModelError, is_failure, own_cancellations
from cluster.gateway.output_buffer import UnreadOutput
from cluster.http import (
    chat,
    chat_answer,
    completions,
    embeddings,
    messages,
    messages_answer,
    messages_schemas,
    responses,
)
from cluster.http.answers import Answer, Maker, encode
from cluster.http.body_decoding import B, decode
from cluster.http.call import AbortedCall, HttpCall
from cluster.http.config import HttpConfig
from cluster.http.errors import HttpProblem, Rename
from cluster.http.fields import FIELDS, refused
from cluster.http.kept_output import KeptOutput, WholeAnswer
from cluster.http.model_list import model_list, model_of
from cluster.http.response_events import ResponsesAnswer
from cluster.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from cluster.http.sse import EventStream
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.text_threads import TextThreads
from kvtransfer.common.clock import Clock, give_way

REQUEST_ID_HEADER = "X-Request-Id"
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


# A longer body is read in another thread than the event loop's, and an answer with more tokens is written
# there.
SHORT_BODY_BYTES = 64 << 10
_SHORT_TOKENS = 4096
# `code` of the errors of calls that were refused by no fault of their caller.
_REFUSED_FOR_LOAD = frozenset(("overloaded", "unavailable"))

_REFUSED = {route: refused(route) for route in FIELDS}


class Served(NamedTuple):
    """A request of a known caller, whose body was read."""

    request: web.Request
    body: bytes
    # Returns the headers that say what is left of the caller's quotas.
    limits: Callable[[], Mapping[str, str]]


T = TypeVar("T")

Method = Literal["GET", "POST"]
Endpoint = Callable[[Served], Awaitable[web.StreamResponse]]


class Endpoints:
    """Answers requests of one gateway's clients."""

    def __init__(
        self,
        servicer: InferenceServicer,
        model_name: str,
        settings: HttpConfig,
        unread: UnreadOutput,
        clock: Clock,
    ) -> None:
        self._servicer = servicer
        self._unread = unread
        self._model_name = model_name
        self._settings = settings
        self._clock = clock
        self._threads = TextThreads("http")
        self._started_at = int(clock.wall())

    def routes(self) -> dict[tuple[Method, str], Endpoint]:
        """Return the handler of each route."""
        return {
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{model:.+}"): self._model,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/responses"): self._responses,
            ("POST", "/v1/messages"): self._messages,
            ("POST", "/v1/messages/count_tokens"): self._count_tokens,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }

    def close(self) -> None:
        """End the threads that read bodies."""
        self._threads.close()

    async def _read(self, served: Served, kind: type[B], translate: Callable[[B], T]) -> tuple[B, T]:
        """Return the request that a body is, and the calls that answer it. A long body is read in a thread:
        no step of that takes long by itself, but all together do. Tenants take turns there."""

        def read() -> tuple[B, T]:
            body = decode(served.body, kind, _REFUSED[served.request.path])
            return body, translate(body)

        if len(served.body) < SHORT_BODY_BYTES:
            return read()
        return await self._threads.run(caller_identity().tenant, read)

    # ------------------------------------------------------------------------------------- generating

    async def _chat(self, served: Served) -> web.StreamResponse:
        body, calls = await self._read(served, ChatRequest, chat.translate)
        return await self._generate(
            served, calls, chat_answer.ChatAnswer(body, self._maker()), bool(body.stream)
        )

    async def _completions(self, served: Served) -> web.StreamResponse:
        translate = functools.partial(completions.translate, max_inputs=self._settings.max_inputs)
        body, calls = await self._read(served, CompletionRequest, translate)
        detokenizer = functools.partial(self._servicer.detokenizer, calls.calls[0])
        answer = completions.CompletionAnswer(body, len(calls.calls), self._maker(), detokenizer)
        return await self._generate(served, calls, answer, bool(body.stream))

    async def _responses(self, served: Served) -> web.StreamResponse:
        body, calls = await self._read(served, responses.ResponsesRequest, responses.translate)
        return await self._generate(served, calls, ResponsesAnswer(body, self._maker()), bool(body.stream))

    async def _messages(self, served: Served) -> web.StreamResponse:
        body, calls = await self._read(served, messages_schemas.MessagesRequest, messages.translate)
        return await self._generate(
            served, calls, messages_answer.MessagesAnswer(body, self._maker()), bool(body.stream)
        )

    def _maker(self) -> Maker:
        return Maker("", int(self._clock.wall()), self._model_name)

    async def _generate(
        self, served: Served, translated: chat.Translated, answer: Answer, streams: bool
    ) -> web.StreamResponse:
        """Run the calls, and write their output: as it comes, or at the end."""
        kept = KeptOutput(self._unread)
        stream = EventStream(served.request, self._settings.write_timeout_s)
        write = _Writer(answer, kept, stream if streams else None)
        calls = [
            HttpCall(served.request, functools.partial(write, number))
            for number in range(len(translated.calls))
        ]
        stream.headers = lambda: self._headers(served, calls)
        read_budget.divide(len(calls))
        _name_calls(translated.calls, served.request)
        with contextlib.ExitStack() as ends, _without_headers_after(stream):
            ends.callback(kept.release)
            try:
                async with kept.bounded():
                    await self._run(translated, calls)
                body = answer.last() if streams else answer.whole()
            except HttpProblem as failed:
                problem = failed
            except BaseException as error:  # in a stream, its client reads an event
                if not stream.has_begun or isinstance(error, ConnectionError) or not is_failure(error):
                    raise
                _log.error("%s failed", served.request.path, exc_info=error)
                problem = HttpProblem.of_call(AbortedCall.of(InternalError()))
            else:
                if streams:
                    return await stream.end(body)
                whole = WholeAnswer(body, kept, self._headers(served, calls))
                ends.pop_all()  # whoever sends it releases it
                return whole
        try:
            if stream.has_begun:
                return await stream.end(answer.failed(problem))
            problem.headers.update(self._headers(served, calls))
            raise problem
        finally:
            del problem  # its traceback leads here

    async def _run(self, translated: chat.Translated, calls: list[HttpCall]) -> None:
        """Run all calls at the same time, if the tenant may have this number; the first that fails ends the
        others."""

        ended: set[int] = set()

        async def one(number: int) -> None:
            with renamed(translated.renames[number]):
                try:
                    await self._servicer.Generate(
                        translated.calls[number], calls[number], is_charged=len(calls) > 1
                    )
                except AbortedCall:
                    ended.add(number)
                    raise
                except asyncio.CancelledError as error:
                    if not is_failure(error):
                        raise
                    raise AbortedCall.of(InternalError()) from error  # a group would not notice it

        if len(calls) == 1:
            await one(0)
            return
        await self._servicer.charge(caller_identity().tenant, len(calls))
        try:
            with own_cancellations():
                async with asyncio.TaskGroup() as group:
                    for number in range(len(calls)):
                        group.create_task(one(number))
                        await give_way()
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            if isinstance(first, HttpProblem) and first.code in _REFUSED_FOR_LOAD:
                # The other calls were not looked at.
                ended.update(number for number, call in enumerate(calls) if call.request_id)
                self._servicer.give_back_requests(caller_identity().tenant, len(calls) - len(ended))
            try:
                raise first from None
            finally:
                del first  # its traceback leads here

    def _headers(self, served: Served, calls: list[HttpCall]) -> dict[str, str]:
        headers = {**calls[0].initial_metadata, **served.limits()}
        if calls[0].request_id:
            headers[REQUEST_ID_HEADER] = calls[0].request_id
        return headers

    # ------------------------------------------------------------------------------------- one answer

    async def _embeddings(self, served: Served) -> web.Response:
        translate = functools.partial(embeddings.embed_request, max_inputs=self._settings.max_inputs)
        body, request = await self._read(served, EmbeddingRequest, translate)
        request.request_id = _name_of(request.request_id, served.request)
        call = HttpCall(served.request)
        with renamed(embeddings.rename_embed):
            reply = await self._servicer.Embed(request, call)
        response = _json(embeddings.embedding_answer(body, reply, self._model_name))
        response.headers.update(served.limits())
        response.headers[REQUEST_ID_HEADER] = reply.request_id
        return response

    async def _tokenize(self, served: Served) -> web.Response:
        _, request = await self._read(served, TokenizeRequest, embeddings.tokenize_request)
        with renamed(embeddings.rename_tokenize):
            reply = await self._servicer.Tokenize(request, HttpCall(served.request))
        (model,) = await self._list(served)
        tokens = reply, model.max_context_tokens
        if len(reply.token_ids) <= _SHORT_TOKENS:
            return _json(embeddings.tokenize_answer(*tokens))
        work = functools.partial(embeddings.tokenize_answer, *tokens)
        return _json(await self._threads.run(caller_identity().tenant, work))

    async def _detokenize(self, served: Served) -> web.Response:
        _, request = await self._read(served, DetokenizeRequest, embeddings.detokenize_request)
        with renamed(embeddings.rename_detokenize):
            reply = await self._servicer.Detokenize(request, HttpCall(served.request))
        return _json(embeddings.detokenize_answer(reply))

    async def _count_tokens(self, served: Served) -> web.Response:
        _, counted = await self._read(served, messages_schemas.CountTokensRequest, messages.count_request)
        request, rename = counted
        with renamed(rename):
            reply = await self._servicer.Tokenize(request, HttpCall(served.request))
        return _json(encode(messages_answer.TokenCount(len(reply.token_ids))))

    # ----------------------------------------------------------------------------------------- models

    async def _models(self, served: Served) -> web.Response:
        return _json(encode(model_list(await self._list(served), self._started_at)))

    async def _model(self, served: Served) -> web.Response:
        name = served.request.match_info["model"]
        for model in await self._list(served):
            if model.name == name:
                return _json(encode(model_of(model, self._started_at)))
        raise UnknownModelError(f"the model {name[:100]!r} does not exist, or you may not use it")

    async def _list(self, served: Served) -> list[pb.Model]:
        reply = await self._servicer.ListModels(pb.ListModelsRequest(), HttpCall(served.request))
        return list(reply.models)


class _Writer:
    """Takes the messages of the calls of one answer: writes them to the stream, if there is one, and counts
    the kept bytes of the answer, which nobody reads before its end."""

    def __init__(self, answer: Answer, kept: KeptOutput, stream: EventStream | None) -> None:
        self._answer = answer
        self._kept = kept
        self._stream = stream

    async def __call__(self, number: int, response: pb.GenerateResponse) -> None:
        """Take a message of the call with this number."""
        events = self._answer.take(number, response)
        self._kept.grow(self._answer.num_kept_bytes)
        if events and self._stream is not None:
            await self._stream.send(events)


@contextlib.contextmanager
def _without_headers_after(stream: EventStream) -> Iterator[None]:
    """Let the stream forget the calls that its headers come from, which write to it: they would be in a
    cycle."""
    try:
        yield
    finally:
        stream.headers = dict


@contextlib.contextmanager
def renamed(rename: Rename) -> Iterator[None]:
    """Give the fields of a failed call their names over HTTP."""
    try:
        yield
    except AbortedCall as aborted:
        raise HttpProblem.of_call(aborted, rename) from aborted


def _name_of(given: str, request: web.Request) -> str:
    """Return the id of a request: the one in its body or, as vLLM has it, in a header; "": it has none."""
    header = request.headers.get(REQUEST_ID_HEADER, "")
    return given or (header if _REQUEST_ID.fullmatch(header) else "")


def _name_calls(requests: list[pb.GenerateRequest], request: web.Request) -> None:
    """Give the calls the request's id, where it has one."""
    name = _name_of(requests[0].request_id, request)
    for number, call in enumerate(requests):
        call.request_id = name if not name or len(requests) == 1 else part_id(name, f"-{number}")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
