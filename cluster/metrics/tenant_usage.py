"""Count the use of each tenant: tokens, KV held over time, device time; and how its requests were served. Few
tenants have series of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

# The tenant label of all that have no series of their own.
OTHERS = "other"
# Tenants that are watched for more use, in units of the limit.
_NUM_CANDIDATES = 4
# Names that ever get a series in a gateway's life, in units of the limit.
_MOST_NAMES = 5
# A tenant takes another's place when it has used this many times as much.
_MARGIN = 2.0


class PoolTime(NamedTuple):
    """Time of a pool's devices, in seconds, summed over the devices."""

    pool: str = ""
    device_s: float = 0.0


@dataclass(slots=True)
class ClassOutcomes:
    """How requests of one class ended: "good" (finished within their objectives), "late" (finished),
    "failed", "cancelled" or "refused"."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_output_tokens: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class TenantUse:
    """The use of one tenant since it has a series; all fields only grow."""

    num_requests: int = 0
    # Refused requests by the limit that was used up.
    num_over_quota: Counter[str] = field(default_factory=Counter)
    # Counts of accepted requests, whatever became of them.
    num_prompt_tokens: int = 0
    # Prompt tokens that were computed.
    num_computed_tokens: int = 0
    # Prompt tokens whose KV was there.
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    # Bytes of KV that its requests held, times seconds.
    kv_byte_s: float = 0.0
    # The time of devices that its requests took, by pool.
    device_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    class_to_outcomes: defaultdict[str, ClassOutcomes] = field(
        default_factory=lambda: defaultdict(ClassOutcomes)
    )

    def took(self, time: PoolTime) -> None:
        """Add device time, if any is known."""
        if time.device_s:
            self.device_s[time.pool] += time.device_s

    @property
    def num_tokens(self) -> int:
        return self.num_computed_tokens + self.num_cached_tokens + self.num_output_tokens


class TenantUsageTable:
    """The use of each tenant, for at most `limit` of them at once by name; the others together.

        unknown --first use, below the limit--> named <-- twice the least named one's tokens, name allowed
           |                                      |                                            |
           +---at the limit---> candidate         +--(another takes its place)--> forgotten    candidate

    Every series only grows: what a tenant used while it had none stays with the others, and one that gets
    its series back continues from its old total.
    """

    def __init__(self, limit: int = 20) -> None:
        assert limit > 0
        self._limit = limit
        self._named: dict[str, TenantUse] = {}
        self._others = TenantUse()
        # Tokens since the tenant is watched.
        self._candidates: dict[str, int] = {}
        # All tenants that ever had a series.
        self._ever: dict[str, TenantUse] = {}

    def use(self, tenant: str) -> TenantUse:
        """Return the counts to which the tenant's use is added; call it again for each use."""
        name = tenant or "default"
        if name == OTHERS:
            return self._others
        found = self._named.get(name)
        if found is None and len(self._named) < self._limit and len(self._ever) < self._limit:
            found = self._name(name)
        return self._others if found is None else found

    def used(self, tenant: str, num_tokens: int) -> None:
        """Add the use of one of its requests: a tenant among the others may now earn a series."""
        name = tenant or "default"
        if name in self._named or name == OTHERS:
            return
        so_far = self._candidates.pop(name, 0) + num_tokens
        if len(self._candidates) >= _NUM_CANDIDATES * self._limit:
            least = min(self._candidates, key=self._candidates.__getitem__)
            so_far += self._candidates.pop(least)  # it may have been the one that was dropped before
        self._candidates[name] = so_far
        smallest = min(self._named, key=lambda each: self._named[each].num_tokens)
        is_allowed = name in self._ever or len(self._ever) < _MOST_NAMES * self._limit
        if is_allowed and so_far > _MARGIN * self._named[smallest].num_tokens:
            del self._named[smallest], self._candidates[name]
            self._name(name)

    def series(self) -> dict[str, TenantUse]:
        """Return the use of tenants by label value."""
        return {**self._named, OTHERS: self._others}

    def _name(self, name: str) -> TenantUse:
        use = self._named[name] = self._ever.setdefault(name, TenantUse())
        return use
