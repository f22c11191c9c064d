"""Report to engine cores in which tier of the node the blocks of their replica lie: in parts, and changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from kvtransfer.common.sliced_map import SlicedMap
from kvtransfer.kv_events import BlocksStored
from kvtransfer.messages import Shard
from kvtransfer.store.dram.record_table import NUM_SLICES, Held
from kvtransfer.store.messages.engine_session import TierEvents, TierPart
from kvtransfer.store.server.shard_cover import cover

LocalTier = Literal["dram", "nvme"]
_LOCAL_TIERS: tuple[LocalTier, ...] = ("dram", "nvme")
# Blocks in one message of changes, and the least in a part where there are more.
_EVENTS_BLOCKS = 4096
PART_BLOCKS = 256
# Of the map of the blocks that were sent.
_NUM_SENT_SLICES = 251


class BlockLocation(NamedTuple):
    """The tier and the parent of a block, as sent to engine cores."""

    tier: LocalTier
    parent: bytes


class TierChanges:
    """What replicas of one shape are sent of one space: a tier holds a block when it covers all their shards.

    Each engine core asks for the parts, which are slices of the catalog as they are then. Whether a change
    is sent depends on what all of them know: `_sent` has the blocks that were in a part or in an event.
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        lookup: Callable[[bytes], Mapping[Shard, Held]],
        slice_of: Callable[[int], Iterable[bytes]],
    ) -> None:
        """`lookup(key)` returns the records of a block, and `slice_of(index)` the blocks in one of the
        `NUM_SLICES` slices of the catalog."""
        self._shards = frozenset(shards)
        self._lookup = lookup
        self._slice_of = slice_of
        self._sent: SlicedMap[bytes, LocalTier] = SlicedMap(_NUM_SENT_SLICES)
        # The slices before this one were in a part.
        self._num_sent_slices = 0
        # The blocks that may have changed, with the reason of a removal.
        self._changed: dict[bytes, str] = {}
        # Those of them whose change somebody knows from a part: if it is undone before `take`, that is news.
        self._sent_ahead: set[bytes] = set()

    def changed(self, key: bytes, reason: str = "") -> None:
        """Note that a record of this block was added, moved or, for this reason, removed."""
        if reason or key not in self._changed:
            self._changed[key] = reason

    def take(self) -> list[TierEvents]:
        """Return the changes since the last call; [] when there are none."""
        stored: dict[bytes, BlockLocation] = {}
        removed: dict[bytes, str] = {}
        for key, reason in self._changed.items():
            now, sent, is_ahead = self._find(key), self._sent.get(key), key in self._sent_ahead
            if now is None:
                if sent is not None or is_ahead:
                    removed[key] = reason
                    self._sent.pop(key)
            elif now.tier != sent or is_ahead:
                stored[key] = now
                self._sent[key] = now.tier
        self._changed.clear()
        self._sent_ahead.clear()
        return _messages(stored, removed)

    def part(self, number: int) -> TierPart:
        """Return what some slices hold, from this one on."""
        first = number = min(max(number, 0), NUM_SLICES)
        stored: list[BlocksStored] = []
        while number < NUM_SLICES and len(stored) < PART_BLOCKS:
            for key in self._slice_of(number):
                now, sent = self._find(key), self._sent.get(key)
                if now is None:
                    continue
                stored.append(BlocksStored(now.parent, (key,), now.tier))
                # A slice that was in a part before is known to others, who are sent its changes by `take`.
                if sent is None and number >= self._num_sent_slices:
                    self._sent[key] = now.tier
                elif sent != now.tier:
                    self._sent_ahead.add(key)
            number += 1
            self._num_sent_slices = max(self._num_sent_slices, number)
        return TierPart(tuple(stored), first, number % NUM_SLICES)

    def whole(self) -> TierEvents:
        """Return all blocks in one message, for an engine core that takes no parts."""
        stored: list[BlocksStored] = []
        number = 0
        while True:
            part = self.part(number)
            stored += part.stored
            if not (number := part.next_part):
                return TierEvents(tuple(stored), ())

    def _find(self, key: bytes) -> BlockLocation | None:
        held = self._lookup(key)
        if not held:
            return None
        tier = tier_of(self._shards, held)
        return None if tier is None else BlockLocation(tier, next(iter(held.values())).info.parent)


def tier_of(shards: Iterable[Shard], held: Mapping[Shard, Held]) -> LocalTier | None:
    """Return the cheapest tier that holds each of the shards; None when one is not held."""
    needed = frozenset(shards)
    if held.keys() == needed:  # the records of replicas of one shape
        return "nvme" if any(each.offset is None for each in held.values()) else "dram"
    in_dram = [shard for shard, each in held.items() if each.offset is not None]
    slowest = 0
    for shard in needed:
        if cover(shard, in_dram) is None:
            slowest = 1
            if cover(shard, held) is None:
                return None
    return _LOCAL_TIERS[slowest]


def _messages(stored: Mapping[bytes, BlockLocation], removed: Mapping[bytes, str]) -> list[TierEvents]:
    messages: list[TierEvents] = []
    chains: list[BlocksStored] = []
    num_blocks = 0
    for chain in _chains(stored):
        chains.append(chain)
        num_blocks += len(chain.keys)
        if num_blocks >= _EVENTS_BLOCKS:
            messages.append(TierEvents(tuple(chains), ()))
            chains, num_blocks = [], 0
    if chains or removed:
        messages.append(TierEvents(tuple(chains), tuple(removed), tuple(removed.values())))
    return messages


def _chains(stored: Mapping[bytes, BlockLocation]) -> Iterable[BlocksStored]:
    """Join blocks to chains: each block follows its parent where both are in the same tier."""
    children: dict[bytes, list[bytes]] = {}
    starts: list[bytes] = []
    for key, sent in stored.items():
        before = stored.get(sent.parent)
        if before is not None and before.tier == sent.tier:
            children.setdefault(sent.parent, []).append(key)
        else:
            starts.append(key)
    while starts:
        first = starts.pop()
        keys = [first]
        while following := children.get(keys[-1]):
            keys.append(following[0])
            starts += following[1:]
        yield BlocksStored(stored[first].parent, tuple(keys), stored[first].tier)
