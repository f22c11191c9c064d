"""Which lines of the audit log are written, of those that a caller can cause in any number."""

from __future__ import annotations

from collections import Counter

from kvtransfer.common.clock import Clock

# A caller who has shown no accepted credential.
NOBODY = "-"
# Lines of one tenant in a second, over all its identities and methods; of all strangers together.
MAX_TENANT_LINES_S = 20
# Lines of one identity and method in a minute.
MAX_LINES_MIN = 20
# Identities and methods that are counted in a minute; a line of any further one is left out.
_MAX_COUNTED = 4096
_WINDOW_S, _LONG_WINDOW_S = 1.0, 60.0


class AuditLimit:
    """Counts the lines of one kind, by tenant and second, and by identity, method and minute.

    Tenants do not use up each other's lines, and strangers nobody's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second = self._minute = -1
        self._by_tenant: Counter[str] = Counter()
        self._by_method: Counter[tuple[str, str]] = Counter()

    def takes(self, who: str, tenant: str, method: str) -> bool:
        """Count a line, and return whether it is written."""
        self._begin_windows()
        by_method = self._by_method
        if who != NOBODY:
            caller = who, method
            if caller not in by_method and len(by_method) >= _MAX_COUNTED:
                return False
            if by_method[caller] >= MAX_LINES_MIN:
                return False
        whose = tenant if who != NOBODY else NOBODY
        if self._by_tenant[whose] >= MAX_TENANT_LINES_S:
            return False
        self._by_tenant[whose] += 1
        if who != NOBODY:
            by_method[who, method] += 1
        return True

    def _begin_windows(self) -> None:
        now = self._clock.now()
        second, minute = int(now / _WINDOW_S), int(now / _LONG_WINDOW_S)
        if second != self._second:
            self._second = second
            self._by_tenant.clear()
        if minute != self._minute:
            self._minute = minute
            self._by_method.clear()
