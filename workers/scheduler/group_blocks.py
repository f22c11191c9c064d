"""GroupBlocks: how many blocks each sharing group takes of a pool, and which of its cached blocks leaves
first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvtransfer.common.group_shares import Claimant, GroupShares, GroupUsage, ShareClaim

# The tick at which a block was released, and its id.
EvictableBlock = tuple[int, int]


class GroupBlocks:
    """The part of a `BlockPool` that exists only where a sharing group has a limit.

    A block has one owner from its allocation until it is free again. It is `in_use` while a request, a
    landing or a load references it, or while it is quarantined: of these a group never has more than its
    share. `held` are, besides those, its cached blocks and those that are only being copied into the store:
    above its share they are the first to be evicted.
    """

    def __init__(self, shares: GroupShares, num_blocks: int) -> None:
        self.in_use = GroupUsage(shares, num_blocks)
        self.held = GroupUsage(shares, num_blocks)
        self.num_cached: dict[str, int] = {}
        self.claims: dict[Claimant, Mapping[str, ShareClaim]] = {}
        self._owners = [""] * num_blocks
        self._num_copies: dict[int, int] = {}
        # A heap for each group, as `BlockPool` has one for all.
        self._group_to_evictable: dict[str, list[EvictableBlock]] = {}
        self._most_entries = 2 * num_blocks + 64

    def owner(self, block_id: int) -> str:
        """Return the group of a block that is not free."""
        return self._owners[block_id]

    def num_claimed(self, by: Claimant, group: str, since: float) -> int:
        """Return how many blocks `by` has claimed of the group's share since an earlier time."""
        claim = self.claims.get(by, {}).get(group)
        return claim.num_blocks if claim is not None and claim.since < since else 0

    # ---------------------------------------------------------------------------------- use of blocks

    def own(self, block_ids: Iterable[int], group: str) -> None:
        """Note that free blocks are allocated for a group."""
        for block_id in block_ids:
            self._owners[block_id] = group
            self.in_use.take(group, 1)
            self.held.take(group, 1)

    def free(self, block_id: int) -> None:
        """Note that a block, which nobody uses, is free."""
        self.held.take(self._owners[block_id], -1)

    def is_in_use(self, block_id: int, num_references: int) -> bool:
        """Whether more than copies into the store reference the block."""
        return num_references > self._num_copies.get(block_id, 0)

    def use(self, block_id: int) -> None:
        """Note that a block of its owner comes into use."""
        self.in_use.take(self._owners[block_id], 1)

    def disuse(self, block_id: int) -> None:
        """Note that nobody but copies uses the block any more."""
        self.in_use.take(self._owners[block_id], -1)

    def begin_copy(self, block_id: int, num_references: int) -> None:
        """Count one of the block's references as that of a copy into the store."""
        self._num_copies[block_id] = self._num_copies.get(block_id, 0) + 1
        if not self.is_in_use(block_id, num_references):
            self.disuse(block_id)

    def end_copy(self, block_id: int, num_references: int) -> None:
        """Count that reference as any other, before it is dropped."""
        if not self.is_in_use(block_id, num_references):
            self.use(block_id)
        self._num_copies[block_id] -= 1
        if not self._num_copies[block_id]:
            del self._num_copies[block_id]

    # --------------------------------------------------------------------------------------- eviction

    def cache(self, block_id: int) -> None:
        """Note that nobody references the block, and that it can be found."""
        group = self._owners[block_id]
        self.num_cached[group] = self.num_cached.get(group, 0) + 1

    def uncache(self, block_id: int) -> None:
        """Note that a cached block is referenced again, or leaves the index."""
        group = self._owners[block_id]
        self.num_cached[group] -= 1
        if not self.num_cached[group]:
            del self.num_cached[group]
            self._group_to_evictable.pop(group, None)

    def push(self, entry: EvictableBlock, is_evictable: Callable[[EvictableBlock], bool]) -> None:
        """Note that a cached block may be evicted. Entries for which `is_evictable` is false are stale."""
        heap = self._group_to_evictable.setdefault(self._owners[entry[1]], [])
        if len(heap) > self._most_entries:
            heap[:] = {it for it in heap if is_evictable(it)}
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def evictable(self, group: str) -> list[EvictableBlock]:
        """Return the heap of a group that has cached blocks."""
        return self._group_to_evictable.setdefault(group, [])

    def victim(self, group: str, num_blocks: int) -> str | None:
        """Return the group whose cached block is evicted where `group` allocates `num_blocks`: itself, where
        it then holds more than its share, else the one that exceeds its share most; None: anybody's."""
        if self.held.would_exceed(group, num_blocks) and group in self.num_cached:
            return group
        return next((it for it in self.held.greediest() if it in self.num_cached), None)

    # ------------------------------------------------------------------------------------------ check

    def check(self, num_references: Iterable[int], quarantined: set[int], free: set[int]) -> None:
        """Assert that the counts are right and that no group uses more than its share."""
        in_use: dict[str, int] = {}
        held: dict[str, int] = {}
        num_copies = 0
        for block_id, count in enumerate(num_references):
            if block_id in free:
                assert block_id not in self._num_copies
                continue
            group = self._owners[block_id]
            held[group] = held.get(group, 0) + 1
            num_copies += self._num_copies.get(block_id, 0)
            assert count >= self._num_copies.get(block_id, 0)
            if block_id in quarantined or self.is_in_use(block_id, count):
                in_use[group] = in_use.get(group, 0) + 1
        assert in_use == self.in_use.taken
        assert held == self.held.taken
        assert num_copies == sum(self._num_copies.values())
        for group, count in in_use.items():
            assert count <= self.in_use.limit(group), f"{group!r} uses {count} blocks, more than its share"

    def entries(self) -> Iterator[tuple[str, EvictableBlock]]:
        """Yield the entries of the heaps, stale ones included."""
        for group, heap in self._group_to_evictable.items():
            for entry in heap:
                yield group, entry
