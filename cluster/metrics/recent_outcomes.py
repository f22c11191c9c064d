"""How the latest requests of each tenant and class were served, for status and console."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from cluster.metrics.tenant_usage import OTHERS
from kvtransfer.codec import Part

# Requests that are remembered, and for how long.
MAX_REQUESTS = 4096
MAX_AGE_S = 600.0
# Tenants that are shown by name.
NUM_TENANTS = 20


class OutcomeStats(Part, frozen=True):
    """The latest requests of a tenant and class by outcome, as in `tenant_usage.ClassOutcomes`."""

    # "other": the tenants that have no place of their own here.
    tenant: str
    service_class: str
    num_requests: dict[str, int]


class _Outcome(NamedTuple):
    at: float
    tenant: str
    service_class: str
    outcome: str


class RecentOutcomes:
    """The outcomes of the last ten minutes, of the latest `MAX_REQUESTS`. Time is an argument."""

    def __init__(self) -> None:
        self._outcomes: deque[_Outcome] = deque(maxlen=MAX_REQUESTS)

    def add(self, tenant: str, service_class: str, outcome: str, now: float) -> None:
        """Note how a request was served."""
        self._outcomes.append(_Outcome(now, tenant or "default", service_class, outcome))

    def stats(self, now: float) -> tuple[OutcomeStats, ...]:
        """Return the counts of the tenants with most requests, then those of the others together."""
        while self._outcomes and self._outcomes[0].at < now - MAX_AGE_S:
            self._outcomes.popleft()
        most = Counter(each.tenant for each in self._outcomes if each.tenant != OTHERS)
        named = {tenant for tenant, _ in most.most_common(NUM_TENANTS)}
        flows: dict[tuple[str, str], Counter[str]] = {}
        for each in self._outcomes:
            tenant = each.tenant if each.tenant in named else OTHERS
            flows.setdefault((tenant, each.service_class), Counter())[each.outcome] += 1
        return tuple(
            OutcomeStats(tenant, service_class, dict(counts))
            for (tenant, service_class), counts in sorted(flows.items())
        )
