"""What `tandem scale` will change, from what Serve, a gateway and Ray say now: figures and texts, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.terminal import NONE, made_table
from cluster.errors import ConfigError
from cluster.proto import tandem_pb2 as pb
from cluster.scaling.serve_client import AppTargets
from cluster.serve.capacity import Room


class PoolChange(NamedTuple):
    """One order. `least` and `most` bound how many running requests the leaving replicas have: which of them
    leave is for Ray Serve to choose. None: no gateway answered."""

    pool: str
    role: str
    before: int
    after: int
    num_running: int
    least: int | None
    most: int | None

    @property
    def num_added(self) -> int:
        return max(0, self.after - self.before)

    @property
    def is_pin(self) -> bool:
        """Serve has this target already: only the roster can be told to keep it."""
        return self.before == self.after


class ScalePlan(NamedTuple):
    """All of it. `shortages` says why added replicas cannot be placed now."""

    changes: tuple[PoolChange, ...]
    released: tuple[str, ...]
    # Replicas that play another pool's role and go home first.
    recalled: tuple[str, ...]
    shortages: tuple[str, ...]
    room: Room | None
    # Of gateways: through them pools are pinned at the count that they have, and released.
    consoles: tuple[str, ...]
    has_status: bool


def parse_orders(texts: Sequence[str]) -> dict[str, int]:
    """Of `decode=3 prefill=2`; `ConfigError` names the one that is not like that."""
    orders: dict[str, int] = {}
    for text in texts:
        pool, _, count = text.partition("=")
        if not pool or not count.isdecimal():
            raise ConfigError(f"{text!r}: expected POOL=REPLICAS, as in decode=3")
        if pool in orders:
            raise ConfigError(f"pool {pool} is ordered twice")
        orders[pool] = int(count)
    return orders


def plan_scale(
    targets: AppTargets,
    status: pb.StatusResponse | None,
    room: Room | None,
    orders: Mapping[str, int],
    released: Collection[str],
) -> ScalePlan:
    """`ConfigError` names a pool that there is not, or an order that would leave nothing to serve."""
    for pool in (*orders, *released):
        if pool not in targets.pools:
            raise ConfigError(f"there is no pool {pool!r}, but {', '.join(sorted(targets.pools))}")
    if status is not None:
        check_decodes({name: pool.target for name, pool in targets.pools.items()}, status, orders)
    changes = tuple(_change(pool, after, targets, status) for pool, after in orders.items())
    has_change = any(not change.is_pin for change in changes)
    return ScalePlan(
        changes=changes,
        released=tuple(released),
        recalled=_lent(status) if status is not None and has_change else (),
        shortages=tuple(room.shortages({it.pool: it.num_added for it in changes}) if room else ()),
        room=room,
        consoles=tuple(it.console for it in status.gateways if it.console) if status is not None else (),
        has_status=status is not None,
    )


def plan_view(plan: ScalePlan) -> Group:
    """For people."""
    parts: list[RenderableType] = []
    if plan.changes:
        table = made_table("replicas", "pool", numbers=("running", "target", "wanted", "affected\nrequests"))
        for it in plan.changes:
            table.add_row(it.pool, str(it.num_running), str(it.before), str(it.after), _moving(it))
        parts.append(table)
        parts += [Text(line) for line in _notes(plan)]
    parts += [Text(f"{pool} is released: the autoscaler may move it again") for pool in plan.released]
    return Group(*parts)


def plan_json(plan: ScalePlan) -> dict[str, Any]:
    """For programs."""
    return {
        "pools": [
            {
                "name": it.pool,
                "before": it.before,
                "after": it.after,
                "num_running": it.num_running,
                "num_moving_least": it.least,
                "num_moving_most": it.most,
                "needed": plan.room.needed(it.pool, it.num_added) if plan.room else None,
            }
            for it in plan.changes
        ],
        "released": list(plan.released),
        "recalled": list(plan.recalled),
        "shortages": list(plan.shortages),
        "free": _free(plan.room) if plan.room else None,
    }


def check_decodes(counts: Mapping[str, int], status: pb.StatusResponse, orders: Mapping[str, int]) -> None:
    """`ConfigError` where pools with these counts, changed by `orders`, would have none that decodes."""
    if not any(count == 0 for count in orders.values()):
        return
    decoding = {pool.name for pool in status.pools if pool.role != "prefill"}
    if not any(orders.get(pool, counts[pool]) for pool in decoding & counts.keys()):
        raise ConfigError("no pool that decodes would have a replica: keep one in at least one of them")


def _change(pool: str, after: int, targets: AppTargets, status: pb.StatusResponse | None) -> PoolChange:
    seen = targets.pools[pool]
    least = most = None
    role = ""
    if status is not None:
        role = next((it.role for it in status.pools if it.name == pool), "")
        loads = sorted(
            replica.load.num_running + replica.load.num_waiting
            for replica in status.replicas
            if replica.pool == pool and replica.state == "ready"
        )
        num_leaving = max(0, len(loads) - after)
        least, most = sum(loads[:num_leaving]), sum(loads[len(loads) - num_leaving :])
    return PoolChange(pool, role, seen.target, after, seen.num_running, least, most)


def _lent(status: pb.StatusResponse) -> tuple[str, ...]:
    return tuple(
        replica.replica_id
        for replica in status.replicas
        if replica.home_role and replica.home_role != replica.role
    )


def _moving(change: PoolChange) -> str:
    if change.least is None or change.after >= change.num_running:
        return NONE
    return str(change.most) if change.least == change.most else f"{change.least} to {change.most}"


def _notes(plan: ScalePlan) -> list[str]:
    lines = []
    for it in plan.changes:
        if it.is_pin and plan.consoles:
            lines.append(f"{it.pool} has this target already, and is pinned to it")
        elif it.is_pin:
            lines.append(
                f"{it.pool} has this target already: without a gateway's console it cannot be pinned"
            )
        elif it.after < it.before:
            fate = "finish there or start elsewhere" if it.role == "prefill" else "move to other replicas"
            lines.append(f"{it.pool}: requests of the replicas that leave {fate}")
    lines += [f"{replica} plays another role and is recalled first" for replica in plan.recalled]
    if not plan.has_status:
        lines.append("no gateway answers: what runs on the replicas is not known")
    if any(it.num_added for it in plan.changes):
        lines += _room_lines(plan)
    return lines


def _room_lines(plan: ScalePlan) -> list[str]:
    if plan.room is None:
        return ["what the Ray cluster has free is not known"]
    needed: dict[str, float] = {}
    for it in plan.changes:
        for name, amount in plan.room.needed(it.pool, it.num_added).items():
            needed[name] = needed.get(name, 0.0) + amount
    lines = [
        f"{name}: {_number(amount)} needed, {_number(plan.room.total_free(name))} free"
        for name, amount in sorted(needed.items())
    ]
    lines += [
        f"{it.pool} has no replica now, so what one takes is not known"
        for it in plan.changes
        if it.num_added and it.pool not in plan.room.bundles
    ]
    return lines + [f"does not fit now: {line}" for line in plan.shortages]


def _free(room: Room) -> dict[str, float]:
    return {name: room.total_free(name) for name in sorted({name for node in room.total for name in node})}


def _number(amount: float) -> str:
    return f"{amount:.4f}".rstrip("0").rstrip(".")
