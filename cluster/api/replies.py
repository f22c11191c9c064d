"""What the gateway knows, as the messages of its API: status, models, explanations, ends of requests."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Generic, TypeVar

import numpy as np

from cluster.api.status import StatusThread
from cluster.api.store_admin import StoreAdmin
from cluster.config import ClusterConfig, PoolConfig
from cluster.gateway.actions import Emit
from cluster.gateway.history import RequestHistory
from cluster.gateway.replica_connections import ReplicaLinks
from cluster.gateway.replica_view import ReplicaView
from cluster.gateway.request_manager import RequestManager, RequestRecord
from cluster.metrics.ended_request import Summary
from cluster.metrics.gateway_counters import cached_by_tier
from cluster.proto import tandem_pb2 as pb
from cluster.roster.messages import RosterView
from cluster.text.preprocess import Preprocessor
from kvtransfer.common.clock import Clock
from router.messages import Decision
from workers.messages import PrefillReport

# How old a status may be. Replicas report about as often.
STATUS_S = 0.2
_PACKAGES = ("tandem-serve", "ray", "torch", "grpcio", "tokenizers", "msgspec")


class Reporter:
    """Answers the questions that concern no single stream."""

    def __init__(
        self,
        config: ClusterConfig,
        desk: RequestManager,
        links: ReplicaLinks,
        intake: Preprocessor,
        stores: StoreAdmin,
        clock: Clock,
        lately: RequestHistory,
    ) -> None:
        self._lately = lately
        self._config = config
        self._desk = desk
        self._links = links
        self._intake = intake
        self._stores = stores
        self._clock = clock
        self._started_at = clock.now()
        self._versions = _versions()
        self._thread = StatusThread()
        self._status = Fresh(self._make_status, STATUS_S, clock)

    def configure(self, config: ClusterConfig) -> None:
        """Another deploy has set other counts."""
        self._config = config

    def model(self) -> pb.Model:
        compatibility = self._links.compatibility
        return pb.Model(
            name=self._config.model_name,
            max_context_tokens=self._links.max_context_tokens,
            vocab_size=self._desk.limits().vocab_size,
            has_chat_template=self._intake.has_chat_template,
            fingerprint=compatibility.model_fingerprint.hex() if compatibility else "",
            block_tokens=self._config.pools[0].engine.block_tokens,
        )

    async def status(self) -> pb.StatusResponse:
        """Not older than `STATUS_S`, and the same for all who ask: nobody may change it."""
        return await self._status.get()

    async def paths(self, replica_ids: Collection[str]) -> AsyncIterator[pb.ReplicaPaths]:
        """The measured paths from these replicas; of all when there are none."""
        views = self._links.views()
        asked = [view for view in views if not replica_ids or view.record.identity.replica_id in replica_ids]
        async for message in self._thread.paths(asked, {view.record.identity for view in views}):
            yield message

    def close(self) -> None:
        """End its thread."""
        self._thread.close()

    async def _make_status(self) -> pb.StatusResponse:
        now = self._clock.now()
        return await self._thread.add_replicas(self._status_without_replicas(now), self._links.views(), now)

    def _status_without_replicas(self, now: float) -> pb.StatusResponse:
        counters = self._desk.counters
        return pb.StatusResponse(
            model=self.model(),
            gateways=[
                pb.GatewayStatus(
                    gateway_id=record.gateway_id,
                    epoch=record.epoch,
                    address=record.address,
                    process_id=record.process_id,
                    console=record.console,
                )
                for record in self._links.gateways
            ],
            uptime_s=now - self._started_at,
            versions=self._versions,
            num_running_requests=self._desk.num_running,
            num_finished_requests=counters.num_finished,
            num_failed_requests=counters.num_failed,
            num_cancelled_requests=counters.num_cancelled,
            ready=self._links.has_route(),
            wall_time_s=self._clock.wall(),
            recent=self._lately.recent(),
            prefixes=self._lately.prefixes(),
            stores=self._stores.members(),
            pools=pools_of(self._config, self._links),
            moves=moves_of(self._links.roster_view),
            traffic=self._links.roster_view.traffic,
            demand=pb.Demand(**dataclasses.asdict(self._desk.meters.demand)),
        )

    def explain(self, request_id: str) -> pb.ExplainResponse:
        """`UnknownRequestError` when the request is neither running nor recent."""
        return _explanation(self._desk.record(request_id))


def delta_of(emit: Emit) -> pb.GenerateResponse:
    """The stream's message for new output of one sample."""
    return pb.GenerateResponse(
        delta=pb.Delta(
            sample=emit.sample,
            first_index=emit.first_index,
            token_ids=np.frombuffer(emit.tokens, dtype="<u4").tolist(),
            text=emit.text,
            logprobs=[
                pb.TokenLogprob(
                    logprob=item.logprob,
                    top=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in item.top],
                )
                for item in emit.logprobs
            ],
            finish_reason=emit.finish,
        )
    )


def finished_of(summary: Summary) -> pb.GenerateResponse:
    """The stream's last message."""
    return pb.GenerateResponse(
        finished=pb.Finished(
            samples=[
                pb.SampleEnd(sample=item.index, finish_reason=item.finish, num_tokens=item.num_tokens)
                for item in summary.samples
            ],
            usage=pb.Usage(
                prompt_tokens=summary.num_prompt_tokens,
                cached=_cached(summary.prefill),
                completion_tokens=sum(item.num_tokens for item in summary.samples),
            ),
            timing=_timing(summary),
            prefill_replica=summary.prefill_replica,
            decode_replica=summary.decode_replica,
        )
    )


def _cached(report: PrefillReport | None) -> pb.CachedTokens:
    return pb.CachedTokens() if report is None else pb.CachedTokens(**cached_by_tier(report))


def _timing(summary: Summary) -> pb.Timing:
    moved = summary.hand_over
    return pb.Timing(
        queue_ms=1e3 * summary.queue_s,
        prefill_ms=1e3 * summary.prefill_s,
        transfer_ms=1e3 * summary.transfer_s,
        decode_ms=1e3 * summary.decode_s,
        ttft_ms=1e3 * summary.ttft_s,
        e2e_ms=1e3 * summary.e2e_s,
        transfer_gb_s=moved.transfer_gb_s if moved else 0.0,
        transport=moved.transport if moved else "",
        transfer_bytes=moved.num_moved_bytes if moved else 0,
        attempts=summary.num_attempts,
    )


def _explanation(record: RequestRecord) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        request_id=record.request_id,
        state=record.state,
        reason=record.reason,
        decisions=[_decision(item.attempt, item.decision) for item in record.decisions],
        timeline=[
            pb.TimelineEvent(at_ms=1e3 * (entry.at - record.started_at), name=entry.name, detail=entry.detail)
            for entry in record.timeline
        ],
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
                backlog_tokens=item.backlog_tokens,
                transfer_tokens=item.transfer_tokens,
                pressure_tokens=item.pressure_tokens,
                cost=item.cost,
                note=item.note,
            )
            for item in decision.candidates
        ],
        reason=decision.reason,
    )


def _versions() -> dict[str, str]:
    """Of what matters when something is reported; "" where it is not installed as a distribution."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


# ----------------------------------------------------------------------------------------------
# Values that cost something, made a few times a second at most for all who ask.

T = TypeVar("T")


class Fresh(Generic[T]):
    """A value that is made again when it is older than `max_age_s`; who asks meanwhile waits for the same.

    It is made once at a time, also when whoever asked for it has gone.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], max_age_s: float, clock: Clock) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._clock = clock
        self._made_at: float | None = None
        self._making: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The value, or what making it raised."""
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


# ----------------------------------------------------------------------------------------------
# What is wanted of the pools, and what there is: the roster's wishes beside this gateway's Links.


def pools_of(config: ClusterConfig, links: ReplicaLinks) -> list[pb.Pool]:
    """The pools of the configuration, in its order."""
    ready = [view for view in links.views() if view.takes_requests]
    return [_pool(config, pool, links.roster_view, ready) for pool in config.pools]


def moves_of(view: RosterView) -> list[pb.ScalingMove]:
    """The latest changes of counts and roles, oldest first."""
    return [
        pb.ScalingMove(
            at=move.at, pool=move.pool, before=move.before, after=move.after, by=move.by, reason=move.reason
        )
        for move in view.moves
    ]


def _pool(config: ClusterConfig, pool: PoolConfig, view: RosterView, ready: list[ReplicaView]) -> pb.Pool:
    own = [replica for replica in ready if replica.record.pool == pool.name]
    limits = config.scaling.pools.get(pool.name) if config.scaling.autoscale else None
    return pb.Pool(
        name=pool.name,
        role=pool.role,
        configured=pool.replicas,
        desired=view.desired.get(pool.name, pool.replicas),
        pinned=pool.name in view.pinned,
        min=limits.min if limits else 0,
        max=limits.max if limits else 0,
        num_ready=len(own),
        num_lent=sum(replica.role != pool.role for replica in own),
    )
