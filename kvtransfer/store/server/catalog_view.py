"""What replicas of one shape see of the store: which blocks they could have, from where, assembled how."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from kvtransfer.blocks.layout import BlockLayout, intersect, shard_size, without
from kvtransfer.messages import ITEM_BYTES, BlocksStored, CompatibilityRecord, Shard
from kvtransfer.store.dram.catalog import Catalog, Held
from kvtransfer.store.index.index import Holder, Index
from kvtransfer.store.messages import FromOwner, RecordId, Tier, TierEvents
from kvtransfer.store.record import space_id

# Blocks whose holders on other nodes are remembered from a look-up, for the fetch that follows.
_MAX_LEARNED = 1 << 14
_TIERS: tuple[Tier, ...] = ("dram", "nvme", "remote")
# Of what other nodes hold only the shape is known before it is here.


class PlannedRead(NamedTuple):
    """Rank `rank` needs `piece` of the record of `shard`."""

    rank: int
    shard: Shard
    piece: Shard


class FetchPlan(NamedTuple):
    """How a block is assembled for all ranks, and the slowest of the tiers from which that is."""

    tier: Tier
    takes: tuple[PlannedRead, ...]


class CatalogView:
    """One space as replicas with `shards` (in rank order) see it."""

    def __init__(
        self,
        compatibility: CompatibilityRecord,
        shards: Sequence[Shard],
        catalog: Catalog,
        index: Callable[[], Index | None],
        usable: Callable[[Sequence[Holder]], Sequence[Holder]],
    ) -> None:
        """`usable` says which holders could be asked now."""
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

    def watch(self, tell: Callable[[FromOwner], None]) -> None:
        """Tell all there is, then what changes."""
        for events in self._changes.snapshot():
            tell(events)
        self._watchers.append(tell)

    def unwatch(self, tell: Callable[[FromOwner], None]) -> None:
        """No more."""
        self._watchers.remove(tell)

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    def changed(self, record: RecordId) -> None:
        """A record of this space came, went or moved."""
        self._changes.changed(record.key)

    def publish(self) -> None:
        """Tell what changed since the last time."""
        for events in self._changes.take():
            for tell in self._watchers:
                tell(events)

    # ------------------------------------------------------------------------------------------- blocks

    def local_tiers(self, keys: Sequence[bytes]) -> tuple[Tier, ...]:
        """The tier of each leading block that this node has."""
        tiers: list[Tier] = []
        for key in keys:
            held = self._held(key)
            tier = tier_of(self._needed, held) if held else None
            if tier is None:
                break
            tiers.append(tier)
        return tuple(tiers)

    def tiers(self, keys: Sequence[bytes]) -> tuple[Tier, ...]:
        """The same, with what other nodes have as far as `learn` was sent."""
        tiers: list[Tier] = []
        for key in keys:
            held = self._held(key)
            tier: Tier | None = tier_of(self._needed, held) if held else None
            if tier is None:
                everywhere = {*held, *(holder.shard for holder in self.holders(key))}
                if any(cover(shard, everywhere) is None for shard in self._needed):
                    break
                tier = "remote"
            tiers.append(tier)
        return tuple(tiers)

    async def learn(self, chain: bytes, keys: Sequence[bytes]) -> None:
        """Ask the index who has these blocks; takes no longer than its budget."""
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
        """The other nodes' records of the block that could be asked for, as learnt last."""
        return tuple(self._usable(self._learned.get(key, ())))

    def forget(self, key: bytes) -> None:
        """What was learnt of the block is wrong."""
        self._learned.pop(key, None)

    def plan(self, key: bytes) -> FetchPlan | None:
        """From the cheapest tiers that suffice for each rank; None when the block cannot be had."""
        held = self._held(key)
        choices = [
            {shard for shard, each in held.items() if each.offset is not None},
            set(held),
            {*held, *(holder.shard for holder in self.holders(key))},
        ]
        takes: list[PlannedRead] = []
        slowest = 0
        for rank, needed in enumerate(self.shards):
            covers = (cover(needed, shards) for shards in choices)
            tier, pieces = next(((tier, found) for tier, found in enumerate(covers) if found), (0, None))
            if pieces is None:
                return None
            slowest = max(slowest, tier)
            takes += [PlannedRead(rank, shard, piece) for shard, piece in pieces]
        return FetchPlan(_TIERS[slowest], tuple(takes))

    def payload_bytes(self, shard: Shard) -> int:
        """What a block's record of that shard holds; 0 when it cannot be known."""
        fields = self._compatibility
        item_bytes = ITEM_BYTES.get(fields.dtype, 0)
        return BlockLayout(shard, fields.head_dim, fields.block_tokens, item_bytes).block_bytes

    def _held(self, key: bytes) -> Mapping[Shard, Held]:
        return self._catalog.lookup(self.space, key)


# ----------------------------------------------------------------------------------------------
# In which tier of the node a replica's blocks lie, as sent to its brain: by differences, sans-I/O.

LocalTier = Literal["dram", "nvme"]
_LOCAL_TIERS: tuple[LocalTier, ...] = ("dram", "nvme")
# Blocks sent in one message.
_EVENTS_BLOCKS = 4096


class BlockLocation(NamedTuple):
    """What brains were sent of a block."""

    tier: LocalTier
    parent: bytes


class TierChanges:
    """One space as seen by replicas of one shape: a block is in a tier when it covers all their shards."""

    def __init__(
        self, shards: Iterable[Shard], lookup: Callable[[bytes], Mapping[Shard, Held]], keys: Iterable[bytes]
    ) -> None:
        """`lookup(key)` are the records of a block; `keys` those there are now."""
        self._shards = frozenset(shards)
        self._lookup = lookup
        self._sent: dict[bytes, BlockLocation] = {}
        self._changed: set[bytes] = set(keys)
        self.take()

    def changed(self, key: bytes) -> None:
        """A record of this block came, went or moved."""
        self._changed.add(key)

    def take(self) -> list[TierEvents]:
        """What changed since the last time; [] when nothing did."""
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
        """All there is, as sent so far; at least one message."""
        return _messages(self._sent, []) or [TierEvents((), ())]

    def _find(self, key: bytes) -> BlockLocation | None:
        held = self._lookup(key)
        if not held:
            return None
        tier = tier_of(self._shards, held)
        return None if tier is None else BlockLocation(tier, next(iter(held.values())).info.parent)


def tier_of(shards: Iterable[Shard], held: Mapping[Shard, Held]) -> LocalTier | None:
    """The cheapest tier from which each of the shards can be had; None when one cannot."""
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
    """As few chains as one pass finds: each block follows its parent where both are in the same tier."""
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
# Which records of a block together hold a shard: for readers of another shape than the writers'.

# After so many attempts to do with fewer records, the best found is taken.
MAX_STEPS = 256


def cover(needed: Shard, held: Iterable[Shard]) -> list[tuple[Shard, Shard]] | None:
    """What to take from which record: (the record's shard, a piece of it and of `needed`); the pieces are
    disjoint and make up `needed`. None when `held` leaves a gap.

    The exact record if there is one, else as few records as can be found in `MAX_STEPS` attempts; the smaller
    ones among equals. A record is named once for each piece that is taken from it. The result depends on the
    set of `held` alone.
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
