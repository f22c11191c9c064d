"""The store as seen by replicas of one shape: available blocks, their tiers, and how each is assembled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import CompatibilityRecord, Shard
from kvtransfer.store.dram.catalog import Catalog
from kvtransfer.store.dram.record_table import Held
from kvtransfer.store.index.holder_reader import Holder
from kvtransfer.store.messages.engine_session import TierEvents, TierPart
from kvtransfer.store.messages.owner_codec import FromOwner
from kvtransfer.store.messages.records import RecordId, Tier
from kvtransfer.store.record import space_id
from kvtransfer.store.server.other_nodes import HolderIndex
from kvtransfer.store.server.shard_cover import cover
from kvtransfer.store.server.tier_changes import TierChanges, tier_of

# Blocks whose holders on other nodes are kept from a look-up, for the fetch that follows.
_MAX_LEARNED = 1 << 14
_TIERS: tuple[Tier, ...] = ("dram", "nvme", "remote")
# Of the records of other nodes, only the shape is known before they are here.


class PlannedRead(NamedTuple):
    """Rank `rank` reads `piece` of the record of `shard`."""

    rank: int
    shard: Shard
    piece: Shard


class FetchPlan(NamedTuple):
    """The way in which a block is assembled for all ranks, and the slowest tier that takes part."""

    tier: Tier
    reads: tuple[PlannedRead, ...]


class CatalogView:
    """The view that replicas with `shards` (in rank order) have of one space."""

    def __init__(
        self,
        compatibility: CompatibilityRecord,
        shards: Sequence[Shard],
        catalog: Catalog,
        index: Callable[[], HolderIndex | None],
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
        self._num_sessions = 0
        self._watchers: list[Callable[[FromOwner], None]] = []
        self._changes = TierChanges(self.shards, self._held, self._slice)

    # ------------------------------------------------------------------------------------------ events

    def open(self) -> None:
        """Note that a session uses the view."""
        self._num_sessions += 1

    def close(self, send: Callable[[FromOwner], None]) -> None:
        """Note that a session does not use the view any more, and send it no more changes."""
        self._num_sessions -= 1
        if send in self._watchers:
            self._watchers.remove(send)

    def watch(self, send: Callable[[FromOwner], None]) -> None:
        """Send a session the changes from now on."""
        if send not in self._watchers:
            self._watchers.append(send)

    def part(self, number: int) -> TierPart:
        """Return a part of the blocks, for a watcher."""
        return self._changes.part(number)

    def whole(self) -> TierEvents:
        """Return all blocks, for a watcher that takes no parts."""
        return self._changes.whole()

    @property
    def is_open(self) -> bool:
        """Whether a session uses the view."""
        return self._num_sessions > 0

    def changed(self, record: RecordId, reason: str) -> None:
        """Note that a record of this space was added, moved or, for this reason, removed."""
        self._changes.changed(record.key, reason)

    def publish(self) -> None:
        """Send the changes since the last call."""
        for events in self._changes.take():
            for send in self._watchers:
                send(events)

    # ------------------------------------------------------------------------------------------- blocks

    def tiers(self, keys: Sequence[bytes], *, local_only: bool = False) -> tuple[Tier, ...]:
        """Return the tier of each leading block that this node holds, or (unless `local_only`) that `learn`
        has found on other nodes."""
        tiers: list[Tier] = []
        for key in keys:
            if (tier := self.tier(key, local_only=local_only)) is None:
                break
            tiers.append(tier)
        return tuple(tiers)

    def tier(self, key: bytes, *, local_only: bool = False) -> Tier | None:
        """Return the tier of a block, or state, like `tiers`; None: it is not available."""
        held = self._held(key)
        tier: Tier | None = tier_of(self._needed, held) if held else None
        if tier is None and not local_only:
            everywhere = {*held, *(holder.shard for holder in self.holders(key))}
            if all(cover(shard, everywhere) is not None for shard in self._needed):
                tier = "remote"
        return tier

    async def learn(self, chain: bytes, keys: Sequence[bytes]) -> None:
        """Look up the holders of these blocks in the index, within its budget."""
        index = self._index()
        if index is None or not self._compatibility.kv_item_bytes:
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

    def payload_bytes(self, shard: Shard, *, is_state: bool = False) -> int:
        """Return the payload size of the record of that shard of a block, or of a state; 0 when it cannot be
        known."""
        num_groups = len(self._compatibility.groups) or 1
        layouts = (BlockLayout.of(self._compatibility, shard, group) for group in range(num_groups))
        return sum(layout.block_bytes for layout in layouts if layout.is_state == is_state)

    def _slice(self, index: int) -> Iterator[bytes]:
        return (each.key for each in self._catalog.slice(index) if each.space == self.space)

    def _held(self, key: bytes) -> Mapping[Shard, Held]:
        return self._catalog.lookup(self.space, key)
