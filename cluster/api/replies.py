"""What the gateway knows, as the messages of its API: output, status, models, explanations."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from msgspec.structs import asdict

from cluster.api.status_thread import StatusThread
from cluster.api.store_admin import StoreAdmin
from cluster.config import ClusterConfig, PoolConfig
from cluster.errors import FieldViolation, InvalidRequestError
from cluster.gateway.fleet.fleet import Fleet, FleetStats, FoundRequest
from cluster.gateway.fleet.messages import ListedRequest
from cluster.gateway.history import RequestHistory
from cluster.gateway.replica_connections import ReplicaConnections, ReplicaView
from cluster.gateway.request_manager import RequestManager
from cluster.metrics.admission_stats import AdmissionStats
from cluster.metrics.demand import demand_message
from cluster.metrics.ended_request import RequestInfo
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import GatewayRecord, RosterView
from cluster.scaling.orders import OrderDone
from cluster.text.preprocess import Preprocessor
from kvtransfer.common.clock import Clock
from router.messages import Decision, MissedBlocks

# The number of running requests, and of ended ones, in one list of requests.
DEFAULT_REQUESTS = 100
MAX_REQUESTS = 1000
# The largest age of a status. Replicas report about as often.
STATUS_S = 0.2
_PACKAGES = ("tandem-serve", "ray", "torch", "grpcio", "tokenizers", "msgspec")

T = TypeVar("T")


class StatusService:
    """Answers the calls that concern no single stream."""

    def __init__(
        self,
        config: ClusterConfig,
        requests: RequestManager,
        connections: ReplicaConnections,
        preprocessor: Preprocessor,
        stores: StoreAdmin,
        clock: Clock,
        history: RequestHistory,
        fleet: Fleet,
    ) -> None:
        self._fleet = fleet
        self._history = history
        self._config = config
        self._requests = requests
        self._connections = connections
        self._preprocessor = preprocessor
        self._stores = stores
        self._clock = clock
        self._started_at = clock.now()
        self._versions = _versions()
        self._thread = StatusThread()
        self._status = Fresh(self._make_status, STATUS_S, clock)
        # Totals of all gateways; as old as a status.
        self.stats: Fresh[FleetStats] = Fresh(fleet.stats, STATUS_S, clock)

    def configure(self, config: ClusterConfig) -> None:
        """Take over the replica counts of another deploy."""
        self._config = config

    def model(self) -> pb.Model:
        """Describe the served model."""
        compatibility = self._connections.compatibility
        return pb.Model(
            name=self._config.model_name,
            max_context_tokens=self._connections.max_context_tokens,
            vocab_size=self._requests.limits().vocab_size,
            has_chat_template=self._preprocessor.has_chat_template,
            fingerprint=compatibility.model_fingerprint.hex() if compatibility else "",
            block_tokens=self._config.pools[0].engine.block_tokens,
        )

    async def status(self) -> admin_pb.StatusResponse:
        """Return a status not older than `STATUS_S`, the same for all callers, who must not change it."""
        return await self._status.get()

    async def paths(self, replica_ids: Collection[str]) -> AsyncIterator[admin_pb.ReplicaPaths]:
        """Yield the measured paths from these replicas; from all when there are none."""
        views = self._connections.views()
        asked = [view for view in views if not replica_ids or view.record.identity.replica_id in replica_ids]
        async for message in self._thread.paths(asked, {view.record.identity for view in views}):
            yield message

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    async def _make_status(self) -> admin_pb.StatusResponse:
        stats, now = await self.stats.get(), self._clock.now()
        return await self._thread.add_replicas(
            self._status_without_replicas(now, stats),
            self._connections.views(),
            now,
            self._requests.admission.queued_loads(),
        )

    def _status_without_replicas(self, now: float, stats: FleetStats) -> admin_pb.StatusResponse:
        counters = self._requests.counters
        return admin_pb.StatusResponse(
            model=self.model(),
            gateways=[_gateway(record, stats) for record in self._connections.gateways],
            uptime_s=now - self._started_at,
            versions=self._versions,
            num_running_requests=self._requests.num_running,
            num_finished_requests=counters.num_ended("finished"),
            num_failed_requests=counters.num_ended("failed"),
            num_cancelled_requests=counters.num_ended("cancelled"),
            ready=self._connections.has_route(),
            wall_time_s=self._clock.wall(),
            recent=self._history.summary(),
            prefixes=self._history.prefixes(),
            stores=self._stores.members(),
            pools=pools_of(self._config, self._connections, stats.minute.pool_to_prompts),
            scaling_changes=moves_of(self._connections.roster_view),
            traffic=self._connections.roster_view.traffic,
            demand=demand_message(
                replace(counters.demand, num_refused=self._requests.admission.refusals.num_by_load)
            ),
            authentication=self._config.auth.mode,
            app=self._config.app,
            quotas=[
                admin_pb.TenantQuota(tenant=it.tenant, used=it.used, num_refused=it.num_refused)
                for it in stats.quotas
            ],
        )

    async def explain(self, request_id: str, tenant: str | None) -> pb.ExplainResponse:
        """Explain a request of the tenant (None: of any); raise `UnknownRequestError` when it is neither
        running nor recent at any gateway."""
        block_tokens = self._config.pools[0].engine.block_tokens
        return _explanation(await self._fleet.explain(request_id, tenant), block_tokens)

    async def list_requests(
        self, request: pb.ListRequestsRequest, tenant: str | None
    ) -> pb.ListRequestsResponse:
        """List the running and recent requests of the tenant (None: of all) at all gateways, the latest
        arrivals first."""
        limit = request.limit if request.HasField("limit") else DEFAULT_REQUESTS
        if not 1 <= limit <= MAX_REQUESTS:
            problem = f"must be from 1 to {MAX_REQUESTS}, not {limit}"
            raise InvalidRequestError(FieldViolation("limit", problem))
        found = await self._fleet.latest(limit, tenant)
        now = self._clock.now()
        requests = [_summary(it, now, gateway_id) for gateway_id, it in found.requests]
        return pb.ListRequestsResponse(requests=requests, missing=found.missing)


def scale_reply(done: OrderDone) -> admin_pb.ScaleResponse:
    """Return the changes of an order."""
    return admin_pb.ScaleResponse(
        pools=[
            admin_pb.PoolChange(
                name=it.pool,
                before=it.before,
                after=it.after,
                num_running=it.num_running,
                states=it.states,
                needed=it.needed,
            )
            for it in done.changes
        ],
        free=done.free or {},
        free_known=done.free is not None,
        shortages=done.shortages,
        unsized_pools=done.unsized,
    )


def _gateway(record: GatewayRecord, stats: FleetStats) -> admin_pb.GatewayStatus:
    status = admin_pb.GatewayStatus(
        gateway_id=record.gateway_id,
        epoch=record.epoch,
        address=record.address,
        process_id=record.process_id,
        console=record.console,
        has_tls=bool(record.certificate),
        admin=record.admin,
    )
    if (totals := stats.totals.get(record.gateway_id)) is not None:
        status.num_running_requests = totals.num_running
        status.num_finished_requests = totals.num_finished
        status.num_failed_requests = totals.num_failed
        status.num_cancelled_requests = totals.num_cancelled
        status.unheard.update(totals.unheard)
        status.quota_note = totals.quota_note
        status.admission.CopyFrom(_admission(totals.admission))
        status.outcomes.extend(
            admin_pb.TenantOutcomes(
                tenant=it.tenant,
                service_class=value_of(pb.ServiceClass, it.service_class),
                num_requests=it.num_requests,
            )
            for it in totals.outcomes
        )
    else:
        status.note = stats.missing.get(record.gateway_id, "has just started")
    return status


def _admission(stats: AdmissionStats) -> admin_pb.AdmissionStatus:
    return admin_pb.AdmissionStatus(
        rung=stats.rung,
        rung_name=stats.rung_name,
        pressure=stats.pressure,
        num_waiting_bytes=stats.num_waiting_bytes,
        waiting_s=stats.waiting_s,
        num_capped=stats.num_capped,
        classes=[
            admin_pb.ClassStatus(
                service_class=value_of(pb.ServiceClass, name),
                num_waiting=it.num_waiting,
                wait_s=it.wait_s,
                num_released=it.num_released,
                num_refused=it.num_refused,
            )
            for name, it in stats.classes.items()
        ],
        changes=[admin_pb.RungChange(**asdict(change)) for change in stats.changes],
        flows=[
            admin_pb.FlowStatus(
                tenant=it.tenant,
                service_class=value_of(pb.ServiceClass, it.service_class),
                served_s=it.served_s,
            )
            for it in stats.flows
        ],
    )


def _summary(record: ListedRequest, now: float, gateway_id: str) -> pb.RequestSummary:
    return pb.RequestSummary(
        request_id=record.request_id,
        tenant=record.tenant,
        state=value_of(pb.RequestState, record.state),
        reason=record.reason,
        age_s=now - record.started_at,
        ttft_ms=_span_ms(record.started_at, record.first_token_at),
        e2e_ms=_span_ms(record.started_at, record.ended_at),
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_cached_tokens=record.num_cached_tokens,
        attempts=record.num_attempts,
        prefill=record.prefill,
        decode=record.decode,
        gateway_id=gateway_id,
    )


def _span_ms(start: float, end: float) -> float | None:
    return 1e3 * (end - start) if end else None


def _explanation(found: FoundRequest, block_tokens: int) -> pb.ExplainResponse:
    record = found.info
    return pb.ExplainResponse(
        request_id=record.request_id,
        tenant=record.tenant,
        gateway_id=found.gateway_id,
        state=value_of(pb.RequestState, record.state),
        reason=record.reason,
        decisions=[_decision(item.attempt, item.decision) for item in record.decisions],
        timeline=[
            pb.TimelineEvent(at_ms=1e3 * (entry.at - record.started_at), name=entry.name, detail=entry.detail)
            for entry in record.timeline
        ],
        prompt=_prompt_reuse(record, block_tokens),
    )


def _prompt_reuse(record: RequestInfo, block_tokens: int) -> pb.PromptReuse:
    """Return the reuse of a prompt. The id of a relative is shown to its own tenant alone."""
    relative = record.relative
    return pb.PromptReuse(
        num_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_relative_tokens=relative.num_tokens,
        num_shared_tokens=relative.num_shared_tokens,
        relative_id=relative.request_id if relative.tenant == record.tenant else "",
        block_tokens=block_tokens,
    )


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _missed(missed: MissedBlocks) -> pb.MissedBlocks:
    return pb.MissedBlocks(
        first=missed.first,
        num_blocks=missed.num_blocks,
        fate=value_of(pb.BlockFate, missed.fate),
        places=[
            pb.BlockPlace(replica_id=it.replica_id, tier=it.tier, is_expected=it.is_expected)
            for it in missed.places
        ],
        reason=missed.reason,
        least_age_s=missed.least_age_s,
        most_age_s=missed.most_age_s,
    )


def _decision(attempt: int, decision: Decision) -> pb.Decision:
    return pb.Decision(
        attempt=attempt,
        policy=decision.policy,
        prefill=decision.prefill,
        decode=decision.decode,
        prefill_cached_tokens=decision.prefill_cached_tokens,
        decode_cached_tokens=decision.decode_cached_tokens,
        candidates=[
            pb.Candidate(
                replica_id=item.replica_id,
                side=item.side,
                matched_tokens=item.matched_tokens,
                uncached_tokens=item.uncached_tokens,
                queue_s=item.queue_s,
                prefill_s=item.prefill_s,
                load_s=item.load_s,
                transfer_s=item.transfer_s,
                once_s=item.once_s,
                pressure_s=item.pressure_s,
                step_s=item.step_s,
                cost_s=item.cost_s,
                note=item.note,
            )
            for item in decision.candidates
        ],
        reason=decision.reason,
        ttft_s=decision.prediction.ttft_s,
        step_s=decision.prediction.step_s,
        limit_wait_s=_finite(decision.limit.wait_s) if decision.limit else None,
        limit_ttft_s=_finite(decision.limit.ttft_s) if decision.limit else None,
        missed=[_missed(each) for each in decision.missed],
        achievable_tokens=decision.achievable_tokens,
    )


def _versions() -> dict[str, str]:
    """Return the versions that a bug report needs; "" where a package is not installed as a distribution."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


class Fresh(Generic[T]):
    """A value that costs something: made again when it is older than `max_age_s`, for all callers at once.

    The value is made once at a time, also when the caller that asked for it has gone.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], max_age_s: float, clock: Clock) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._clock = clock
        self._made_at: float | None = None
        self._making: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the value, or raise the error of making it."""
        if self._making is None or (self._making.done() and self._is_old()):
            self._making = asyncio.create_task(self._make_it())
        return await asyncio.shield(self._making)

    def _is_old(self) -> bool:
        return self._made_at is None or self._clock.now() - self._made_at >= self._max_age_s

    async def _make_it(self) -> T:
        self._made_at = None
        asked_at = self._clock.now()
        value = await self._make()
        self._made_at = asked_at
        return value


def pools_of(
    config: ClusterConfig, connections: ReplicaConnections, pool_to_prompts: Mapping[str, int]
) -> list[admin_pb.Pool]:
    """Return the state of the configured pools, in the order of the configuration, with the prompts that each
    has computed in the last minute."""
    ready = [view for view in connections.views() if view.takes_requests]
    view = connections.roster_view
    return [_pool(config, pool, view, ready, pool_to_prompts.get(pool.name, 0)) for pool in config.pools]


def moves_of(view: RosterView) -> list[admin_pb.ScalingChange]:
    """Return the latest changes of counts and roles, oldest first."""
    return [
        admin_pb.ScalingChange(
            at=move.at, pool=move.pool, before=move.before, after=move.after, by=move.by, reason=move.reason
        )
        for move in view.moves
    ]


def _pool(
    config: ClusterConfig,
    pool: PoolConfig,
    view: RosterView,
    ready: list[ReplicaView],
    num_recent_prompts: int,
) -> admin_pb.Pool:
    own = [replica for replica in ready if replica.record.pool == pool.name]
    limits = config.scaling.pools.get(pool.name) if config.scaling.autoscale else None
    return admin_pb.Pool(
        name=pool.name,
        role=value_of(admin_pb.ReplicaRole, pool.role),
        configured=pool.replicas,
        desired=view.desired.get(pool.name, pool.replicas),
        pinned=pool.name in view.pinned,
        min=limits.min if limits else 0,
        max=limits.max if limits else 0,
        num_ready=len(own),
        num_reassigned=sum(replica.role != pool.role for replica in own),
        num_recent_prompts=num_recent_prompts,
    )
