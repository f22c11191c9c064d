"""Answer the requests of administrators: statistics, records, verification of every byte, and deletion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import Clock
from kvtransfer.errors import WireError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream
from kvtransfer.store.messages.admin_requests import (
    AdminAnswer,
    AdminFailed,
    IndexStat,
    ListedRecord,
    ListRequest,
    PurgeRequest,
    PurgeResult,
    StatRequest,
    StoreListing,
    StoreStat,
    TierStat,
    VerifyRequest,
    VerifyResult,
)
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, TO_OWNER_CODEC, ToOwner
from kvtransfer.store.messages.records import PurgeOrder, RecordId
from kvtransfer.store.server.node import StoreNode

_log = logging.getLogger("tandem.store")


_MAX_LISTED = 10_000

# While readers wait for records, a verification pauses before each record: so long, at most so often.
_YIELD_S, _MAX_YIELDS = 0.005, 200


class AdminService:
    """Answers administrators: on any number of connections, with one verification at a time."""

    def __init__(
        self, identity: ReplicaIdentity, node: StoreNode, clock: Clock, sessions: Collection[bytes]
    ) -> None:
        self._identity = identity
        self._node = node
        self._clock = clock
        self._sessions = sessions
        self._thread = ThreadPoolExecutor(1, "store-verify")
        self._verifying = asyncio.Lock()

    def close(self) -> None:
        """End the thread. No request may be under way."""
        self._thread.shutdown()

    async def serve(self, stream: FrameStream) -> None:
        """Answer an administrator until the connection ends."""
        try:
            while True:
                answer = await self._answer(TO_OWNER_CODEC.decode(await stream.next_frame()))
                stream.send(FROM_OWNER_CODEC.encode(answer))
        finally:
            stream.abort()

    async def _answer(self, request: ToOwner) -> AdminAnswer:
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

    # ---------------------------------------------------------------------------------------- statistics

    def stat(self) -> StoreStat:
        """Return the statistics of all tiers of the node."""
        node = self._node
        nvme = node.disk.stat()
        tiers = [node.catalog.stat()]
        if nvme is not None:
            waiting = node.writes.num_waiting, nvme.num_refused + node.writes.num_dropped
            tiers.append(replace(nvme, num_queued=waiting[0], num_refused=waiting[1]))
        if node.index is not None:
            exchange = node.exchange
            tiers.append(TierStat("remote", 0, 0, 0) if exchange is None else exchange.stat())
        return StoreStat(
            self._identity,
            tuple(tiers),
            IndexStat("off") if node.index is None else node.index.stat(),
            node.catalog.bytes_by_group(),
            len(self._sessions),
        )

    def _list(self, request: ListRequest) -> StoreListing:
        matching = self._node.catalog.records(request.sharing_group, request.model)
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
            for held in self._node.catalog.records(request.sharing_group, request.model)
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
            if not self._node.loader.num_waiting:
                return
            await self._clock.sleep(_YIELD_S)

    async def _check_dram(self, record: RecordId) -> bool | None:
        """Whether the record is good; None: it is not in this tier."""
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
        """Whether the record is good; None: it is not in this tier."""
        held = self._node.catalog.find(record)
        if held is None or held.nvme_info is None:
            return None
        return await self._node.disk.examine(record)

    # --------------------------------------------------------------------------------------------- purge

    async def _purge(self, request: PurgeRequest) -> PurgeResult | AdminFailed:
        """Delete matching records. They cannot be found from here on; those being read or written are deleted
        when their last user is done."""
        failure, purged = await self._node.purge(PurgeOrder(request.sharing_group, request.model))
        if failure:
            return AdminFailed(failure)
        _log.info("purged: group %s, model %s: %s", request.sharing_group, request.model, purged.num_records)
        return PurgeResult(purged.num_records, purged.num_bytes, purged.num_pending)
