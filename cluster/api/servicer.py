"""The methods of `tandem.v1.Inference`: each translates, asks the desk, and ends in one reply or status."""

from __future__ import annotations

from typing import Any, NoReturn

from cluster.errors import FieldViolation, InvalidRequestError, RequestError, to_grpc_status
from cluster.gateway.actions import Summary
from cluster.gateway.desk import Accepted, Desk
from cluster.gateway.reports import Reporter, delta_of, finished_of
from cluster.gateway.text_calls import TextCalls
from cluster.gateway.traffic import TrafficRelay
from cluster.observe.ended import Caller
from cluster.proto import tandem_pb2 as pb
from cluster.stores.admin import StoreAdmin
from kvtransfer.faults import Faults

Context = Any
"""grpc.aio.ServicerContext, which has no types."""


class InferenceServicer:
    """One instance serves all calls. A cancelled call is a `CancelledError` here, and then at the desk."""

    def __init__(
        self,
        *,
        desk: Desk,
        texts: TextCalls,
        reporter: Reporter,
        stores: StoreAdmin,
        faults: Faults,
        traffic: TrafficRelay,
    ) -> None:
        self._desk = desk
        self._traffic = traffic
        self._texts = texts
        self._reporter = reporter
        self._stores = stores
        self._faults = faults

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        if await self._traffic.answered(request, context):
            return
        try:
            accepted = await self._desk.accept(request, context.time_remaining(), caller_of(context))
        except RequestError as error:
            await _abort(context, error)
        try:
            await self._stream(accepted, context)
        except RequestError as error:
            await _abort(context, error)
        finally:
            accepted.walk.abandon()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        try:
            return await self._texts.tokenize(request, self._desk.limits())
        except RequestError as error:
            await _abort(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        try:
            return await self._texts.detokenize(request, self._desk.limits())
        except RequestError as error:
            await _abort(context, error)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._reporter.model()])

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return await self._reporter.status()

    async def Paths(self, request: pb.PathsRequest, context: Context) -> None:
        async for message in self._reporter.paths(frozenset(request.replica_ids)):
            await context.write(message)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        try:
            if not request.request_id:
                problem = "is empty; `accepted` and the command line tell it"
                raise InvalidRequestError(FieldViolation("request_id", problem))
            if (reply := await self._traffic.explain(request)) is not None:
                return reply
            return self._reporter.explain(request.request_id)
        except RequestError as error:
            await _abort(context, error)

    async def StoreStat(self, request: pb.StoreStatRequest, context: Context) -> pb.StoreStatResponse:
        return await self._stores.stat(context.time_remaining())

    async def StoreList(self, request: pb.StoreListRequest, context: Context) -> pb.StoreListResponse:
        try:
            return await self._stores.records(request, context.time_remaining())
        except RequestError as error:
            await _abort(context, error)

    async def StoreVerify(self, request: pb.StoreVerifyRequest, context: Context) -> pb.StoreVerifyResponse:
        try:
            return await self._stores.verify(request, context.time_remaining())
        except RequestError as error:
            await _abort(context, error)

    async def StorePurge(self, request: pb.StorePurgeRequest, context: Context) -> pb.StorePurgeResponse:
        try:
            return await self._stores.purge(request, context.time_remaining())
        except RequestError as error:
            await _abort(context, error)

    async def _stream(self, accepted: Accepted, context: Context) -> None:
        """One `accepted`, the deltas, one `finished`; raises how the request failed."""
        first = pb.Accepted(
            request_id=accepted.request_id,
            seed=accepted.seed,
            num_prompt_tokens=accepted.num_prompt_tokens,
        )
        await context.write(pb.GenerateResponse(accepted=first))
        while not isinstance(output := await accepted.walk.next(), Summary):
            self._faults.at("gateway.token")
            await context.write(delta_of(output))
        await context.write(finished_of(output))


def caller_of(context: Context) -> Caller:
    """Who calls, and the trace that the call belongs to."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Caller(
        peer=context.peer() or "",
        traceparent=metadata.get("traceparent", ""),
        tracestate=metadata.get("tracestate", ""),
    )


async def _abort(context: Context, error: RequestError) -> NoReturn:
    status = to_grpc_status(error)
    await context.abort(status.code, status.message, status.trailing_metadata)
    raise AssertionError("abort does not return")
