"""Tell engine cores in which tier of the node the blocks of their replica lie, by differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from kvtransfer.kv_events import BlocksStored
from kvtransfer.messages import Shard
from kvtransfer.store.dram.record_table import Held
from kvtransfer.store.messages.engine_session import TierEvents
from kvtransfer.store.server.shard_cover import cover

LocalTier = Literal["dram", "nvme"]
_LOCAL_TIERS: tuple[LocalTier, ...] = ("dram", "nvme")
# Blocks in one message.
_EVENTS_BLOCKS = 4096


class BlockLocation(NamedTuple):
    """The tier and the parent of a block, as sent to engine cores."""

    tier: LocalTier
    parent: bytes


class TierChanges:
    """Changes of one space for replicas of one shape: a tier holds a block when it covers all their
    shards."""

    def __init__(
        self, shards: Iterable[Shard], lookup: Callable[[bytes], Mapping[Shard, Held]], keys: Iterable[bytes]
    ) -> None:
        """`lookup(key)` returns the records of a block; `keys` are the blocks of now."""
        self._shards = frozenset(shards)
        self._lookup = lookup
        self._sent: dict[bytes, BlockLocation] = {}
        self._changed: dict[bytes, None] = dict.fromkeys(keys)
        self.take()

    def changed(self, key: bytes) -> None:
        """Note that a record of this block was added, removed or moved."""
        self._changed[key] = None

    def take(self) -> list[TierEvents]:
        """Return the changes since the last call; [] when there are none."""
        stored: dict[bytes, BlockLocation] = {}
        removed: list[bytes] = []
        for key in self._changed:
            now = self._find(key)
            if now == self._sent.get(key):
                continue
            if now is None:
                removed.append(key)
                del self._sent[key]
            else:
                stored[key] = self._sent[key] = now
        self._changed.clear()
        return _messages(stored, removed)

    def snapshot(self) -> list[TierEvents]:
        """Return all blocks, as sent so far; at least one message."""
        return _messages(self._sent, []) or [TierEvents((), ())]

    def _find(self, key: bytes) -> BlockLocation | None:
        held = self._lookup(key)
        if not held:
            return None
        tier = tier_of(self._shards, held)
        return None if tier is None else BlockLocation(tier, next(iter(held.values())).info.parent)


def tier_of(shards: Iterable[Shard], held: Mapping[Shard, Held]) -> LocalTier | None:
    """Return the cheapest tier that holds each of the shards; None when one is not held."""
    in_dram = [shard for shard, each in held.items() if each.offset is not None]
    slowest = 0
    for shard in shards:
        if cover(shard, in_dram) is None:
            slowest = 1
            if cover(shard, held) is None:
                return None
    return _LOCAL_TIERS[slowest]


def _messages(stored: Mapping[bytes, BlockLocation], removed: list[bytes]) -> list[TierEvents]:
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
        messages.append(TierEvents(tuple(chains), tuple(removed)))
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
