"""Which transports to which peer ranks may be tried: an error budget and a doubling cool-down (sans-I/O).

fresh --failure--> counting --failures = budget--> cooling down --time--> due --failure--> cooling down,
  ^                   |                                                    |              twice as long
  +----- success -----+------------------------- success ------------------+
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.common.health import Backoff
from kvtransfer.messages import ReplicaIdentity


class PathKey(NamedTuple):
    """Names a path to a rank of one registration of a peer; a restarted peer starts afresh."""

    peer: ReplicaIdentity
    rank: int
    transport: str


@dataclass
class _Record:
    backoff: Backoff
    num_failures: int = 0
    # The end of the last cool-down.
    ends_at: float = 0.0
    reason: str = ""
    last_at: float = 0.0


class PathHealth:
    """Counts the failures of all paths of one rank since their last success. Any thread may call it."""

    def __init__(self, error_budget: int, cool_down_s: float, max_cool_down_s: float) -> None:
        self._error_budget = error_budget
        self._cool_down_s = cool_down_s
        self._max_cool_down_s = max_cool_down_s
        self._lock = threading.Lock()
        self._records: dict[PathKey, _Record] = {}

    def failed(self, key: PathKey, reason: str, now: float) -> None:
        """Note that the path could not be opened, or broke. From the last failure of the budget on, each
        failure starts a cool-down twice as long as the one before."""
        with self._lock:
            self._forget_old(now)
            record = self._records.setdefault(key, _Record(Backoff(self._cool_down_s, self._max_cool_down_s)))
            record.num_failures += 1
            record.reason = reason
            record.last_at = now
            if record.num_failures >= self._error_budget:
                record.ends_at = now + record.backoff.failed()

    def succeeded(self, key: PathKey) -> None:
        """Note that a push went through: the budget is whole again, and the next cool-down short."""
        with self._lock:
            self._records.pop(key, None)

    def cooling_s(self, key: PathKey, now: float) -> float:
        """Return the seconds for which the path must not be tried yet; 0.0: it may be."""
        with self._lock:
            record = self._records.get(key)
            return 0.0 if record is None else max(0.0, record.ends_at - now)

    def reason(self, key: PathKey) -> str:
        """Return why the path failed last; "" when it has not failed since its last success."""
        with self._lock:
            record = self._records.get(key)
            return "" if record is None else record.reason

    def is_due(self, key: PathKey, now: float) -> bool:
        """Whether the path has failed and may be tried again."""
        return bool(self.reason(key)) and self.cooling_s(key, now) == 0

    def _forget_old(self, now: float) -> None:
        """Forget paths that have not been tried for four of the longest cool-downs, since peers come and
        go."""
        limit = now - 4 * self._max_cool_down_s
        for key in [key for key, record in self._records.items() if record.last_at < limit]:
            del self._records[key]
