"""Track which blocks the store of this node holds, as its owner reports, for the replica's KV events."""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.blocks.keys import state_key
from kvtransfer.common.sliced_map import SlicedMap
from kvtransfer.kv_events import BlocksRemoved, BlocksStored
from kvtransfer.store.messages.engine_session import TierEvents

# Of a million blocks each slice has some 250.
NUM_SLICES = 4096


class TierView:
    """Maps each key to its tier and parent. After `restart` the next events are the whole content.

    States are told apart from blocks: each follows the block that it is behind."""

    def __init__(self, *, has_states: bool = False) -> None:
        self._held: SlicedMap[BlocksStored] = SlicedMap(NUM_SLICES)
        self._has_states = has_states
        # The block that each state is behind, by the state's key, and the blocks with one.
        self._state_to_block: dict[bytes, bytes] = {}
        self._with_state: SlicedMap[None] = SlicedMap(NUM_SLICES)
        # Blocks that changed since `take_changed`.
        self._changed: dict[bytes, None] = {}
        self._is_whole = True
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def restart(self) -> None:
        """Expect the whole content again: the owner is gone."""
        self._is_whole = True

    def apply(self, events: TierEvents) -> None:
        """Take in changes of the store."""
        gone = list(events.removed)
        if self._is_whole:
            reported = {key for stored in events.stored for key in stored.keys}
            gone += [key for key in (*self._held, *self._state_to_block) if key not in reported]
            self._is_whole = False
        for key in gone:
            if (block := self._state_to_block.pop(key, None)) is not None:
                self._with_state.pop(block)
                self._changed[block] = None
            elif self._held.pop(key) is not None:
                self._stored.pop(key, None)
                self._removed[key] = self._changed[key] = None
        for stored in events.stored:
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
        removed = (BlocksRemoved(tuple(self._removed), "store"),) if self._removed else ()
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
