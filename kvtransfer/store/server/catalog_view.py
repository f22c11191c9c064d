"""The store as seen by replicas of one shape: available blocks, their tiers, and how each is assembled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from kvtransfer.blocks.layout import BlockLayout, intersect, shard_size, without
from kvtransfer.messages import ITEM_BYTES, BlocksStored, CompatibilityRecord, Shard
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.dram.record_table import Held
from kvtransfer.store.index.index import Holder, Index
from kvtransfer.store.messages import FromOwner, RecordId, Tier, TierEvents
from kvtransfer.store.record import space_id

# Blocks whose holders on other nodes are kept from a look-up, for the fetch that follows.
_MAX_LEARNED = 1 << 14
_TIERS: tuple[Tier, ...] = ("dram", "nvme", "remote")
# Of what other nodes hold only the shape is known before it is here.


class PlannedRead(NamedTuple):
    """Rank `rank` reads `piece` of the record of `shard`."""

    rank: int
    shard: Shard
    piece: Shard


class FetchPlan(NamedTuple):
    """How a block is assembled for all ranks, and the slowest tier that takes part."""

    tier: Tier
    reads: tuple[PlannedRead, ...]


class CatalogView:
    """The view that replicas with `shards` (in rank order) have of one space."""

    def __init__(
        self,
        compatibility: CompatibilityRecord,
        shards: Sequence[Shard],
        catalog: Catalog,
        index: Callable[[], Index | None],
        usable: Callable[[Sequence[Holder]], Sequence[Holder]],
    ) -> None:
        """`index` returns the index, once there is one; `usable` selects the holders that could be contacted
        now."""
        self.space = space_id(compatibility)
        self.shards = tuple(shards)
        self.model = compatibility.model_fingerprint
        self._needed = frozenset(shards)
        self._compatibility = compatibility
        self._catalog = catalog
        self._index = index
        self._usable = usable
        self._learned: OrderedDict[bytes, tuple[Holder, ...]] = OrderedDict()
        self._watchers: list[Callable[[FromOwner], None]] = []
        keys = [each.info.id.key for each in catalog.records() if each.info.id.space == self.space]
        self._changes = TierChanges(self.shards, self._held, keys)

    # ------------------------------------------------------------------------------------------ events

    def watch(self, send: Callable[[FromOwner], None]) -> None:
        """Send all blocks, and their changes from now on."""
        for events in self._changes.snapshot():
            send(events)
        self._watchers.append(send)

    def unwatch(self, send: Callable[[FromOwner], None]) -> None:
        """Send no more changes."""
        self._watchers.remove(send)

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    def changed(self, record: RecordId) -> None:
        """Note that a record of this space was added, removed or moved."""
        self._changes.changed(record.key)

    def publish(self) -> None:
        """Send what has changed since the last call."""
        for events in self._changes.take():
            for send in self._watchers:
                send(events)

    # ------------------------------------------------------------------------------------------- blocks

    def tiers(self, keys: Sequence[bytes], *, local_only: bool = False) -> tuple[Tier, ...]:
        """Return the tier of each leading block that this node holds, or (unless `local_only`) that `learn`
        has found on other nodes."""
        tiers: list[Tier] = []
        for key in keys:
            held = self._held(key)
            tier: Tier | None = tier_of(self._needed, held) if held else None
            if tier is None and not local_only:
                everywhere = {*held, *(holder.shard for holder in self.holders(key))}
                if all(cover(shard, everywhere) is not None for shard in self._needed):
                    tier = "remote"
            if tier is None:
                break
            tiers.append(tier)
        return tuple(tiers)

    async def learn(self, chain: bytes, keys: Sequence[bytes]) -> None:
        """Look up the holders of these blocks in the index, within its budget."""
        index = self._index()
        if index is None or self._compatibility.dtype not in ITEM_BYTES:
            return
        for key, holders in zip(keys, await index.find(self.space, chain, keys), strict=True):
            self._learned.pop(key, None)
            if holders:
                self._learned[key] = holders
        while len(self._learned) > _MAX_LEARNED:
            self._learned.popitem(last=False)

    def holders(self, key: bytes) -> tuple[Holder, ...]:
        """Return the usable holders of the block on other nodes, as of the last look-up."""
        return tuple(self._usable(self._learned.get(key, ())))

    def forget(self, key: bytes) -> None:
        """Discard the holders of the block, which proved wrong."""
        self._learned.pop(key, None)

    def plan(self, key: bytes) -> FetchPlan | None:
        """Plan the block from the cheapest tiers that suffice for each rank; None: it is not available."""
        held = self._held(key)
        choices = [
            {shard for shard, each in held.items() if each.offset is not None},
            set(held),
            {*held, *(holder.shard for holder in self.holders(key))},
        ]
        reads: list[PlannedRead] = []
        slowest = 0
        for rank, needed in enumerate(self.shards):
            covers = (cover(needed, shards) for shards in choices)
            tier, pieces = next(((tier, found) for tier, found in enumerate(covers) if found), (0, None))
            if pieces is None:
                return None
            slowest = max(slowest, tier)
            reads += [PlannedRead(rank, shard, piece) for shard, piece in pieces]
        return FetchPlan(_TIERS[slowest], tuple(reads))

    def payload_bytes(self, shard: Shard) -> int:
        """Return the payload size of a block's record of that shard; 0 when it cannot be known."""
        fields = self._compatibility
        item_bytes = ITEM_BYTES.get(fields.dtype, 0)
        return BlockLayout(shard, fields.head_dim, fields.block_tokens, item_bytes).block_bytes

    def _held(self, key: bytes) -> Mapping[Shard, Held]:
        return self._catalog.lookup(self.space, key)


# ----------------------------------------------------------------------------------------------
# In which tier of the node a replica's blocks lie, as sent to engine cores: by differences, sans-I/O.

LocalTier = Literal["dram", "nvme"]
_LOCAL_TIERS: tuple[LocalTier, ...] = ("dram", "nvme")
# Blocks in one message.
_EVENTS_BLOCKS = 4096


class BlockLocation(NamedTuple):
    """The tier and the parent of a block, as sent to engine cores."""

    tier: LocalTier
    parent: bytes


class TierChanges:
    """Changes of one space for replicas of one shape: a tier holds a block when it covers all their
    shards."""

    def __init__(
        self, shards: Iterable[Shard], lookup: Callable[[bytes], Mapping[Shard, Held]], keys: Iterable[bytes]
    ) -> None:
        """`lookup(key)` returns the records of a block; `keys` are the blocks of now."""
        self._shards = frozenset(shards)
        self._lookup = lookup
        self._sent: dict[bytes, BlockLocation] = {}
        self._changed: set[bytes] = set(keys)
        self.take()

    def changed(self, key: bytes) -> None:
        """Note that a record of this block was added, removed or moved."""
        self._changed.add(key)

    def take(self) -> list[TierEvents]:
        """Return the changes since the last call; [] when there are none."""
        stored: dict[bytes, BlockLocation] = {}
        removed: list[bytes] = []
        for key in self._changed:
            now = self._find(key)
            if now == self._sent.get(key):
                continue
            if now is None:
                removed.append(key)
                del self._sent[key]
            else:
                stored[key] = self._sent[key] = now
        self._changed.clear()
        return _messages(stored, removed)

    def snapshot(self) -> list[TierEvents]:
        """Return all blocks, as sent so far; at least one message."""
        return _messages(self._sent, []) or [TierEvents((), ())]

    def _find(self, key: bytes) -> BlockLocation | None:
        held = self._lookup(key)
        if not held:
            return None
        tier = tier_of(self._shards, held)
        return None if tier is None else BlockLocation(tier, next(iter(held.values())).info.parent)


def tier_of(shards: Iterable[Shard], held: Mapping[Shard, Held]) -> LocalTier | None:
    """Return the cheapest tier that holds each of the shards; None when one is not held."""
    in_dram = [shard for shard, each in held.items() if each.offset is not None]
    slowest = 0
    for shard in shards:
        if cover(shard, in_dram) is None:
            slowest = 1
            if cover(shard, held) is None:
                return None
    return _LOCAL_TIERS[slowest]


def _messages(stored: Mapping[bytes, BlockLocation], removed: list[bytes]) -> list[TierEvents]:
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


def _chains(stored: Mapping[bytes, BlockLocation]) -> Iterable[BlocksStored]:
    """Join blocks to chains: each block follows its parent where both are in the same tier."""
    children: dict[bytes, list[bytes]] = {}
    starts: list[bytes] = []
    for key, sent in stored.items():
        before = stored.get(sent.parent)
        if before is not None and before.tier == sent.tier:
            children.setdefault(sent.parent, []).append(key)
        else:
            starts.append(key)
    while starts:
        first = starts.pop()
        keys = [first]
        while following := children.get(keys[-1]):
            keys.append(following[0])
            starts += following[1:]
        yield BlocksStored(stored[first].parent, tuple(keys), stored[first].tier)


# ----------------------------------------------------------------------------------------------
# Which records of a block together hold a shard, for readers of another shape than the writers'.

# After so many attempts to find fewer records, the best cover so far is used.
MAX_STEPS = 256


def cover(needed: Shard, held: Iterable[Shard]) -> list[tuple[Shard, Shard]] | None:
    """Return what to read from which record, as (the record's shard, a piece of it and of `needed`): the
    pieces are disjoint and make up `needed`. None when `held` leaves a gap.

    Uses the exact record if there is one, otherwise as few records as are found in `MAX_STEPS` attempts, and
    among equals the smaller ones. A record is named once for each piece that is read from it. The result
    depends on the set of `held` alone.
    """
    if not isinstance(held, frozenset | set | dict):
        held = set(held)
    if needed in held:
        return [(needed, needed)]
    pieces = _assemble(needed, frozenset(held))
    return None if pieces is None else list(pieces)


@lru_cache(maxsize=1024)  # the blocks of a chain are held alike
def _assemble(needed: Shard, held: frozenset[Shard]) -> tuple[tuple[Shard, Shard], ...] | None:
    useful = {shard: both for shard in held if (both := intersect(needed, shard))}
    order = {shard: (-shard_size(both), shard_size(shard), _corner(shard)) for shard, both in useful.items()}
    ordered = sorted(useful, key=order.__getitem__)
    chosen = _Search(needed, ordered).best
    if chosen is None:
        return None
    pieces: list[tuple[Shard, Shard]] = []
    for shard in chosen:
        taken = [piece for _, piece in pieces]
        pieces += [(shard, piece) for piece in without(useful[shard], taken)]
    return tuple(sorted(pieces, key=lambda pair: _corner(pair[1])))


class _Search:
    """Depth first: the first cell that is not covered must be covered by some record; the one with most of
    the shard is tried first. Any choice can be completed, so the first descent finds a cover or a gap."""

    def __init__(self, needed: Shard, ordered: list[Shard]) -> None:
        self.best: list[Shard] | None = None
        self._needed = needed
        self._ordered = ordered
        self._num_steps = 0
        self._descend([])

    def _descend(self, chosen: list[Shard]) -> None:
        gap = min(without(self._needed, chosen), key=_corner, default=None)
        if gap is None:
            self.best = chosen
            return
        corner = Shard(gap.layer_start, gap.layer_start + 1, gap.head_start, gap.head_start + 1)
        for shard in self._ordered:
            if self.best is not None and len(chosen) + 1 >= len(self.best):
                return
            if intersect(corner, shard) is None:
                continue
            if self.best is not None:
                self._num_steps += 1
                if self._num_steps > MAX_STEPS:
                    return
            self._descend([*chosen, shard])


def _corner(shard: Shard) -> tuple[int, int, int, int]:
    return shard.layer_start, shard.head_start, shard.layer_end, shard.head_end
