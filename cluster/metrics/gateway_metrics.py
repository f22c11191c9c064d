"""What a gateway measured and sees, as metrics of the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cluster.metrics.gateway_counters import GatewayCounters, ReplicaCounters
from cluster.metrics.registry import MetricsRegistry
from cluster.proto import tandem_pb2 as pb

# Begin at 0; others when they first happen.
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
_TIERS = ("device", "dram", "nvme", "remote")
_STATES = ("ready", "connecting", "leaving", "refused")
_MOVERS = ("operator", "autoscaler", "deploy")


class GatewayMetrics:
    """Exports the meters of one gateway, whose id and model the board knows."""

    def __init__(self, board: MetricsRegistry, path_floor_gb_s: float) -> None:
        self._board = board
        self._path_floor = path_floor_gb_s * 1e9
        self._num_moves: Counter[tuple[str, str]] = Counter()
        # Unix time of the latest move that is counted; None: before the first look.
        self._moves_seen_to: float | None = None

    def update(self, meters: GatewayCounters, status: pb.StatusResponse, now: float) -> Iterator[None]:
        """Set and count everything, a part at each step: the event loop may have other work in between. `now`
        is the meters' clock."""
        meters.advance(now)
        self._update_requests(meters)
        self._update_pools(meters, status)
        self._update_moves(status)
        self._board.set("path_floor_bytes_per_second", self._path_floor)
        yield
        self._update_tenants(meters)
        yield
        for replica_id, replica in list(meters.replicas.items()):
            self._update_replica(replica_id, replica)
            yield

    def _update_requests(self, meters: GatewayCounters) -> None:
        board, demand = self._board, meters.demand
        for state, code in {*_ENDS, *meters.num_requests}:
            board.total("requests_total", meters.num_requests[state, code], state=state, code=code)
        board.set("running_requests", meters.num_running)
        board.total("retried_requests_total", meters.num_retried)
        board.total("prompt_tokens_total", meters.num_prompt_tokens)
        board.total("output_tokens_total", meters.num_output_tokens)
        for tier in {*_TIERS, *meters.num_cached_tokens}:
            board.total("cached_prompt_tokens_total", meters.num_cached_tokens[tier], tier=tier)
        board.total("first_tokens_total", demand.num_first_tokens)
        board.total("late_first_tokens_total", demand.num_late_first_tokens)
        board.total("token_gaps_total", demand.num_gaps)
        board.total("late_token_gaps_total", demand.num_late_gaps)
        board.total("expected_cached_tokens_total", meters.num_expected_cached_tokens)
        for transport, count in meters.num_hand_overs.items():
            board.total("hand_overs_total", count, transport=transport)
        for transport, num_bytes in meters.num_hand_over_bytes.items():
            board.total("hand_over_bytes_total", num_bytes, transport=transport)

    def _update_replica(self, replica_id: str, replica: ReplicaCounters) -> None:
        labels = {"pool": replica.pool, "replica": replica_id}
        for name, histogram in replica.histograms.items():
            if histogram.num_values:
                self._board.histogram(name, histogram.cumulative(), histogram.total, **labels)
        for side, count in replica.num_routed.items():
            self._board.total("routed_attempts_total", count, side=side, **labels)
        for code, count in replica.num_attempt_failures.items():
            self._board.total("attempt_failures_total", count, code=code, **labels)

    def _update_tenants(self, meters: GatewayCounters) -> None:
        for tenant, use in meters.tenants.series().items():
            board = self._board
            board.total("tenant_requests_total", use.num_requests, tenant=tenant)
            board.total("tenant_computed_tokens_total", use.num_computed_tokens, tenant=tenant)
            board.total("tenant_cached_tokens_total", use.num_cached_tokens, tenant=tenant)
            board.total("tenant_output_tokens_total", use.num_output_tokens, tenant=tenant)
            board.total("tenant_kv_byte_seconds_total", use.kv_byte_s, tenant=tenant)

    def _update_pools(self, meters: GatewayCounters, status: pb.StatusResponse) -> None:
        counts = Counter((replica.pool, replica.state) for replica in status.replicas)
        for pool in status.pools:
            for state in _STATES:
                self._board.set("pool_replicas", counts[pool.name, state], pool=pool.name, state=state)
            self._board.set("pool_desired_replicas", pool.desired, pool=pool.name)
            self._board.set("pool_pinned", float(pool.pinned), pool=pool.name)
            self._board.set("pool_lent_replicas", pool.num_lent, pool=pool.name)
            self._board.total("replica_losses_total", meters.num_losses[pool.name], pool=pool.name)

    def _update_moves(self, status: pb.StatusResponse) -> None:
        latest = max((move.at for move in status.moves), default=0.0)
        if self._moves_seen_to is not None:  # what is older than this gateway is not counted
            new = [(move.pool, move.by) for move in status.moves if move.at > self._moves_seen_to]
            self._num_moves.update(new)
        self._moves_seen_to = max(latest, self._moves_seen_to or 0.0)
        for pool in status.pools:
            for by in _MOVERS:
                total = self._num_moves[pool.name, by]
                self._board.total("scaling_moves_total", total, pool=pool.name, by=by)
