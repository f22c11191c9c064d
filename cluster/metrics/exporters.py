"""Exports the statistics of gateways: each metric names the field that it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from cluster.metrics.admission_stats import AdmissionStats
from cluster.metrics.config import CostConfig
from cluster.metrics.definitions import SECTIONS
from cluster.metrics.gateway_counters import GatewayCounters, ReplicaCounters
from cluster.metrics.gateway_metrics import ADMISSION, CLASSES, OUTPUT, RECORDING, TENANT_CLASSES
from cluster.metrics.registry import MetricsRegistry
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

_GB = 1e9
NO_COSTS = CostConfig()
_REQUESTS = [metric for metric in SECTIONS["Requests"] if metric.field]
_GATEWAY = [metric for metric in _REQUESTS if "replica" not in metric.labels]
_SERVED = [metric for metric in _REQUESTS if "replica" in metric.labels]

# Series that begin at 0; others begin when they first happen.
_ENDS = (
    ("finished", "ok"),
    ("cancelled", "cancelled"),
    ("failed", "unavailable"),
    ("failed", "deadline_exceeded"),
    ("failed", "resource_exhausted"),
    ("refused", "invalid_argument"),
    ("refused", "resource_exhausted"),
    ("refused", "unavailable"),
)
_CACHE_TIERS = ("device", "dram", "nvme", "remote")
_REPLICA_STATES = ("ready", "connecting", "leaving", "refused")
_BREAKER_STATES = ("open", "half-open", "closed")
_MOVERS = ("operator", "autoscaler", "deploy")


class RecordingSize(Protocol):
    """How much a gateway has recorded (`cluster.gateway.request_recording`)."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class UnreadSize(Protocol):
    """How much output of a gateway waits, and how long (`cluster.gateway.output_buffer`)."""

    num_bytes: int

    @property
    def pause_s(self) -> float: ...


class GatewayMetrics:
    """Exports the counters of one gateway, whose id and model the registry knows."""

    def __init__(
        self, registry: MetricsRegistry, path_floor_gb_s: float, costs: CostConfig = NO_COSTS
    ) -> None:
        self._registry = registry
        self._costs = costs
        self._path_floor = path_floor_gb_s * _GB
        self._num_moves: Counter[tuple[str, str]] = Counter()
        # Unix time of the latest move that is counted; None: before the first look.
        self._moves_seen_to: float | None = None

    def update(
        self,
        counters: GatewayCounters,
        admission: AdmissionStats,
        status: admin_pb.StatusResponse,
        now: float,
        num_unheard: int,
        recording: RecordingSize,
        unread: UnreadSize,
    ) -> Iterator[None]:
        """Set and count everything, a part at each step: the event loop may have other work in between. `now`
        is the counters' clock, `num_unheard` the gateways whose placements are not heard."""
        registry = self._registry
        counters.advance(now)
        registry.export(_GATEWAY, counters)
        registry.set("unheard_gateways", num_unheard)
        registry.export(RECORDING, recording)
        registry.export(OUTPUT, unread)
        registry.export(ADMISSION, admission)
        for name, of_class in admission.classes.items():
            registry.export(CLASSES, of_class, **{"class": name})
        for state, code in {*_ENDS, *counters.num_requests}:
            registry.total("requests_total", counters.num_requests[state, code], state=state, code=code)
        for tier in _CACHE_TIERS:
            registry.total("cached_prompt_tokens_total", counters.num_cached_tokens[tier], tier=tier)
        self._update_pools(counters, status)
        self._update_moves(status)
        registry.set("path_floor_bytes_per_second", self._path_floor)
        yield
        for tenant, use in counters.tenants.series().items():
            registry.export(SECTIONS["Tenants"], use, tenant=tenant)
            for name, outcomes in use.class_to_outcomes.items():
                registry.export(TENANT_CLASSES, outcomes, **{"tenant": tenant, "class": name})
            if (price := self._costs.price(use.device_s)) is not None:
                registry.total("tenant_cost_total", price, tenant=tenant)
        yield
        for replica_id, replica in list(counters.replicas.items()):
            self._update_replica(replica_id, replica)
            yield

    def _update_replica(self, replica_id: str, replica: ReplicaCounters) -> None:
        labels = {"pool": replica.pool, "replica": replica_id}
        self._registry.export(_SERVED, replica, **labels)
        for name, histogram in replica.histograms.items():
            if histogram.num_values:
                self._registry.histogram(name, histogram.cumulative(), histogram.total, **labels)

    def _update_pools(self, counters: GatewayCounters, status: admin_pb.StatusResponse) -> None:
        counts = Counter(
            (replica.pool, name_of(admin_pb.ReplicaState, replica.state)) for replica in status.replicas
        )
        for pool in status.pools:
            for state in _REPLICA_STATES:
                self._registry.set("pool_replicas", counts[pool.name, state], pool=pool.name, state=state)
            self._registry.set("pool_desired_replicas", pool.desired, pool=pool.name)
            self._registry.set("pool_pinned", float(pool.pinned), pool=pool.name)
            self._registry.set("pool_reassigned_replicas", pool.num_reassigned, pool=pool.name)
            self._registry.total("replica_losses_total", counters.num_losses[pool.name], pool=pool.name)
            for state in _BREAKER_STATES:
                changes = counters.num_breaker_changes[pool.name, state]
                self._registry.total("breaker_changes_total", changes, pool=pool.name, state=state)

    def _update_moves(self, status: admin_pb.StatusResponse) -> None:
        latest = max((move.at for move in status.scaling_changes), default=0.0)
        if self._moves_seen_to is not None:  # moves from before this gateway are not counted
            new = [(move.pool, move.by) for move in status.scaling_changes if move.at > self._moves_seen_to]
            self._num_moves.update(new)
        self._moves_seen_to = max(latest, self._moves_seen_to or 0.0)
        for pool in status.pools:
            for by in _MOVERS:
                total = self._num_moves[pool.name, by]
                self._registry.total("scaling_changes_total", total, pool=pool.name, by=by)
