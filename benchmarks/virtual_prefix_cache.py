"""The prefix cache of a replica without an engine: block keys, of which the least recently used leave."""

from __future__ import annotations

from collections import OrderedDict

from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents
from kvtransfer.messages import ReplicaIdentity


class VirtualPrefixCache:
    """Holds at most `num_blocks` block keys; a chain leaves from its end."""

    def __init__(self, identity: ReplicaIdentity, num_blocks: int) -> None:
        self._identity = identity
        self._num_blocks = num_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._sequence = 0

    def num_cached(self, keys: tuple[bytes, ...]) -> int:
        """Return how many leading blocks are held."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: tuple[bytes, ...]) -> KvEvents:
        """Add the blocks, or note that they are used again; return what changed."""
        new = [key for key in keys if key not in self._keys]
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        num_surplus = max(0, len(self._keys) - self._num_blocks)
        removed = tuple(self._keys.popitem(last=False)[0] for _ in range(num_surplus))
        stored = tuple(key for key in new if key in self._keys)
        self._sequence += 1
        return KvEvents(
            self._identity,
            self._sequence,
            (BlocksStored(b"", stored),) if stored else (),
            (BlocksRemoved(removed),) if removed else (),
        )
