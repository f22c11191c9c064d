"""How fast callers of a tenant that has used up a limit are refused: one that calls again at once, on any
number of connections, costs the gateway no more than one that waits as it was told.

Without I/O: times are arguments.
"""

from __future__ import annotations

from kvtransfer.common.recent_map import RecentMap

# Refusals of one tenant: this number at once, and then one in each period.
BURST = 16
PERIOD_S = 0.05
# No refusal waits for longer, however many do.
MAX_DELAY_S = 2.0
_MAX_TENANTS = 1024


class RefusalPace:
    """The times at which refusals of a tenant may be answered."""

    def __init__(self) -> None:
        # When the next refusal would be due if they came evenly.
        self._tenant_to_due: RecentMap[str, float] = RecentMap(_MAX_TENANTS)

    def delay_s(self, tenant: str, now: float) -> float:
        """Count a refusal, and return how long it has to wait."""
        due_at = max(self._tenant_to_due.pop(tenant, 0.0), now - BURST * PERIOD_S)
        self._tenant_to_due.put(tenant, min(due_at + PERIOD_S, now + MAX_DELAY_S))
        return max(0.0, due_at - now)
