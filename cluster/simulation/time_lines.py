"""The state of all replicas over time, for plots."""

from __future__ import annotations

from cluster.simulation.simulated_cluster import SimulatedCluster


class TimeLines:
    """Notes the state of every replica now and then: the requests that run and wait there, the tokens of
    prompts that wait, and the share of KV blocks that is in use; and how many requests the gateways hold."""

    def __init__(self, cluster: SimulatedCluster, period_s: float) -> None:
        """Notes begin now, every `period_s` seconds; 0: none are made."""
        self._cluster = cluster
        self._period_s = period_s
        self._begins_at = cluster.clock.now()
        self.times_s: list[float] = []
        self.running: dict[str, list[int]] = {}
        self.backlog_tokens: dict[str, list[int]] = {}
        self.kv_used: dict[str, list[float]] = {}
        self.held: list[int] = []
        if period_s > 0:
            cluster.events.after(0.0, self._note)

    def _note(self) -> None:
        cluster = self._cluster
        self.times_s.append(cluster.clock.now() - self._begins_at)
        self.held.append(sum(len(gateway.admission.waiting) for gateway in cluster.gateways))
        for replica in cluster.replicas:
            name, counts, pool = replica.identity.replica_id, replica.scheduler.counts, replica.pool
            for lines, value in (
                (self.running, counts.num_running),
                (self.backlog_tokens, counts.num_backlog_tokens),
            ):
                self._append(lines, name, value)
            self._append(self.kv_used, name, 1 - pool.num_free / pool.num_total)
        cluster.events.after(self._period_s, self._note)

    def _append(self, lines: dict[str, list], name: str, value: float) -> None:  # type: ignore[type-arg]
        line = lines.setdefault(name, [])
        # One that started later, or again.
        line.extend([0] * (len(self.times_s) - 1 - len(line)))
        line.append(value)
