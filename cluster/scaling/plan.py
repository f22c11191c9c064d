"""What the policy decides."""

from __future__ import annotations

from typing import NamedTuple


class PoolMove(NamedTuple):
    """Another desired count."""

    pool: str
    before: int
    after: int
    reason: str


class Lend(NamedTuple):
    """This replica shall play `role`, which is not its pool's."""

    replica_id: str
    pool: str
    role: str
    reason: str


class Recall(NamedTuple):
    """This replica shall play its pool's role again."""

    replica_id: str
    pool: str
    reason: str


class Plan(NamedTuple):
    """What to do now: recalls and lends first, then the moves. `notes` tell what stands in the way."""

    moves: tuple[PoolMove, ...] = ()
    lends: tuple[Lend | Recall, ...] = ()
    notes: tuple[str, ...] = ()
