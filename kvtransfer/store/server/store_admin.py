"""What administrators ask of a node's store: figures, records, a check of every byte, and deletion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import Clock
from kvtransfer.errors import WireError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.store_stream import FrameStream
from kvtransfer.store.dram.record_table import is_meant
from kvtransfer.store.messages import (
    FROM_OWNER_CODEC,
    TO_OWNER_CODEC,
    AdminFailed,
    AdminUp,
    IndexStat,
    ListedRecord,
    ListRequest,
    PurgeRequest,
    PurgeResult,
    RecordId,
    StatRequest,
    StoreListing,
    StoreStat,
    TierStat,
    ToOwner,
    VerifyRequest,
    VerifyResult,
)
from kvtransfer.store.server.node import Node

_MAX_LISTED = 10_000
# While records are awaited by readers, a check of all of them pauses before each, so often for so long.
_YIELD_S, _MAX_YIELDS = 0.005, 200

_log = logging.getLogger("tandem.store")


class Admin:
    """Answers administrators; any number of connections, one check of all records at a time."""

    def __init__(
        self, identity: ReplicaIdentity, node: Node, clock: Clock, num_sessions: Callable[[], int]
    ) -> None:
        self._identity = identity
        self._node = node
        self._clock = clock
        self._num_sessions = num_sessions
        self._thread = ThreadPoolExecutor(1, "store-verify")
        self._verifying = asyncio.Lock()

    def close(self) -> None:
        """Nothing is under way any more."""
        self._thread.shutdown()

    async def serve(self, stream: FrameStream) -> None:
        """Answer one administrator until the connection ends."""
        try:
            while True:
                answer = await self._answer(TO_OWNER_CODEC.decode(await stream.receive()))
                stream.send(FROM_OWNER_CODEC.encode(answer))
        finally:
            stream.abort()

    async def _answer(self, request: ToOwner) -> AdminUp:
        match request:
            case StatRequest():
                return self.stat()
            case ListRequest():
                return self._list(request)
            case VerifyRequest():
                async with self._verifying:
                    return await self._verify(request)
            case PurgeRequest():
                return await self._purge(request)
            case _:
                raise WireError(f"an administrator sent {type(request).__name__}")

    # -------------------------------------------------------------------------------------------- asking

    def stat(self) -> StoreStat:
        """All tiers of the node."""
        node = self._node
        nvme = node.disk.stat()
        tiers = [node.catalog.stat()]
        if nvme is not None:
            waiting = node.writes.num_waiting, nvme.num_refused + node.writes.num_dropped
            tiers.append(replace(nvme, num_queued=waiting[0], num_refused=waiting[1]))
        if node.index is not None:
            tiers.append(self._remote())
        return StoreStat(
            self._identity,
            tuple(tiers),
            IndexStat("off") if node.index is None else node.index.stat(),
            node.catalog.bytes_by_tenant(),
            self._num_sessions(),
        )

    def _remote(self) -> TierStat:
        exchange = self._node.exchange
        if exchange is None:
            return TierStat("remote", 0, 0, 0)
        seen = exchange.stat()
        return TierStat(
            "remote",
            0,
            0,
            0,
            num_hits=seen.num_hits,
            num_misses=seen.num_misses,
            num_hit_bytes=seen.num_hit_bytes,
            num_written_bytes=seen.num_sent_bytes,
            num_io_errors=seen.num_failures,
            num_quarantined=seen.num_quarantined,
            read_gb_s=seen.gb_s,
            latency_s=seen.latency_s,
            note=seen.note,
        )

    def _list(self, request: ListRequest) -> StoreListing:
        matching = [
            held
            for held in self._node.catalog.records()
            if is_meant(held.info, request.tenant, request.model)
        ]
        limit = min(max(request.limit, 0), _MAX_LISTED)
        listed = (ListedRecord(held.info, held.tiers, held.num_hits) for held in matching[:limit])
        return StoreListing(tuple(listed), len(matching))

    # -------------------------------------------------------------------------------------------- verify

    async def _verify(self, request: VerifyRequest) -> VerifyResult:
        started_at = self._clock.now()
        num_read = {"dram": 0, "nvme": 0}
        num_bad = {"dram": 0, "nvme": 0}
        num_bytes = 0
        meant = [
            (held.info.id, held.info.num_bytes)
            for held in self._node.catalog.records()
            if is_meant(held.info, request.tenant, request.model)
        ]
        for record, size in meant:
            await self._give_way()
            for tier, check in (("dram", self._check_dram), ("nvme", self._check_nvme)):
                is_good = await check(record)
                if is_good is not None:
                    num_read[tier] += 1
                    num_bad[tier] += not is_good
                    num_bytes += size
        return VerifyResult(num_read, num_bad, num_bytes, self._clock.now() - started_at)

    async def _give_way(self) -> None:
        for _ in range(_MAX_YIELDS):
            if not self._node.loads.num_waiting:
                return
            await self._clock.sleep(_YIELD_S)

    async def _check_dram(self, record: RecordId) -> bool | None:
        """None: it is not there."""
        catalog = self._node.catalog
        offset, arena = catalog.lease(record, is_hit=False), catalog.arena
        if offset is None or arena is None:
            return None
        try:
            held = catalog.find(record)
            if held is None or held.offset != offset:
                return None
            info = held.info
            payload = arena.payload(offset, info.num_bytes)
            found = await asyncio.get_running_loop().run_in_executor(self._thread, checksum, payload)
            if found == info.checksum:
                return True
            self._node.bad(offset)
            return False
        finally:
            catalog.release(offset)

    async def _check_nvme(self, record: RecordId) -> bool | None:
        """None: it is not there."""
        held = self._node.catalog.find(record)
        if held is None or held.nvme_info is None:
            return None
        return await self._node.disk.examine(record)

    # --------------------------------------------------------------------------------------------- purge

    async def _purge(self, request: PurgeRequest) -> PurgeResult | AdminFailed:
        """Not found from here on; deleted when this answers, but for what is being read or written."""
        failure, purged = await self._node.purge(request.tenant, request.model)
        if failure:
            return AdminFailed(failure)
        _log.info("purged: tenant %s, model %s: %s", request.tenant, request.model, purged.num_records)
        return PurgeResult(purged.num_records, purged.num_bytes, purged.num_pending)
