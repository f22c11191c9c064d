"""Which replicas play the other role, where that is short, until home needs them: idle ones, and others that
home could do without. A decode replica is hardly ever idle, since prompts that wait at prefill replicas have
their blocks there already; its streams move to the others. A prefill replica finishes its prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.scaling.forecast_replicas import ReplicaNeed
from cluster.scaling.policy_input import OTHER_ROLE, PolicyView, ReplicaKind
from cluster.scaling.samples import PoolView, ReplicaSample
from cluster.scaling.scaling_plan import RoleAssignment, RoleReturn


def role_changes(
    view: PolicyView, needs: Mapping[str, ReplicaNeed], lasting: Mapping[str, ReplicaNeed]
) -> tuple[RoleAssignment | RoleReturn, ...]:
    """Return the changes of roles, returns first. At most one replica at a time is assigned in each
    direction, and is seen at work for `role_change_after_s` before the next."""
    changes: list[RoleAssignment | RoleReturn] = []
    for home, other in OTHER_ROLE.items():
        if home in view.kinds and other in view.kinds:
            changes += _returns(view, view.kinds[home], view.kinds[other], needs, lasting)
    if not view.config.change_roles:
        return tuple(changes)
    returned = {change.pool for change in changes}
    for home, other in OTHER_ROLE.items():
        if home in view.kinds and other in view.kinds:
            source = view.kinds[home]
            if not returned & {pool.name for kind in (source, view.kinds[other]) for pool in kind.pools}:
                changes += _assignments(view, source, view.kinds[other], lasting)
    return tuple(changes)


def _returns(
    view: PolicyView,
    home: ReplicaKind,
    other: ReplicaKind,
    needs: Mapping[str, ReplicaNeed],
    lasting: Mapping[str, ReplicaNeed],
) -> Iterator[RoleReturn]:
    """Yield the returns of the replicas that home needs now, the latest assigned first; else of one that the
    other role can do without."""
    num_missing = _num_missing(view, home, needs)
    why_home = _why_home(view, home, needs)
    assigned = sorted(
        ((since, replica_id, pool) for pool in home.pools for replica_id, since in pool.assigned),
        reverse=True,
    )
    has_returned = False
    for since, replica_id, pool in assigned:
        reason = ""
        if not view.config.change_roles:
            reason = "role changes are switched off"
        elif pool.is_pinned:
            reason = "an operator chose the pool's count"
        elif num_missing > 0:
            reason = why_home
            num_missing -= 1
        elif not has_returned and (reason := _why_spare(view, other, lasting, replica_id, since)):
            has_returned = True
        if reason:
            yield RoleReturn(replica_id, pool.name, reason)


def _num_missing(view: PolicyView, home: ReplicaKind, needs: Mapping[str, ReplicaNeed]) -> int:
    shortage = view.shortages.get(home.name)
    wanted = max(needs[home.name].num_replicas or 0, shortage.num_replicas if shortage else 0)
    return max(wanted - home.num_effective, 1 if shortage else 0)


def _why_home(view: PolicyView, home: ReplicaKind, needs: Mapping[str, ReplicaNeed]) -> str:
    shortage = view.shortages.get(home.name)
    return f"{home.name} needs it: {shortage.reason if shortage else needs[home.name].reason}"


def _why_spare(
    view: PolicyView, other: ReplicaKind, lasting: Mapping[str, ReplicaNeed], replica_id: str, since: float
) -> str:
    """Return why the other role can do without the replica; "": it cannot, or has had the replica for too
    short a time to know."""
    for_s = view.config.role_change_after_s
    if since > view.now - for_s or other.name in view.shortages:
        return ""
    if _is_idle(view, replica_id, other.name):
        return f"idle for {for_s:g} s as {other.name}"
    is_enough = (lasting[other.name].num_replicas or 1) < other.num_effective
    if is_enough and view.can_spare(other.name, for_s):
        return f"{other.name} could do with one replica less for {for_s:g} s"
    return ""


def _assignments(
    view: PolicyView, home: ReplicaKind, other: ReplicaKind, lasting: Mapping[str, ReplicaNeed]
) -> Iterator[RoleAssignment]:
    shortage = view.shortages.get(other.name)
    for_s = view.config.role_change_after_s
    if shortage is None or home.name in view.shortages:
        return
    if any(since > view.now - for_s for pool in home.pools for _, since in pool.assigned):
        return
    num_kept = max(1, lasting[home.name].num_replicas or 1)
    num_here = view.side(home.name, view.latest).num_replicas
    if min(num_here, home.num_effective) <= num_kept or not view.was_short(other.name, for_s):
        return
    for pool in home.pools:
        for replica_id in _idle_at_home(view, pool):
            reason = f"idle for {for_s:g} s, while {other.name} is short: {shortage.reason}"
            yield RoleAssignment(replica_id, pool.name, other.name, reason)
            return
    if not view.can_spare(home.name, for_s):
        return
    for pool in home.pools:
        for replica in _least_busy_first(view, pool):
            spare = f"{home.name} could do with one replica less for {for_s:g} s"
            reason = f"{spare}, while {other.name} is short: {shortage.reason}"
            yield RoleAssignment(replica.replica_id, pool.name, other.name, reason)
            return


def _least_busy_first(view: PolicyView, pool: PoolView) -> list[ReplicaSample]:
    """Return the replicas of a pool in its own role, those with the fewest streams to move, or prompts left,
    first."""
    assigned = {replica_id for replica_id, _ in pool.assigned}
    own = [
        each
        for each in view.latest.replicas
        if each.pool == pool.name and each.role == pool.role and each.replica_id not in assigned
    ]
    own.sort(key=lambda each: (each.num_running, each.num_backlog_tokens, each.replica_id))
    return [] if pool.is_pinned else own


def _idle_at_home(view: PolicyView, pool: PoolView) -> list[str]:
    """Return the idle replicas of a pool in its own role, in the order of their ids."""
    assigned = {replica_id for replica_id, _ in pool.assigned}
    if pool.is_pinned:
        return []
    own = [each.replica_id for each in view.latest.replicas if each.pool == pool.name]
    return [each for each in sorted(own) if each not in assigned and _is_idle(view, each, pool.role)]


def _is_idle(view: PolicyView, replica_id: str, role: str) -> bool:
    """Whether it was seen all the time since `role_change_after_s`, in this role and without work."""
    for_s = view.config.role_change_after_s
    samples = view.history.since(view.now - for_s)
    seen = [each for sample in samples for each in sample.replicas if each.replica_id == replica_id]
    return (
        view.history.covered_s >= for_s
        and len(seen) == len(samples) > 0
        and all(each.is_idle and each.role == role for each in seen)
    )
