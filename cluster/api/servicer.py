"""The methods of `tandem.v1.Inference`: each translates, calls the gateway, and ends in one reply.

Every caller gets what belongs to its own tenant alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc.aio
import numpy as np

from cluster.admission import read_budget
from cluster.api.authentication import Context, abort, caller_identity, claim, headers_arrived_at
from cluster.api.output_messages import OutputMessages, usage_of
from cluster.api.prompt_calls import CallContext, PromptCalls
from cluster.api.replies import StatusService
from cluster.errors import (
    FieldViolation,
    GrpcStatus,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    to_grpc_status,
)
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_manager import RequestHandle, RequestManager
from cluster.gateway.traffic_splitter import TrafficSplitter
from cluster.identity.identity import Identity
from cluster.metrics.ended_request import Caller, Summary
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.chat_template import Rendered
from cluster.text.constraints import tags_of
from cluster.text.preprocess import Preprocessor
from cluster.text.tag_grammar import tag_markers
from cluster.text.text_threads import TextThreads
from cluster.text.tokenizer import Detokenizer, ModelText
from cluster.text.validation import ServingLimits, check_detokenize, check_tokenize
from kvtransfer.common.clock import let_others_run
from kvtransfer.common.faults import Faults

# How long a handler waits until the status of a failed stream is sent.
STATUS_WAIT_S = 1.0


class InferenceServicer:
    """Serves all calls. A cancelled call is a `CancelledError` here, which abandons the request."""

    def __init__(
        self,
        requests: RequestManager,
        connections: ReplicaConnections,
        texts: TextCalls,
        prompts: PromptCalls,
        status: StatusService,
        faults: Faults,
        traffic: TrafficSplitter,
    ) -> None:
        self._requests = requests
        self._connections = connections
        self._traffic = traffic
        self._texts = texts
        self._prompts = prompts
        self._status = status
        self._faults = faults

    async def charge(self, tenant: str, count: int = 1) -> None:
        """Take the requests of one call from its tenant's quota, all or none; `QuotaError`."""
        await self._requests.charges.charge(tenant, count)

    def give_back_requests(self, tenant: str, count: int = 1) -> None:
        """Give requests of `charge` back of which nothing is done, as there is no room for them."""
        self._requests.charges.give_back(tenant, count)

    async def pace_refusal(self, tenant: str) -> None:
        """Wait before a call is refused by its tenant's quota, if others were refused just before."""
        await self._requests.charges.pace_refusal(tenant)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context, *, is_charged: bool = False
    ) -> None:
        """Serve one call; `is_charged`: its request was taken from its tenant's quota (`charge`)."""
        identity = caller_identity()
        claim(request, identity)
        shares = self._connections.roster_view.traffic
        if shares and await self._is_relayed(request, context, shares, is_charged):
            return
        try:
            caller = caller_of(context, identity)
            accepted = await self._requests.accept(
                request, context.time_remaining(), identity, caller, is_charged=is_charged
            )
            read_budget.pass_on()
        except RequestError as error:
            await abort(context, error)
        failure: GrpcStatus | None = None
        try:
            await _send_headers(context)
            async with accepted.task.reading():
                await self._stream(OutputMessages(request, accepted, self._texts.text), accepted, context)
        except RequestError as error:
            failure = to_grpc_status(error, usage_of(accepted.task.summary()))
        finally:
            accepted.task.abandon()
        if failure is not None:  # nothing of what was taken is held any more
            await _end_behind_output(context, failure)

    async def _is_relayed(
        self, request: pb.GenerateRequest, context: Context, shares: dict[str, float], is_charged: bool
    ) -> bool:
        """As `TrafficSplitter.answered`. Whoever answers the call charges for it, also where it fails
        there."""
        is_answered = True
        try:
            is_answered = await self._traffic.answered(request, context, shares)
        finally:
            if is_answered and (is_charged or read_budget.use_paid()):
                self._requests.charges.give_back(request.tenant)
        return is_answered

    def detokenizer(self, request: pb.GenerateRequest) -> Detokenizer:
        """Return the maker of the text of an answer that is nothing but text."""
        has_tags = request.constraint.HasField("structural_tags")
        kept = tag_markers(tags_of(request.constraint)) if has_tags else ()
        return self._texts.text.detokenizer(kept, keeps_all=request.keep_special_tokens)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        claim(request, caller_identity())
        call = _call_context(context)
        try:
            return await self._prompts.embed(request, call)
        except RequestError as error:
            await abort(context, error, call.usage())

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        claim(request, caller_identity())
        call = _call_context(context)
        try:
            return await self._prompts.score(request, call)
        except RequestError as error:
            await abort(context, error, call.usage())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        try:
            identity, limits = caller_identity(), self._requests.limits()
            identity.check_may_use(limits.model_name)
            async with self._charged(identity.tenant):
                return await self._texts.tokenize(request, limits, identity.tenant)
        except RequestError as error:
            await abort(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        try:
            identity, limits = caller_identity(), self._requests.limits()
            identity.check_may_use(limits.model_name)
            async with self._charged(identity.tenant):
                return await self._texts.detokenize(request, limits, identity.tenant)
        except RequestError as error:
            await abort(context, error)

    @contextlib.asynccontextmanager
    async def _charged(self, tenant: str) -> AsyncIterator[None]:
        """Take the request of a call that tokenizes; give it back where there is no room for the call."""
        await self._requests.charges.charge(tenant)
        try:
            yield
        except OverloadedError:
            self._requests.charges.give_back(tenant)
            raise

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        model = self._status.model()
        return pb.ListModelsResponse(models=[model] if caller_identity().may_use(model.name) else [])

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        tenant = _tenant_of(caller_identity())
        return await explain(self._status, self._traffic, request, tenant, context)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        return await list_requests(self._status, request, _tenant_of(caller_identity()), context)

    async def _stream(self, messages: OutputMessages, accepted: RequestHandle, context: Context) -> None:
        """Write one `accepted`, the output and one `finished`; raise the error of a failed request."""
        for message in messages.first():
            await context.write(message)
        while not isinstance(output := await accepted.task.next(), Summary):
            self._faults.at("gateway.token")
            for message in messages.of(output):
                await context.write(message)
        await context.write(messages.last(output))


async def _send_headers(context: Context) -> None:
    """Send the headers by themselves: if a write with the headers in it were cut off, gRPC would not take a
    status after it."""
    with contextlib.suppress(grpc.aio.UsageError):  # `TrafficSplitter` has sent them
        await context.send_initial_metadata(())


async def _end_behind_output(context: Context, status: GrpcStatus) -> None:
    """End a call of `Generate` with the status of its error. The client reads all output that was written
    before; after `STATUS_WAIT_S`, gRPC alone waits for that, and the handler ends."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STATUS_WAIT_S):
            await context.abort(status.code, status.message, status.trailing_metadata)


def _call_context(context: Context) -> CallContext:
    """Return who makes a call, and how to learn how long it may still take."""
    identity = caller_identity()
    return CallContext(identity, caller_of(context, identity), context.time_remaining)


def caller_of(context: Context, identity: Identity) -> Caller:
    """Return the caller, its address, and the trace that the call belongs to."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Caller(
        name=identity.name,
        peer=context.peer() or "",
        traceparent=metadata.get("traceparent", ""),
        tracestate=metadata.get("tracestate", ""),
        arrived_at=headers_arrived_at(),
    )


async def explain(
    status: StatusService,
    traffic: TrafficSplitter,
    request: pb.ExplainRequest,
    tenant: str | None,
    context: Context,
) -> pb.ExplainResponse:
    """Answer `Explain` of either service, for requests of this tenant alone; None: of any."""
    try:
        if not request.request_id:
            problem = "is empty; `accepted` and the command line show it"
            raise InvalidRequestError(FieldViolation("request_id", problem))
        if (reply := await traffic.explain(request, tenant, context)) is not None:
            return reply
        return await status.explain(request.request_id, tenant)
    except RequestError as error:
        await abort(context, error)


async def list_requests(
    status: StatusService, request: pb.ListRequestsRequest, tenant: str | None, context: Context
) -> pb.ListRequestsResponse:
    """Answer `ListRequests` of either service, for requests of this tenant alone; None: of all."""
    try:
        return await status.list_requests(request, tenant)
    except RequestError as error:
        await abort(context, error)


def _tenant_of(identity: Identity) -> str | None:
    """Return whose requests the caller may see; None: all, where nobody is authenticated."""
    return None if identity.names_tenants else identity.tenant


# Calls of Tokenize and Detokenize at once, running and waiting: of all tenants, and of one. The size of each
# is limited by the model's context.
MAX_CALLS = 64
MAX_TENANT_CALLS = MAX_CALLS // 2
# Token ids copied before the event loop may run again.
_NUM_TOKENS = 4096


class TextCalls:
    """Runs Tokenize and Detokenize in their own threads, apart from the event loop and the threads of
    Generate.

    A call beyond `MAX_CALLS`, or `MAX_TENANT_CALLS` of its tenant, raises `OverloadedError`.
    """

    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._threads = TextThreads("text")
        self._tenant_to_num_calls: Counter[str] = Counter()

    @property
    def text(self) -> ModelText:
        """The model's tokenizer."""
        return self._preprocessor.text

    async def tokenize(
        self, request: pb.TokenizeRequest, limits: ServingLimits, tenant: str
    ) -> pb.TokenizeResponse:
        """Tokenize text or a chat; raise `RequestError` when the request cannot be served."""
        with self._admitted(tenant):
            await self._threads.run(tenant, lambda: check_tokenize(request, limits))
            prompt: str | Rendered = request.text
            is_chat = request.WhichOneof("input") == "chat"
            if is_chat:
                prompt = await self._preprocessor.render_chat(request.chat, limits, tenant)
            adds_tokens = (
                request.add_special_tokens if request.HasField("add_special_tokens") else not is_chat
            )
            return await self._threads.run(tenant, lambda: self._tokenized(prompt, adds_tokens))

    async def detokenize(
        self, request: pb.DetokenizeRequest, limits: ServingLimits, tenant: str
    ) -> pb.DetokenizeResponse:
        """Decode token ids; raise `RequestError` when the request cannot be served."""
        with self._admitted(tenant):
            return await self._threads.run(tenant, lambda: self._detokenized(request, limits))

    def close(self) -> None:
        """End the threads, after their present work."""
        self._threads.close()

    @contextlib.contextmanager
    def _admitted(self, tenant: str) -> Iterator[None]:
        num_calls = self._tenant_to_num_calls
        if num_calls[tenant] >= MAX_TENANT_CALLS:
            raise _too_many(MAX_TENANT_CALLS, " of this tenant")
        if num_calls.total() >= MAX_CALLS:
            raise _too_many(MAX_CALLS, "")
        num_calls[tenant] += 1
        try:
            yield
        finally:
            num_calls[tenant] -= 1
            if not num_calls[tenant]:
                del num_calls[tenant]

    def _tokenized(self, prompt: str | Rendered, adds_tokens: bool) -> pb.TokenizeResponse:
        tokens = np.frombuffer(
            self._preprocessor.encode_now(prompt, add_special_tokens=adds_tokens), dtype="<u4"
        )
        response = pb.TokenizeResponse()
        for start in range(0, len(tokens), _NUM_TOKENS):
            response.token_ids.extend(tokens[start : start + _NUM_TOKENS].tolist())
            let_others_run()
        return response

    def _detokenized(self, request: pb.DetokenizeRequest, limits: ServingLimits) -> pb.DetokenizeResponse:
        check_detokenize(request, limits)
        tokens = _as_bytes(request.token_ids)
        text = self._preprocessor.decode(tokens, keep_special_tokens=request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)


def _too_many(most: int, whose: str) -> OverloadedError:
    what = f"{most} calls of Tokenize and Detokenize{whose}"
    return OverloadedError(f"this gateway has {what}, the most it takes at once")


def _as_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as uint32 little-endian."""
    parts = []
    for start in range(0, len(ids), _NUM_TOKENS):
        parts.append(np.asarray(ids[start : start + _NUM_TOKENS], dtype="<u4").tobytes())
        let_others_run()
    return b"".join(parts)
