"""Records what the cluster does, every `FINE.period_s`, for the console's curves of up to six hours."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from cluster.errors import failures_logged
from cluster.gateway.fleet.fleet import FleetStats
from cluster.gateway.replica_connections import ReplicaView
from cluster.metrics.trends import FINE, Gauges, Trends
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity

# The delay after the end of a period: the other gateways' clocks are not quite the same.
_LATE_S = 1.0
_log = logging.getLogger(__name__)


class _Prompts(NamedTuple):
    """Totals of a replica: prompt tokens that could have been cached, and those that were."""

    num_queried: int
    num_hit: int


class TrendRecorder:
    """Keeps `trends` up to date while `run` runs. `stats` queries all gateways; `views` are the replicas that
    this gateway hears, and `has_gpus` returns of a pool whether its ranks have any."""

    def __init__(
        self,
        stats: Callable[[], Awaitable[FleetStats]],
        views: Callable[[], Iterable[ReplicaView]],
        has_gpus: Callable[[str], bool],
        clock: Clock,
    ) -> None:
        self.trends = Trends()
        self._stats = stats
        self._views = views
        self._has_gpus = has_gpus
        self._clock = clock
        self._prompts: dict[ReplicaIdentity, _Prompts] = {}

    async def run(self) -> None:
        """Record each period once it is over, until cancelled."""
        self._queried_and_hit()  # what was before is no part of the first period
        while True:
            wall = self._clock.wall()
            end = int(wall) - int(wall) % FINE.period_s + FINE.period_s
            await self._clock.sleep(end + _LATE_S - wall)
            with failures_logged(_log, "a point of the console's curves"):
                await self.record(end - FINE.period_s)

    async def record(self, at: int) -> None:
        """Record the period that begins at `at`, in unix time."""
        stats = await self._stats()
        seconds = [each for each in stats.seconds if at <= each.at < at + FINE.period_s]
        self.trends.add(at, seconds, self._gauges(stats))

    def _gauges(self, stats: FleetStats) -> Gauges:
        num_waiting = sum(
            each.num_waiting for totals in stats.totals.values() for each in totals.admission.classes.values()
        )
        num_used: Counter[str] = Counter()
        num_blocks: Counter[str] = Counter()
        memory_shares = []
        for view in self._views():
            if (load := view.load) is None:
                continue
            num_waiting += load.num_waiting
            num_blocks[view.role] += load.num_total_blocks
            num_used[view.role] += load.num_total_blocks - load.num_free_blocks
            if self._has_gpus(view.record.pool):
                memory_shares += [it.used_bytes / it.total_bytes for it in load.memory if it.total_bytes]
        num_queried, num_hit = self._queried_and_hit()
        return Gauges(
            num_waiting=num_waiting,
            role_to_kv_share={role: num_used[role] / count for role, count in num_blocks.items() if count},
            gpu_memory_share=max(memory_shares, default=None),
            num_queried_tokens=num_queried,
            num_hit_tokens=num_hit,
        )

    def _queried_and_hit(self) -> tuple[int, int]:
        """Return how much the replicas' totals have grown since the last call."""
        before, self._prompts = self._prompts, {}
        num_queried = num_hit = 0
        for view in self._views():
            if (load := view.load) is None:
                continue
            now = _Prompts(load.num_queried_tokens, sum(load.num_hit_tokens.values()))
            self._prompts[view.record.identity] = now
            # Counts of a replica from before this gateway heard it are of no known time.
            last = before.get(view.record.identity, now)
            num_queried += now.num_queried - last.num_queried
            num_hit += now.num_hit - last.num_hit
        return num_queried, num_hit
