"""In which tier of the node a replica's blocks lie, as told to its brain: by differences, sans-I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from kvtransfer.messages import BlocksStored, Shard
from kvtransfer.store.cover import cover
from kvtransfer.store.dram.books import Held
from kvtransfer.store.messages import TierEvents

LocalTier = Literal["dram", "nvme"]
_TIERS: tuple[LocalTier, ...] = ("dram", "nvme")
_EVENTS_BLOCKS = 4096
"""Blocks told in one message."""


class Told(NamedTuple):
    """What brains were told of a block."""

    tier: LocalTier
    parent: bytes


class TierView:
    """One space as seen by replicas of one shape: a block is in a tier when it covers all their shards."""

    def __init__(
        self, shards: Iterable[Shard], lookup: Callable[[bytes], Mapping[Shard, Held]], keys: Iterable[bytes]
    ) -> None:
        """`lookup(key)` are the records of a block; `keys` those there are now."""
        self._shards = frozenset(shards)
        self._lookup = lookup
        self._told: dict[bytes, Told] = {}
        self._changed: set[bytes] = set(keys)
        self.take()

    def changed(self, key: bytes) -> None:
        """A record of this block came, went or moved."""
        self._changed.add(key)

    def take(self) -> list[TierEvents]:
        """What changed since the last time; [] when nothing did."""
        stored: dict[bytes, Told] = {}
        removed: list[bytes] = []
        for key in self._changed:
            now = self._find(key)
            if now == self._told.get(key):
                continue
            if now is None:
                removed.append(key)
                del self._told[key]
            else:
                stored[key] = self._told[key] = now
        self._changed.clear()
        return _messages(stored, removed)

    def snapshot(self) -> list[TierEvents]:
        """All there is, as told so far; at least one message."""
        return _messages(self._told, []) or [TierEvents((), ())]

    def _find(self, key: bytes) -> Told | None:
        held = self._lookup(key)
        if not held:
            return None
        tier = tier_of(self._shards, held)
        return None if tier is None else Told(tier, next(iter(held.values())).info.parent)


def tier_of(shards: Iterable[Shard], held: Mapping[Shard, Held]) -> LocalTier | None:
    """The cheapest tier from which each of the shards can be had; None when one cannot."""
    in_dram = [shard for shard, each in held.items() if each.offset is not None]
    slowest = 0
    for shard in shards:
        if cover(shard, in_dram) is None:
            slowest = 1
            if cover(shard, held) is None:
                return None
    return _TIERS[slowest]


def _messages(stored: Mapping[bytes, Told], removed: list[bytes]) -> list[TierEvents]:
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


def _chains(stored: Mapping[bytes, Told]) -> Iterable[BlocksStored]:
    """As few chains as one pass finds: each block follows its parent where both are in the same tier."""
    children: dict[bytes, list[bytes]] = {}
    starts: list[bytes] = []
    for key, told in stored.items():
        before = stored.get(told.parent)
        if before is not None and before.tier == told.tier:
            children.setdefault(told.parent, []).append(key)
        else:
            starts.append(key)
    while starts:
        first = starts.pop()
        keys = [first]
        while following := children.get(keys[-1]):
            keys.append(following[0])
            starts += following[1:]
        yield BlocksStored(stored[first].parent, tuple(keys), stored[first].tier)
