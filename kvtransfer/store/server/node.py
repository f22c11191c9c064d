"""The tiers of a node, in shared memory and in a folder on NVMe, beside the index and other owners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import Spawn
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.dram.arena import Arena, fill_with_zeros
from kvtransfer.store.dram.catalog import Purged
from kvtransfer.store.dram.prefault import Prefault
from kvtransfer.store.index.index import Index
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo, Tier
from kvtransfer.store.nvme.log import NvmeTier
from kvtransfer.store.remote.exchange import Exchange, arena_pool
from kvtransfer.store.remote.serve import RecordSender
from kvtransfer.store.server.node_tiers import NodeTiers

_log = logging.getLogger("tandem.store")


class StoreNode(NodeTiers):
    """See the module's text."""

    def __init__(
        self, settings: StoreSettings, trust: Trust, clock: Clock, faults: Faults, spawn: Spawn
    ) -> None:
        nvme = NvmeTier(settings, clock, faults) if settings.nvme_path else None
        super().__init__(settings, nvme, clock, faults, spawn)
        self._trust = trust
        self._faults = faults
        self._prefault: Prefault | None = None
        # Serves the owners that request records; none before there is an arena.
        self.sender: RecordSender | None = None

    async def open(self, address: str) -> None:
        """Open the index, under this owner's `address`, and NVMe; return when the records on NVMe are
        known."""
        if self.settings.redis_url:
            identity = ReplicaIdentity(self.settings.node_id, self.settings.epoch)
            index = self.index = Index(self.settings, identity, address, self._clock, self._everything)
            await index.start()
        await self.open_disk()

    def attach(self, arena: Arena, prefault: Prefault) -> None:
        """Use this arena as the host tier, and begin to exchange records with other nodes."""
        self._prefault = prefault
        pool = arena_pool(arena.fd, arena.num_bytes, arena.granule_bytes)
        exchange = Exchange(self.settings, self._trust, pool, self, self._spawn, self._clock, self._faults)
        self.sender = exchange.sender
        self.use(arena, exchange)

    def _turn(self) -> None:
        super()._turn()
        if self._prefault is not None:
            self._prefault.top_up()

    async def close(self, flush_s: float) -> None:
        """Write admitted records to NVMe for at most `flush_s`, and leave the index."""
        self.settle_all()
        try:
            async with asyncio.timeout(flush_s):
                await self.disk.was_tried.wait()  # records from before are judged only then
                self.settle_all()
                await self.writes.flush()
        except TimeoutError:
            _log.warning("%d records were not written to NVMe in time", self.writes.num_waiting)
            self.writes.drop_all()
            await self.writes.flush()
        if self.index is not None:
            await self.index.close()

    async def release(self) -> None:
        """Close the tiers, when no task of the node runs any more."""
        await self.disk.close()
        if self.exchange is not None:
            await self.exchange.close()
        if self.catalog.arena is not None:
            self.catalog.arena.close()

    async def purge(self, order: PurgeOrder) -> tuple[str, Purged]:
        """Delete these records from all tiers, and clear their memory and their places on NVMe. Also return
        why a restart may bring some back from NVMe, or ""."""
        purged = self.catalog.purge(order, keeps_slots=True)
        # A client that no longer waits for the answer must not keep slots from being free.
        clearing = self._spawn(self._clear(purged.slots), "store-clear")
        failure = await self.disk.erase(purged.erase, order)
        await self.writes.passed()
        failure = failure or await self.disk.end_purge(order)
        await asyncio.wait([clearing])
        return failure, purged

    async def _clear(self, offsets: Sequence[int]) -> None:
        """Clear these slots on a thread, and free them."""
        for offset in offsets:
            if (memory := self.catalog.unread_memory(offset)) is not None:
                await asyncio.to_thread(fill_with_zeros, memory)
                self.catalog.cleared(offset)
            self.catalog.release(offset)

    def _everything(self) -> Iterator[tuple[RecordInfo, Tier]]:
        return ((held.info, held.tiers[0]) for held in self.catalog.records())
