"""Ray Serve as the scaler sees it: targets of pools, and replicas that take their time to start and to
leave."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

from cluster.scaling.serve_client import AppTargets, PoolTarget, ServeClient
from cluster.simulation.simulated_cluster import SimulatedCluster
from cluster.simulation.simulated_replica import SimulatedEngine

APP = "tandem"
_MARK = "simulated"


class ReplicaTimes(NamedTuple):
    """How long a replica takes from its order until it serves, and may take to leave, in seconds."""

    start_s: float = 60.0
    drain_s: float = 10.0


class _Starting(NamedTuple):
    pool: str
    ordered_at: float


class SimulatedServe(ServeClient):
    """Keeps every pool at its target: starts replicas, also in place of those that have died, and lets the
    latest ones leave, those first that have not started yet. A pool is named like its role."""

    def __init__(
        self, cluster: SimulatedCluster, engines: Mapping[str, SimulatedEngine], times: ReplicaTimes
    ) -> None:
        """The pools are those of `engines`, with as many replicas as the cluster has now."""
        super().__init__("simulated", APP, "")
        self._cluster = cluster
        self._engines = engines
        self._times = times
        self._numbers = itertools.count(len(cluster.shape.replicas))
        self._starting: dict[str, _Starting] = {}
        self._leaving: set[str] = set()
        # The replica seconds of those that were called off before they served.
        self._called_off: list[tuple[float, float]] = []
        self._configured = {pool: len(self._staying(pool)) for pool in engines}
        self.targets = dict(self._configured)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is no connection to close."""

    async def application(self) -> AppTargets:
        pools = {
            pool: PoolTarget(target, self._configured[pool], len(self._staying(pool)))
            for pool, target in self.targets.items()
        }
        return AppTargets("RUNNING", _MARK, True, pools)

    async def scale(self, pool: str, num_replicas: int) -> None:
        self.targets[pool] = num_replicas
        self.keep_targets()

    def is_leaving(self, replica_id: str) -> bool:
        """Whether the replica was told to leave."""
        return replica_id in self._leaving

    def keep_targets(self) -> None:
        """Start and stop replicas where there are not as many as there should be."""
        for pool, target in self.targets.items():
            starting = [name for name, it in self._starting.items() if it.pool == pool]
            staying = self._staying(pool)
            for _ in range(target - len(starting) - len(staying)):
                self._start(pool)
            num_surplus = len(starting) + len(staying) - target
            latest_first = starting[::-1] + staying[::-1]
            for name in latest_first[: max(0, num_surplus)]:
                self._stop(name)

    def starting_s(self, since_s: float, until_s: float) -> float:
        """Return the seconds between two times of all replicas that did not serve yet."""
        spans = [*self._called_off, *((it.ordered_at, until_s) for it in self._starting.values())]
        return sum(max(0.0, min(end, until_s) - max(begin, since_s)) for begin, end in spans)

    def _staying(self, pool: str) -> list[str]:
        names = (it.identity.replica_id for it in self._cluster.replicas if it.pool_name == pool)
        return [name for name in names if name not in self._leaving]

    def _start(self, pool: str) -> None:
        name, now = f"r{next(self._numbers):04}", self._cluster.clock.now()
        self._starting[name] = _Starting(pool, now)
        self._cluster.events.after(self._times.start_s, lambda: self._started(name))

    def _started(self, name: str) -> None:
        starting = self._starting.pop(name, None)
        if starting is not None:
            engine = self._engines[starting.pool]
            self._cluster.add_replica(name, starting.pool, engine, starting.ordered_at)

    def _stop(self, name: str) -> None:
        starting, replica = self._starting.pop(name, None), self._cluster.find(name)
        if starting is not None:
            self._called_off.append((starting.ordered_at, self._cluster.clock.now()))
        elif replica is not None:
            self._leaving.add(name)
            replica.drain(self._times.drain_s, lambda: self._cluster.remove_replica(name))
