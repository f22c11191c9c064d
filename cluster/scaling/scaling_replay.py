"""Replay requests to a simulated cluster, with the work of the scaler and of the roster around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from cluster.roster.messages import ScalingChange
from cluster.scaling.config import ScalingConfig
from cluster.scaling.policy import Policy, decide, history_span_s
from cluster.scaling.samples import (
    History,
    PoolView,
    last_changes,
)
from cluster.scaling.scaling_plan import PoolMove, RoleAssignment
from cluster.scaling.simulation import (
    TICK_S,
    Arrival,
    Outcomes,
    ReplayedCluster,
    ReplayedRequest,
    ServiceModel,
)

# The longest time for which the replay continues after the last arrival.
_TAIL_S = 3600.0


@dataclass(slots=True, kw_only=True)
class Replayed(Outcomes):
    """The outcome of a trace."""

    # Moves of counts.
    changes: list[ScalingChange]
    role_changes: list[tuple[float, str]]
    # The desired counts, at every look.
    counts: list[tuple[float, dict[str, int]]]
    # Each note once, when it first stood.
    notes: list[tuple[float, str]]
    config: ScalingConfig = field(repr=False)

    @property
    def ttfts_s(self) -> list[float]:
        """The times to the first token of the requests that had one."""
        return [job.first_at - job.arrival.at for job in self.jobs if job.first_at is not None]

    @property
    def ttft_share(self) -> float:
        """The share of all requests with their first token in time."""
        in_time = sum(ttft_s <= self.config.ttft_slo_s for ttft_s in self.ttfts_s)
        return in_time / max(len(self.jobs), 1)

    @property
    def itl_share(self) -> float:
        """The share of all gaps between tokens that were short enough."""
        return 1 - self.num_late_gaps / self.num_gaps if self.num_gaps else 1.0

    @property
    def good_share(self) -> float:
        """The share of all requests in time with the first token and, on average, with the others."""
        return sum(self._is_good(job) for job in self.jobs) / max(len(self.jobs), 1)

    def _is_good(self, job: ReplayedRequest) -> bool:
        if job.first_at is None or job.end_at is None:
            return False
        gap_s = (job.end_at - job.first_at) / max(job.arrival.output_tokens - 1, 1)
        is_prompt = job.first_at - job.arrival.at <= self.config.ttft_slo_s
        return is_prompt and gap_s <= self.config.itl_slo_s

    @property
    def total_replica_s(self) -> float:
        return sum(self.replica_s.values())


def replay(
    arrivals: Sequence[Arrival],
    pools: Sequence[PoolView],
    model: ServiceModel,
    config: ScalingConfig,
    scheme: Policy = decide,
) -> Replayed:
    """Replay the trace from its beginning until all is answered. `pools` are those at the start."""
    return _Replay(pools, model, config, scheme).run(sorted(arrivals))


class _Replay:
    """A run: the cluster, and the memory of the scaler actor and the roster."""

    def __init__(
        self, pools: Sequence[PoolView], model: ServiceModel, config: ScalingConfig, scheme: Policy
    ) -> None:
        self._pools = tuple(pools)
        self._config = config
        self._scheme = scheme
        self._cluster = ReplayedCluster(pools, model, config.ttft_slo_s, config.itl_slo_s)
        self._history = History(history_span_s(config))
        self._assigned: dict[str, tuple[str, float]] = {}
        self._changes: list[ScalingChange] = []
        self._role_changes: list[tuple[float, str]] = []
        self._counts: list[tuple[float, dict[str, int]]] = []
        self._notes: dict[str, float] = {}

    def run(self, arrivals: Sequence[Arrival]) -> Replayed:
        cluster, next_index, look_at = self._cluster, 0, 0.0
        end_at = (arrivals[-1].at if arrivals else 0.0) + _TAIL_S
        while next_index < len(arrivals) or (not cluster.is_idle and cluster.now < end_at):
            while next_index < len(arrivals) and arrivals[next_index].at < cluster.now + TICK_S:
                cluster.submit(arrivals[next_index])
                next_index += 1
            if cluster.now >= look_at:
                look_at += self._config.interval_s
                self._look()
            cluster.advance()
        outcomes = cluster.outcomes
        return Replayed(
            changes=self._changes,
            role_changes=self._role_changes,
            counts=self._counts,
            notes=[(at, note) for note, at in self._notes.items()],
            **{item.name: getattr(outcomes, item.name) for item in fields(outcomes)},
            config=self._config,
        )

    def _look(self) -> None:
        """Look, decide and carry out, as the scaler does at each tick."""
        sample = self._cluster.take_sample()
        self._history.add(sample)
        plan = self._scheme(self._history, self._config, self._views(), sample.at)
        for change in plan.role_changes:
            self._switch(
                change.replica_id, change.pool, change.role if isinstance(change, RoleAssignment) else ""
            )
            self._role_changes.append(
                (sample.at, f"{type(change).__name__} {change.replica_id}: {change.reason}")
            )
        for move in plan.moves:
            self._carry_out(move, sample.at)
        for note in plan.notes:
            self._notes.setdefault(note, sample.at)
        self._counts.append((sample.at, dict(self._cluster.desired)))

    def _carry_out(self, move: PoolMove, at: float) -> None:
        for replica_id, (home, _) in list(self._assigned.items()):  # a scale order calls all of them back
            self._switch(replica_id, home, "")
            self._role_changes.append((at, f"RoleReturn {replica_id}: pool {move.pool} goes to {move.after}"))
        self._cluster.scale(move.pool, move.after)
        self._changes.append(ScalingChange(at, move.pool, move.before, move.after, "autoscaler", move.reason))

    def _switch(self, replica_id: str, pool: str, role: str) -> None:
        """Switch the role of a replica; `role` "": back to its pool's."""
        if role:
            self._assigned[replica_id] = pool, self._cluster.now
        else:
            self._assigned.pop(replica_id, None)
        self._cluster.set_role(replica_id, role or self._cluster.home_role(pool))

    def _views(self) -> list[PoolView]:
        views = []
        for pool in self._pools:
            grew_at, changed_at = last_changes(pool.name, self._changes)
            assigned = tuple(
                (key, since) for key, (home, since) in self._assigned.items() if home == pool.name
            )
            desired = self._cluster.desired[pool.name]
            views.append(
                pool._replace(desired=desired, grew_at=grew_at, changed_at=changed_at, assigned=assigned)
            )
        return views
