"""BlockPool: which request uses which KV block, which finished blocks can be found by key, and which were
cached or evicted since the last look. Used by the scheduler and by the engine core for landings; holds no KV
itself.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvtransfer.common.group_shares import Claimant, GroupShares, ShareClaim
from kvtransfer.kv_events import BlocksRemoved, BlocksStored
from workers.errors import OutOfBlocksError
from workers.scheduler.group_blocks import EvictableBlock, GroupBlocks

ROOT = b""
_NO_LIMITS = GroupShares()


class BlockPool:
    """Keeps reference counts, prefix index, least-recently-used eviction, quarantine and KV events of
    `num_blocks`.

    A block is in exactly one state::

        free --allocate--> referenced --release, last one, not registered--> free
                            |    ^  \\--release, last one, registered--> cached --evict--> free
                            |    \\-----------------acquire----------------/
                            \\--quarantine--> quarantined --release_quarantine--> free

    The prefix index is a forest over block keys that is closed upward: the parent of a registered block is
    registered. So a block is evicted after its children (leaf first), the least recently released one first.

    Where sharing groups have limits (`shares`), no group has more blocks in use than its share, and its
    cached blocks above its share are evicted before those of others (`GroupBlocks`).
    """

    def __init__(self, num_blocks: int, block_tokens: int, shares: GroupShares = _NO_LIMITS) -> None:
        assert num_blocks > 0
        self.block_tokens = block_tokens
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._released_at = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._quarantined: set[int] = set()
        self._key_to_block: dict[bytes, int] = {}
        self._key_to_parent: dict[bytes, bytes] = {}
        # The registered children of each key that has some: most have one.
        self._key_to_children: dict[bytes, bytes | dict[bytes, None]] = {}
        # The keys of the first block of each prompt; a chain is one sharing group's
        # (`kvtransfer.blocks.keys`).
        self._head_to_group: dict[bytes, str] = {}
        # A heap of cached leaves. `acquire` leaves the entries of blocks there, and `_evict` skips these:
        # with an `IndexedHeap`, allocating with eviction is 5 % slower.
        self._evictable: list[EvictableBlock] = []
        self._most_entries = 2 * num_blocks + 64
        self.shares = shares
        self._groups = GroupBlocks(shares, num_blocks) if shares.is_limited else None
        self._num_cached = 0
        self._private_key_to_block: dict[bytes, int] = {}
        self._block_to_private_key: dict[int, bytes] = {}
        self._num_references = 0
        self._tick = 0
        self._stored: dict[bytes, None] = {}  # net changes since `take_events`, in order
        self._removed: dict[bytes, str] = {}  # with the reasons of `BlocksRemoved`
        self._followers: list[Callable[[bytes], None]] = []

    # ------------------------------------------------------------------------------------------ counts

    @property
    def num_total(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones that nobody references."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Blocks that are in the prefix index and that nobody references."""
        return self._num_cached

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_referenced(self) -> int:
        """Blocks with at least one reference."""
        return self.num_total - self.num_free - self.num_quarantined

    @property
    def num_references(self) -> int:
        """Sum of all reference counts."""
        return self._num_references

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one holder references the block: copy before writing."""
        return self._refs[block_id] > 1

    def is_referenced(self, block_id: int) -> bool:
        return self._refs[block_id] > 0

    def is_registered(self, block_id: int) -> bool:
        return self._keys[block_id] is not None

    # ---------------------------------------------------------------------------- shares of groups

    def has_limit(self, group: str) -> bool:
        """Whether the group may not use all blocks."""
        return self._groups is not None and self._groups.in_use.has_limit(group)

    def limit(self, group: str) -> int:
        """Return the most blocks that a group may use."""
        return self.num_total if self._groups is None else self._groups.in_use.limit(group)

    def num_used_by(self, group: str) -> int:
        """Return how many blocks a group uses; 0 where no group has a limit."""
        return 0 if self._groups is None else self._groups.in_use.taken.get(group, 0)

    def num_left(self, group: str) -> int:
        """Return how many more blocks a group may use, were they free."""
        if self._groups is None or not self._groups.in_use.has_limit(group):
            return self.num_total
        return self._groups.in_use.limit(group) - self._groups.in_use.taken.get(group, 0)

    def claim(self, by: Claimant, claims: Mapping[str, ShareClaim]) -> None:
        """Note the blocks that groups wait for, so that the other claimant leaves them to the groups that are
        older."""
        if self._groups is not None:
            self._groups.claims[by] = claims

    def num_claimed(self, by: Claimant, group: str, since: float) -> int:
        """Return how many blocks `by` has claimed of the group's share since an earlier time."""
        return 0 if self._groups is None else self._groups.num_claimed(by, group, since)

    def num_to_use(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks, which can be found, come into use with `acquire`."""
        if self._groups is None:
            return 0
        return sum(not self._groups.is_in_use(block_id, self._refs[block_id]) for block_id in block_ids)

    def is_of(self, block_id: int, group: str) -> bool:
        """Whether the block, which is not free, is this group's; some group has a limit."""
        assert self._groups is not None
        return self._groups.owner(block_id) == group

    def give(self, block_ids: Iterable[int], group: str) -> None:
        """Pass blocks with one reference, which nobody can find, on to another owner."""
        if self._groups is None:
            return
        for block_id in block_ids:
            assert self._refs[block_id] == 1
            assert self._keys[block_id] is None
            self._groups.disuse(block_id)
            self._groups.free(block_id)
            self._groups.own([block_id], group)

    # -------------------------------------------------------------------------------------- references

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `keys` that is cached; takes no reference."""
        block_ids: list[int] = []
        for key in keys:
            block_id = self._key_to_block.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; the blocks are referenced or cached."""
        for block_id in block_ids:
            if self._groups is not None and not self._groups.is_in_use(block_id, self._refs[block_id]):
                self._groups.use(block_id)
            if self._refs[block_id] == 0:
                assert self._keys[block_id] is not None, f"block {block_id} is free: it holds nothing"
                self._uncache(block_id)
            self._refs[block_id] += 1
            self._num_references += 1

    def allocate(self, num_blocks: int, group: str = "") -> list[int]:
        """Return blocks of this group with one reference each, evicting cached ones when needed.

        Raises `OutOfBlocksError`, taking and evicting nothing, when fewer are free or left of its share.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocksError(f"{num_blocks} blocks are needed, {self.num_free} are free")
        if self._groups is not None and num_blocks > self.num_left(group):
            left = f"{self.num_left(group)} are left of the share of {group!r}"
            raise OutOfBlocksError(f"{num_blocks} blocks are needed, {left}")
        free, refs = self._free, self._refs
        while len(free) < num_blocks:
            self._evict(None if self._groups is None else self._groups.victim(group, num_blocks))
        block_ids = free[len(free) - num_blocks :][::-1]
        del free[len(free) - num_blocks :]
        for block_id in block_ids:
            refs[block_id] = 1
        self._num_references += num_blocks
        if self._groups is not None:
            self._groups.own(block_ids, group)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block. Given in the order of a prompt, so the last counts as the
        oldest."""
        refs, keys, groups = self._refs, self._keys, self._groups
        is_plain = groups is None and not self._block_to_private_key
        for block_id in reversed(block_ids):
            if is_plain and refs[block_id] > 0:
                # As `_drop_reference`, without a call for each of many.
                refs[block_id] -= 1
                self._num_references -= 1
            else:
                self._drop_reference(block_id)
            if refs[block_id] > 0:
                continue
            key = keys[block_id]
            if key is None:
                self._free_block(block_id)
                continue
            self._num_cached += 1
            if groups is not None:
                groups.cache(block_id)
            self._tick += 1
            self._released_at[block_id] = self._tick
            if key not in self._key_to_children:
                self._push_evictable(block_id)

    def begin_copies(self, block_ids: Sequence[int]) -> None:
        """Add references as `acquire` does, for copies into the store, which count to nobody's share."""
        self.acquire(block_ids)
        if self._groups is not None:
            for block_id in block_ids:
                self._groups.begin_copy(block_id, self._refs[block_id])

    def end_copies(self, block_ids: Sequence[int]) -> None:
        """Drop the references that `begin_copies` added, as `release` does."""
        if self._groups is not None:
            for block_id in block_ids:
                self._groups.end_copy(block_id, self._refs[block_id])
        self.release(block_ids)

    # -------------------------------------------------------------------------------------- quarantine

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Drop the only reference of blocks that a writer may still write: nobody may have them yet."""
        for block_id in block_ids:
            assert self._keys[block_id] is None, f"block {block_id} is in the prefix index"
            self._drop_reference(block_id)
            assert self._refs[block_id] == 0, f"block {block_id} is referenced: it cannot be quarantined"
            self._quarantined.add(block_id)
            if self._groups is not None:
                self._groups.use(block_id)

    def release_quarantine(self, block_ids: Iterable[int]) -> None:
        """Free the blocks: the writer has proven that it stopped."""
        for block_id in block_ids:
            self._quarantined.remove(block_id)
            if self._groups is not None:
                self._groups.disuse(block_id)
            self._free_block(block_id)

    # ------------------------------------------------------------------------------------ prefix index

    def register(self, block_id: int, parent_key: bytes, key: bytes, group: str) -> bool:
        """Make a full, computed block findable; `parent_key` is b"" for a prompt's first block.

        False, and the block stays private, when another block has the key already or when the parent is
        not registered (any more): nothing could find the block then.
        """
        assert self._refs[block_id] > 0, f"block {block_id} is not referenced: it cannot be registered"
        assert self._groups is None or self._groups.owner(block_id) == group
        if self._keys[block_id] is not None:
            assert self._keys[block_id] == key, f"block {block_id} is registered under another key"
            return True
        if key in self._key_to_block or (parent_key != ROOT and parent_key not in self._key_to_block):
            return False
        if self._block_to_private_key:
            self._drop_private(block_id)
        self._keys[block_id] = key
        self._key_to_block[key] = block_id
        self._key_to_parent[key] = parent_key
        siblings = self._key_to_children.get(parent_key)
        if siblings is None:
            self._key_to_children[parent_key] = key
        elif isinstance(siblings, dict):
            siblings[key] = None
        else:
            self._key_to_children[parent_key] = {siblings: None, key: None}
        if parent_key == ROOT:
            self._head_to_group[key] = group
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None
        return True

    def register_all(
        self, block_ids: Sequence[int], parent_key: bytes, keys: Sequence[bytes], group: str
    ) -> None:
        """Make blocks findable of which each is the parent of the next one, as `register` does."""
        own_keys, refs, removed, stored = self._keys, self._refs, self._removed, self._stored
        found, parents, children = self._key_to_block, self._key_to_parent, self._key_to_children
        is_plain = self._groups is None and not self._block_to_private_key
        for block_id, key in zip(block_ids, keys, strict=True):
            if (
                is_plain
                and refs[block_id] > 0
                and own_keys[block_id] is None
                and key not in removed
                and parent_key in found
                and parent_key not in children
            ):
                # As `register`, for the first child of its parent, which nobody can have, without a call for
                # each of many.
                own_keys[block_id] = key
                found[key] = block_id
                parents[key] = parent_key
                children[parent_key] = key
                stored[key] = None
            else:
                self.register(block_id, parent_key, key, group)
            parent_key = key

    def remember(self, block_id: int, key: bytes) -> bool:
        """Let `find` return a full, computed block whose parent is not registered, while it is referenced.

        False when `find` returns another block for that key already.
        """
        assert self._refs[block_id] > 0, f"block {block_id} is not referenced: it cannot be remembered"
        if self.find(key) is None and block_id not in self._block_to_private_key:
            self._private_key_to_block[key] = block_id
            self._block_to_private_key[block_id] = key
        return self._private_key_to_block.get(key) == block_id

    def follow(self, follower: Callable[[bytes], None]) -> None:
        """Call the follower with each key that is taken out of the prefix index."""
        self._followers.append(follower)

    def find(self, key: bytes) -> int | None:
        """Return the block that holds the KV of this key, registered or remembered; takes no reference."""
        block_id = self._key_to_block.get(key)
        return self._private_key_to_block.get(key) if block_id is None else block_id

    def forget(self, block_id: int) -> None:
        """Take this referenced block out of what can be found, and out of the index all blocks that it led
        to: the referenced ones among these are still returned by `find`."""
        self._drop_private(block_id)
        key = self._keys[block_id]
        if key is None:
            return
        for below in reversed(list(self._subtree(key))):
            other_id = self._key_to_block[below]
            self._unregister(below, "offloaded")
            if other_id != block_id and self._refs[other_id] > 0:
                self.remember(other_id, below)

    def purge(self, group: str | None) -> tuple[int, int]:
        """Take the blocks of this group (None: of any) out of what can be found. Return how many those were,
        and how many of them are still referenced; they are free when they are released."""
        heads = [head for head, its in self._head_to_group.items() if group in (None, its)]
        num_found = num_held = 0
        for head in heads:
            for key in reversed(list(self._subtree(head))):
                num_found += 1
                num_held += self._refs[self._key_to_block[key]] > 0
                self._unregister(key, "purged")
        return num_found, num_held

    def _evict(self, group: str | None) -> None:
        """Turn the least recently released cached leaf (of this group, which has some) into a free block."""
        heap = self._evictable
        reason = "space" if group is None else "share"
        if group is not None:
            assert self._groups is not None
            heap = self._groups.evictable(group)
        refs, released_at, has_children = self._refs, self._released_at, self._key_to_children
        while heap:
            at, block_id = heapq.heappop(heap)
            key = self._keys[block_id]
            # As `_is_evictable`, without a call for each of many.
            if key is None or refs[block_id] or released_at[block_id] != at or key in has_children:
                continue
            self._unregister(key, reason)
            return
        # Every cached block has a referenced descendant (a holder of a duplicate registered the child): its
        # whole subtree leaves the index, so that every block that counts as free can be had.
        oldest = min(
            (self._released_at[block], key)
            for key, block in self._key_to_block.items()
            if self._refs[block] == 0 and (group is None or self.is_of(block, group))
        )
        for key in reversed(list(self._subtree(oldest[1]))):
            self._unregister(key, reason)

    def _unregister(self, key: bytes, reason: str) -> None:
        for follow in self._followers:
            follow(key)
        block_id = self._key_to_block.pop(key)
        parent_key = self._key_to_parent.pop(key)
        self._keys[block_id] = None
        self._head_to_group.pop(key, None)
        siblings = self._key_to_children[parent_key]
        if isinstance(siblings, dict):
            del siblings[key]
        if siblings == key or not siblings:
            del self._key_to_children[parent_key]
            parent = self._key_to_block.get(parent_key)
            if parent is not None and self._refs[parent] == 0:
                self._push_evictable(parent)
        if self._refs[block_id] == 0:
            self._num_cached -= 1
            self._free.append(block_id)
            if self._groups is not None:
                self._groups.uncache(block_id)
                self._groups.free(block_id)
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = reason

    def _push_evictable(self, block_id: int) -> None:
        if len(self._evictable) > self._most_entries:
            self._evictable = [entry for entry in set(self._evictable) if self._is_evictable(entry)]
            heapq.heapify(self._evictable)
        entry = self._released_at[block_id], block_id
        heapq.heappush(self._evictable, entry)
        if self._groups is not None:
            self._groups.push(entry, self._is_evictable)

    def _is_evictable(self, entry: EvictableBlock) -> bool:
        released_at, block_id = entry
        key = self._keys[block_id]
        return (
            key is not None
            and self._refs[block_id] == 0
            and self._released_at[block_id] == released_at
            and key not in self._key_to_children
        )

    def _drop_reference(self, block_id: int) -> None:
        assert self._refs[block_id] > 0, f"block {block_id} has no reference to release"
        self._refs[block_id] -= 1
        self._num_references -= 1
        if self._block_to_private_key and self._refs[block_id] == 0:
            self._drop_private(block_id)
        if self._groups is not None and not self._groups.is_in_use(block_id, self._refs[block_id]):
            self._groups.disuse(block_id)

    def _uncache(self, block_id: int) -> None:
        self._num_cached -= 1
        if self._groups is not None:
            self._groups.uncache(block_id)

    def _free_block(self, block_id: int) -> None:
        self._free.append(block_id)
        if self._groups is not None:
            self._groups.free(block_id)

    def _drop_private(self, block_id: int) -> None:
        key = self._block_to_private_key.pop(block_id, None)
        if key is not None:
            del self._private_key_to_block[key]

    def _children(self, key: bytes) -> Sequence[bytes]:
        """Return the registered children of a key, in the order in which they were registered."""
        children = self._key_to_children.get(key, {})
        return tuple(children) if isinstance(children, dict) else (children,)

    def _subtree(self, key: bytes) -> Iterator[bytes]:
        """Yield the registered keys of the subtree of `key`, itself included, parents first."""
        stack = [key]
        while stack:
            key = stack.pop()
            if key != ROOT:
                yield key
            stack.extend(reversed(self._children(key)))

    # ------------------------------------------------------------------------------------------ events

    def take_events(self) -> tuple[tuple[BlocksStored, ...], tuple[BlocksRemoved, ...]]:
        """Return the net change of the prefix index since the last call; the two parts name disjoint keys, so
        the order of their application does not matter."""
        if not self._stored and not self._removed:
            return (), ()
        stored = self._chains(self._stored)
        reasons = dict.fromkeys(self._removed.values())
        removed = tuple(
            BlocksRemoved(tuple(key for key, why in self._removed.items() if why == reason), reason=reason)
            for reason in reasons
        )
        self._stored = {}
        self._removed = {}
        return stored, removed

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Return the whole prefix index as chains, each after the chain that holds its parent."""
        return self._chains(self._subtree(ROOT))

    def snapshot_slice(self, start: int, end: int) -> tuple[BlocksStored, ...]:
        """Return what of the prefix index these blocks hold, as chains in any order."""
        return self._chains(key for key in self._keys[start:end] if key is not None)

    def _chains(self, keys: Iterable[bytes]) -> tuple[BlocksStored, ...]:
        chains: list[tuple[bytes, list[bytes]]] = []
        tail_to_chain: dict[bytes, list[bytes]] = {}
        for key in keys:
            parent = self._key_to_parent[key]
            chain = tail_to_chain.pop(parent, None)
            if chain is None:
                chain = []
                chains.append((parent, chain))
            chain.append(key)
            tail_to_chain[key] = chain
        return tuple(BlocksStored(parent=parent, keys=tuple(chain)) for parent, chain in chains)

    # ------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Assert every invariant; O(num_blocks)."""
        assert all(count >= 0 for count in self._refs)
        assert sum(self._refs) == self._num_references
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        referenced = {block for block, count in enumerate(self._refs) if count > 0}
        registered = {block for block, key in enumerate(self._keys) if key is not None}
        cached = registered - referenced
        assert len(cached) == self._num_cached
        assert len(free) + len(cached) + len(referenced) + len(self._quarantined) == self.num_total
        assert free | cached | referenced | self._quarantined == set(range(self.num_total))
        assert not self._quarantined & registered
        assert {self._keys[block]: block for block in registered} == self._key_to_block
        assert self._key_to_parent.keys() == self._key_to_block.keys()
        for key, parent in self._key_to_parent.items():
            assert parent == ROOT or parent in self._key_to_block, "a registered block's parent is not"
            assert key in self._children(parent)
        assert sum(len(self._children(key)) for key in self._key_to_children) == len(self._key_to_block)
        assert self._head_to_group.keys() == set(self._children(ROOT))
        private = {key: block for block, key in self._block_to_private_key.items()}
        assert private == self._private_key_to_block
        assert all(self._refs[block] > 0 and self._keys[block] is None for block in private.values())
        entries = set(self._evictable)
        for block in cached:
            if self._keys[block] not in self._key_to_children:
                assert (self._released_at[block], block) in entries, f"cached leaf {block} is out of reach"
        if self._groups is not None:
            self._check_groups(self._groups, cached, free)

    def _check_groups(self, groups: GroupBlocks, cached: set[int], free: set[int]) -> None:
        groups.check(self._refs, self._quarantined, free)
        assert groups.num_cached == Counter(map(groups.owner, cached))
        entries = set(groups.entries())
        for block in cached:
            if self._keys[block] not in self._key_to_children:
                entry = self._released_at[block], block
                assert (groups.owner(block), entry) in entries, f"cached leaf {block} is out of reach"
