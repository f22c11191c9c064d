"""Which replicas play the other role: idle ones, where that role is short, until home needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.scaling.forecast_replicas import Need
from cluster.scaling.policy_input import Kind, Lend, Recall, View
from cluster.scaling.rates import DECODE, PREFILL
from cluster.scaling.samples import PoolView

_OTHER = {PREFILL: DECODE, DECODE: PREFILL}


def role_changes(
    view: View, needs: Mapping[str, Need], lasting: Mapping[str, Need]
) -> tuple[Lend | Recall, ...]:
    """Recalls first. At most one replica is lent at a time in each direction, and seen at work for
    `lend_after_s` before the next."""
    changes: list[Lend | Recall] = []
    for home, other in _OTHER.items():
        if home in view.kinds and other in view.kinds:
            changes += _recalls(view, view.kinds[home], view.kinds[other], needs, lasting)
    if not view.config.lend_roles:
        return tuple(changes)
    recalled = {change.pool for change in changes}
    for home, other in _OTHER.items():
        if home in view.kinds and other in view.kinds:
            lender = view.kinds[home]
            if not recalled & {pool.name for kind in (lender, view.kinds[other]) for pool in kind.pools}:
                changes += _lends(view, lender, view.kinds[other], lasting)
    return tuple(changes)


# ------------------------------------------------------------------------------------------------ recall


def _recalls(
    view: View, home: Kind, other: Kind, needs: Mapping[str, Need], lasting: Mapping[str, Need]
) -> Iterator[Recall]:
    """Those whom home needs now, the latest lent first; else one that the other role can do without."""
    num_missing = _num_missing(view, home, needs)
    why_home = _why_home(view, home, needs)
    lent = sorted(
        ((since, replica_id, pool) for pool in home.pools for replica_id, since in pool.lent), reverse=True
    )
    has_returned = False
    for since, replica_id, pool in lent:
        reason = ""
        if not view.config.lend_roles:
            reason = "lending is switched off"
        elif pool.is_pinned:
            reason = "an operator chose the pool's count"
        elif num_missing > 0:
            reason = why_home
            num_missing -= 1
        elif not has_returned and (reason := _why_spare(view, other, lasting, replica_id, since)):
            has_returned = True
        if reason:
            yield Recall(replica_id, pool.name, reason)


def _num_missing(view: View, home: Kind, needs: Mapping[str, Need]) -> int:
    pressure = view.pressures.get(home.name)
    wanted = max(needs[home.name].num_replicas or 0, pressure.num_replicas if pressure else 0)
    return max(wanted - home.num_effective, 1 if pressure else 0)


def _why_home(view: View, home: Kind, needs: Mapping[str, Need]) -> str:
    pressure = view.pressures.get(home.name)
    return f"{home.name} needs it: {pressure.reason if pressure else needs[home.name].reason}"


def _why_spare(view: View, other: Kind, lasting: Mapping[str, Need], replica_id: str, since: float) -> str:
    """Why the other role can do without it; "": it cannot, or has had it for too short to tell."""
    for_s = view.config.lend_after_s
    if since > view.now - for_s or other.name in view.pressures:
        return ""
    if _is_idle(view, replica_id, other.name):
        return f"idle for {for_s:g} s as {other.name}"
    is_enough = (lasting[other.name].num_replicas or 1) < other.num_effective
    if is_enough and view.can_spare(other.name, for_s):
        return f"{other.name} had room for one replica less for {for_s:g} s"
    return ""


# -------------------------------------------------------------------------------------------------- lend


def _lends(view: View, home: Kind, other: Kind, lasting: Mapping[str, Need]) -> Iterator[Lend]:
    pressure = view.pressures.get(other.name)
    for_s = view.config.lend_after_s
    if pressure is None or home.name in view.pressures:
        return
    if any(since > view.now - for_s for pool in home.pools for _, since in pool.lent):
        return
    num_kept = max(1, lasting[home.name].num_replicas or 1)
    num_here = view.side(home.name, view.latest).num_replicas
    if min(num_here, home.num_effective) <= num_kept or not view.was_short(other.name, for_s):
        return
    for pool in home.pools:
        for replica_id in _idle_at_home(view, pool):
            reason = f"idle for {for_s:g} s, while {other.name} is short: {pressure.reason}"
            yield Lend(replica_id, pool.name, other.name, reason)
            return


def _idle_at_home(view: View, pool: PoolView) -> list[str]:
    """In the order of their ids."""
    lent = {replica_id for replica_id, _ in pool.lent}
    if pool.is_pinned:
        return []
    own = [each.replica_id for each in view.latest.replicas if each.pool == pool.name]
    return [each for each in sorted(own) if each not in lent and _is_idle(view, each, pool.role)]


def _is_idle(view: View, replica_id: str, role: str) -> bool:
    """Whether it was seen all the time since `lend_after_s`, in this role and without work."""
    for_s = view.config.lend_after_s
    samples = view.history.since(view.now - for_s)
    seen = [each for sample in samples for each in sample.replicas if each.replica_id == replica_id]
    return (
        view.history.covered_s >= for_s
        and len(seen) == len(samples) > 0
        and all(each.is_idle and each.role == role for each in seen)
    )
