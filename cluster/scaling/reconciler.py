"""Decide which count is right when Serve's target differs from the desired one: sans-I/O, one look at a time.

Serve reports only its targets, not who set them. The rest follows from the memory of the roster:

    target == desired                         nothing to do
    target as at the last look                our own order has not arrived: pull the client (again)
    target as configured, after a deploy      the deploy has reset it: restore the desired count
    anything else                             an operator's order: that is desired now, and pinned

A deploy of ours binds the desired counts, so that it resets nothing; the counts of the configuration itself
stand next to them (`PoolTarget.declared`). Where these change, pools that nobody pinned and that are not
autoscaled follow them.

So a look is right after any restart of the scaler, of the roster or of Serve's controller. Two things cannot
be distinguished: an operator who orders just the configured count within `SETTLE_S` of a deploy from Serve,
and the reset by the deploy itself; the count is restored then. An order of the count that the pool has
already cannot be seen at all. Neither holds for orders through a gateway (`cluster.scaling.orders`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.roster.messages import ForgetPool, Observed, RosterOrder, RosterView, ScalingChange, SetDesired
from cluster.scaling.serve_client import AppTargets, PoolTarget
from kvtransfer.common.health import Backoff

# The time after a deploy was seen in which its resets may come.
SETTLE_S = 5.0
_MIN_RETRY_S = 2.0
_MAX_RETRY_S = 60.0
_DELETING = "DELETING"
_RUNNING = "RUNNING"


class RestoreRoles(NamedTuple):
    """Return every replica to its pool's role."""

    reason: str


class SetTarget(NamedTuple):
    """Set Serve's target; then say how it went (`pulled` or `failed`)."""

    pool: str
    num_replicas: int


# `Observed` comes before any client is pulled.
Action = RosterOrder | RestoreRoles | SetTarget


@dataclass(slots=True)
class _Retry:
    """A retry of a client that could not be pulled."""

    backoff: Backoff = field(default_factory=lambda: Backoff(_MIN_RETRY_S, _MAX_RETRY_S))
    not_before: float = 0.0


class Reconciler:
    """Turns looks and orders into actions, which the caller carries out in their order and stops at the first
    that fails: the next look starts from the state at that time.

    Times are seconds of one monotonic clock (`now`) and Unix time for records (`wall`).
    """

    def __init__(self) -> None:
        self._mark = ""
        self._mark_since = 0.0
        self._retries: dict[str, _Retry] = {}
        self._observed = Observed("", {}, {})

    def look(
        self,
        seen: AppTargets | None,
        roster: RosterView,
        autoscaled: Collection[str],
        now: float,
        wall: float,
    ) -> list[Action]:
        """Return what to do about the targets of Serve; `autoscaled` pools are held without a pin.

        `seen` None (the application is absent) and an application that is being deleted change nothing.
        """
        if seen is None or seen.status == _DELETING or not seen.pools:
            return []
        is_settled = self._settle(seen.deploy_mark, roster, now)
        judge = _Comparison(roster, set(autoscaled), is_settled, wall)
        for pool, target in sorted(seen.pools.items()):
            judge.judge(pool, target)
        if seen.status == _RUNNING:
            judge.forget_removed(seen.pools)
        targets = {pool: target.target for pool, target in seen.pools.items()}
        declared = {pool: it.declared for pool, it in seen.pools.items() if it.declared is not None}
        mark = seen.deploy_mark if is_settled else roster.deploy_mark
        self._observed = Observed(mark, targets, declared)
        before: list[Action] = list(judge.actions)
        if self._observed != Observed(roster.deploy_mark, roster.targets, roster.declared):
            before.append(self._observed)
        return before + [pull for pull in judge.pulls if self._may_pull(pull.pool, now)]

    def order(self, move: ScalingChange) -> list[Action]:
        """Return the actions of a move of our own, decided on the state that the last look saw: it is
        recorded first, then carried out. Replicas keep their roles, which the policy knows."""
        return [
            SetDesired(move.pool, move.after, pinned=False),
            move,
            SetTarget(move.pool, move.after),
        ]

    def ordered(self, move: ScalingChange) -> list[Action]:
        """Return the actions of an operator's move that Serve has taken already, or that leaves its target as
        it is."""
        actions: list[Action] = [SetDesired(move.pool, move.after, pinned=True), move]
        if move.before != move.after:
            actions.insert(0, RestoreRoles(f"{move.by} set pool {move.pool} to {move.after}"))
        return actions

    def pulled(self, pull: SetTarget) -> Observed:
        """Serve has taken the order: from now on another target is somebody else's."""
        self._retries.pop(pull.pool, None)
        targets = {**self._observed.targets, pull.pool: pull.num_replicas}
        self._observed = Observed(self._observed.deploy_mark, targets, self._observed.declared)
        return self._observed

    def failed(self, pull: SetTarget, now: float) -> None:
        """Serve could not be reached, or refused: the desired count stays, and it is tried again."""
        retry = self._retries.setdefault(pull.pool, _Retry())
        retry.not_before = now + retry.backoff.failed()

    def _settle(self, mark: str, roster: RosterView, now: float) -> bool:
        """Whether the targets are past the reset of the deploy of this mark."""
        if roster.deploy_mark in ("", mark):
            self._mark = ""
            return True
        if self._mark != mark:
            self._mark, self._mark_since = mark, now
        return now >= self._mark_since + SETTLE_S

    def _may_pull(self, pool: str, now: float) -> bool:
        retry = self._retries.get(pool)
        return retry is None or now >= retry.not_before


class _Comparison:
    """A look: collects the changes for the roster, and the targets to set in Serve after that."""

    def __init__(self, roster: RosterView, autoscaled: set[str], is_settled: bool, wall: float) -> None:
        self._roster = roster
        self._autoscaled = autoscaled
        self._is_settled = is_settled
        self._wall = wall
        self.actions: list[Action] = []
        self.pulls: list[SetTarget] = []

    def judge(self, pool: str, seen: PoolTarget) -> None:
        desired = self._roster.desired.get(pool)
        last = self._roster.targets.get(pool)
        before = self._roster.declared.get(pool)
        if seen.declared not in (None, before) and before is not None and self._follows_the_file(pool):
            self._declared_anew(pool, seen, before)
        elif desired is None:
            self._nothing_wanted(pool, seen, last)
        elif seen.target == desired:
            return
        elif seen.target == last:
            self.pulls.append(SetTarget(pool, desired))
        elif not self._is_settled and seen.target == seen.configured:
            self._after_deploy(pool, seen, desired)
        else:
            self._ordered(pool, desired, seen.target)

    def forget_removed(self, there: Mapping[str, PoolTarget]) -> None:
        """Forget the pools that a deploy removed: they shall not be remembered when another deploy adds one
        of their name."""
        self.actions += [ForgetPool(pool) for pool in self._roster.desired if pool not in there]

    def _follows_the_file(self, pool: str) -> bool:
        return pool not in self._roster.pinned and pool not in self._autoscaled

    def _declared_anew(self, pool: str, seen: PoolTarget, before: int) -> None:
        """Take another count in the configuration as an order for a pool whose count nobody has chosen."""
        assert seen.declared is not None
        if self._roster.desired.get(pool, seen.target) != seen.declared or seen.target != seen.declared:
            self.actions.append(SetDesired(pool, seen.declared, pinned=False))
        if seen.target != seen.declared:
            self.actions.append(RestoreRoles(f"the configuration sets pool {pool} to {seen.declared}"))
            reason = f"the configuration says {seen.declared}, it said {before}"
            self._tell(pool, seen.target, seen.declared, "deploy", reason)
            self.pulls.append(SetTarget(pool, seen.declared))

    def _nothing_wanted(self, pool: str, seen: PoolTarget, last: int | None) -> None:
        if seen.target == seen.configured:
            return
        before = seen.configured if last is None else last
        if pool in self._autoscaled and last is None:
            # Nobody remembers a choice: this may be an earlier life's own, and is free to move.
            self.actions.append(SetDesired(pool, seen.target, pinned=False))
        else:
            self._ordered(pool, before, seen.target)

    def _after_deploy(self, pool: str, seen: PoolTarget, desired: int) -> None:
        if pool in self._roster.pinned or pool in self._autoscaled:
            reason = f"a deploy had set it to the configured {seen.configured}"
            self._tell(pool, seen.target, desired, "deploy", reason)
            self.pulls.append(SetTarget(pool, desired))
            return
        self.actions.append(ForgetPool(pool))
        reason = "a deploy set it to the configured count, and nobody has pinned the pool"
        self._tell(pool, desired, seen.target, "deploy", reason)

    def _ordered(self, pool: str, before: int, after: int) -> None:
        self.actions.append(RestoreRoles(f"an operator set pool {pool} to {after}"))
        self.actions.append(SetDesired(pool, after, pinned=True))
        self._tell(pool, before, after, "operator", "ordered through Ray Serve's scale endpoint")

    def _tell(self, pool: str, before: int, after: int, by: str, reason: str) -> None:
        self.actions.append(ScalingChange(self._wall, pool, before, after, by, reason))
