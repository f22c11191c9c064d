"""A keeper between Serve and the roster, both of plain values."""

from __future__ import annotations

from cluster.roster.messages import RosterView, ScalingMove
from cluster.roster.state import DesiredState
from cluster.scaling.reconciler import (
    Action,
    Forget,
    Observed,
    Pull,
    RecallLent,
    Reconciler,
    SetDesired,
    Tell,
)
from cluster.scaling.serve_client import AppTargets, PoolTarget

NOBODY: frozenset[str] = frozenset()


class House:
    """Serve, the roster and a keeper, as plain values: `look` carries out what the keeper says."""

    def __init__(self, counts: dict[str, int], autoscaled: frozenset[str] = NOBODY) -> None:
        self.configured = dict(counts)
        self.targets = dict(counts)
        self.declared: dict[str, int] = {}
        self.mark = "m0"
        self.status = "RUNNING"
        self.autoscaled = autoscaled
        self.version = 0
        self.wishes = DesiredState(0)
        self.keeper = Reconciler()
        self.now = 100.0
        self.lever_works = True
        self.is_there = True
        self.told: list[tuple[str, int, int, str]] = []
        self.pulls: list[tuple[str, int]] = []
        self.num_recalls = 0

    def view(self) -> RosterView:
        self.version += 1
        return self.wishes.fill(RosterView(version=self.version))

    def seen(self) -> AppTargets | None:
        if not self.is_there:
            return None
        pools = {
            pool: PoolTarget(target, self.configured[pool], declared=self.declared.get(pool))
            for pool, target in self.targets.items()
        }
        return AppTargets(self.status, self.mark, True, pools)

    def look(self, after_s: float = 2.0) -> None:
        self.now += after_s
        self.carry_out(self.keeper.look(self.seen(), self.view(), self.autoscaled, self.now, self.now))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SetDesired(pool, count, pinned):
                    self.wishes.set_desired(pool, count, pinned=pinned)
                case Forget(pool):
                    self.wishes.forget(pool)
                case Tell(move):
                    self.wishes.add_move(move)
                    self.told.append((move.pool, move.before, move.after, move.by))
                case RecallLent():
                    self.num_recalls += 1
                case Observed():
                    self.wishes.set_observed(*action)
                case Pull(pool, count):
                    self.pull(action, pool, count)

    def pull(self, action: Pull, pool: str, count: int) -> None:
        self.pulls.append((pool, count))
        if not self.lever_works:
            self.keeper.failed(action, self.now)
            return
        self.targets[pool] = count
        self.wishes.set_observed(*self.keeper.pulled(action))

    def autoscale(self, pool: str, count: int) -> None:
        """As the scaler does: only after a look that found nothing to do."""
        before = self.wishes.fill(RosterView(version=0)).desired.get(pool, self.targets[pool])
        move = ScalingMove(self.now, pool, before, count, "autoscaler", "more load")
        self.carry_out(self.keeper.order(move))

    def deploy(self, mark: str, counts: dict[str, int]) -> None:
        self.mark, self.configured, self.targets = mark, dict(counts), dict(counts)

    @property
    def desired(self) -> dict[str, int]:
        return self.wishes.fill(RosterView(version=0)).desired

    @property
    def pinned(self) -> tuple[str, ...]:
        return self.wishes.fill(RosterView(version=0)).pinned
