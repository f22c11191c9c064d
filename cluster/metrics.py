"""A replica's figures as Ray metrics, which Ray exports to Prometheus on every node (`ray_tandem_...`)."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from workers.messages import LoadReport

_PATH_TAGS = ("pool", "replica", "peer", "rank", "peer_rank", "transport", "device")
_GAUGES = {
    "num_running": "Sequences that are computed.",
    "num_waiting": "Sequences that wait.",
    "num_landings": "Landings that are open or wait for room.",
    "num_free_blocks": "KV blocks that can be taken, cached ones included.",
    "num_quarantined_blocks": "KV blocks that a writer of an ended landing could still write.",
    "num_leaked_blocks": "KV blocks that are referenced although nothing runs.",
    "prefill_tok_s": "Prompt tokens computed a second while there is prefill.",
    "decode_step_s": "Seconds of a step without prefill.",
    "transfer_gb_s": "Rate of recent pushes, 1e9 bytes a second.",
}
_COUNTERS = {
    "num_steps": "Engine steps.",
    "num_checksum_failures": "KV pieces that failed their checksum and were computed again.",
    "num_preemptions": "Sequences that gave their blocks to others.",
    "num_moved_bytes": "Bytes of KV written to other replicas.",
}


class ReplicaMetrics:
    """Exports the reports of one replica; `update` takes each as it is made."""

    def __init__(self, pool: str, replica_id: str) -> None:
        self._tags = {"pool": pool, "replica": replica_id}
        tags = tuple(self._tags)
        self._gauges = {name: Gauge(f"tandem_{name}", text, tags) for name, text in _GAUGES.items()}
        self._counters = {name: Counter(f"tandem_{name}", text, tags) for name, text in _COUNTERS.items()}
        self._lost = Counter(
            "tandem_num_lost_landings", "Landings that ended without hand-over, by cause.", (*tags, "cause")
        )
        self._path_gb_s = Gauge("tandem_path_gb_s", "Measured rate of a path between ranks.", _PATH_TAGS)
        self._path_latency = Gauge("tandem_path_latency_us", "Its one-way latency.", _PATH_TAGS)
        self._paths: dict[tuple[str, ...], dict[str, str]] = {}
        self._totals: dict[str, int] = {}

    def update(self, load: LoadReport) -> None:
        """Set and count everything of this report."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(load, name), self._tags)
        for name, counter in self._counters.items():
            self._count(counter, name, getattr(load, name), self._tags)
        for cause, total in load.num_lost_landings.items():
            self._count(self._lost, f"lost {cause}", total, {**self._tags, "cause": cause})
        self._update_paths(load)

    def _update_paths(self, load: LoadReport) -> None:
        gone, self._paths = self._paths, {}
        for path in load.paths:
            tags = {
                **self._tags,
                "peer": path.peer.replica_id,
                "rank": str(path.rank),
                "peer_rank": str(path.peer_rank),
                "transport": path.transport,
                "device": path.device,
            }
            self._paths[tuple(tags.values())] = tags
            self._path_gb_s.set(path.gb_s, tags)
            self._path_latency.set(path.latency_us, tags)
        for key, tags in gone.items():
            if key not in self._paths:  # a series cannot be taken back: 0 says that it carries nothing
                self._path_gb_s.set(0.0, tags)
                self._path_latency.set(0.0, tags)

    def _count(self, counter: Counter, name: str, total: int, tags: dict[str, str]) -> None:
        grown = total - self._totals.get(name, 0)
        if grown > 0:
            self._totals[name] = total
            counter.inc(grown, tags)
