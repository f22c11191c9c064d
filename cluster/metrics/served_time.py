"""Record the recent part of the replicas' time that each tenant and class was given."""

from __future__ import annotations

import math
from collections import defaultdict

from cluster.metrics.admission_stats import FlowStats
from cluster.metrics.tenant_usage import OTHERS
from kvtransfer.common.moving_average import kept_share

# The age at which given time counts 1/e: a tenant that is given half of a replica has 30 s.
SERVED_S = 60.0
# Tenants that are shown by name.
NUM_TENANTS = 20
# Tenants that are counted by name: more than are shown, so that one whose use grows is noticed.
MOST_TENANTS = 200
# Before the common factor of new numbers becomes too large, all are brought up to date.
_RENEW_S = 20 * SERVED_S
# Smaller amounts are forgotten.
_LEAST_S = 1e-3


class ServedTime:
    """Seconds of the replicas' time that each tenant and class was given; older ones count less. At most
    `MOST_TENANTS` are counted by name, and the others together. Time is an argument."""

    def __init__(self) -> None:
        # Amounts as they were worth at `_counted_at`: later ones are worth more.
        self._tenants: dict[str, defaultdict[str, float]] = {}
        self._counted_at = 0.0
        self._given_at = -math.inf

    def __len__(self) -> int:
        """The number of tenants that are counted by name, and the others as one."""
        return len(self._tenants)

    def add(self, tenant: str, service_class: str, cost_s: float, now: float) -> None:
        """Count a request that goes to its replica."""
        if now - self._counted_at > _RENEW_S:
            self._renew(now)
        self._given_at = now
        name = tenant or "default"
        if name not in self._tenants and len(self._tenants) > MOST_TENANTS:
            self._tenants = _largest(self._tenants, MOST_TENANTS // 2)
        served = self._tenants.setdefault(name, defaultdict(float))
        served[service_class] += cost_s * kept_share(self._counted_at - now, SERVED_S)

    def stats(self, now: float) -> tuple[FlowStats, ...]:
        """Return the shares of the tenants that were given most, then those of the others together. Nothing,
        where nobody was given anything for `SERVED_S`: all fade alike, so that their shares would stay."""
        if now - self._given_at > SERVED_S:
            return ()
        kept = kept_share(now - self._counted_at, SERVED_S)
        return tuple(
            FlowStats(tenant, service_class, served_s * kept)
            for tenant, served in _largest(self._tenants, NUM_TENANTS).items()
            for service_class, served_s in served.items()
            if served_s * kept >= _LEAST_S
        )

    def _renew(self, now: float) -> None:
        kept = kept_share(now - self._counted_at, SERVED_S)
        self._counted_at = now
        renewed: dict[str, defaultdict[str, float]] = {}
        for tenant, served in self._tenants.items():
            if sum(served.values()) * kept >= _LEAST_S:
                renewed[tenant] = defaultdict(float, {name: value * kept for name, value in served.items()})
        self._tenants = renewed


def _largest(tenants: dict[str, defaultdict[str, float]], limit: int) -> dict[str, defaultdict[str, float]]:
    """Return the `limit` tenants that were given most, the first of all first, and the others as one."""
    names = sorted(
        (name for name in tenants if name != OTHERS), key=lambda name: -sum(tenants[name].values())
    )
    others: defaultdict[str, float] = defaultdict(float)
    for name in [*names[limit:], *({OTHERS} & tenants.keys())]:
        for service_class, served_s in tenants[name].items():
            others[service_class] += served_s
    largest = {name: tenants[name] for name in names[:limit]}
    return {**largest, OTHERS: others} if others else largest
