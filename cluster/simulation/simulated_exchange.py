"""What simulated nodes know of the records of others, and how these come over the network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.simulation.simulated_media import CopyLane
from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.virtual_loop import LoopClock
from kvtransfer.common.moving_average import RateMeter
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.store.index.holder_reader import Holder
from kvtransfer.store.messages.admin_requests import IndexStat, TierStat
from kvtransfer.store.messages.records import RecordId, RecordInfo, Tier
from kvtransfer.store.record import image_bytes
from kvtransfer.store.remote.owner_link import Wanted
from kvtransfer.store.server.node_tiers import NodeTiers

# What a look-up in the index takes: there, and back.
LOOK_UP_S = 2 * NETWORK_S
_EPOCH = 1


class OtherStores:
    """All nodes of a simulation, and who has which block: the index, without delay of announcements."""

    def __init__(self) -> None:
        self.nodes: dict[str, SimulatedExchange] = {}
        self.holders: dict[tuple[bytes, bytes], dict[tuple[str, Shard], Holder]] = {}


class SimulatedIndex:
    """The index, as one node sees it (`kvtransfer.store.server.other_nodes.HolderIndex`)."""

    def __init__(self, node_id: str, others: OtherStores, clock: LoopClock) -> None:
        self._node_id = node_id
        self._others = others
        self._holders = others.holders
        self._clock = clock
        self._num_lookups = 0

    def announce(self, info: RecordInfo, tier: Tier | None) -> None:
        block, place = (info.id.space, info.id.key), (self._node_id, info.id.shard)
        if tier is not None:
            holder = Holder(self._node_id, _EPOCH, self._node_id, tier, info.id.shard)
            self._holders.setdefault(block, {})[place] = holder
        elif (its := self._holders.get(block)) is not None:
            its.pop(place, None)
            if not its:
                del self._holders[block]

    async def find(self, space: bytes, chain: bytes, keys: Sequence[bytes]) -> list[tuple[Holder, ...]]:
        if len(self._others.nodes) == 1:
            return [()] * len(keys)
        self._num_lookups += 1
        await self._clock.sleep(LOOK_UP_S)
        found = [self._holders.get((space, key), {}).values() for key in keys]
        return [tuple(each for each in its if each.node_id != self._node_id) for its in found]

    def stat(self) -> IndexStat:
        return IndexStat("up", self._num_lookups)

    async def close(self) -> None:
        """A simulated node does not leave."""


class SimulatedExchange:
    """The exchange of one node with all others (`kvtransfer.store.server.other_nodes.RecordExchange`)."""

    def __init__(
        self, node_id: str, tiers: NodeTiers, others: OtherStores, clock: LoopClock, bytes_s: float
    ) -> None:
        self.rate = RateMeter()
        self.tiers = tiers
        # What leaves the node, and what comes in.
        self.sends, self.receives = CopyLane(bytes_s), CopyLane(bytes_s)
        self._others = others
        self._clock = clock
        self._num_hits = self._num_misses = self._num_hit_bytes = 0
        others.nodes[node_id] = self

    async def fetch(
        self, holder: ReplicaIdentity, address: str, wanted: Sequence[Wanted]
    ) -> dict[RecordId, int]:
        clock, source = self._clock, self._others.nodes[holder.replica_id]
        began_at = clock.now()
        self.rate.begin(began_at)
        await clock.sleep(NETWORK_S)
        came = await asyncio.gather(*[self._bring(source, each) for each in wanted])
        fetched = {each.record: total for each, total in zip(wanted, came, strict=True) if total is not None}
        num_bytes = sum(image_bytes(each.num_bytes) for each in wanted if each.record in fetched)
        self.rate.end(clock.now(), began_at, num_bytes)
        self._num_hits += len(fetched)
        self._num_misses += len(wanted) - len(fetched)
        self._num_hit_bytes += num_bytes
        return fetched

    async def _bring(self, source: SimulatedExchange, wanted: Wanted) -> int | None:
        """Bring a record into its slot; return its checksum, or None, with the slot free, if that failed."""
        leased, arena = await source.tiers.lease_record(wanted.record), self.tiers.catalog.arena
        source_arena = source.tiers.catalog.arena
        assert arena is not None
        assert source_arena is not None
        if leased is None:
            self.tiers.slot_free(wanted.offset)
            return None
        num_bytes = image_bytes(leased.num_bytes)
        sent_at = source.sends.take(self._clock.now(), num_bytes)
        received_at = max(sent_at, self.receives.take(self._clock.now(), num_bytes)) + NETWORK_S
        await self._clock.sleep(received_at - self._clock.now())
        if (info := source_arena.info_at(leased.offset)) is not None:
            arena.write_header(wanted.offset, info, "allocated", 0)
        source.tiers.release_record(leased)
        return leased.checksum

    def is_cooling(self, holder: ReplicaIdentity) -> bool:
        return False

    def stat(self) -> TierStat:
        return TierStat(
            "remote",
            num_bytes=0,
            capacity_bytes=0,
            num_records=0,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_hit_bytes=self._num_hit_bytes,
            read_gb_s=self.rate.gb_s,
            latency_s=self.rate.latency_s,
        )

    async def close(self) -> None:
        """A simulated node does not leave."""
