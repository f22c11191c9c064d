"""Exchanges records between the owners of two nodes: requested by frames, written by transfer agents.

    requesting owner                                       holding owner
    fetch: OpenLanding, SendRecords -------------------->  lease (from NVMe first), ConnectPeer, PushOrder
           the records' granules <===== prefetch class ==     of the records' granules
           CloseLanding, checksums <---- RecordsSent -----  PushDone, release

A fetch that ends otherwise (timeout, cancel, lost connection) leaves its slots in quarantine until the holder
confirms that it has stopped (`RecordsSent`), or no connection is left over which it could write
(`LandingClosed`, `WriterGone`); no timer ends that. Everything runs on the owner's event loop; the agent has
threads of its own ("kv-...").
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from kvtransfer.agent.agent import TransferAgent
from kvtransfer.agent.path_health import PathHealth, PathKey
from kvtransfer.blocks.host_memory import KvMemory, map_shared, mapping_bytes
from kvtransfer.blocks.pool import HostPool
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.moving_average import RateMeter
from kvtransfer.common.tasks import Spawn, wait_first
from kvtransfer.config import StoreSettings
from kvtransfer.errors import TransferError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.admin_requests import TierStat
from kvtransfer.store.messages.records import RecordId
from kvtransfer.store.record import image_bytes
from kvtransfer.store.remote.owner_link import OwnerLink, RecordLanding, Wanted, open_link
from kvtransfer.store.remote.serve import LocalRecords, RecordSender, granule_layout
from kvtransfer.transfer_orders import CloseLanding, TransferSettings
from kvtransfer.transfer_reports import LandingClosed, TransferReport, WriterGone

_PATIENCE_S = 3.0
# A fetch is given up after `_PATIENCE_S` and the time of its bytes at this rate: before the engine cores that
# wait for it conclude that their own owner hangs.
_SLOWEST_BYTES_S = 20e6
_COOL_DOWN_S = 1.0
_MAX_COOL_DOWN_S = 60.0

_log = logging.getLogger("tandem.store")


def arena_pool(fd: int, num_bytes: int, granule_bytes: int) -> HostPool:
    """Return the arena as a pool of granules, in a mapping of its own. As for a rank's pool, the file must
    be `mapping_bytes(num_bytes)` long (`kvtransfer.blocks.host_memory`): other owners measure their path in
    the tail."""
    memory = KvMemory(map_shared(fd, mapping_bytes(num_bytes)), os.dup(fd), num_bytes)
    return HostPool(granule_layout(granule_bytes), memory)


class Exchange:
    """One owner's exchange with all others, over the pool of its arena (`arena_pool`), which `close`
    closes."""

    def __init__(
        self,
        settings: StoreSettings,
        trust: Trust,
        pool: HostPool,
        records: LocalRecords,
        spawn: Spawn,
        clock: Clock,
        faults: Faults,
    ) -> None:
        """Runs on the running event loop, on which `records` is called too."""
        self._identity = ReplicaIdentity(settings.node_id, settings.epoch)
        self._settings = settings
        self._trust = trust
        self._pool = pool
        self._records = records
        self._spawn = spawn
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._links: dict[ReplicaIdentity, asyncio.Future[OwnerLink]] = {}
        self._landings: dict[bytes, RecordLanding] = {}
        self._health = PathHealth(1, _COOL_DOWN_S, _MAX_COOL_DOWN_S)
        # The rate of fetches, from request to last byte.
        self.rate = RateMeter()
        self._num_hits = self._num_misses = self._num_hit_bytes = self._num_failures = 0
        self._note = ""
        self._agent = TransferAgent(
            identity=self._identity,
            rank=0,
            pools=(pool,),
            trust=trust,
            clock=clock,
            faults=faults,
            report=self._report,
            settings=TransferSettings(
                settings.host, settings.transports, prefetch_gb_s=settings.prefetch_gb_s
            ),
        )
        # Serves the owners that request records.
        self.sender = RecordSender(settings, records, self._agent.handle, spawn)

    def stat(self) -> TierStat:
        """Return statistics of the records that other nodes sent; written bytes are those sent to them, and
        quarantined slots wait for the end of their writers."""
        return TierStat(
            "remote",
            num_bytes=0,
            capacity_bytes=0,
            num_records=0,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_hit_bytes=self._num_hit_bytes,
            num_written_bytes=self.sender.num_sent_bytes,
            num_io_errors=self._num_failures,
            num_quarantined=sum(len(each.slots) for each in self._landings.values() if each.has_ended),
            read_gb_s=self.rate.gb_s,
            latency_s=self.rate.latency_s,
            note=self._note,
        )

    def is_cooling(self, holder: ReplicaIdentity) -> bool:
        """Whether `fetch` would not contact that owner now, because it failed a short while ago."""
        return self._health.cooling_s(_key(holder), self._clock.now()) > 0

    async def close(self) -> None:
        """End the agent, after the tasks that serve, fetch or were spawned have been cancelled."""
        await asyncio.to_thread(self._agent.close)
        self._pool.close()

    # ------------------------------------------------------------------------------------------- fetch

    async def fetch(
        self, holder: ReplicaIdentity, address: str, wanted: Sequence[Wanted]
    ) -> dict[RecordId, int]:
        """Fetch these records from the owner at `address` into their slots. Return the records that arrived
        whole, header page included, with the payload's checksum, which is not yet verified. Every other slot
        is reported by `LocalRecords.slot_free` when it may be used again, also after a cancel."""
        link: OwnerLink | None = None
        try:
            if not self.is_cooling(holder):
                link = await self._link(holder, address)
        except TransferError as error:
            self._note_failure(holder, str(error))
        finally:
            if link is None:
                self._num_misses += len(wanted)
                for each in wanted:
                    self._records.slot_free(each.offset)
        return {} if link is None else await self._fetch(link, wanted)

    async def _fetch(self, link: OwnerLink, wanted: Sequence[Wanted]) -> dict[RecordId, int]:
        landing = RecordLanding(link, wanted, self._settings.granule_bytes, self._records.slot_free)
        self._landings[landing.id] = landing
        self._agent.handle(landing.open())
        landing.request(self._agent.endpoints())
        started_at = self._clock.now()
        self.rate.begin(started_at)
        fetched: dict[RecordId, int] = {}
        try:
            # The wait ends when it is answered, its link is lost, or it takes too long.
            patience_s = _PATIENCE_S + landing.num_bytes / _SLOWEST_BYTES_S
            await wait_first(landing.answered.wait(), self._clock.sleep(patience_s))
        finally:
            # When this returns, the agent accepts nothing more: records that are whole stay as they are.
            self._agent.handle(CloseLanding(landing.id))
            fetched = landing.end()
            num_bytes = sum(image_bytes(each.num_bytes) for each in wanted if each.record in fetched)
            self.rate.end(self._clock.now(), started_at, num_bytes)
            self._num_hits += len(fetched)
            self._num_misses += len(wanted) - len(fetched)
            self._num_hit_bytes += num_bytes
        self._note_end(landing, bool(fetched))
        return fetched

    def _note_end(self, landing: RecordLanding, has_records: bool) -> None:
        if landing.sent is None:
            self._note_failure(landing.link.holder, landing.link.lost or "no answer in time")
        elif landing.sent.reason and not has_records:
            self._note_failure(landing.link.holder, landing.sent.reason)
        else:
            self._health.succeeded(_key(landing.link.holder))
            self._note = ""

    def _note_failure(self, holder: ReplicaIdentity, reason: str) -> None:
        self._num_failures += 1
        self._note = f"{holder.replica_id}: {reason}"
        self._health.failed(_key(holder), reason, self._clock.now())
        _log.warning("no records from %s: %s", holder.replica_id, reason)

    # ------------------------------------------------------------------------------------------ links

    async def _link(self, holder: ReplicaIdentity, address: str) -> OwnerLink:
        """Return the link to that owner, opened now if there is none. `TransferError` when that fails."""
        known = self._links.get(holder)
        if known is None:
            known = self._links[holder] = self._loop.create_future()
            self._spawn(self._keep_link(holder, address, known), "store-link")
        return await asyncio.shield(known)

    async def _keep_link(
        self, holder: ReplicaIdentity, address: str, opened: asyncio.Future[OwnerLink]
    ) -> None:
        """Open a link and handle its messages until it ends."""
        settings = self._settings
        link: OwnerLink | None = None
        reason = "this owner ends"
        try:
            link = await open_link(holder, address, self._trust, self._identity, settings.granule_bytes)
            opened.set_result(link)
            while True:
                message = await link.receive()
                landing = self._landings.get(message.landing_id)
                if landing is not None and landing.link is link:
                    landing.answer(message)
                    self._forget(landing)
        except TransferError as error:
            reason = str(error)
            if link is None:
                opened.set_exception(error)
                opened.exception()  # the caller may have been cancelled
        finally:
            del self._links[holder]
            if link is not None:
                link.abort()
                self._lose(link, reason)

    def _lose(self, link: OwnerLink, reason: str) -> None:
        link.lost = reason
        for landing in self._landings.values():
            if landing.link is link:
                landing.answered.set()

    # ---------------------------------------------------------------------------------------- reports

    def _report(self, report: TransferReport) -> None:
        """Take a report from any thread of the agent."""
        self._loop.call_soon_threadsafe(self._handle_report, report)

    def _handle_report(self, report: TransferReport) -> None:
        match report:
            case LandingClosed():
                landing = self._landings[report.landing_id]
                landing.closed(report)
                self._forget(landing)
            case WriterGone():
                for landing in list(self._landings.values()):
                    landing.writer_gone(report)
                    self._forget(landing)
            case _:
                self.sender.report(report)

    def _forget(self, landing: RecordLanding) -> None:
        if landing.is_over:
            self._landings.pop(landing.id, None)


def _key(holder: ReplicaIdentity) -> PathKey:
    return PathKey(holder, 0, "owner")
