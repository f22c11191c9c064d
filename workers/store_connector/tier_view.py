"""Track which blocks the store of this node holds, as its owner reports, for the replica's KV events."""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.blocks.keys import state_key
from kvtransfer.common.sliced_map import SlicedMap
from kvtransfer.kv_events import BlocksRemoved, BlocksStored
from kvtransfer.store.messages.engine_session import TierEvents, TierPart

# Of a million blocks each slice has some 250. A prime (`SlicedMap`).
NUM_SLICES = 4093
# Blocks that are compared at a time with what the owner has named. Those of them that are gone are in one KV
# event, which a gateway takes in some milliseconds.
_COMPARED_AT_ONCE = 1024


class TierView:
    """Maps each key to its tier and parent.

    When the connection to the owner has ended, `restart` keeps what is known: most of it is there again. The
    owner then sends the whole content in parts, and its changes between them. After the last part, whatever
    neither has named is gone, and `forget_some` removes it in slices.

    States are told apart from blocks: each follows the block that it is behind.
    """

    def __init__(self, *, has_states: bool = False) -> None:
        self._held: SlicedMap[bytes, BlocksStored] = SlicedMap(NUM_SLICES)
        self._has_states = has_states
        # The block that each state is behind, by the state's key, and the blocks with one.
        self._state_to_block: SlicedMap[bytes, bytes] = SlicedMap(NUM_SLICES)
        self._with_state: SlicedMap[bytes, None] = SlicedMap(NUM_SLICES)
        # Blocks that changed since `take_changed`.
        self._changed: dict[bytes, None] = {}
        # Since the last `restart`: whether a part has come, and whether the whole content has.
        self._has_part = self._is_whole = False
        # The keys that were named since the last `restart`, but for the slices before `_num_compared`, which
        # have no others.
        self._named: SlicedMap[bytes, None] = SlicedMap(NUM_SLICES)
        self._num_compared = 0
        self._stored: dict[bytes, None] = {}
        # With the reasons.
        self._removed: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._held)

    def restart(self) -> None:
        """Expect the whole content again: the connection to the owner has ended."""
        self._has_part = self._is_whole = False
        self._num_compared = 0
        self._named = SlicedMap(NUM_SLICES)

    def apply(self, events: TierEvents) -> None:
        """Take in changes of the store. An owner of an older version sends no parts: its first message is the
        whole content."""
        has_reasons = len(events.reasons) == len(events.removed)
        reasons = events.reasons if has_reasons else ("",) * len(events.removed)
        for key, reason in zip(events.removed, reasons, strict=True):
            self._named.pop(key)
            self._remove(key, reason)
        self._add(events.stored)
        if not self._is_whole and not self._has_part:
            self._end_whole()

    def apply_part(self, part: TierPart) -> None:
        """Take in a part of the whole content."""
        if part.part == 0:
            self.restart()
        self._has_part = True
        self._add(part.stored)
        if not part.next_part:
            self._end_whole()

    def forget_some(self) -> bool:
        """Remove some of the blocks that are gone since the last `restart`, once the whole content is known.
        Return whether some may be left."""
        if not self._is_whole or self._num_compared == NUM_SLICES:
            return False
        num_left = _COMPARED_AT_ONCE
        while self._num_compared < NUM_SLICES and num_left > 0:
            index = self._num_compared
            named = self._named.slice(index)
            keys = (*self._held.slice(index), *self._state_to_block.slice(index))
            for key in keys:
                if key not in named:
                    self._remove(key, "lost")
            self._named.slices[index].clear()
            self._num_compared += 1
            num_left -= len(keys)
        return self._num_compared < NUM_SLICES

    def _end_whole(self) -> None:
        self._is_whole = True
        self.forget_some()

    def _remove(self, key: bytes, reason: str) -> None:
        if (block := self._state_to_block.pop(key)) is not None:
            self._with_state.pop(block)
            self._changed[block] = None
        elif self._held.pop(key) is not None:
            self._stored.pop(key, None)
            self._removed[key] = reason
            self._changed[key] = None

    def _add(self, chains: Iterable[BlocksStored]) -> None:
        for stored in chains:
            self._note_named(stored.keys)
            parent = stored.parent
            for key in stored.keys:
                entry = BlocksStored(parent, (key,), stored.tier)
                if self._has_states and parent and key == state_key(parent):
                    self._state_to_block[key] = parent
                    self._with_state[parent] = None
                    self._changed[parent] = None
                elif self._held.get(key) != entry:
                    self._held[key] = entry
                    self._removed.pop(key, None)
                    self._stored[key] = self._changed[key] = None
                parent = key

    def _note_named(self, keys: Iterable[bytes]) -> None:
        """Note that the owner has named these, where they are still to be compared."""
        num_compared, named = self._num_compared, self._named.slices
        if num_compared < NUM_SLICES:
            for key in keys:
                index = hash(key) % NUM_SLICES
                if index >= num_compared:
                    named[index][key] = None

    def is_marked(self, key: bytes) -> bool:
        """Whether the store has what layers with windows, or states, need of this block: records of blocks
        have the KV of all layers."""
        return key in (self._with_state if self._has_states else self._held)

    @property
    def marked(self) -> Iterable[bytes]:
        """The blocks of which that is true."""
        return self._with_state if self._has_states else self._held

    def marked_slice(self, index: int) -> Iterable[bytes]:
        """Return those of a slice."""
        return self._with_state.slice(index) if self._has_states else self._held.slice(index)

    def take_changed(self) -> Iterable[bytes]:
        """Return the blocks of which that may have changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def take_events(self) -> tuple[tuple[BlocksStored, ...], tuple[BlocksRemoved, ...]]:
        """Return the net change since the last call; the two parts name disjoint keys."""
        stored = tuple(_chains(self._held[key] for key in self._stored))
        by_reason: dict[str, list[bytes]] = {}
        for key, reason in self._removed.items():
            by_reason.setdefault(reason, []).append(key)
        removed = tuple(BlocksRemoved(tuple(keys), "store", reason) for reason, keys in by_reason.items())
        self._stored, self._removed = {}, {}
        return stored, removed

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Return the whole content."""
        return tuple(_chains(self._held.values()))

    def snapshot_slice(self, index: int) -> tuple[BlocksStored, ...]:
        """Return the content of a slice, block by block: those of a chain are in different slices."""
        return tuple(self._held.slice(index).values())


def _chains(blocks: Iterable[BlocksStored]) -> Iterable[BlocksStored]:
    """Join single blocks to chains where each follows the one before in the same tier."""
    parent, keys, tier = b"", list[bytes](), ""
    for block in blocks:
        if keys and (block.parent != keys[-1] or block.tier != tier):
            yield BlocksStored(parent, tuple(keys), tier)  # type: ignore[arg-type]
            keys = []
        if not keys:
            parent, tier = block.parent, block.tier
        keys += block.keys
    if keys:
        yield BlocksStored(parent, tuple(keys), tier)  # type: ignore[arg-type]
