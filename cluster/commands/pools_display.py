"""The pools as `tandem status` shows them: what is wanted, what there is, and what changed lately."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cluster.commands.tables import NONE, made_table
from cluster.proto import tandem_pb2 as pb

_NUM_MOVES = 5


def pool_parts(status: pb.StatusResponse) -> list[RenderableType]:
    """A table of the pools, then the latest changes, oldest first."""
    if not status.pools:
        return []
    parts: list[RenderableType] = [_table(status.pools)]
    parts += [Text(move_line(move)) for move in status.moves[-_NUM_MOVES:]]
    return [*parts, Text("")] if status.moves else parts


def move_line(move: pb.ScalingMove) -> str:
    """`2026-01-31 12:00:00Z decode 1 -> 3 by operator: why`; a change of role has no counts."""
    at = datetime.fromtimestamp(move.at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    counts = f" {move.before} -> {move.after}" if move.before != move.after else ""
    return f"{at} {move.pool}{counts} by {move.by}: {move.reason}"


def _table(pools: Sequence[pb.Pool]) -> Table:
    numbers = "configured", "desired", "ready", "lent", "limits"
    table = made_table("pools", "pool", "role", "chosen by", numbers=numbers)
    for pool in pools:
        late = pool.num_ready != pool.desired
        table.add_row(
            pool.name,
            pool.role,
            _chosen_by(pool),
            str(pool.configured),
            str(pool.desired),
            f"[yellow]{pool.num_ready}[/]" if late else str(pool.num_ready),
            str(pool.num_lent) if pool.num_lent else NONE,
            f"{pool.min}-{pool.max}" if pool.max else NONE,
        )
    return table


def _chosen_by(pool: pb.Pool) -> str:
    if pool.pinned:
        return "operator (pinned)"
    return "autoscaler" if pool.max else "configuration" if pool.desired == pool.configured else "nobody now"
