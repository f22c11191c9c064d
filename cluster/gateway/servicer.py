"""The methods of `tandem.v1.Inference`: each translates, asks the desk, and ends in one reply or status."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cluster.errors import FieldViolation, InvalidRequestError, RequestError, to_grpc_status
from cluster.gateway.actions import Summary
from cluster.gateway.desk import Accepted, Desk
from cluster.gateway.intake import Intake
from cluster.gateway.reports import Reporter, delta_of, finished_of
from cluster.gateway.traffic import TrafficRelay
from cluster.gateway.validation import check_detokenize, check_tokenize
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
        intake: Intake,
        reporter: Reporter,
        stores: StoreAdmin,
        faults: Faults,
        traffic: TrafficRelay,
    ) -> None:
        self._desk = desk
        self._traffic = traffic
        self._intake = intake
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
            limits = self._desk.limits()
            check_tokenize(request, limits)
            if request.WhichOneof("input") == "chat":
                text, adds_tokens = await self._intake.render_chat(request.chat, limits), False
            else:
                text, adds_tokens = request.text, True
            if request.HasField("add_special_tokens"):
                adds_tokens = request.add_special_tokens
            tokens = await self._intake.encode(text, add_special_tokens=adds_tokens)
        except RequestError as error:
            await _abort(context, error)
        return pb.TokenizeResponse(token_ids=np.frombuffer(tokens, dtype="<u4").tolist())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        try:
            check_detokenize(request, self._desk.limits())
        except RequestError as error:
            await _abort(context, error)
        tokens = np.asarray(request.token_ids, dtype="<u4").tobytes()
        text = self._intake.decode(tokens, keep_special_tokens=request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._reporter.model()])

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return self._reporter.status()

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
