"""A reconciler between Serve and the roster, both as plain values."""

from __future__ import annotations

from cluster.roster.messages import RosterView, ScalingMove
from cluster.roster.state import DesiredState
from cluster.scaling.reconciler import (
    Action,
    Reconciler,
    RestoreRoles,
    SetTarget,
)
from cluster.scaling.serve_client import AppTargets, PoolTarget

NOBODY: frozenset[str] = frozenset()


class ReconcilerHarness:
    """Serve, the roster and a reconciler, as plain values: `look` carries out the actions."""

    def __init__(self, counts: dict[str, int], autoscaled: frozenset[str] = NOBODY) -> None:
        self.configured = dict(counts)
        self.targets = dict(counts)
        self.declared: dict[str, int] = {}
        self.mark = "m0"
        self.status = "RUNNING"
        self.autoscaled = autoscaled
        self.version = 0
        self.state = DesiredState(0)
        self.reconciler = Reconciler()
        self.now = 100.0
        self.serve_works = True
        self.is_there = True
        self.recorded: list[tuple[str, int, int, str]] = []
        self.orders: list[tuple[str, int]] = []
        self.num_restored = 0

    def view(self) -> RosterView:
        self.version += 1
        return self.state.fill(RosterView(version=self.version))

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
        self.carry_out(self.reconciler.look(self.seen(), self.view(), self.autoscaled, self.now, self.now))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RestoreRoles():
                    self.num_restored += 1
                case SetTarget(pool, count):
                    self.pull(action, pool, count)
                case _:
                    self.state.change(action)
                    if isinstance(action, ScalingMove):
                        self.recorded.append((action.pool, action.before, action.after, action.by))

    def pull(self, action: SetTarget, pool: str, count: int) -> None:
        self.orders.append((pool, count))
        if not self.serve_works:
            self.reconciler.failed(action, self.now)
            return
        self.targets[pool] = count
        self.state.change(self.reconciler.pulled(action))

    def autoscale(self, pool: str, count: int) -> None:
        """As the scaler does: only after a look that found nothing to do."""
        before = self.state.fill(RosterView(version=0)).desired.get(pool, self.targets[pool])
        move = ScalingMove(self.now, pool, before, count, "autoscaler", "more load")
        self.carry_out(self.reconciler.order(move))

    def deploy(self, mark: str, counts: dict[str, int]) -> None:
        self.mark, self.configured, self.targets = mark, dict(counts), dict(counts)

    @property
    def desired(self) -> dict[str, int]:
        return self.state.fill(RosterView(version=0)).desired

    @property
    def pinned(self) -> tuple[str, ...]:
        return self.state.fill(RosterView(version=0)).pinned
