"""The decisions of the scaling policy."""

from __future__ import annotations

from typing import NamedTuple


class PoolMove(NamedTuple):
    """Another desired count."""

    pool: str
    before: int
    after: int
    reason: str


class RoleAssignment(NamedTuple):
    """This replica shall play `role`, which is not its pool's."""

    replica_id: str
    pool: str
    role: str
    reason: str


class RoleReturn(NamedTuple):
    """This replica shall play its pool's role again."""

    replica_id: str
    pool: str
    reason: str


class ScalingPlan(NamedTuple):
    """The actions for now: role changes first, then the moves. `notes` give the reasons that prevent more."""

    moves: tuple[PoolMove, ...] = ()
    role_changes: tuple[RoleAssignment | RoleReturn, ...] = ()
    notes: tuple[str, ...] = ()
