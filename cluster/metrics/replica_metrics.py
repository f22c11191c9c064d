"""Figures of replicas and stores as metrics of the catalogue, each told report by report."""

from __future__ import annotations

from typing import NamedTuple

from cluster.metrics import buckets
from cluster.metrics.histogram import cumulative
from cluster.metrics.registry import MetricsRegistry
from kvtransfer.store.messages import StoreStat
from workers.messages import LoadReport, PathMeasure

_GB = 1e9
_INDEX_STATES = ("off", "up", "slow", "down")


class _Field(NamedTuple):
    """A field of a report, the metric that shows it, and the factor to the metric's unit."""

    field: str
    metric: str
    scale: float = 1.0


_REPLICA_GAUGES = (
    _Field("num_running", "running_sequences"),
    _Field("num_waiting", "waiting_sequences"),
    _Field("num_backlog_tokens", "backlog_tokens"),
    _Field("num_landings", "landings"),
    _Field("num_total_blocks", "kv_blocks"),
    _Field("num_free_blocks", "free_blocks"),
    _Field("num_cached_blocks", "cached_blocks"),
    _Field("num_quarantined_blocks", "quarantined_blocks"),
    _Field("num_leaked_blocks", "leaked_blocks"),
    _Field("num_offloaded_blocks", "offloaded_blocks"),
    _Field("prefill_tok_s", "prefill_tokens_per_second"),
    _Field("decode_step_s", "decode_step_seconds"),
    _Field("transfer_gb_s", "transfer_bytes_per_second", _GB),
    _Field("peak_flop_s", "peak_flops_per_second"),
    _Field("peak_byte_s", "peak_read_bytes_per_second"),
    _Field("mfu", "mfu_ratio"),
    _Field("mbu", "mbu_ratio"),
)
_REPLICA_COUNTERS = (
    _Field("num_steps", "steps_total"),
    _Field("num_computed_tokens", "computed_tokens_total"),
    _Field("num_sampled_tokens", "sampled_tokens_total"),
    _Field("busy_s", "busy_seconds_total"),
    _Field("num_flops", "flops_total"),
    _Field("num_read_bytes", "device_read_bytes_total"),
    _Field("num_checksum_failures", "checksum_failures_total"),
    _Field("num_preemptions", "preemptions_total"),
    _Field("num_stored_blocks", "stored_blocks_total"),
    _Field("num_store_checksum_failures", "store_read_failures_total"),
    _Field("num_queried_tokens", "prefix_queried_tokens_total"),
    _Field("num_moved_streams", "moved_streams_total"),
    _Field("num_failed_moves", "failed_stream_moves_total"),
)
# Counters by the value of a label.
_REPLICA_FAMILIES = (
    (_Field("num_lost_landings", "lost_landings_total"), "cause"),
    (_Field("num_moved_bytes", "moved_bytes_total"), "class"),
    (_Field("num_unstored_blocks", "unstored_blocks_total"), "cause"),
    (_Field("num_loaded_tokens", "loaded_tokens_total"), "tier"),
    (_Field("num_hit_tokens", "prefix_hit_tokens_total"), "tier"),
    (_Field("num_transport_bytes", "transfer_bytes_total"), "transport"),
    (_Field("transport_s", "transfer_seconds_total"), "transport"),
)
_TIER_GAUGES = (
    _Field("num_bytes", "store_bytes"),
    _Field("capacity_bytes", "store_capacity_bytes"),
    _Field("num_records", "store_records"),
    _Field("num_queued", "store_queued"),
    _Field("num_leases", "store_leases"),
    _Field("num_quarantined", "store_quarantined"),
    _Field("read_gb_s", "store_read_bytes_per_second", _GB),
    _Field("write_gb_s", "store_write_bytes_per_second", _GB),
    _Field("latency_s", "store_latency_seconds"),
)
_TIER_COUNTERS = (
    _Field("num_hits", "store_hits_total"),
    _Field("num_misses", "store_misses_total"),
    _Field("num_hit_bytes", "store_hit_bytes_total"),
    _Field("num_put_bytes", "store_put_bytes_total"),
    _Field("num_written_bytes", "store_written_bytes_total"),
    _Field("num_evictions", "store_evictions_total"),
    _Field("num_refused", "store_refused_total"),
    _Field("num_checksum_failures", "store_checksum_failures_total"),
    _Field("num_io_errors", "store_io_errors_total"),
)
_INDEX_COUNTERS = tuple(
    _Field(f"num_{name}", f"store_index_{name}_total")
    for name in ("lookups", "late", "errors", "announced", "dropped", "rebuilds")
)


class ReplicaMetrics:
    """Exports the reports of one replica, whose pool, id and model the board knows."""

    def __init__(self, board: MetricsRegistry, block_tokens: int) -> None:
        self._board = board
        self._block_tokens = block_tokens
        self._paths: dict[tuple[str, ...], dict[str, str]] = {}
        self._role = ""

    def update(self, load: LoadReport, role: str) -> None:
        """Set and count everything of this report; `role` is the one that is in effect."""
        board = self._board
        _set(board, _REPLICA_GAUGES, load)
        _count(board, _REPLICA_COUNTERS, load)
        for item, label in _REPLICA_FAMILIES:
            for value, total in getattr(load, item.field).items():
                board.total(item.metric, total, **{label: value})
        for tier, tok_s in load.load_tok_s.items():
            board.set("load_tokens_per_second", tok_s, tier=tier)
        for rank, memory in enumerate(load.memory):
            board.set("device_memory_used_bytes", memory.used_bytes, rank=str(rank))
            board.set("device_memory_total_bytes", memory.total_bytes, rank=str(rank))
        if load.num_steps_by_batch:
            batches = cumulative(buckets.BATCH_SIZE, load.num_steps_by_batch)
            board.histogram("batch_size", batches, load.num_batched_sequences)
        self._update_kv(load)
        self._update_role(role)
        self._update_paths(load)

    def _update_kv(self, load: LoadReport) -> None:
        num_held = load.num_total_blocks - load.num_free_blocks - load.num_quarantined_blocks
        num_slots = (num_held + load.num_offloaded_blocks) * self._block_tokens
        usage = num_held / load.num_total_blocks if load.num_total_blocks else 0.0
        fragmentation = min(1.0, load.num_unfilled_tokens / num_slots) if num_slots else 0.0
        self._board.set("kv_usage_ratio", usage)
        self._board.set("kv_fragmentation_ratio", fragmentation)

    def _update_role(self, role: str) -> None:
        if self._role and self._role != role:
            self._board.set("replica_role", 0, role=self._role)
        self._role = role
        self._board.set("replica_role", 1, role=role)

    def _update_paths(self, load: LoadReport) -> None:
        gone, self._paths = self._paths, {}
        for path in load.paths:
            labels = _path_labels(path)
            self._paths[tuple(labels.values())] = labels
            self._board.set("path_bytes_per_second", path.gb_s * _GB, **labels)
            self._board.set("path_latency_seconds", path.latency_us * 1e-6, **labels)
        for key, labels in gone.items():
            if key not in self._paths:  # 0 until Ray forgets the series: it carries nothing
                self._board.set("path_bytes_per_second", 0.0, **labels)
                self._board.set("path_latency_seconds", 0.0, **labels)


class StoreMetrics:
    """Exports the figures of one node's store, whose node the board knows."""

    def __init__(self, board: MetricsRegistry) -> None:
        self._board = board

    def update(self, stat: StoreStat) -> None:
        """Set and count everything of this report."""
        board = self._board
        for tier in stat.tiers:
            _set(board, _TIER_GAUGES, tier, tier=tier.tier)
            _count(board, _TIER_COUNTERS, tier, tier=tier.tier)
            if tier.tier == "nvme":  # the host tier is also written when blocks are read from elsewhere
                amplification = tier.num_written_bytes / tier.num_put_bytes if tier.num_put_bytes else 0.0
                board.set("store_write_amplification", amplification)
        _count(board, _INDEX_COUNTERS, stat.index)
        board.set("store_index_latency_seconds", stat.index.latency_s)
        for state in _INDEX_STATES:
            board.set("store_index_state", float(state == stat.index.state), state=state)


def _path_labels(path: PathMeasure) -> dict[str, str]:
    return {
        "peer": path.peer.replica_id,
        "rank": str(path.rank),
        "peer_rank": str(path.peer_rank),
        "transport": path.transport or "none",
        "device": path.device,
    }


def _set(board: MetricsRegistry, items: tuple[_Field, ...], report: object, **labels: str) -> None:
    for item in items:
        board.set(item.metric, getattr(report, item.field) * item.scale, **labels)


def _count(board: MetricsRegistry, items: tuple[_Field, ...], report: object, **labels: str) -> None:
    for item in items:
        board.total(item.metric, getattr(report, item.field), **labels)
