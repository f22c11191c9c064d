"""The catalog of one node: which record is in the host tier, on NVMe or in both; what may be done to it.

Sans-I/O: it decides, and writes header pages into the arena; payloads, files and sockets are others'. It
alone divides the arena. One thread (the owner's event loop) calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import Shard
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.dram.eviction import ChainKey
from kvtransfer.store.dram.slot_allocator import ArenaSlot, SlotAllocator
from kvtransfer.store.messages import HELD, REFUSED, NewRecord, RecordId, RecordInfo, Tier, TierStat
from kvtransfer.store.nvme.segments import NvmeRef
from kvtransfer.store.record import Writer, image_bytes


class Catalog:
    """See the module. A record is *findable* when it is in a tier; what is being filled, doomed or stray is
    not. Eviction takes a block: all its records in the host tier, when no lease or pin holds any of them.

    `tenant_share` is the most of the arena that one tenant gets while others want it.
    """

    def __init__(
        self,
        arena: Arena | None,
        clock: Clock,
        faults: Faults,
        listener: CatalogEvents,
        tenant_share: float = 1,
    ) -> None:
        self._faults = faults
        self._listener = listener
        self._table = RecordTable()
        self._allocator = SlotAllocator(clock, tenant_share, self._evict)
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
    def arena(self) -> Arena | None:
        return self._allocator.arena

    def attach(self, arena: Arena) -> None:
        """Use this arena (once; none before). Of an adopted one, what was committed is findable again, told
        as `committed`, the last one used last; what was being written is stray until its writer is known to
        be dead (`free_orphans`) or its session is back (`session_opened`, also before this)."""
        for slot in self._allocator.attach(arena):
            if self._is_kept(slot.info.id):
                self._forget(self._table.enter(slot.info))  # an older one of the same name
            self._found(slot)

    # ---------------------------------------------------------------------------------------- sessions

    def session_opened(self, session: bytes) -> None:
        """A brain said hello with this session; only now may it allocate. Its ranks write nothing (any more)
        that the session was granted before, by this owner or the one before: that is free now."""
        for slot in self._allocator.session_opened(session):
            self._end_put(slot)

    def session_lost(self, session: bytes) -> None:
        """The brain's connection ended, and no other of the session has said hello since. Others may put what
        it was granted; the slots stay taken until `writers_gone`: call that now, too, when no rank of the
        session is connected."""
        for slot in self._allocator.session_lost(session):
            self._end_put(slot)

    def writers_gone(self, session: bytes) -> int:
        """The session's last rank connection has ended: frees what `session_lost` left, if it was called, and
        returns the number of slots."""
        return self._allocator.writers_gone(session)

    def free_orphans(self, is_running: Callable[[Writer], bool]) -> int:
        """Free what adoption found half written by processes that do not run any more (`writers`). Returns
        the number of slots. To be called now and then; costs nothing when nothing is stray."""
        return self._allocator.free_orphans(is_running)

    # --------------------------------------------------------------------------------------------- puts

    def allocate(
        self,
        session: bytes,
        tenant: str,
        chain: bytes,
        space: bytes,
        model: bytes,
        record: NewRecord,
        writer: Writer,
    ) -> int:
        """The offset to which `writer` (of this open session) may write the payload; or `HELD`, `REFUSED`."""
        record_id = RecordId(space, record.key, record.shard)
        info = RecordInfo(record_id, record.parent, chain, tenant, model, record.num_bytes, 0)
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
        """The payload is all there. None: it is not kept, because the session was not granted that offset (or
        not any more), because of a purge, or because another copy is there by now."""
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
        """Nobody writes there (any more): if the session was granted that offset, it is free."""
        slot = self._granted(session, offset)
        if slot is not None:
            self._end_put(slot)
            self._allocator.free(slot)

    # -------------------------------------------------------------------------- reads from other tiers

    def begin_read(self, info: RecordInfo) -> int:
        """Where the owner may read the record's image into, from NVMe or another node (the header page is
        written anew at commit); or `HELD`: it is in the host tier or being read already; or `REFUSED`. A
        session may be putting the same record: who is done first is kept."""
        if info.id in self._reads or self._is_kept(info.id):
            return HELD
        slot = self._allocator.reserve(info, None)
        if slot is None:
            self._num_refused += 1
            return REFUSED
        self._reads[info.id] = slot.offset
        return slot.offset

    def commit_read(self, offset: int, checksum: int, info: RecordInfo | None = None) -> RecordInfo | None:
        """The image is all there; its payload's sum is `checksum`. `info`: what else it turned out to be, of
        the id and size given to `begin_read`. Returns the record as it is in the host tier now, perhaps from
        a put; None after a purge."""
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
        """The image could not be had, and nobody writes there any more."""
        self._allocator.free(self._read(offset))

    # ------------------------------------------------------------------------------------------ readers

    def lookup(self, space: bytes, key: bytes) -> Mapping[Shard, Held]:
        """The findable records of a block. Live: not to be kept while anything else runs."""
        return self._table.block(ChainKey(space, key))

    def find(self, record_id: RecordId) -> Held | None:
        """The record, when it is in any tier of this node."""
        return self.lookup(record_id.space, record_id.key).get(record_id.shard)

    def lease(self, record_id: RecordId, is_hit: bool = True) -> int | None:
        """The offset of a record in the host tier, which stays there until `release`; None: it is not there.
        Without `is_hit` no reader wants it: not counted, not told, no younger for it. Parents first."""
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
        """One lease of the record at `offset` ends."""
        self._allocator.release(self._allocator.slots[offset])

    def count_misses(self, num_records: int) -> None:
        """So many records were asked for and were not in the host tier."""
        self._num_misses += num_records

    def pin(self, record_id: RecordId, until: float) -> bool:
        """Keep it in the host tier until then (clock). False: it is not there, or pins hold all they may."""
        held = self.find(record_id)
        if held is None or held.offset is None:
            return False
        return self._allocator.pin(self._allocator.slots[held.offset], until)

    def is_findable(self, offset: int) -> bool:
        """Whether the leased record at `offset` was neither purged nor dropped: ask before `added_nvme`."""
        slot = self._allocator.slots.get(offset)
        return slot is not None and slot.state == "kept"

    def bad(self, offset: int) -> Dropped | None:
        """A reader with a lease found another sum: the record leaves the books, the arena after its last
        lease, NVMe by the caller's hand. None: it had left before."""
        if not self.is_findable(offset):
            return None
        self._num_bad += 1
        info = self._allocator.slots[offset].info
        held = self._table.enter(info)
        nvme = held.nvme
        self._table.clear_nvme(held)
        self._forget(held)
        return Dropped(info, nvme)

    # --------------------------------------------------------------------------------------------- NVMe

    def added_nvme(self, info: RecordInfo, nvme: NvmeRef) -> NvmeRef | None:
        """The record lies on NVMe and is as in `info`. Returns where it lay before: the caller drops that."""
        held = self._table.enter(info)
        before = held.nvme
        self._table.put_on_nvme(held, info, nvme)
        return before

    def moved_nvme(self, record_id: RecordId, before: NvmeRef, after: NvmeRef) -> bool:
        """Compaction moved it. False: it was not at `before` any more, and the caller drops `after`."""
        held = self.find(record_id)
        if held is None or held.nvme != before:
            return False
        held.nvme = after
        return True

    def removed_nvme(self, record_id: RecordId, nvme: NvmeRef) -> bool:
        """The record is not at `nvme` any more. False: the books did not have it there."""
        held = self.find(record_id)
        if held is None or held.nvme != nvme:
            return False
        self._table.clear_nvme(held)
        if held.offset is None:
            self._remove(held)
        return True

    # ------------------------------------------------------------------------------------------- admin

    def records(self, tenant: str | None = None, model: str | None = None) -> list[Held]:
        """Return the findable records of this tenant and model (`is_meant`), the most recently used first."""
        matching = (held for held in self._table if is_meant(held.info, tenant, model))
        return sorted(matching, key=lambda held: -held.used_at)

    def purge(self, tenant: str | None, model: str | None) -> Purged:
        """Take these records (`is_meant`) out of the books; what has a reader or a writer is free after the
        last one. A read of nobody knows whose record is not kept either."""
        self._faults.at("store.purge")
        num_records, num_bytes, erase = {"dram": 0, "nvme": 0}, {"dram": 0, "nvme": 0}, []
        for held in [held for held in self._table if is_meant(held.info, tenant, model)]:
            if held.nvme is not None and held.nvme_info is not None:
                num_records["nvme"] += 1
                num_bytes["nvme"] += image_bytes(held.nvme_info.num_bytes)
                erase.append(held.nvme)
                self._table.clear_nvme(held)
            if held.offset is None:
                self._remove(held)
            else:
                num_records["dram"] += 1
                num_bytes["dram"] += self._allocator.slots[held.offset].num_bytes
                self._forget(held)
        num_pending = 0
        for slot in self._allocator.slots.values():
            is_unknown = slot.state == "read" and not slot.info.tenant
            if slot.state != "kept" and (is_unknown or is_meant(slot.info, tenant, model)):
                num_pending += 1
                slot.is_wanted = False
                self._end_put(slot)
                self._end_read(slot)
        return Purged(num_records, num_bytes, num_pending, tuple(erase))

    def stat(self) -> TierStat:
        """The host tier, in whole granules."""
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

    def bytes_by_tenant(self) -> dict[str, int]:
        """What each tenant takes of the arena and of NVMe."""
        return dict(Counter(self._allocator.shares.num_bytes) + Counter(self._table.nvme_bytes))

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
        """The slot's record is in the host tier now."""
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

    def _evict(self, key: ChainKey) -> None:
        """The block leaves the host tier."""
        self._faults.at("store.evict")
        for held in [held for held in self._table.block(key).values() if held.offset is not None]:
            self._num_evictions += 1
            self._listener.evicted(held.info)
            self._forget(held)

    def _forget(self, held: Held) -> None:
        """The record leaves the host tier."""
        assert held.offset is not None
        slot = self._allocator.slots[held.offset]
        held.offset = None
        self._num_kept -= 1
        self._allocator.drop(slot)
        if held.nvme_info is None:
            self._remove(held)
        else:
            held.info = held.nvme_info

    def _remove(self, held: Held) -> None:
        """The record is in no tier any more."""
        self._table.remove(held)
        self._listener.gone(held.info.id)


# ----------------------------------------------------------------------------------------------
# What a node holds, by name: which record is where, and what the catalog tells of it.


class Held:
    """A record that this node holds, live: read it, never write it, ask again after anything else ran.

    `info` is the record as it lies in the cheapest of its tiers: its checksum is that of the bytes at
    `offset` when it has one, else of those at `nvme`. (Two writings of a block need not be equal to the bit.)
    """

    __slots__ = ("info", "num_hits", "nvme", "nvme_info", "offset", "used_at")

    def __init__(self, info: RecordInfo) -> None:
        self.info = info
        # Where it lies in the arena; None: not in the host tier.
        self.offset: int | None = None
        self.nvme: NvmeRef | None = None
        # As it lies on NVMe; given exactly when `nvme` is.
        self.nvme_info: RecordInfo | None = None
        self.num_hits = 0
        # Grows with every use of any record: who has more was used later.
        self.used_at = 0

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where it is, the cheapest first."""
        dram: tuple[Tier, ...] = ("dram",) if self.offset is not None else ()
        return (*dram, "nvme") if self.nvme is not None else dram


class Dropped(NamedTuple):
    """A record that left all tiers of the node; `nvme` is what the caller must drop there."""

    info: RecordInfo
    nvme: NvmeRef | None


class Purged(NamedTuple):
    """What a purge took out of the books. `erase` is what the caller must erase from NVMe, durably. Counts
    and bytes are by tier; `num_pending` slots of the arena still have a user and are free after the last."""

    num_records: dict[str, int]
    num_bytes: dict[str, int]
    num_pending: int
    erase: tuple[NvmeRef, ...]


class CatalogEvents(Protocol):
    """Who must know of changes: called at once, in the middle of the change; must not change the catalog."""

    def committed(self, info: RecordInfo) -> None:
        """The record is in the host tier now: put by a session, read from another tier, or adopted."""

    def touched(self, info: RecordInfo) -> None:
        """A reader asked for it and it was in the host tier."""

    def evicted(self, info: RecordInfo) -> None:
        """It leaves the host tier for want of room; if it is nowhere else, `gone` follows."""

    def gone(self, record_id: RecordId) -> None:
        """It is in no tier of this node any more."""


def is_meant(info: RecordInfo, tenant: str | None, model: str | None) -> bool:
    """Whether a record is of this tenant and of a model whose fingerprint in hex begins so; None: of any."""
    return tenant in (None, info.tenant) and (model is None or info.model.hex().startswith(model))


class RecordTable:
    """The records of a node by block and shard. Who enters a record puts it in a tier at once."""

    def __init__(self) -> None:
        # Whole records on NVMe, by tenant.
        self.nvme_bytes: dict[str, int] = {}
        self._blocks: dict[ChainKey, dict[Shard, Held]] = {}
        self._nothing: Mapping[Shard, Held] = {}

    def __iter__(self) -> Iterator[Held]:
        return (held for block in self._blocks.values() for held in block.values())

    def block(self, key: ChainKey) -> Mapping[Shard, Held]:
        return self._blocks.get(key, self._nothing)

    def enter(self, info: RecordInfo) -> Held:
        """The record of that name; a new one is in no tier yet."""
        block = self._blocks.setdefault(ChainKey(info.id.space, info.id.key), {})
        held = block.get(info.id.shard)
        if held is None:
            held = block[info.id.shard] = Held(info)
        return held

    def remove(self, held: Held) -> None:
        """It is in no tier any more."""
        key = ChainKey(held.info.id.space, held.info.id.key)
        del self._blocks[key][held.info.id.shard]
        if not self._blocks[key]:
            del self._blocks[key]

    def put_on_nvme(self, held: Held, info: RecordInfo, nvme: NvmeRef) -> None:
        self.clear_nvme(held)
        held.nvme, held.nvme_info = nvme, info
        if held.offset is None:
            held.info = info
        self._count_nvme(info, 1)

    def clear_nvme(self, held: Held) -> None:
        if held.nvme_info is not None:
            self._count_nvme(held.nvme_info, -1)
        held.nvme = held.nvme_info = None

    def check(self) -> None:
        """Assert every invariant."""
        nvme_bytes: dict[str, int] = {}
        for key, block in self._blocks.items():
            assert block, "a block without records is still known"
            for shard, held in block.items():
                assert held.info.id == RecordId(key.space, key.key, shard)
                assert held.tiers, "a record is in no tier"
                assert (held.nvme is None) == (held.nvme_info is None)
                assert held.offset is not None or held.info is held.nvme_info
                if held.nvme_info is not None:
                    tenant, num_bytes = held.nvme_info.tenant, image_bytes(held.nvme_info.num_bytes)
                    nvme_bytes[tenant] = nvme_bytes.get(tenant, 0) + num_bytes
        assert nvme_bytes == self.nvme_bytes

    def _count_nvme(self, info: RecordInfo, sign: int) -> None:
        total = self.nvme_bytes.get(info.tenant, 0) + sign * image_bytes(info.num_bytes)
        if total:
            self.nvme_bytes[info.tenant] = total
        else:
            del self.nvme_bytes[info.tenant]
