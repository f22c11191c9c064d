"""Requests that another application of the Ray cluster answers, with another version of the model.

The roster says which share of the requests goes where. Which requests those are is decided by a hash of
tenant and request id, so that retries and resumed streams stay where the request began.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
import grpc.aio

from cluster.errors import (
    FieldViolation,
    InvalidRequestError,
    RosterAwayError,
    UnavailableError,
    to_grpc_status,
)
from cluster.gateway.relay_channels import OwnCertificate, RelayChannels
from cluster.identity.certificates import names_of_auth_context
from cluster.identity.relay_tokens import RelayedCaller, RelayTokens
from cluster.identity.request_ids import draw_request_id
from cluster.metrics.ended_request import RelayedRequest
from cluster.proto import APPLICATION_KEY, RELAYED_CERTIFICATE_KEY
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import GatewayRecord, SetTraffic
from cluster.roster.state import RosterClient, ScalingRoster
from kvtransfer.common.clock import Clock
from kvtransfer.common.recent_map import RecentMap

# Metadata of a request that a gateway passes on: it is answered where it arrives.
RELAYED_KEY = "tandem-relayed-by"
# How long the first request for an application waits to learn where its gateways are.
_FIRST_VIEW_S = 2.0
_WATCH_S = 30.0
_NUM_REMEMBERED = 1024
_HASH_BYTES = 8
_OWN_METADATA = {"user-agent", "content-type", "te", "host"}
_OWN_METADATA |= {RELAYED_KEY, RELAYED_CERTIFICATE_KEY, APPLICATION_KEY}
# How a gateway refuses a relayed request that another one may answer: it cannot, or does not know the caller.
_ELSEWHERE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_log = logging.getLogger(__name__)

# grpc.aio.ServicerContext, which has no types.
Context = Any


def application_of(shares: Mapping[str, float], own: str, tenant: str, request_id: str) -> str:
    """Return which application answers the request. A change of the shares moves no more requests than it
    must: those of `own` are the rest that the others, in the order of their names, leave."""
    digest = hashlib.sha256(f"{tenant}\0{request_id}".encode()).digest()
    place = int.from_bytes(digest[:_HASH_BYTES], "big") / 256**_HASH_BYTES
    total = sum(shares.values())
    upto = 0.0
    for app in sorted(shares):
        if app == own:
            continue
        upto += shares[app] / total
        if place < upto:
            return app
    return own if shares.get(own, 0.0) > 0 or not shares else max(shares, key=lambda app: (shares[app], app))


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """Return shares that sum up to 1; `InvalidRequestError` where the weights make none."""
    for app, weight in weights.items():
        if not app or not math.isfinite(weight) or weight < 0:
            problem = f"the weight of {app[:100]!r} is {weight:g}; give every application a number from 0"
            raise InvalidRequestError(FieldViolation("weights", problem))
    total = sum(weights.values())
    if not 0 < total < math.inf:
        problem = "at least one application needs a weight above 0"
        raise InvalidRequestError(FieldViolation("weights", problem))
    return {app: weight / total for app, weight in weights.items()}


class RemoteApp:
    """The gateways of another application, followed through its roster."""

    def __init__(self, app: str, roster: RosterClient) -> None:
        self.app = app
        self.gateways: tuple[GatewayRecord, ...] = ()
        self._roster = roster
        self._seen = asyncio.Event()
        self._is_away = False
        self._watching = asyncio.create_task(self._watch(), name=f"roster of {app}")

    async def wait_seen(self) -> None:
        """Return when the roster has answered once; after a while without, nobody waits for it any more."""
        if self._seen.is_set() or self._is_away:
            return
        try:
            await asyncio.wait_for(self._seen.wait(), _FIRST_VIEW_S)
        except TimeoutError:
            self._is_away = True
            _log.warning("the roster of application %s does not answer", self.app)

    def in_order(self, request_id: str) -> list[GatewayRecord]:
        """Return the gateways to try; the order depends on the request."""
        return sorted(
            self.gateways,
            key=lambda record: hashlib.sha256(f"{record.gateway_id}\0{request_id}".encode()).digest(),
        )

    def stop(self) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        version = -1
        while True:
            view = await self._roster.view(version, _WATCH_S if version >= 0 else 0.0)
            if view.version > version:
                self.gateways = view.gateways
            if view.version > 0:
                self._seen.set()
            version = max(version, view.version)


class _Answer(NamedTuple):
    """The end of a forwarded call, as `context.abort` takes it."""

    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    has_begun: bool = True


class TrafficSplitter:
    """Forwards calls of `Generate` to the application that must answer them.

    The caller stays the same there: a key or token is passed on, and this gateway vouches for a certificate.
    A gateway of the other application that refuses the request, or does not know the caller, is no reason to
    fail: the next one is tried, then the request is answered here. Only a resumed stream that began there
    cannot be answered here, because its tokens are another model's. Messages, deadline, cancellation and
    errors with their details are passed through as they come.
    """

    def __init__(
        self,
        *,
        app: str,
        gateway_id: str,
        model_name: str,
        roster: ScalingRoster,
        open_roster: Callable[[str], RosterClient] | None,
        clock: Clock,
        relays: RelayTokens,
        certificate: OwnCertificate | None,
        on_end: Callable[[RelayedRequest], None] | None = None,
    ) -> None:
        """`open_roster` finds the roster of another application; without it, requests stay here."""
        self._app = app
        self._gateway_id = gateway_id
        self._roster = roster
        self._model_name = model_name
        self._open_roster = open_roster
        self._clock = clock
        self._on_end = on_end
        self._others: dict[str, RemoteApp] = {}
        self._relays = relays
        self._channels = RelayChannels(certificate)
        self._calls: set[Any] = set()
        # Destinations of forwarded requests, by tenant and id.
        self._relayed_to: RecentMap[tuple[str, str], GatewayRecord] = RecentMap(_NUM_REMEMBERED)
        self._is_leaving = self._is_closed = False

    @property
    def num_running(self) -> int:
        """The number of calls that other applications are answering."""
        return len(self._calls)

    async def answered(self, request: pb.GenerateRequest, context: Context, shares: dict[str, float]) -> bool:
        """Return True when another application answered the call to its end; False: answer it here.

        `shares` is the traffic that each application gets. The request gets an id if it has none. Ends by
        `context.abort` where the other application answers with an error.
        """
        if self._open_roster is None or self._is_leaving:
            return False
        metadata = dict(context.invocation_metadata() or ())
        if RELAYED_KEY in metadata:
            return False
        request.request_id = request.request_id or draw_request_id(self._gateway_id)
        began_at = metadata.get(APPLICATION_KEY, "") if request.resume else ""
        must = began_at in shares
        app = began_at if must else application_of(shares, self._app, request.tenant, request.request_id)
        if app != self._app and await self._forward(app, request, context, must=must):
            return True
        await context.send_initial_metadata(((APPLICATION_KEY, self._app),))
        return False

    async def explain(
        self, request: pb.ExplainRequest, tenant: str | None, context: Context
    ) -> pb.ExplainResponse | None:
        """Return the answer of the gateway that the tenant's request (None: any tenant's) was forwarded to,
        asked as the caller; None where there is none."""
        gateways = [
            gateway
            for (owner, request_id), gateway in self._relayed_to.items()
            if request_id == request.request_id and tenant in (None, owner)
        ]
        if not gateways:
            return None
        try:
            reply: pb.ExplainResponse = await self._channels.stub(gateways[-1]).Explain(
                request, timeout=_FIRST_VIEW_S, metadata=self._metadata(context, request.request_id)
            )
        except grpc.aio.AioRpcError:
            return None
        return reply

    async def set_shares(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Set how this application's requests are split; return the shares of all applications.

        Applications that got requests so far and are no longer named keep a share of 0, while they run: so
        streams that began there and are resumed still find them. `InvalidRequestError` for weights that make
        no shares, and for an application that does not run.
        """
        wanted = shares_of(weights)
        names = [name for name, share in wanted.items() if share > 0 and name != self._app]
        if away := [name for name in names if not await self._runs(name)]:
            problem = f"no gateway of an application {away[0][:100]!r} serves in this Ray cluster"
            raise InvalidRequestError(FieldViolation("weights", problem))
        try:
            before = (await self._roster.view(-1, 0.0)).traffic
            kept = [name for name in before if name != self._app and await self._runs(name)]
            shares = {name: wanted.get(name, 0.0) for name in sorted({*kept, *wanted, self._app})}
            await self._roster.change(SetTraffic(shares))
        except RosterAwayError as error:
            raise UnavailableError(f"the split could not be recorded: {error}") from error
        return shares

    async def _runs(self, app: str) -> bool:
        """Whether the other application has a gateway."""
        if self._open_roster is None:
            return False
        return bool((await self._open_roster(app).view(-1, 0.0)).gateways)

    def leave(self) -> None:
        """Forward no more calls; those that run continue."""
        self._is_leaving = True

    def close(self) -> None:
        """End every call with UNAVAILABLE, so that clients resume at another gateway."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()

    async def stop(self) -> None:
        """Close all connections."""
        for other in self._others.values():
            other.stop()
        await self._channels.close()

    async def _forward(self, app: str, request: pb.GenerateRequest, context: Context, *, must: bool) -> bool:
        began_at = self._clock.now()
        other = self._remote_app(app)
        await other.wait_seen()
        answer = _Answer(grpc.StatusCode.UNAVAILABLE, "it has no gateway", has_begun=False)
        try:
            for gateway in other.in_order(request.request_id):
                answer = await self._ask(gateway, app, request, context)
                if answer.has_begun or answer.code not in _ELSEWHERE:
                    break
                about = {"request_id": request.request_id}
                _log.warning("application %s: %s: %s", app, gateway.address, answer.details, extra=about)
        except asyncio.CancelledError:
            self._ended(request, context, app, grpc.StatusCode.CANCELLED, began_at)
            raise
        if not answer.has_begun and answer.code in _ELSEWHERE:
            if not must:
                return False
            if answer.code is grpc.StatusCode.UNAVAILABLE:
                answer = _unavailable(f"application {app}, where the request began: {answer.details}", 1.0)
        self._ended(request, context, app, answer.code, began_at)
        if answer.code is not grpc.StatusCode.OK:
            await context.abort(answer.code, answer.details, answer.trailing)
        return True

    async def _ask(
        self, gateway: GatewayRecord, app: str, request: pb.GenerateRequest, context: Context
    ) -> _Answer:
        forwarded = pb.GenerateRequest()
        forwarded.CopyFrom(request)
        if forwarded.model == self._model_name:
            forwarded.model = ""
        timeout_s = context.time_remaining()
        metadata = self._metadata(context, forwarded.request_id)
        call = self._channels.stub(gateway).Generate(forwarded, timeout=timeout_s, metadata=metadata)
        self._calls.add(call)
        has_begun = False
        try:
            async for response in call:
                if not has_begun:
                    has_begun = True
                    self._remember((request.tenant, request.request_id), gateway)
                    await context.send_initial_metadata(((APPLICATION_KEY, app),))
                await context.write(response)
            return _Answer(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            return _Answer(error.code(), error.details() or "", trailing, has_begun)
        except asyncio.CancelledError:
            if not (self._is_closed and call.cancelled()):
                raise  # the client left
            return _unavailable("this gateway is stopping", 0.0)
        finally:
            self._calls.discard(call)
            call.cancel()

    def _metadata(self, context: Context, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
        kept = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key not in _OWN_METADATA and not key.startswith(("grpc-", ":"))
        ]
        names = names_of_auth_context(context.auth_context())
        if names:
            kept.append((RELAYED_CERTIFICATE_KEY, self._relays.issue(RelayedCaller(names, request_id))))
        return (*kept, (RELAYED_KEY, self._app))

    def _remote_app(self, app: str) -> RemoteApp:
        if app not in self._others:
            assert self._open_roster is not None
            self._others[app] = RemoteApp(app, self._open_roster(app))
        return self._others[app]

    def _remember(self, key: tuple[str, str], gateway: GatewayRecord) -> None:
        self._relayed_to.put(key, gateway)

    def _ended(
        self, request: pb.GenerateRequest, context: Context, app: str, code: grpc.StatusCode, began_at: float
    ) -> None:
        if self._on_end is not None:
            e2e_ms = round(1e3 * (self._clock.now() - began_at), 3)
            peer, tenant = context.peer() or "", request.tenant
            self._on_end(RelayedRequest(request.request_id, tenant, peer, app, code.name, e2e_ms))


def _unavailable(reason: str, retry_after_s: float) -> _Answer:
    status = to_grpc_status(UnavailableError(reason, retry_after_s))
    return _Answer(status.code, status.message, status.trailing_metadata)
