"""What each sharing group may take of a memory while others want it, and what each one takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvtransfer.codec import Part

# The amount by which a product may exceed a whole number.
_ROUNDING = 1e-9


class GroupShares(Part, frozen=True):
    """The shares of a memory, above 0 and at most 1 (no limit): by group, and that of all other groups."""

    default: float = 1.0
    by_group: dict[str, float] = {}

    @property
    def is_limited(self) -> bool:
        """Whether any group has a limit."""
        return min(self.default, *self.by_group.values(), 1.0) < 1

    def of(self, group: str) -> float:
        """Return the share of a group."""
        return self.by_group.get(group, self.default)

    def most_of(self, group: str, num_slots: int) -> int:
        """Return how many of `num_slots` slots a group may take: its share, rounded up."""
        return max(1, math.ceil(num_slots * self.of(group) - _ROUNDING))


class ShareClaim(NamedTuple):
    """A group's claim to blocks of its share, with the time since which it waits."""

    since: float
    num_blocks: int


# The two that wait for blocks of a device: each defers to an older claim of the other.
Claimant = Literal["sequences", "landings"]


class GroupUsage:
    """The use of one memory by each group, in blocks or bytes, and the groups that exceed their share."""

    def __init__(self, shares: GroupShares, capacity: int = 0) -> None:
        self.is_limited = shares.is_limited
        self.taken: dict[str, int] = {}
        self._shares = shares
        self._capacity = capacity
        self._over: set[str] = set()

    def set_capacity(self, capacity: int) -> None:
        """Set the size of the memory, of which nothing is taken yet."""
        assert not self.taken
        self._capacity = capacity

    def has_limit(self, group: str) -> bool:
        """Whether the group may not take all of it."""
        return self._shares.of(group) < 1

    def limit(self, group: str) -> int:
        """Return the most that a group may take while others want it."""
        return int(self._capacity * self._shares.of(group))

    def take(self, group: str, amount: int) -> None:
        """Add to the use of a group (subtract, when negative)."""
        now = self.taken.get(group, 0) + amount
        assert now >= 0
        if now:
            self.taken[group] = now
        else:
            self.taken.pop(group, None)
        if not self.is_limited:
            return
        if now > self.limit(group):
            self._over.add(group)
        else:
            self._over.discard(group)

    def would_exceed(self, group: str, amount: int) -> bool:
        """Whether so much more would exceed the group's share."""
        return self.is_limited and self.taken.get(group, 0) + amount > self.limit(group)

    def exceeds(self, group: str) -> bool:
        """Whether the group takes more than its share."""
        return group in self._over

    def greediest(self) -> Iterator[str]:
        """Yield the groups that exceed their share, by how much, the most first."""
        yield from sorted(self._over, key=lambda group: (self.limit(group) - self.taken[group], group))
