"""Plan what `tandem scale` changes, from the reports of Serve and of a gateway. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.terminal import NONE, made_table
from cluster.errors import ConfigError
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.scaling.resource_demand import add_up, amount_text


class AffectedPool(NamedTuple):
    """Represents one order. `least` and `most` bound the running requests of the replicas that leave, because
    Ray Serve chooses which do; None: not known."""

    change: admin_pb.PoolChange
    role: str
    least: int | None
    most: int | None

    @property
    def num_added(self) -> int:
        return max(0, self.change.after - self.change.before)

    @property
    def is_pin(self) -> bool:
        """Whether Serve has this target already, so that only the roster can keep it."""
        return bool(self.change.before == self.change.after)


class ScalePlan(NamedTuple):
    """Represents all changes of one command."""

    pools: tuple[AffectedPool, ...]
    released: tuple[str, ...]
    # Replicas that play another pool's role and return to their own first.
    recalled: tuple[str, ...]
    reply: admin_pb.ScaleResponse
    has_status: bool


def parse_orders(texts: Sequence[str]) -> dict[str, int]:
    """Parse `decode=3 prefill=2`; `ConfigError` names the text that has another form."""
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
    reply: admin_pb.ScaleResponse, status: admin_pb.StatusResponse | None, released: Sequence[str]
) -> ScalePlan:
    """Put together what changes; `status` None: what runs on the replicas is not known."""
    pools = tuple(_affected_pool(change, status) for change in reply.pools)
    has_change = any(not pool.is_pin for pool in pools)
    return ScalePlan(
        pools=pools,
        released=tuple(released),
        recalled=tuple(
            replica.replica_id
            for replica in (status.replicas if status is not None and has_change else ())
            if replica.home_role not in (admin_pb.REPLICA_ROLE_UNSPECIFIED, replica.role)
        ),
        reply=reply,
        has_status=status is not None,
    )


def plan_view(plan: ScalePlan) -> Group:
    """Render the plan as tables and lines."""
    parts: list[RenderableType] = []
    if plan.pools:
        table = made_table("replicas", "pool", numbers=("running", "target", "wanted", "affected\nrequests"))
        for it in plan.pools:
            change = it.change
            table.add_row(
                change.name, str(change.num_running), str(change.before), str(change.after), _affected(it)
            )
        parts.append(table)
        parts += [Text(line) for line in _notes(plan)]
    parts += [Text(f"{pool} is released: the autoscaler may move it again") for pool in plan.released]
    return Group(*parts)


def plan_json(plan: ScalePlan) -> dict[str, Any]:
    """Return the plan as one JSON object."""
    return {
        "pools": [
            {
                "name": it.change.name,
                "before": it.change.before,
                "after": it.change.after,
                "num_running": it.change.num_running,
                "num_moving_least": it.least,
                "num_moving_most": it.most,
                "needed": dict(it.change.needed) if plan.reply.free_known else None,
            }
            for it in plan.pools
        ],
        "released": list(plan.released),
        "recalled": list(plan.recalled),
        "shortages": list(plan.reply.shortages),
        "free": dict(plan.reply.free) if plan.reply.free_known else None,
    }


def _affected_pool(change: admin_pb.PoolChange, status: admin_pb.StatusResponse | None) -> AffectedPool:
    if status is None:
        return AffectedPool(change, "", None, None)
    role = next((name_of(admin_pb.ReplicaRole, it.role) for it in status.pools if it.name == change.name), "")
    loads = sorted(
        replica.load.num_running + replica.load.num_waiting
        for replica in status.replicas
        if replica.pool == change.name and replica.state == admin_pb.REPLICA_STATE_READY
    )
    num_leaving = max(0, len(loads) - change.after)
    return AffectedPool(change, role, sum(loads[:num_leaving]), sum(loads[len(loads) - num_leaving :]))


def _affected(pool: AffectedPool) -> str:
    if pool.least is None or pool.change.after >= pool.change.num_running:
        return NONE
    return str(pool.most) if pool.least == pool.most else f"{pool.least} to {pool.most}"


def _notes(plan: ScalePlan) -> list[str]:
    lines = []
    for it in plan.pools:
        name = it.change.name
        if it.is_pin and plan.has_status:
            lines.append(f"{name} has this target already, and is pinned to it")
        elif it.is_pin:
            lines.append(f"{name} has this target already: only a gateway could pin it")
        elif it.change.after < it.change.before:
            fate = (
                "finish there or start at another replica"
                if it.role == "prefill"
                else "move to other replicas"
            )
            lines.append(f"{name}: requests of the replicas that leave {fate}")
    lines += [f"{replica} plays another role and is recalled first" for replica in plan.recalled]
    if not plan.has_status:
        lines.append("what runs on the replicas is not known without a gateway")
    if any(it.num_added for it in plan.pools):
        lines += _headroom_lines(plan)
    return lines


def _headroom_lines(plan: ScalePlan) -> list[str]:
    if not plan.reply.free_known:
        return ["what the Ray cluster has free is not known"]
    needed = add_up(it.change.needed for it in plan.pools)
    lines = [
        f"{name}: {amount_text(amount)} needed, {amount_text(plan.reply.free.get(name, 0.0))} free"
        for name, amount in sorted(needed.items())
    ]
    lines += [
        f"{pool} has no replica now, so what one takes is not known" for pool in plan.reply.unsized_pools
    ]
    return lines + [f"does not fit now: {line}" for line in plan.reply.shortages]
