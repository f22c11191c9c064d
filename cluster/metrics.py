"""A replica's figures as Ray metrics, which Ray exports to Prometheus on every node (`ray_tandem_...`)."""

from __future__ import annotations

from typing import NamedTuple

from ray.util.metrics import Counter, Gauge

from workers.messages import LoadReport

_PATH_TAGS = ("pool", "replica", "peer", "rank", "peer_rank", "transport", "device")
_GB = 1e9


class _Gauge(NamedTuple):
    """A field of `LoadReport`, in the base unit that its name ends with."""

    field: str
    name: str
    text: str
    scale: float = 1.0


class _Counter(NamedTuple):
    """A field of `LoadReport` that only grows; Ray adds `_total` to the name, and shows it from 1 on."""

    field: str
    name: str
    text: str


_GAUGES = (
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
)
_COUNTERS = (
    _Counter("num_steps", "steps", "Engine steps."),
    _Counter(
        "num_checksum_failures",
        "checksum_failures",
        "KV pieces that failed their checksum and were computed again.",
    ),
    _Counter("num_preemptions", "preemptions", "Sequences that gave their blocks to others."),
)


class ReplicaMetrics:
    """Exports the reports of one replica; `update` takes each as it is made."""

    def __init__(self, pool: str, replica_id: str) -> None:
        self._tags = {"pool": pool, "replica": replica_id}
        tags = tuple(self._tags)
        self._gauges = [(item, Gauge(f"tandem_{item.name}", item.text, tags)) for item in _GAUGES]
        self._counters = [(item, Counter(f"tandem_{item.name}", item.text, tags)) for item in _COUNTERS]
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
        self._totals: dict[str, int] = {}

    def update(self, load: LoadReport) -> None:
        """Set and count everything of this report."""
        for item, gauge in self._gauges:
            gauge.set(getattr(load, item.field) * item.scale, self._tags)
        for kind, counter in self._counters:
            self._count(counter, kind.name, getattr(load, kind.field), self._tags)
        for cause, total in load.num_lost_landings.items():
            self._count(self._lost, f"lost {cause}", total, {**self._tags, "cause": cause})
        for traffic, total in load.num_moved_bytes.items():
            self._count(self._moved, f"moved {traffic}", total, {**self._tags, "class": traffic})
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

    def _count(self, counter: Counter, name: str, total: int, tags: dict[str, str]) -> None:
        grown = total - self._totals.get(name, 0)
        if grown > 0:
            self._totals[name] = total
            counter.inc(grown, tags)
