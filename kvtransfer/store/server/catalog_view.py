"""What replicas of one shape see of the store: which blocks they could have, from where, assembled how."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvtransfer.layout import BlockLayout
from kvtransfer.messages import CompatibilityRecord, Shard
from kvtransfer.store.cover import cover
from kvtransfer.store.dram.books import Held
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.index.holders import Holder
from kvtransfer.store.index.index import Index
from kvtransfer.store.messages import FromOwner, RecordId, Tier
from kvtransfer.store.node.tier_view import TierView, tier_of
from kvtransfer.store.record import space_id

_MAX_LEARNED = 1 << 14
"""Blocks whose holders on other nodes are remembered from a look-up, for the fetch that follows."""
_TIERS: tuple[Tier, ...] = ("dram", "nvme", "remote")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of what other nodes hold only the shape is known before it is here."""


class Take(NamedTuple):
    """Rank `rank` needs `piece` of the record of `shard`."""

    rank: int
    shard: Shard
    piece: Shard


class Plan(NamedTuple):
    """How a block is assembled for all ranks, and the slowest of the tiers from which that is."""

    tier: Tier
    takes: tuple[Take, ...]


class Sight:
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
        self._view = TierView(self.shards, self._held, keys)

    # ------------------------------------------------------------------------------------------ events

    def watch(self, tell: Callable[[FromOwner], None]) -> None:
        """Tell all there is, then what changes."""
        for events in self._view.snapshot():
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
        self._view.changed(record.key)

    def publish(self) -> None:
        """Tell what changed since the last time."""
        for events in self._view.take():
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
        """The same, with what other nodes have as far as `learn` was told."""
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
        if index is None or self._compatibility.dtype not in _ITEM_BYTES:
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

    def plan(self, key: bytes) -> Plan | None:
        """From the cheapest tiers that suffice for each rank; None when the block cannot be had."""
        held = self._held(key)
        choices = [
            {shard for shard, each in held.items() if each.offset is not None},
            set(held),
            {*held, *(holder.shard for holder in self.holders(key))},
        ]
        takes: list[Take] = []
        slowest = 0
        for rank, needed in enumerate(self.shards):
            covers = (cover(needed, shards) for shards in choices)
            tier, pieces = next(((tier, found) for tier, found in enumerate(covers) if found), (0, None))
            if pieces is None:
                return None
            slowest = max(slowest, tier)
            takes += [Take(rank, shard, piece) for shard, piece in pieces]
        return Plan(_TIERS[slowest], tuple(takes))

    def payload_bytes(self, shard: Shard) -> int:
        """What a block's record of that shard holds; 0 when it cannot be known."""
        fields = self._compatibility
        item_bytes = _ITEM_BYTES.get(fields.dtype, 0)
        return BlockLayout(shard, fields.head_dim, fields.block_tokens, item_bytes).block_bytes

    def _held(self, key: bytes) -> Mapping[Shard, Held]:
        return self._catalog.lookup(self.space, key)
