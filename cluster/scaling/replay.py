"""Replays arrivals through a simulated cluster, with the live policy, or another one, at the lever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from cluster.errors import BenchError
from cluster.roster.messages import ScalingMove
from cluster.scaling.config import ScalingConfig
from cluster.scaling.policy import decide, history_span_s
from cluster.scaling.policy_input import Lend, Plan, PoolMove
from cluster.scaling.rates import PREFILL
from cluster.scaling.reactive import NUM_SAMPLES
from cluster.scaling.samples import History, PoolView, Sample, last_changes
from cluster.scaling.simulation import TICK_S, Arrival, Job, ServiceModel, SimulatedCluster

# After the last arrival the replay goes on for at most so long.
_TAIL_S = 3600.0


class Scheme(Protocol):
    """Whoever decides counts: `cluster.scaling.policy.decide`, or what it is compared with."""

    def __call__(
        self, history: History, config: ScalingConfig, pools: Sequence[PoolView], now: float
    ) -> Plan: ...


class Change(NamedTuple):
    """What was done, and when: a `PoolMove`, `Lend` or `Recall` as text and counts."""

    at: float
    pool: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a trace went."""

    jobs: list[Job]
    # Moves of counts; `role_changes` are the lends and recalls.
    changes: list[Change]
    role_changes: list[tuple[float, str]]
    # Desired, at every look.
    counts: list[tuple[float, dict[str, int]]]
    # Each once, when it first stood.
    notes: list[tuple[float, str]]
    replica_s: dict[str, float]
    num_preemptions: int
    num_gaps: float
    num_late_gaps: float
    config: ScalingConfig = field(repr=False)

    @property
    def ttfts_s(self) -> list[float]:
        """Of those that had a first token."""
        return [job.first_at - job.arrival.at for job in self.jobs if job.first_at is not None]

    @property
    def ttft_share(self) -> float:
        """Of all requests: those with their first token in time."""
        in_time = sum(ttft_s <= self.config.ttft_slo_s for ttft_s in self.ttfts_s)
        return in_time / max(len(self.jobs), 1)

    @property
    def itl_share(self) -> float:
        """Of all gaps between tokens: those that were short enough."""
        return 1 - self.num_late_gaps / self.num_gaps if self.num_gaps else 1.0

    @property
    def good_share(self) -> float:
        """Of all requests: those in time with the first token and, on average, with the others."""
        return sum(self._is_good(job) for job in self.jobs) / max(len(self.jobs), 1)

    def _is_good(self, job: Job) -> bool:
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
    scheme: Scheme = decide,
) -> Replayed:
    """The trace from its beginning until all is answered. `pools` say what there is at the start."""
    return _Replay(pools, model, config, scheme).run(sorted(arrivals))


class _Replay:
    """One run: the cluster, and what the scaler actor and the roster remember."""

    def __init__(
        self, pools: Sequence[PoolView], model: ServiceModel, config: ScalingConfig, scheme: Scheme
    ) -> None:
        self._pools = tuple(pools)
        self._config = config
        self._scheme = scheme
        self._cluster = SimulatedCluster(pools, model, config.ttft_slo_s, config.itl_slo_s)
        self._history = History(history_span_s(config))
        self._moves: list[ScalingMove] = []
        self._lent: dict[str, tuple[str, float]] = {}
        self._changes: list[Change] = []
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
            jobs=outcomes.jobs,
            changes=self._changes,
            role_changes=self._role_changes,
            counts=self._counts,
            notes=[(at, note) for note, at in self._notes.items()],
            replica_s=outcomes.replica_s,
            num_preemptions=outcomes.num_preemptions,
            num_gaps=outcomes.num_gaps,
            num_late_gaps=outcomes.num_late_gaps,
            config=self._config,
        )

    def _look(self) -> None:
        """What the scaler does at each tick: look, decide, carry out."""
        sample = self._cluster.take_sample()
        self._history.add(sample)
        plan = self._scheme(self._history, self._config, self._views(), sample.at)
        for change in plan.lends:
            self._switch(change.replica_id, change.pool, change.role if isinstance(change, Lend) else "")
            self._role_changes.append(
                (sample.at, f"{type(change).__name__} {change.replica_id}: {change.reason}")
            )
        for move in plan.moves:
            self._carry_out(move, sample.at)
        for note in plan.notes:
            self._notes.setdefault(note, sample.at)
        self._counts.append((sample.at, dict(self._cluster.desired)))

    def _carry_out(self, move: PoolMove, at: float) -> None:
        for replica_id, (home, _) in list(self._lent.items()):  # a scale order calls all of them back
            self._switch(replica_id, home, "")
            self._role_changes.append((at, f"Recall {replica_id}: pool {move.pool} goes to {move.after}"))
        self._cluster.scale(move.pool, move.after)
        self._moves.append(ScalingMove(at, move.pool, move.before, move.after, "autoscaler", move.reason))
        self._changes.append(Change(at, *move))

    def _switch(self, replica_id: str, pool: str, role: str) -> None:
        """`role` "": back to its pool's."""
        if role:
            self._lent[replica_id] = pool, self._cluster.now
        else:
            self._lent.pop(replica_id, None)
        self._cluster.set_role(replica_id, role or self._cluster.home_role(pool))

    def _views(self) -> list[PoolView]:
        views = []
        for pool in self._pools:
            grew_at, changed_at = last_changes(pool.name, self._moves)
            lent = tuple((key, since) for key, (home, since) in self._lent.items() if home == pool.name)
            desired = self._cluster.desired[pool.name]
            views.append(pool._replace(desired=desired, grew_at=grew_at, changed_at=changed_at, lent=lent))
        return views


# ------------------------------------------------------------------------------------ other schemes


def keep_counts(history: History, config: ScalingConfig, pools: Sequence[PoolView], now: float) -> Plan:
    """Nothing is ever changed."""
    return Plan()


class TargetQueue:
    """Each pool by itself: as many replicas as hold its requests at `target` a replica, the plain scheme of
    many autoscalers. Upward at once, downward when it held for `down_cool_down_s`."""

    def __init__(self, prefill_target: float, decode_target: float) -> None:
        self._targets = {True: prefill_target, False: decode_target}

    def __call__(
        self, history: History, config: ScalingConfig, pools: Sequence[PoolView], now: float
    ) -> Plan:
        """One move a pool at most."""
        moves = [self._move(history, config, pool, now) for pool in pools]
        return Plan(tuple(move for move in moves if move is not None))

    def _move(self, history: History, config: ScalingConfig, pool: PoolView, now: float) -> PoolMove | None:
        if pool.limits is None:
            return None
        target = self._targets[pool.role == PREFILL]
        wanted = [
            _num_requests(sample, pool.name) / target
            for sample in history.since(now - config.down_cool_down_s)
        ]
        up = math.ceil(sum(wanted[-NUM_SAMPLES:]) / len(wanted[-NUM_SAMPLES:]))
        down = math.ceil(max(wanted))
        count = up if up > pool.desired else min(down, pool.desired)
        count = min(max(count, pool.limits.min), pool.limits.max)
        is_up = count > pool.desired
        since, wait_s = (
            (pool.grew_at, config.up_cool_down_s) if is_up else (pool.changed_at, config.down_cool_down_s)
        )
        if count == pool.desired or (since is not None and now < since + wait_s):
            return None
        return PoolMove(pool.name, pool.desired, count, f"{up} would hold {target:g} requests each")


def _num_requests(sample: Sample, pool: str) -> int:
    return sum(each.num_running + each.num_waiting for each in sample.replicas if each.pool == pool)


# -------------------------------------------------------------------------------------------- traces


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int


def read_arrivals(path: Path, *, speed: float = 1.0, last_s: float = math.inf) -> list[Arrival]:
    """A trace in Mooncake's format (JSON lines, times in ms), `speed` times as fast, its first `last_s`
    seconds. `BenchError` names the line that is none."""
    decoder = msgspec.json.Decoder(_Line)
    arrivals = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    request = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise BenchError(f"{path}, line {number}: {error}") from error
                at = request.timestamp / 1e3 / speed
                if at <= last_s:
                    arrivals.append(Arrival(at, max(1, request.input_length), max(1, request.output_length)))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    return sorted(arrivals)
