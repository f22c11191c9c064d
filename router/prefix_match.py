"""The leading blocks of a prompt that each replica has, as the prefix tree counts them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

Counts = ctypes.Array[ctypes.c_int32]


class InStore(NamedTuple):
    """Blocks of a prompt that only the store of a replica's node holds, by tier."""

    dram: int
    nvme: int


NOT_IN_STORE = InStore(0, 0)


class Match:
    """The leading blocks of a prompt that each replica has without computing: the first ones on its device,
    those after them in its node's store. `counts` has `num_slots` numbers for the device, as many for DRAM
    and as many for NVMe, by the slots of the replicas."""

    def __init__(self, id_to_slot: Mapping[str, int], counts: Counts, num_slots: int) -> None:
        self._id_to_slot = id_to_slot
        self.counts = counts
        self.num_slots = num_slots

    @property
    def device(self) -> dict[str, int]:
        """The blocks on the device by replica; replicas with none are absent."""
        return {name: self.counts[slot] for name, slot in self._id_to_slot.items() if self.counts[slot]}

    @property
    def stored(self) -> dict[str, InStore]:
        """The blocks in the store by replica; replicas with none are absent."""
        each = {name: self.of(name)[1] for name in self._id_to_slot}
        return {name: counts for name, counts in each.items() if any(counts)}

    @property
    def most_blocks(self) -> int:
        """The number of blocks of the replica that has most of them."""
        counts, num_slots = self.counts, self.num_slots
        tiers = (counts[start : start + num_slots] for start in range(0, 3 * num_slots, num_slots))
        return max(map(sum, zip(*tiers, strict=True)))

    def of(self, replica_id: str) -> tuple[int, InStore]:
        """Return how many a replica has on its device and in the store."""
        slot = self._id_to_slot.get(replica_id)
        if slot is None:
            return 0, NOT_IN_STORE
        counts, num_slots = self.counts, self.num_slots
        return counts[slot], InStore(counts[num_slots + slot], counts[2 * num_slots + slot])
