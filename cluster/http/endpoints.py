"""What answers each route: reads the body, makes the calls of `tandem.v1.Inference`, writes the answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple

from aiohttp import web

from cluster.api.servicer import InferenceServicer
from cluster.config import HttpConfig
from cluster.errors import UnknownModelError
from cluster.http import chat, completions
from cluster.http.answers import Answer, Maker, encode
from cluster.http.call import AbortedCall, HttpCall
from cluster.http.errors import HttpProblem
from cluster.http.fields import REFUSED
from cluster.http.model_list import model_list, model_of
from cluster.http.schemas import ChatRequest, CompletionRequest, decode
from cluster.http.sse import EventStream
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import Clock

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class Served(NamedTuple):
    """A request of a known caller, whose body was read."""

    request: web.Request
    body: bytes
    # Returns the headers that say what is left of the caller's quotas.
    limits: Callable[[], Mapping[str, str]]


Method = Literal["GET", "POST"]
Endpoint = Callable[[Served], Awaitable[web.StreamResponse]]


class Endpoints:
    """Answers requests of one gateway's clients."""

    def __init__(
        self, servicer: InferenceServicer, model_name: str, settings: HttpConfig, clock: Clock
    ) -> None:
        self._servicer = servicer
        self._model_name = model_name
        self._settings = settings
        self._clock = clock
        self._started_at = int(clock.wall())

    def routes(self) -> dict[tuple[Method, str], Endpoint]:
        """Return what answers each route."""
        return {
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{model}"): self._model,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completions,
        }

    # ------------------------------------------------------------------------------------- generating

    async def _chat(self, served: Served) -> web.StreamResponse:
        body = decode(served.body, ChatRequest, REFUSED)
        calls = chat.translate(body)
        return await self._generate(served, calls, chat.ChatAnswer(body, self._maker()), bool(body.stream))

    async def _completions(self, served: Served) -> web.StreamResponse:
        body = decode(served.body, CompletionRequest, REFUSED)
        calls = completions.translate(body, self._settings.max_inputs)
        answer = completions.CompletionAnswer(body, len(calls.calls), self._maker())
        return await self._generate(served, calls, answer, bool(body.stream))

    def _maker(self) -> Maker:
        return Maker("", int(self._clock.wall()), self._model_name)

    async def _generate(
        self, served: Served, translated: chat.Translated, answer: Answer, streams: bool
    ) -> web.StreamResponse:
        """Run the calls, and write what they bring: as it comes, or at the end."""
        stream = EventStream(served.request, self._settings.write_timeout_s)
        calls = [
            HttpCall(served.request, self._writer(number, answer, stream if streams else None))
            for number in range(len(translated.calls))
        ]
        stream.headers = lambda: self._headers(served, calls)
        _name_calls(translated.calls, served.request)
        try:
            await self._run(translated.calls, calls)
        except AbortedCall as aborted:
            problem = HttpProblem.of_call(aborted, translated.rename)
            if not stream.has_begun:
                problem.headers.update(self._headers(served, calls))
                raise problem from aborted
            return await stream.end(answer.failed(problem))
        if streams:
            return await stream.end(answer.last())
        headers = self._headers(served, calls)
        return web.Response(body=answer.whole(), content_type="application/json", headers=headers)

    async def _run(self, requests: list[pb.GenerateRequest], calls: list[HttpCall]) -> None:
        """Run all calls at once; the first that fails ends the others."""
        if len(calls) == 1:
            await self._servicer.Generate(requests[0], calls[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for request, call in zip(requests, calls, strict=True):
                    group.create_task(self._servicer.Generate(request, call))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _writer(
        self, number: int, answer: Answer, stream: EventStream | None
    ) -> Callable[[pb.GenerateResponse], Awaitable[None]]:
        async def write(response: pb.GenerateResponse) -> None:
            events = answer.take(number, response)
            if events and stream is not None:
                await stream.send(events)

        return write

    def _headers(self, served: Served, calls: list[HttpCall]) -> dict[str, str]:
        headers = {**calls[0].initial_metadata, **served.limits()}
        if calls[0].request_id:
            headers[REQUEST_ID_HEADER] = calls[0].request_id
        return headers

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


def _name_calls(requests: list[pb.GenerateRequest], request: web.Request) -> None:
    """Give the calls the request's id, where it has one: in its body or, as vLLM has it, in a header."""
    header = request.headers.get(REQUEST_ID_HEADER, "")
    name = requests[0].request_id or (header if _REQUEST_ID.fullmatch(header) else "")
    for number, call in enumerate(requests):
        call.request_id = name if not name or len(requests) == 1 else f"{name}-{number}"


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
