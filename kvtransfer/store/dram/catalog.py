"""The catalog of one node: which records are in the host tier, on NVMe or in both, and their life cycle.

Sans-I/O: the catalog decides, and writes header pages into the arena; payloads, files and sockets belong to
others. It alone divides the arena. One thread (the owner's event loop) calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.group_shares import GroupShares, GroupUsage
from kvtransfer.messages import Shard
from kvtransfer.store.dram.arena_space import ArenaSpace
from kvtransfer.store.dram.chain_lru import ChainKey
from kvtransfer.store.dram.record_table import Held, RecordTable
from kvtransfer.store.dram.slot_allocator import ArenaSlot, SlotAllocator
from kvtransfer.store.messages.admin_requests import TierStat
from kvtransfer.store.messages.engine_session import HELD, REFUSED, NewRecord
from kvtransfer.store.messages.records import PurgeOrder, RecordId, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.record import Writer, image_bytes

_NO_LIMITS = GroupShares()


class Catalog:
    """The records of one node. A record is *findable* when it is in a tier, not while its slot is being
    filled, doomed or in quarantine. Eviction drops all records of a block from the host tier, when no lease
    or pin holds any of them.

    `dram_shares` are the largest parts of the arena that groups get while others need space; `nvme_usage` has
    those of NVMe.
    """

    def __init__(
        self,
        arena: ArenaSpace | None,
        clock: Clock,
        faults: Faults,
        listener: CatalogEvents,
        dram_shares: GroupShares = _NO_LIMITS,
        nvme_usage: GroupUsage | None = None,
    ) -> None:
        self._faults = faults
        self._listener = listener
        self._table = RecordTable(nvme_usage or GroupUsage(_NO_LIMITS))
        self._allocator = SlotAllocator(clock, dram_shares, self._evict)
        self._puts: dict[RecordId, int] = {}
        self._reads: dict[RecordId, int] = {}
        self._num_uses = 0
        self._num_kept = 0
        self._num_hits = self._num_misses = self._num_hit_bytes = 0
        self._num_put_bytes = self._num_written_bytes = 0
        self._num_evictions = self._num_refused = self._num_bad = 0
        if arena is not None:
            self.attach(arena)

    @property
    def arena(self) -> ArenaSpace | None:
        return self._allocator.arena

    def attach(self, arena: ArenaSpace) -> None:
        """Use this arena (once; none before). In an adopted one, committed records are findable again and
        reported as `committed`, the last one used last; slots that were being written stay in quarantine
        until their writer is known to be dead (`free_orphans`) or its session is back (`session_opened`, also
        before this)."""
        for slot in self._allocator.attach(arena):
            if self._is_kept(slot.info.id):
                self._forget(self._table.enter(slot.info), "")  # an older one of the same name
            self._found(slot)

    # ---------------------------------------------------------------------------------------- sessions

    def session_opened(self, session: bytes) -> None:
        """Open a session at the hello of its engine core; only now may it allocate. Its ranks no longer write
        earlier grants, of this or the previous owner: these are free now."""
        for slot in self._allocator.session_opened(session):
            self._end_put(slot)

    def session_lost(self, session: bytes) -> None:
        """Note that the engine core's connection has ended, without a new hello of the session. Others may
        put the records it was granted; its slots stay in quarantine until `writers_gone`: call that too if no
        rank of the session is connected."""
        for slot in self._allocator.session_lost(session):
            self._end_put(slot)

    def writers_gone(self, session: bytes) -> int:
        """Note that the session's last rank connection has ended: free the slots that `session_lost` left, if
        it was called, and return their number."""
        return self._allocator.writers_gone(session)

    def free_orphans(self, is_running: Callable[[Writer], bool]) -> int:
        """Free the slots of an adopted arena that were being written by processes that have ended. Return the
        number of slots. To be called periodically; costs nothing while the quarantine is empty."""
        return self._allocator.free_orphans(is_running)

    # --------------------------------------------------------------------------------------------- puts

    def allocate(
        self,
        session: bytes,
        group: str,
        chain: bytes,
        space: bytes,
        model: bytes,
        record: NewRecord,
        writer: Writer,
    ) -> int:
        """Return the offset at which `writer` (of this open session) may write; or `HELD`, `REFUSED`."""
        record_id = RecordId(space, record.key, record.shard)
        info = RecordInfo(record_id, record.parent, chain, group, model, record.num_bytes, 0)
        if self._is_kept(record_id):
            self._use(self._table.enter(info))
            return HELD
        if record_id in self._puts:
            return HELD
        slot = self._allocator.reserve(info, writer._replace(session=session))
        if slot is None:
            self._num_refused += 1
            return REFUSED
        self._puts[record_id] = slot.offset
        self._faults.at("store.put.allocate")
        return slot.offset

    def commit(self, session: bytes, offset: int, checksum: int) -> RecordInfo | None:
        """Commit a record whose payload is written completely. None: it is not kept, because the session does
        not hold that offset (any more), because of a purge, or because there is another copy by now."""
        slot = self._granted(session, offset)
        if slot is None:
            return None
        self._faults.at("store.put.commit")
        self._end_put(slot)
        if not slot.is_wanted or self._is_kept(slot.info.id):
            self._allocator.free(slot)
            return None
        self._num_put_bytes += slot.num_bytes
        return self._keep(slot, replace(slot.info, checksum=checksum)).info

    def abandon(self, session: bytes, offset: int) -> None:
        """Free an offset that was granted to the session and is not written (any more)."""
        slot = self._granted(session, offset)
        if slot is not None:
            self._end_put(slot)
            self._allocator.free(slot)

    # -------------------------------------------------------------------------- reads from other tiers

    def begin_read(self, info: RecordInfo) -> int:
        """Return the offset at which the owner may read the record's image, from NVMe or another node (commit
        rewrites the header page); or `HELD`: it is in the host tier or being read already; or `REFUSED`. A
        session may be putting the same record: the first one that completes is kept."""
        if info.id in self._reads or self._is_kept(info.id):
            return HELD
        slot = self._allocator.reserve(info, None)
        if slot is None:
            self._num_refused += 1
            return REFUSED
        self._reads[info.id] = slot.offset
        return slot.offset

    def commit_read(self, offset: int, checksum: int, info: RecordInfo | None = None) -> RecordInfo | None:
        """Commit an image that was read completely, with this checksum of its payload. `info` is its actual
        header, of the id and size given to `begin_read`. Return the record as it is in the host tier now,
        perhaps from a put; None after a purge."""
        slot = self._read(offset)
        held = self.find(slot.info.id)
        if held is not None and held.offset is not None:
            self._allocator.free(slot)
            return held.info
        if not slot.is_wanted:
            self._allocator.free(slot)
            return None
        return self._keep(slot, replace(info or slot.info, checksum=checksum)).info

    def abandon_read(self, offset: int) -> None:
        """Free the slot of an image that could not be read, and that is not written any more."""
        self._allocator.free(self._read(offset))

    # ------------------------------------------------------------------------------------------ readers

    def lookup(self, space: bytes, key: bytes) -> Mapping[Shard, Held]:
        """Return the findable records of a block: a live view, to be used at once."""
        return self._table.block(ChainKey(space, key))

    def slice(self, index: int) -> Iterable[ChainKey]:
        """Return the blocks in one of the `record_table.NUM_SLICES` slices of the catalog."""
        return self._table.slice(index)

    def find(self, record_id: RecordId) -> Held | None:
        """Return the record, if it is in any tier of this node."""
        return self.lookup(record_id.space, record_id.key).get(record_id.shard)

    def lease(self, record_id: RecordId, is_hit: bool = True) -> int | None:
        """Lease a record of the host tier until `release` and return its offset; None: it is not there.
        Without `is_hit` no reader wants it: no hit is counted or reported, and its age remains. Parents
        first."""
        held = self.find(record_id)
        if held is None or held.offset is None:
            return None
        self._faults.at("store.get")
        self._allocator.lease(self._allocator.slots[held.offset])
        if is_hit:
            self._num_hits += 1
            self._num_hit_bytes += held.info.num_bytes
            held.num_hits += 1
            self._use(held)
            self._listener.touched(held.info)
        return held.offset

    def release(self, offset: int) -> None:
        """End one lease of the record at `offset`."""
        self._allocator.release(self._allocator.slots[offset])

    def count_misses(self, num_records: int) -> None:
        """Count records that were requested and not in the host tier."""
        self._num_misses += num_records

    def pin(self, record_id: RecordId, until: float) -> bool:
        """Keep a record in the host tier until then (clock). False: it is not there, or pins have reached
        their limit."""
        held = self.find(record_id)
        if held is None or held.offset is None:
            return False
        return self._allocator.pin(self._allocator.slots[held.offset], until)

    def is_findable(self, offset: int) -> bool:
        """Whether the leased record at `offset` was neither purged nor dropped; a condition of
        `added_nvme`."""
        slot = self._allocator.slots.get(offset)
        return slot is not None and slot.state == "kept"

    def bad(self, offset: int) -> Dropped | None:
        """Drop a leased record with a wrong checksum: from the catalog now, from the arena after its last
        lease; the caller drops it from NVMe. None: it was dropped before."""
        if not self.is_findable(offset):
            return None
        self._num_bad += 1
        info = self._allocator.slots[offset].info
        held = self._table.enter(info)
        nvme = held.nvme
        self._table.clear_nvme(held)
        self._forget(held, "corrupt")
        return Dropped(info, nvme)

    # --------------------------------------------------------------------------------------------- NVMe

    def added_nvme(self, info: RecordInfo, nvme: NvmeRef) -> NvmeRef | None:
        """Note that a record is on NVMe, with this `info`. Return its former place, which the caller
        drops."""
        held = self._table.enter(info)
        before = held.nvme
        self._table.put_on_nvme(held, info, nvme)
        return before

    def moved_nvme(self, record_id: RecordId, before: NvmeRef, after: NvmeRef) -> bool:
        """Note that compaction moved a record. False: it was not at `before`, and the caller drops
        `after`."""
        held = self.find(record_id)
        if held is None or held.nvme != before:
            return False
        held.nvme = after
        return True

    def removed_nvme(self, record_id: RecordId, nvme: NvmeRef, reason: str) -> bool:
        """Note that a record is not at `nvme` any more, for a reason of `BlocksRemoved`. False: the catalog
        did not have it there."""
        held = self.find(record_id)
        if held is None or held.nvme != nvme:
            return False
        self._table.clear_nvme(held)
        if held.offset is None:
            self._remove(held, reason)
        return True

    def make_nvme_space(self, info: RecordInfo) -> list[Dropped] | None:
        """Drop records from NVMe, which is full, so that this one may be written there: those of its own
        group when that has its share, else of groups that exceed theirs, the least recently used blocks
        first. The caller drops their places; an empty list leaves it to the next compaction to free space.
        None: the record alone exceeds the share."""
        usage, group, num_bytes = self._table.nvme_usage, info.sharing_group, image_bytes(info.num_bytes)
        if usage.has_limit(group) and num_bytes > usage.limit(group):
            return None
        dropped: list[Dropped] = []
        num_freed = 0
        while num_freed < num_bytes and (key := self._table.nvme_victim(group, num_bytes)) is not None:
            for held in list(self._table.block(key).values()):
                if held.nvme is not None and held.nvme_info is not None:
                    dropped.append(Dropped(held.nvme_info, held.nvme))
                    num_freed += held.nvme.num_bytes
                    self.removed_nvme(held.info.id, held.nvme, "share")
        return dropped

    def exceeding_nvme(self) -> frozenset[str]:
        """Return the groups that exceed their share of NVMe."""
        return frozenset(self._table.nvme_usage.greediest())

    # ------------------------------------------------------------------------------------------- admin

    def records(self, group: str | None = None, model: str | None = None) -> list[Held]:
        """Return the findable records of this group and model, the most recently used first."""
        order = PurgeOrder(group, model)
        matching = (held for held in self._table if order.includes(held.info))
        return sorted(matching, key=lambda held: -held.used_at)

    def purge(self, order: PurgeOrder, *, keeps_slots: bool = False) -> Purged:
        """Remove these records from the catalog; a slot with a reader or a writer is free after the last one.
        Memory is cleared before it is free: here, or, with `keeps_slots`, by the caller, which has a lease of
        each slot of `Purged.slots`."""
        self._faults.at("store.purge")
        num_records, num_bytes, erase = {"dram": 0, "nvme": 0}, {"dram": 0, "nvme": 0}, []
        kept: list[int] = []
        for held in [held for held in self._table if order.includes(held.info)]:
            if held.nvme is not None and held.nvme_info is not None:
                num_records["nvme"] += 1
                num_bytes["nvme"] += image_bytes(held.nvme_info.num_bytes)
                erase.append(held.nvme)
                self._table.clear_nvme(held)
            if held.offset is None:
                self._remove(held, "purged")
                continue
            slot = self._allocator.slots[held.offset]
            num_records["dram"] += 1
            num_bytes["dram"] += slot.num_bytes
            slot.is_purged = True
            if keeps_slots and not slot.num_leases:
                self._allocator.lease(slot)
                kept.append(slot.offset)
            self._forget(held, "purged")
        num_pending, own = 0, frozenset(kept)
        for slot in self._allocator.slots.values():
            if slot.state != "kept" and slot.offset not in own and order.includes(slot.info):
                num_pending += 1
                slot.is_wanted, slot.is_purged = False, True
                self._end_put(slot)
                self._end_read(slot)
        return Purged(num_records, num_bytes, num_pending, tuple(erase), tuple(kept))

    def unread_memory(self, offset: int) -> memoryview | None:
        """Return the memory of a purged slot; None while others than the caller read it: then it is cleared
        when it becomes free."""
        slot, arena = self._allocator.slots[offset], self._allocator.arena
        assert slot.is_purged
        assert arena is not None
        return arena.space(offset) if slot.num_leases == 1 else None

    def cleared(self, offset: int) -> None:
        """Note that the memory of a purged slot is cleared."""
        self._allocator.slots[offset].is_purged = False

    def stat(self) -> TierStat:
        """Return the statistics of the host tier, in whole granules."""
        arena = self._allocator.arena
        capacity_bytes = 0 if arena is None else arena.capacity_bytes
        return TierStat(
            tier="dram",
            num_bytes=0 if arena is None else capacity_bytes - arena.num_free_bytes,
            capacity_bytes=capacity_bytes,
            num_records=self._num_kept,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_hit_bytes=self._num_hit_bytes,
            num_put_bytes=self._num_put_bytes,
            num_written_bytes=self._num_written_bytes,
            num_evictions=self._num_evictions,
            num_refused=self._num_refused,
            num_checksum_failures=self._num_bad,
            num_leases=self._allocator.num_leases,
            num_quarantined=self._allocator.num_quarantined,
        )

    def bytes_by_group(self) -> dict[str, int]:
        """Return the bytes of each group in the arena and on NVMe."""
        return dict(Counter(self._allocator.usage.taken) + Counter(self._table.nvme_usage.taken))

    def check(self) -> None:
        """Assert every invariant; O(n log n)."""
        self._allocator.check()
        self._table.check()
        slots = self._allocator.slots
        kept = {offset: slot.info for offset, slot in slots.items() if slot.state == "kept"}
        assert kept == {held.offset: held.info for held in self._table if held.offset is not None}
        assert self._num_kept == len(kept)
        for state, underway in (("written", self._puts), ("read", self._reads)):
            filled = {offset: slot.info.id for offset, slot in slots.items() if slot.state == state}
            known = {offset: record_id for record_id, offset in underway.items()}
            assert known.items() <= filled.items()
            assert all(not slots[offset].is_wanted for offset in filled.keys() - known.keys())

    # ------------------------------------------------------------------------------------------- inside

    def _is_kept(self, record_id: RecordId) -> bool:
        held = self.find(record_id)
        return held is not None and held.offset is not None

    def _granted(self, session: bytes, offset: int) -> ArenaSlot | None:
        slot = self._allocator.slots.get(offset)
        return slot if slot is not None and slot.state == "written" and slot.session == session else None

    def _end_put(self, slot: ArenaSlot) -> None:
        if self._puts.get(slot.info.id) == slot.offset:
            del self._puts[slot.info.id]

    def _end_read(self, slot: ArenaSlot) -> None:
        if self._reads.get(slot.info.id) == slot.offset:
            del self._reads[slot.info.id]

    def _read(self, offset: int) -> ArenaSlot:
        slot = self._allocator.slots[offset]
        assert slot.state == "read"
        self._end_read(slot)
        return slot

    def _keep(self, slot: ArenaSlot, info: RecordInfo) -> Held:
        self._allocator.keep(slot, info)
        self._num_written_bytes += slot.num_bytes
        return self._found(slot)

    def _found(self, slot: ArenaSlot) -> Held:
        """Enter the slot's record, which is in the host tier now."""
        held = self._table.enter(slot.info)
        held.offset, held.info = slot.offset, slot.info
        self._num_kept += 1
        self._use(held)
        self._listener.committed(slot.info)
        return held

    def _use(self, held: Held) -> None:
        assert held.offset is not None
        self._num_uses += 1
        held.used_at = self._num_uses
        self._allocator.touch(self._allocator.slots[held.offset])
        self._table.touch_nvme(held)

    def _evict(self, key: ChainKey, reason: str) -> None:
        """Drop the records of a block from the host tier."""
        self._faults.at("store.evict")
        for held in [held for held in self._table.block(key).values() if held.offset is not None]:
            self._num_evictions += 1
            self._listener.evicted(held.info)
            self._forget(held, reason)

    def _forget(self, held: Held, reason: str) -> None:
        """Drop a record from the host tier."""
        assert held.offset is not None
        slot = self._allocator.slots[held.offset]
        held.offset = None
        self._num_kept -= 1
        self._allocator.drop(slot)
        if held.nvme_info is None:
            self._remove(held, reason)
        else:
            held.info = held.nvme_info

    def _remove(self, held: Held, reason: str) -> None:
        """Remove a record that is in no tier any more."""
        self._table.remove(held)
        self._listener.gone(held.info.id, reason)


class Dropped(NamedTuple):
    """A record that was dropped, except its place on NVMe, which the caller drops."""

    info: RecordInfo
    nvme: NvmeRef | None


class Purged(NamedTuple):
    """What a purge removed from the catalog. The caller must erase `erase` from NVMe, durably. Counts and
    bytes are by tier; `num_pending` slots of the arena still have a user, and are free after the last one.
    `slots` are the offsets of those that the caller must clear and release."""

    num_records: dict[str, int]
    num_bytes: dict[str, int]
    num_pending: int
    erase: tuple[NvmeRef, ...]
    slots: tuple[int, ...] = ()


class CatalogEvents(Protocol):
    """Receives the changes of the catalog, in the middle of each change, and must not change the catalog."""

    def committed(self, info: RecordInfo) -> None:
        """Note that a record was added to the host tier: put by a session, read from another tier, or
        adopted."""

    def touched(self, info: RecordInfo) -> None:
        """Note that a reader hit a record in the host tier."""

    def evicted(self, info: RecordInfo) -> None:
        """Note that a record is evicted from the host tier; if it is in no other tier, `gone` follows."""

    def gone(self, record_id: RecordId, reason: str) -> None:
        """Note that a record is in no tier of this node any more, and why it left the last one: a reason of
        `kvtransfer.kv_events.BlocksRemoved`."""
