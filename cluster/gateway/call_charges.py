"""Charge calls to their tenants' quotas, before anything of them is done, and pace the refusals of these."""

from __future__ import annotations

from cluster.admission import read_budget
from cluster.admission.quotas import Quotas
from cluster.admission.refusal_pace import RefusalPace
from cluster.errors import QuotaError
from cluster.metrics.gateway_counters import GatewayCounters
from kvtransfer.common.clock import Clock


class CallCharges:
    """The requests that calls take from their tenants."""

    def __init__(self, quotas: Quotas, counters: GatewayCounters, clock: Clock) -> None:
        self.quotas = quotas
        self._counters = counters
        self._clock = clock
        self._refusals = RefusalPace()

    async def charge(self, tenant: str, count: int = 1) -> None:
        """Take the requests of a call from its tenant's quota, before anything of it is done; raise
        `QuotaError` where the quota has fewer. Prompts are accepted with `is_charged` then. The request that
        was taken when the reading of the call began is one of them."""
        now = self._clock.now()
        if read_budget.use_paid():
            self.quotas.withdraw(tenant, 0, now)
        try:
            self.quotas.admit(tenant, now, count)
        except QuotaError as error:
            await self.refused(tenant, error)
            raise

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Give requests back that were taken before they were accepted: another application answers them, and
        charges for them, or this gateway has too much to do for them."""
        self.quotas.withdraw(tenant, 0, self._clock.now(), count)

    async def refused(self, tenant: str, error: QuotaError) -> None:
        """Count a refusal, and wait before the caller learns of it."""
        self._counters.over_quota(tenant, error.limit)
        await self.pace_refusal(tenant)

    async def pace_refusal(self, tenant: str) -> None:
        """Wait before a call is refused by its tenant's quota, if others were refused just before."""
        if delay_s := self._refusals.delay_s(tenant, self._clock.now()):
            await self._clock.sleep(delay_s)
