"""GroupPool: which request uses which block of a group of layers with a window or a recurrent state, and
which can be found by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtransfer.common.indexed_heap import IndexedHeap
from kvtransfer.common.recent_map import RecentMap
from workers.errors import OutOfBlocksError
from workers.scheduler.block_pool import BlockPool

# The keys of blocks that were evicted, and that nobody has passed, of which a pool remembers so many.
_MOST_EVICTED = 4096


class GroupPool:
    """Keeps reference counts, finished blocks by key, eviction and quarantine of `num_blocks`.

    A block is in exactly one state::

        free --allocate--> referenced --release, last one, not registered--> free
                            |    ^  \\--release, last one, registered--> cached --evict--> free
                            |    \\-----------------acquire----------------/
                            \\--quarantine--> quarantined --release_quarantine--> free

    A sequence needs no block before its window, so a block can be found whether or not those before it can.
    Of the cached ones, those that sequences have `passed` are evicted first: only a prompt that leaves theirs
    right there has a use for them. Then the one goes that is worth least, by the rule *greedy dual*: a block
    counts as its worth, and as what the last one counted that was evicted before its release. So of blocks
    that are worth the same the least recently released one goes, and each goes some time. A block behind
    which nothing can begin, since the other layers have lost their KV, goes like one that was passed.
    """

    def __init__(
        self, window: int, num_blocks: int, *, has_states: bool = False, kv: BlockPool | None = None
    ) -> None:
        """Take the window of the layers, in tokens. With `has_states` a block is the state behind its last
        token that was computed, and only complete ones can be found: snapshots. `kv` has the blocks of layers
        that see all tokens (None: nothing is ever evicted there)."""
        assert window > 0
        assert num_blocks > 0
        self.window = window
        self.has_states = has_states
        self._kv = kv
        if kv is not None:
            kv.follow(self._lose_kv)
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._quarantined: set[int] = set()
        self._key_to_block: dict[bytes, int] = {}
        self._key_to_group: dict[bytes, str] = {}
        self._worths = [0] * num_blocks
        # Cached blocks: those that were passed in the order in which they are evicted, the others by what
        # they count.
        self._passed: dict[int, None] = {}
        self._kept: IndexedHeap[int] = IndexedHeap()
        # What the last of the others counted that was evicted.
        self._inflation = 0.0
        self._evicted: RecentMap[bytes, None] = RecentMap(_MOST_EVICTED)
        # Keys that were registered, or are not any more, since `take_changed`.
        self._changed: dict[bytes, None] = {}
        self.num_references = 0

    @property
    def num_total(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks that can be found and that nobody references."""
        return len(self._passed) + len(self._kept)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one holder references the block: copy before writing."""
        return self._refs[block_id] > 1

    def is_foreign(self, block_id: int) -> bool:
        """Whether others use the block or can find it."""
        return self.is_shared(block_id) or self.is_registered(block_id)

    def is_referenced(self, block_id: int) -> bool:
        return self._refs[block_id] > 0

    def is_registered(self, block_id: int) -> bool:
        return self._keys[block_id] is not None

    def find(self, key: bytes) -> int | None:
        """Return the block that holds the KV of this key; takes no reference."""
        return self._key_to_block.get(key)

    def register(self, block_id: int, key: bytes, group: str, worth: int = 0) -> bool:
        """Make a full, computed block of a sharing group findable, whose loss costs `worth` blocks that are
        computed again. False, and the block stays private, when another block has the key already."""
        assert self._refs[block_id] > 0, f"block {block_id} is not referenced: it cannot be registered"
        if self._keys[block_id] is not None:
            assert self._keys[block_id] == key, f"block {block_id} is registered under another key"
            return True
        if key in self._key_to_block:
            return False
        self._evicted.pop(key, None)
        self._keys[block_id] = key
        self._worths[block_id] = worth
        self._key_to_block[key] = block_id
        self._key_to_group[key] = group
        self._changed[key] = None
        return True

    def worth(self, block_id: int) -> int:
        """Return how many blocks are computed again without this one, which can be found."""
        return self._worths[block_id]

    def was_evicted(self, key: bytes) -> bool:
        """Whether the block of this key was evicted lately, although no sequence had passed it, and was not
        computed again."""
        return key in self._evicted

    def purge(self, group: str | None) -> int:
        """Take the blocks of this sharing group (None: of any) out of what can be found. Return how many
        those were."""
        keys = [key for key, its in self._key_to_group.items() if group in (None, its)]
        for key in keys:
            self._unregister(self._key_to_block[key])
        return len(keys)

    @property
    def keys(self) -> Iterable[bytes]:
        """The keys of all blocks that can be found."""
        return self._key_to_block.keys()

    def keys_of(self, start: int, end: int) -> Iterable[bytes]:
        """Return the keys by which these blocks can be found."""
        return (key for key in self._keys[start:end] if key is not None)

    def take_changed(self) -> Iterable[bytes]:
        """Return the keys that `find` may answer otherwise than before the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; the blocks are referenced or cached."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                assert self._keys[block_id] is not None, f"block {block_id} is free: it holds nothing"
                self._passed.pop(block_id, None)
                self._kept.remove(block_id)
            self._refs[block_id] += 1
            self.num_references += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks with one reference each, evicting cached ones when needed.

        Raises `OutOfBlocksError`, taking and evicting nothing, when fewer are free."""
        if num_blocks > self.num_free:
            raise OutOfBlocksError(f"{num_blocks} blocks of a window are needed, {self.num_free} are free")
        while len(self._free) < num_blocks:
            self._evict()
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._refs[block_id] = 1
        self.num_references += num_blocks
        return block_ids

    def release(self, block_ids: Sequence[int], *, passed: bool = False) -> None:
        """Drop one reference of each block. Given in the order of a prompt, so the last counts as the
        oldest."""
        for block_id in reversed(block_ids):
            self._drop_reference(block_id)
            if self._refs[block_id] > 0:
                continue
            if self._keys[block_id] is None:
                self._free.append(block_id)
            elif passed or self._is_useless(block_id):
                self._passed[block_id] = None
            else:
                self._keep(block_id)

    def keep(self, key: bytes) -> None:
        """Let the block of this key, if it is cached, be evicted as late as one that nobody has passed."""
        block_id = self._key_to_block.get(key)
        if block_id is not None and block_id in self._passed and not self._is_useless(block_id):
            del self._passed[block_id]
            self._keep(block_id)

    def find_all(self, keys: Iterable[bytes]) -> list[int] | None:
        """Return the blocks that hold the KV of these keys; None if one is missing."""
        found = [self._key_to_block.get(key) for key in keys]
        held = [block_id for block_id in found if block_id is not None]
        return held if len(held) == len(found) else None

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Drop the only reference of blocks that a writer may still write: nobody may have them yet."""
        for block_id in block_ids:
            assert self._keys[block_id] is None, f"block {block_id} can be found"
            self._drop_reference(block_id)
            assert self._refs[block_id] == 0, f"block {block_id} is referenced: it cannot be quarantined"
            self._quarantined.add(block_id)

    def release_quarantine(self, block_ids: Iterable[int]) -> None:
        """Free the blocks: the writer has proven that it stopped."""
        for block_id in block_ids:
            self._quarantined.remove(block_id)
            self._free.append(block_id)

    def check(self) -> None:
        """Assert that every block is in one state, and that counts and index agree."""
        referenced = {block for block, count in enumerate(self._refs) if count}
        cached = {*self._passed, *self._kept}
        self._kept.check()
        states = [set(self._free), cached, referenced, self._quarantined]
        assert sum(map(len, states)) == self.num_total, "a block is in two states, or in none"
        assert set().union(*states) == set(range(self.num_total))
        assert len(self._free) == len(states[0]), "a block is free twice"
        assert sum(self._refs) == self.num_references
        registered = {block for block, key in enumerate(self._keys) if key is not None}
        assert {self._keys[block]: block for block in registered} == self._key_to_block
        assert self._key_to_group.keys() == self._key_to_block.keys()
        assert registered - referenced == cached
        assert not self._evicted.keys() & self._key_to_block.keys()

    def _drop_reference(self, block_id: int) -> None:
        assert self._refs[block_id] > 0, f"block {block_id} has no reference to release"
        self._refs[block_id] -= 1
        self.num_references -= 1

    def _keep(self, block_id: int) -> None:
        self._kept.put(block_id, self._inflation + self._worths[block_id])

    def _lose_kv(self, key: bytes) -> None:
        """Let the block of this key, if it is cached, go first: nothing can begin behind it."""
        block_id = self._key_to_block.get(key)
        if block_id is not None and self._kept.remove(block_id):
            self._passed[block_id] = None

    def _is_useless(self, block_id: int) -> bool:
        key = self._keys[block_id]
        assert key is not None
        return self._kv is not None and self._kv.find(key) is None

    def _evict(self) -> None:
        if self._passed:
            block_id = next(iter(self._passed))
        else:
            least = self._kept.first()
            assert least is not None
            self._inflation, block_id = least
            key = self._keys[block_id]
            assert key is not None
            self._evicted.put(key, None)
        self._unregister(block_id)

    def _unregister(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        self._keys[block_id] = None
        del self._key_to_block[key], self._key_to_group[key]
        self._changed[key] = None
        if self._refs[block_id] == 0:
            self._passed.pop(block_id, None)
            self._kept.remove(block_id)
            self._free.append(block_id)
