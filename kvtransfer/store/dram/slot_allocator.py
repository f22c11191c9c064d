"""The slots of the arena: the state of each, the writers that may still use it, and eviction for new ones.

A slot is in exactly one state:

    (free) --reserve--> written by a session, or read into by the owner --keep--> kept --drop--> (free), or
                       | its session is lost                                       doomed while leased
                       v
                     quarantined: no proof yet that its writer stopped --proof--> (free)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from kvtransfer.common.clock import Clock
from kvtransfer.common.group_shares import GroupShares, GroupUsage
from kvtransfer.common.indexed_heap import IndexedHeap
from kvtransfer.errors import StoreError
from kvtransfer.store.dram.arena import fill_with_zeros
from kvtransfer.store.dram.arena_space import ArenaSpace
from kvtransfer.store.dram.chain_lru import ChainKey, ChainLru
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.record import State, Writer

# The most bytes evicted for one record, in multiples of its size: more may not join a large enough range.
MAX_EVICTED_RATIO = 8
# Pins take at most this part of the arena, so that prefetches cannot exclude everything else.
MAX_PINNED_RATIO = 0.5

SlotState = Literal["written", "read", "kept", "doomed", "quarantined"]


class ArenaSlot:
    """The space of one record in the arena."""

    __slots__ = (
        "info",
        "is_adopted",
        "is_purged",
        "is_wanted",
        "key",
        "num_bytes",
        "num_leases",
        "offset",
        "pinned_until",
        "session",
        "state",
        "writer",
    )

    def __init__(self, offset: int, num_bytes: int, info: RecordInfo, state: SlotState) -> None:
        self.offset = offset
        # The size in whole granules.
        self.num_bytes = num_bytes
        self.info = info
        self.key = ChainKey(info.id.space, info.id.key)
        self.state: SlotState = state
        self.session = b""
        self.writer: Writer | None = None
        # False: purged while it was being filled.
        self.is_wanted = True
        # Its memory must be cleared before anybody else gets it.
        self.is_purged = False
        # An earlier owner allocated it, and only that one knew which connections to watch.
        self.is_adopted = False
        self.num_leases = 0
        self.pinned_until: float | None = None


class SlotAllocator:
    """All slots of one arena (none at first). `evict(key, reason)` is called to drop every kept slot of that
    block, when no lease or pin holds any of them. The reason is "space", or "share" where its group has more
    than its share."""

    def __init__(self, clock: Clock, shares: GroupShares, evict: Callable[[ChainKey, str], None]) -> None:
        self.arena: ArenaSpace | None = None
        self.slots: dict[int, ArenaSlot] = {}
        self.usage = GroupUsage(shares)
        self.num_leases = 0
        self.num_quarantined = 0
        self._clock = clock
        self._evict = evict
        self._chain = ChainLru()
        self._sessions: dict[bytes, set[int]] = {}
        self._quarantined: dict[bytes, set[int]] = {}
        # The pinned slots by the time when each pin expires.
        self._pins: IndexedHeap[ArenaSlot] = IndexedHeap()
        self._num_pinned_bytes = 0
        self._sequence = 0

    def attach(self, arena: ArenaSpace) -> list[ArenaSlot]:
        """Use this arena. Return the slots that an earlier owner kept there, the oldest first; its other
        slots are free if nothing can be writing them, otherwise in quarantine."""
        assert self.arena is None
        self.arena = arena
        self.usage.set_capacity(arena.capacity_bytes)
        kept: list[ArenaSlot] = []
        for offset, header in sorted(arena.scan(), key=lambda found: found[1].sequence):
            self._sequence = header.sequence
            slot = ArenaSlot(offset, arena.record_bytes(header.info.num_bytes), header.info, "read")
            self._take(slot)
            if header.state == "committed":
                self._mark_kept(slot)
                kept.append(slot)
            elif header.writer is None or header.writer.session in self._sessions:
                self.free(slot)  # the owner before read into it and is dead, or the session writes no more
            else:
                slot.is_adopted = True
                slot.writer = header.writer
                slot.session = header.writer.session
                self._quarantine(slot)
        return kept

    # ------------------------------------------------------------------------------------- being filled

    def reserve(self, info: RecordInfo, writer: Writer | None) -> ArenaSlot | None:
        """Allocate a slot, to be filled by `writer` for its open session (None: by the owner), with eviction
        if needed. None: there is no space, the group has its share, or the fields are too long. A rank of
        whose layers none has KV, or none a state, has records of no bytes."""
        if self.arena is None or info.num_bytes < 0:
            return None
        offset = self._allocate(info)
        if offset is None:
            return None
        slot = ArenaSlot(offset, self.arena.record_bytes(info.num_bytes), info, "read")
        self._take(slot)
        if writer is not None:
            slot.state, slot.session, slot.writer = "written", writer.session, writer
            self._sessions[slot.session].add(offset)
        try:
            self._write_header(slot, "allocated")
        except StoreError:  # the group's name is too long for a header
            self.free(slot)
            return None
        return slot

    def keep(self, slot: ArenaSlot, info: RecordInfo) -> None:
        """Keep the slot, whose bytes are complete and have the checksum of `info`."""
        self._settle(slot)
        self.usage.take(slot.info.sharing_group, -slot.num_bytes)
        self.usage.take(info.sharing_group, slot.num_bytes)
        slot.info = info
        slot.session, slot.writer = b"", None
        self._write_header(slot, "committed")
        self._mark_kept(slot)

    def free(self, slot: ArenaSlot) -> None:
        """Free a slot that nothing writes or reads any more."""
        assert self.arena is not None
        if slot.state in ("written", "quarantined"):
            self._settle(slot)
        assert not slot.num_leases
        assert slot.pinned_until is None
        self.usage.take(slot.info.sharing_group, -slot.num_bytes)
        del self.slots[slot.offset]
        if slot.is_purged:
            fill_with_zeros(self.arena.space(slot.offset))
        self.arena.free(slot.offset)

    # --------------------------------------------------------------------------------------------- kept

    def touch(self, slot: ArenaSlot) -> None:
        self._chain.touch(slot.key)

    def lease(self, slot: ArenaSlot) -> None:
        """Add a reader of a kept slot."""
        assert slot.state == "kept"
        slot.num_leases += 1
        self.num_leases += 1
        self._chain.hold(slot.key)

    def release(self, slot: ArenaSlot) -> None:
        """Remove a reader; a doomed slot is free after the last one."""
        assert slot.num_leases, "more leases end than began"
        slot.num_leases -= 1
        self.num_leases -= 1
        if slot.state == "kept":
            self._chain.release(slot.key)
        elif not slot.num_leases:
            self.free(slot)

    def pin(self, slot: ArenaSlot, until: float) -> bool:
        """Pin a kept slot until then (the clock's seconds). False: too much is pinned already."""
        assert self.arena is not None
        assert slot.state == "kept"
        self._end_pins()
        if slot.pinned_until is None:
            if self._num_pinned_bytes + slot.num_bytes > self.arena.capacity_bytes * MAX_PINNED_RATIO:
                return False
            self._num_pinned_bytes += slot.num_bytes
            self._chain.hold(slot.key)
        elif until <= slot.pinned_until:
            return True
        slot.pinned_until = until
        self._pins.put(slot, until)
        return True

    def drop(self, slot: ArenaSlot) -> bool:
        """Drop a kept slot, despite any pin. False: it is doomed, and free when the last lease ends; no scan
        of the arena finds it any more."""
        assert self.arena is not None
        assert slot.state == "kept"
        if slot.pinned_until is not None:
            self._unpin(slot)
        for _ in range(slot.num_leases):
            self._chain.release(slot.key)
        self._chain.remove(slot.key)
        slot.state = "doomed"
        if slot.num_leases:
            self.arena.erase_header(slot.offset)
            return False
        self.free(slot)
        return True

    # ---------------------------------------------------------------------------------- whose writers

    def session_opened(self, session: bytes) -> list[ArenaSlot]:
        """Open a session: its engine core's hello assures that its ranks write none of its earlier grants,
        which are free now. Return those slots that were still being written."""
        written = [self.slots[offset] for offset in self._sessions.get(session, ())]
        for slot in [*written, *(self.slots[offset] for offset in self._quarantined.get(session, ()))]:
            self.free(slot)
        self._sessions[session] = set()
        return written

    def session_lost(self, session: bytes) -> list[ArenaSlot]:
        """Quarantine the slots of a session whose engine core is gone while its ranks may still write, and
        return them."""
        slots = [self.slots[offset] for offset in self._sessions.pop(session, ())]
        for slot in slots:
            self._quarantine(slot)
        return slots

    def writers_gone(self, session: bytes) -> int:
        """Free the slots in quarantine, except adopted ones, of a session of which all ranks that had the
        arena mapped from this owner have ended. Return their number."""
        gone = [self.slots[offset] for offset in self._quarantined.get(session, ())]
        return self._free_all(slot for slot in gone if not slot.is_adopted)

    def free_orphans(self, is_running: Callable[[Writer], bool]) -> int:
        """Free the adopted slots in quarantine whose writer does not run any more. Return their number."""
        quarantined = [self.slots[offset] for offsets in self._quarantined.values() for offset in offsets]
        return self._free_all(
            slot for slot in quarantined if slot.is_adopted and slot.writer and not is_running(slot.writer)
        )

    @property
    def sessions(self) -> frozenset[bytes]:
        """The open sessions."""
        return frozenset(self._sessions)

    # -------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Assert every invariant; O(n log n)."""
        self._chain.check()
        if self.arena is not None:
            self.arena.check()
            used = sum(slot.num_bytes for slot in self.slots.values())
            assert used + self.arena.num_free_bytes == self.arena.capacity_bytes
        by_group: dict[str, int] = {}
        for offset, slot in self.slots.items():
            assert slot.offset == offset
            assert slot.state in ("kept", "doomed") or not (slot.num_leases or slot.pinned_until)
            assert slot.state != "doomed" or slot.num_leases, "a doomed slot has no reader"
            assert (slot.state == "written") == (offset in self._sessions.get(slot.session, ()))
            assert (slot.state == "quarantined") == (offset in self._quarantined.get(slot.session, ()))
            by_group[slot.info.sharing_group] = by_group.get(slot.info.sharing_group, 0) + slot.num_bytes
        assert by_group == self.usage.taken
        kept = [slot for slot in self.slots.values() if slot.state == "kept"]
        assert all(slot.key in self._chain for slot in kept)
        assert len({slot.key for slot in kept}) == self._chain.num_resident
        assert self.num_leases == sum(slot.num_leases for slot in self.slots.values())
        pinned = [slot for slot in kept if slot.pinned_until is not None]
        assert self._num_pinned_bytes == sum(slot.num_bytes for slot in pinned)
        self._pins.check()
        assert set(pinned) == set(self._pins)
        assert self.num_quarantined == sum(map(len, self._quarantined.values()))
        assert all(offset in self.slots for offsets in self._sessions.values() for offset in offsets)

    # ------------------------------------------------------------------------------------------- inside

    def _allocate(self, info: RecordInfo) -> int | None:
        assert self.arena is not None
        num_bytes = self.arena.record_bytes(info.num_bytes)
        if num_bytes > self.arena.capacity_bytes:
            return None
        least_free = self.arena.num_free_bytes + MAX_EVICTED_RATIO * num_bytes
        while (offset := self.arena.allocate(info.num_bytes)) is None:
            key, reason = self._victim(info.sharing_group, num_bytes)
            if key is None or self.arena.num_free_bytes >= least_free:
                return None
            self._evict(key, reason)
        return offset

    def _victim(self, group: str, num_bytes: int) -> tuple[ChainKey | None, str]:
        """Return the block to evict for `num_bytes` bytes of this group, and the reason: its own when it has
        its share, else one of a group that exceeds its share, else the least recently used of all."""
        self._end_pins()
        if self.usage.would_exceed(group, num_bytes):
            return self._chain.oldest(group), "share" if self.usage.has_limit(group) else "space"
        for other in self.usage.greediest():
            key = self._chain.oldest(other)
            if key is not None:
                return key, "share"
        return self._chain.oldest(), "space"

    def _write_header(self, slot: ArenaSlot, state: State) -> None:
        assert self.arena is not None
        self._sequence += 1
        self.arena.write_header(slot.offset, slot.info, state, self._sequence, slot.writer)

    def _take(self, slot: ArenaSlot) -> None:
        self.slots[slot.offset] = slot
        self.usage.take(slot.info.sharing_group, slot.num_bytes)

    def _mark_kept(self, slot: ArenaSlot) -> None:
        slot.state = "kept"
        self._chain.add(slot.key, slot.info.parent, slot.info.sharing_group)

    def _quarantine(self, slot: ArenaSlot) -> None:
        slot.state = "quarantined"
        self._quarantined.setdefault(slot.session, set()).add(slot.offset)
        self.num_quarantined += 1

    def _settle(self, slot: ArenaSlot) -> None:
        """Take the slot from its session, or out of quarantine."""
        if slot.state == "written":
            self._sessions[slot.session].remove(slot.offset)
        elif slot.state == "quarantined":
            self.num_quarantined -= 1
            quarantined = self._quarantined[slot.session]
            quarantined.remove(slot.offset)
            if not quarantined:
                del self._quarantined[slot.session]

    def _free_all(self, slots: Iterable[ArenaSlot]) -> int:
        gone = list(slots)
        for slot in gone:
            self.free(slot)
        return len(gone)

    def _unpin(self, slot: ArenaSlot) -> None:
        slot.pinned_until = None
        self._pins.remove(slot)
        self._num_pinned_bytes -= slot.num_bytes
        self._chain.release(slot.key)

    def _end_pins(self) -> None:
        """Remove the pins that have expired."""
        now = self._clock.now()
        while (first := self._pins.first()) is not None and first[0] <= now:
            self._unpin(first[1])
