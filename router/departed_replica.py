"""What is left in the prefix tree of a replica that was removed, until it has been forgotten in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvtransfer.common.sliced_map import SlicedMap
from router.block_history import BlockHistory
from router.block_holder import BlockHolder, StoreTier
from router.holder_masks import HolderMasks

KeyMaps = list[SlicedMap[bytes, Any] | dict[bytes, Any]]


class DepartedReplica:
    """The blocks of one epoch of a replica whose masks may still have its bits.

    No match counts them. The slot is given to another replica when there are none left, so a replica that
    comes back under the same id has another slot, and nothing that is forgotten here is what it reports.
    """

    def __init__(self, holder: BlockHolder, left_at: float) -> None:
        """`left_at` is the time of the clock at which the replica was removed."""
        self.replica_id = holder.identity.replica_id
        self.slot = holder.slot
        self.left_at = left_at
        self._holder = holder
        outdated = holder.outdated
        self._stored = [each.stored for each in outdated] + [holder.stored]
        self._held = [each.held for each in outdated] + [holder.held]
        # Blocks that the replica never had do not go into the history.
        self._expected: KeyMaps = [holder.predicted, holder.num_expecting]
        self._marked: KeyMaps = [*(each.marked for each in outdated), holder.marked, holder.num_foreseen]

    def where(self, key: bytes) -> str:
        """Return where the replica had a block that is not forgotten yet: "device" or "store"; "": nowhere,
        or it is forgotten."""
        if any(key in each for each in self._held):
            return "device"
        return "store" if any(key in each for each in self._stored) else ""

    def forget(self, most: int, masks: HolderMasks, history: BlockHistory | None) -> bool:
        """Forget `most` of the blocks, and note in `history` that they left. Return whether all are forgotten
        now."""
        while most > 0 and self._stored:
            blocks: list[tuple[bytes, StoreTier]] = self._stored[-1].pop_some(most)
            self._note(history, [key for key, _ in blocks], "store")
            for tier, bit in self._holder.store_bits.items():
                masks.clear_bit(bit, [key for key, its in blocks if its == tier])
            most -= len(blocks)
            if not self._stored[-1]:
                self._stored.pop()
        while most > 0 and self._held:
            keys = _popped(self._held[-1], most)
            self._note(history, keys, "device")
            masks.clear_bit(self._holder.device_bit, keys)
            most -= len(keys)
            if not self._held[-1]:
                self._held.pop()
        for bit, maps in ((self._holder.device_bit, self._expected), (self._holder.mark_bit, self._marked)):
            while most > 0 and maps:
                keys = _popped(maps[-1], most)
                masks.clear_bit(bit, keys)
                most -= len(keys)
                if not maps[-1]:
                    maps.pop()
        return not (self._stored or self._held or self._expected or self._marked)

    def bits(self) -> Iterator[tuple[int, Iterable[bytes]]]:
        """Yield each bit that masks may still have, with the keys of these masks."""
        for tier, bit in self._holder.store_bits.items():
            yield bit, [key for each in self._stored for key, its in each.items() if its == tier]
        for keys in (*self._held, *self._expected):
            yield self._holder.device_bit, keys
        for keys in self._marked:
            yield self._holder.mark_bit, keys

    def _note(self, history: BlockHistory | None, keys: Sequence[bytes], tier: str) -> None:
        if history is not None and keys:
            history.removed(self.replica_id, keys, tier, "left", self.left_at)


def _popped(keys: SlicedMap[bytes, Any] | dict[bytes, Any], most: int) -> list[bytes]:
    """Remove keys, `most` of them or all that there are, and return them."""
    if isinstance(keys, SlicedMap):
        return [key for key, _ in keys.pop_some(most)]
    return [keys.popitem()[0] for _ in range(min(most, len(keys)))]
