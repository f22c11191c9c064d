"""Which blocks of the prefix index are marked: layers with windows and states have what is theirs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from kvtransfer.common.sliced_map import SlicedMap
from workers.scheduler.group_pool import GroupPool
from workers.store_connector.tier_view import NUM_SLICES, TierView

# The blocks of the first group with a window or states in a slice.
_SLICE_BLOCKS = 512
# Of the set of marked blocks. A prime (`SlicedMap`).
_NUM_MARKED_SLICES = 251


class BlockMarks:
    """The marks of `kvtransfer.kv_events`, of what is on the device and, with a `view`, in the store."""

    def __init__(self, pools: Sequence[GroupPool], block_tokens: int, view: TierView | None = None) -> None:
        """Take the blocks of each group of layers with a window or states; none: nothing is ever marked."""
        self._pools = pools
        self._view = view
        self._marked: SlicedMap[bytes, None] = SlicedMap(_NUM_MARKED_SLICES)
        # How many blocks without a gap are to be marked for a prompt to be continued behind the last.
        self.num_needed = max((-(-(pool.window - 1) // block_tokens) for pool in pools), default=0)

    def take_events(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the blocks that are marked, and those that are not any more, since the last call."""
        of_view = () if self._view is None else self._view.take_changed()
        if not self._pools:
            return (), ()
        changed = dict.fromkeys(chain.from_iterable(pool.take_changed() for pool in self._pools))
        changed |= dict.fromkeys(of_view)
        marked = [key for key in changed if key not in self._marked and self._is_marked(key)]
        unmarked = [key for key in changed if key in self._marked and not self._is_marked(key)]
        self._marked.set_all(marked, None)
        self._marked.discard_all(unmarked)
        return tuple(marked), tuple(unmarked)

    def snapshot(self) -> tuple[bytes, ...]:
        """Return all blocks that are marked, outstanding events included."""
        sources: list[Iterable[bytes]] = [pool.keys for pool in self._pools[:1]]
        if self._view is not None and self._pools:
            sources.append(self._view.marked)
        return tuple(key for key in dict.fromkeys(chain.from_iterable(sources)) if self._is_marked(key))

    @property
    def num_slices(self) -> int:
        """The number of slices into which `slice` cuts the marks."""
        if not self._pools:
            return 0
        return self._num_of_device + (0 if self._view is None else NUM_SLICES)

    def slice(self, index: int) -> tuple[bytes, ...]:
        """Return the blocks of a slice that are marked."""
        keys: Iterable[bytes]
        if index < self._num_of_device:
            keys = self._pools[0].keys_of(index * _SLICE_BLOCKS, (index + 1) * _SLICE_BLOCKS)
        else:
            keys = () if self._view is None else self._view.marked_slice(index - self._num_of_device)
        return tuple(filter(self._is_marked, keys))

    @property
    def _num_of_device(self) -> int:
        return -(-self._pools[0].num_total // _SLICE_BLOCKS) if self._pools else 0

    def _is_marked(self, key: bytes) -> bool:
        if self._view is not None and self._view.is_marked(key):
            return True
        return all(pool.find(key) is not None for pool in self._pools)
