"""Figures of replicas and stores as Ray metrics, which Ray exports to Prometheus (`ray_tandem_...`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ray.util.metrics import Counter, Gauge

from kvtransfer.store.messages import StoreStat
from workers.messages import LoadReport

_PATH_TAGS = ("pool", "replica", "peer", "rank", "peer_rank", "transport", "device")
_GB = 1e9


class _Gauge(NamedTuple):
    """A field of a report, in the base unit that its name ends with."""

    field: str
    name: str
    text: str
    scale: float = 1.0


class _Counter(NamedTuple):
    """A field of a report that only grows; Ray adds `_total` to the name, and shows it from 1 on."""

    field: str
    name: str
    text: str


_REPLICA_GAUGES = (
    _Gauge("num_running", "running_sequences", "Sequences that are computed."),
    _Gauge("num_waiting", "waiting_sequences", "Sequences that wait."),
    _Gauge("num_landings", "landings", "Landings that are open or wait for room."),
    _Gauge("num_free_blocks", "free_blocks", "KV blocks that can be taken, cached ones included."),
    _Gauge(
        "num_quarantined_blocks",
        "quarantined_blocks",
        "KV blocks that a writer of an ended landing could still write.",
    ),
    _Gauge("num_leaked_blocks", "leaked_blocks", "KV blocks that are referenced although nothing runs."),
    _Gauge("prefill_tok_s", "prefill_tokens_per_second", "Prompt tokens computed while there is prefill."),
    _Gauge("decode_step_s", "decode_step_seconds", "How long a step without prefill takes."),
    _Gauge("transfer_gb_s", "transfer_bytes_per_second", "Rate of recent pushes.", _GB),
    _Gauge("num_offloaded_blocks", "offloaded_blocks", "KV blocks of running sequences in host memory."),
)
_REPLICA_COUNTERS = (
    _Counter("num_steps", "steps", "Engine steps."),
    _Counter(
        "num_checksum_failures",
        "checksum_failures",
        "KV pieces that failed their checksum and were computed again.",
    ),
    _Counter("num_preemptions", "preemptions", "Sequences that gave their blocks to others."),
    _Counter("num_stored_blocks", "stored_blocks", "KV blocks written through to the node's store."),
    _Counter(
        "num_store_checksum_failures",
        "store_read_failures",
        "Records of the store that failed their checksum when this replica read them.",
    ),
)
_TIER_GAUGES = (
    _Gauge("num_bytes", "store_bytes", "What a tier holds, headers and padding included."),
    _Gauge("capacity_bytes", "store_capacity_bytes", "What it may hold."),
    _Gauge("num_records", "store_records", "Records in it."),
    _Gauge("num_queued", "store_queued", "Records that wait to be written to it."),
    _Gauge("num_leases", "store_leases", "Records that are being read."),
    _Gauge("num_quarantined", "store_quarantined", "Places that somebody could still write."),
    _Gauge("read_gb_s", "store_read_bytes_per_second", "Measured rate of recent reads.", _GB),
    _Gauge("write_gb_s", "store_write_bytes_per_second", "Measured rate of recent writes.", _GB),
    _Gauge("latency_s", "store_latency_seconds", "Of one read (nvme), of one fetch (remote)."),
)
_TIER_COUNTERS = (
    _Counter("num_hits", "store_hits", "Blocks asked for that it had."),
    _Counter("num_misses", "store_misses", "Blocks asked for that it did not have."),
    _Counter("num_hit_bytes", "store_hit_bytes", "What was read of it."),
    _Counter("num_put_bytes", "store_put_bytes", "What was put into it."),
    _Counter("num_written_bytes", "store_written_bytes", "The same, with what was written again."),
    _Counter("num_evictions", "store_evictions", "Records that made room for others."),
    _Counter("num_refused", "store_refused", "Records that found no room."),
    _Counter("num_checksum_failures", "store_checksum_failures", "Records dropped for a wrong checksum."),
    _Counter("num_io_errors", "store_io_errors", "Reads and writes that failed."),
)
_INDEX_COUNTERS = (
    _Counter("num_lookups", "store_index_lookups", "Look-ups in the index of all nodes."),
    _Counter("num_late", "store_index_late", "Those that were not waited for."),
    _Counter("num_errors", "store_index_errors", "Those that failed."),
    _Counter("num_announced", "store_index_announced", "Records announced to it."),
    _Counter("num_dropped", "store_index_dropped", "Announcements that found no room in the queue."),
    _Counter("num_rebuilds", "store_index_rebuilds", "Times that everything was announced again."),
)
_INDEX_STATES = ("off", "up", "slow", "down")


class ReplicaMetrics:
    """Exports the reports of one replica; `update` takes each as it is made."""

    def __init__(self, pool: str, replica_id: str) -> None:
        self._tags = {"pool": pool, "replica": replica_id}
        tags = tuple(self._tags)
        self._gauges = _made_gauges(_REPLICA_GAUGES, tags)
        self._counters = _Counters(_REPLICA_COUNTERS, tags)
        self._lost = Counter(
            "tandem_lost_landings", "Landings that ended without hand-over, by cause.", (*tags, "cause")
        )
        self._moved = Counter(
            "tandem_moved_bytes", "KV written to other replicas, by traffic class.", (*tags, "class")
        )
        self._path_rate = Gauge(
            "tandem_path_bytes_per_second", "Measured rate of a path between ranks.", _PATH_TAGS
        )
        self._path_latency = Gauge("tandem_path_latency_seconds", "Its measured latency.", _PATH_TAGS)
        self._paths: dict[tuple[str, ...], dict[str, str]] = {}
        self._load_rate = Gauge(
            "tandem_load_tokens_per_second",
            "Rate at which KV comes from a tier of the store.",
            (*tags, "tier"),
        )
        self._loaded = Counter(
            "tandem_loaded_tokens", "Tokens whose KV was loaded instead of computed.", (*tags, "tier")
        )
        self._unstored = Counter(
            "tandem_unstored_blocks",
            "Finished KV blocks that were not written to the store, by cause.",
            (*tags, "cause"),
        )

    def update(self, load: LoadReport) -> None:
        """Set and count everything of this report."""
        _set_all(self._gauges, load, self._tags)
        self._counters.update(load, self._tags)
        for cause, total in load.num_lost_landings.items():
            self._counters.count(self._lost, total, {**self._tags, "cause": cause})
        for traffic, total in load.num_moved_bytes.items():
            self._counters.count(self._moved, total, {**self._tags, "class": traffic})
        for cause, total in load.num_unstored_blocks.items():
            self._counters.count(self._unstored, total, {**self._tags, "cause": cause})
        for tier, total in load.num_loaded_tokens.items():
            self._counters.count(self._loaded, total, {**self._tags, "tier": tier})
        for tier, tok_s in load.load_tok_s.items():
            self._load_rate.set(tok_s, {**self._tags, "tier": tier})
        self._update_paths(load)

    def _update_paths(self, load: LoadReport) -> None:
        gone, self._paths = self._paths, {}
        for path in load.paths:
            tags = {
                **self._tags,
                "peer": path.peer.replica_id,
                "rank": str(path.rank),
                "peer_rank": str(path.peer_rank),
                "transport": path.transport or "none",
                "device": path.device,
            }
            self._paths[tuple(tags.values())] = tags
            self._path_rate.set(path.gb_s * _GB, tags)
            self._path_latency.set(path.latency_us * 1e-6, tags)
        for key, tags in gone.items():
            if key not in self._paths:  # a series cannot be taken back: 0 says that it carries nothing
                self._path_rate.set(0.0, tags)
                self._path_latency.set(0.0, tags)


class StoreMetrics:
    """Exports the figures of one node's store; `update` takes each as it is made."""

    def __init__(self, node_id: str) -> None:
        self._node = {"node": node_id}
        tags = "node", "tier"
        self._gauges = _made_gauges(_TIER_GAUGES, tags)
        self._counters = _Counters(_TIER_COUNTERS, tags)
        self._amplification = Gauge(
            "tandem_store_write_amplification", "Bytes written to NVMe over bytes put there.", ("node",)
        )
        self._index_counters = _Counters(_INDEX_COUNTERS, ("node",))
        self._index_latency = Gauge("tandem_store_index_latency_seconds", "Of one look-up.", ("node",))
        self._index_state = Gauge("tandem_store_index_state", "1 for what it is, else 0.", ("node", "state"))

    def update(self, stat: StoreStat) -> None:
        """Set and count everything of this report."""
        for tier in stat.tiers:
            tags = {**self._node, "tier": tier.tier}
            _set_all(self._gauges, tier, tags)
            self._counters.update(tier, tags)
            if tier.tier == "nvme":  # the host tier is also written when blocks are read from elsewhere
                amplification = tier.num_written_bytes / tier.num_put_bytes if tier.num_put_bytes else 0.0
                self._amplification.set(amplification, self._node)
        self._index_counters.update(stat.index, self._node)
        self._index_latency.set(stat.index.latency_s, self._node)
        for state in _INDEX_STATES:
            self._index_state.set(float(state == stat.index.state), {**self._node, "state": state})


class _Counters:
    """Ray's counters take increments, reports tell totals: this remembers what each series was told."""

    def __init__(self, items: Iterable[_Counter], tags: tuple[str, ...]) -> None:
        self._items = [(item, Counter(f"tandem_{item.name}", item.text, tags)) for item in items]
        self._totals: dict[tuple[int, tuple[str, ...]], int] = {}

    def update(self, report: object, tags: dict[str, str]) -> None:
        """Count all fields of the report."""
        for item, counter in self._items:
            self.count(counter, getattr(report, item.field), tags)

    def count(self, counter: Counter, total: int, tags: dict[str, str]) -> None:
        """Bring the series of these tags up to the total."""
        key = id(counter), tuple(tags.values())
        grown = total - self._totals.get(key, 0)
        if grown > 0:
            self._totals[key] = total
            counter.inc(grown, tags)


def _made_gauges(items: Iterable[_Gauge], tags: tuple[str, ...]) -> list[tuple[_Gauge, Gauge]]:
    return [(item, Gauge(f"tandem_{item.name}", item.text, tags)) for item in items]


def _set_all(gauges: list[tuple[_Gauge, Gauge]], report: object, tags: dict[str, str]) -> None:
    for item, gauge in gauges:
        gauge.set(getattr(report, item.field) * item.scale, tags)
