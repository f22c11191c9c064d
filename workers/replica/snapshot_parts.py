"""Snapshots of a replica's prefix cache in parts, each of which takes the engine core a few milliseconds.

The cache is cut into slices that stay what they are while it changes: ranges of blocks of the device, slices
of what the store of the node holds, and both once more for marks. A part is the content of some slices as it
is made. Changes between two parts come as events, in order with the parts (`kvtransfer.kv_events`).
"""

from __future__ import annotations

from kvtransfer.kv_events import BlocksStored
from workers.replica.block_marks import BlockMarks
from workers.scheduler.block_pool import BlockPool
from workers.store_connector.tier_view import NUM_SLICES, TierView

# The blocks of the device in a slice, how many a part has at least where there are more, and how many slices
# it has at most: most may be empty.
SLICE_BLOCKS = 512
LEAST_PART_BLOCKS = 256
_MOST_SLICES = 256


class SnapshotParts:
    """Makes the parts. Their numbers count slices: a part's number is that of its first slice."""

    def __init__(self, pool: BlockPool, marks: BlockMarks, view: TierView | None) -> None:
        self._pool = pool
        self._marks = marks
        self._view = view
        self._num_of_device = -(-pool.num_total // SLICE_BLOCKS)
        self._num_of_store = 0 if view is None else NUM_SLICES
        self._num_slices = self._num_of_device + self._num_of_store + marks.num_slices

    def part(self, number: int) -> tuple[tuple[BlocksStored, ...], tuple[bytes, ...], int]:
        """Return the blocks and marks of a part, and the number of the next part; 0: this is the last one."""
        stored: list[BlocksStored] = []
        marked: list[bytes] = []
        num_blocks = 0
        end = min(number + _MOST_SLICES, self._num_slices)
        while number < end and num_blocks + len(marked) < LEAST_PART_BLOCKS:
            if number < self._num_of_device:
                chains = self._pool.snapshot_slice(number * SLICE_BLOCKS, (number + 1) * SLICE_BLOCKS)
            elif self._view is not None and number < self._num_of_device + self._num_of_store:
                chains = self._view.snapshot_slice(number - self._num_of_device)
            else:
                chains = ()
                marked += self._marks.slice(number - self._num_of_device - self._num_of_store)
            stored += chains
            num_blocks += sum(len(chain.keys) for chain in chains)
            number += 1
        return tuple(stored), tuple(marked), number if number < self._num_slices else 0
