"""The table of the NVMe tier: the place of each record, the segment for the next one, and the one to give up.

Sans-I/O; any thread may call it, and nothing in it waits for a disk. Space is counted in whole segments:
clients always leave one that only a compaction may begin, so that it never needs more than the capacity.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.segment import Directory, NvmeRef, Segment
from kvtransfer.store.record import image_bytes

# Records that one system call writes at most.
MAX_RUN_RECORDS = 64
# The next compaction is due when less than this part of a segment is left.
EARLY_SHARE = 0.25
# A compaction writes at most this part of a segment again, so that it always frees enough.
SURVIVING_SHARE = 0.5


class Moved(NamedTuple):
    """A record that a compaction wrote again; `old` is not valid any more."""

    info: RecordInfo
    old: NvmeRef
    new: NvmeRef


class Compacted(NamedTuple):
    """The result of a compaction, for records that were still in the tier."""

    moved: tuple[Moved, ...] = ()
    dropped: tuple[tuple[RecordInfo, NvmeRef], ...] = ()


class Reservation(NamedTuple):
    """The places of the leading records to be written, one right behind the other."""

    segment: Segment
    refs: tuple[NvmeRef, ...]


class SegmentTable:
    """All segments of one tier. A segment with `num_writing` is neither sealed nor compacted."""

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        # The one that is written now.
        self.open_segment: Segment | None = None
        self._ready: list[Segment] = []
        self._next_number = 1
        self._was_refused = False
        self._places: dict[RecordId, NvmeRef] = {}
        # Moved by the last compaction: until its result is known everywhere, the old places are still used.
        self._moved: dict[NvmeRef, NvmeRef] = {}
        # The size of all images.
        self.num_bytes = 0

    # -------------------------------------------------------------------------------------- records

    def adopt(self, segments: Sequence[Segment], next_number: int) -> None:
        """Take in the segments found on the disk, the oldest first; of a record found twice the newer
        counts."""
        with self._lock:
            self._next_number = next_number
            for segment in segments:
                self._segments[segment.number] = segment
                for offset, info in sorted(segment.live.items()):
                    self._place(info, _ref(segment, offset, info))

    def records(self) -> list[tuple[RecordInfo, NvmeRef]]:
        with self._lock:
            return [(self._segments[ref.segment].live[ref.offset], ref) for ref in self._places.values()]

    def find(self, ref: NvmeRef, pin: Callable[[Segment], None]) -> tuple[Segment, NvmeRef] | None:
        """Return the segment of a record, pinned, and the record's current place; None: it is not held."""
        with self._lock:
            ref = self._moved.get(ref, ref)
            segment = self._segments.get(ref.segment)
            if segment is None or ref.offset not in segment.live:
                return None
            pin(segment)
            return segment, ref

    def forget(self, ref: NvmeRef) -> None:
        """Forget a record; its header remains on the disk."""
        with self._lock:
            self._forget(self._moved.get(ref, ref))

    @property
    def num_records(self) -> int:
        return len(self._places)

    # -------------------------------------------------------------------------------------- writing

    def reserve(self, infos: Sequence[RecordInfo]) -> Reservation | None:
        """Reserve space for at least the first of the records in the open segment; None when it has none. The
        segment counts one more writer until `leave`."""
        with self._lock:
            segment = self.open_segment
            if segment is None:
                return None
            refs = []
            for info in infos[:MAX_RUN_RECORDS]:
                offset = segment.take(image_bytes(info.num_bytes), info)
                if offset is None:
                    break
                refs.append(_ref(segment, offset, info))
            if not refs:
                return None
            segment.num_writing += 1
            return Reservation(segment, tuple(refs))

    def leave(self, reservation: Reservation, written: Sequence[RecordInfo] | None, *, is_copy: bool) -> bool:
        """End a reservation: the records are written (copies by a compaction count from its `commit` on), or,
        with None, in an unknown state. True: the caller must seal the segment and call `sealed`."""
        with self._lock:
            if written is None:
                reservation.segment.stale.update(ref.offset for ref in reservation.refs)
                reservation.segment.has_remains = True
                return self._leave(reservation.segment)
            for ref, info in zip(reservation.refs, written, strict=True):
                reservation.segment.add(ref.offset, info)
                if not is_copy:
                    self._place(info, ref)
            return self._leave(reservation.segment)

    def sealed(self, segment: Segment) -> None:
        with self._lock:
            segment.num_writing -= 1

    def live(self, segment: Segment) -> list[tuple[int, RecordInfo]]:
        """Return the records of a segment and their offsets, in no order."""
        with self._lock:
            return list(segment.live.items())

    def directory(self, segment: Segment, erased: Iterable[int] = ()) -> Directory:
        """Return the directory of a segment, once these headers are erased."""
        with self._lock:
            return Directory(list(segment.live.items()), list(segment.stale.difference(erased)))

    # ------------------------------------------------------------------------------------- segments

    @property
    def newest_segment(self) -> Segment | None:
        with self._lock:
            return self._segments[max(self._segments)] if self._segments else None

    def next_number(self) -> int:
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            return number

    def may_grow(self, *, is_copy: bool) -> bool:
        """Whether another segment may be begun, by a compaction also the last one."""
        with self._lock:
            may = self._used_bytes() + (1 if is_copy else 2) * self._segment_bytes <= self._capacity_bytes
            self._was_refused |= not may
            return may

    def take_ready(self) -> Segment | None:
        """Take an empty segment left by a compaction."""
        with self._lock:
            return self._ready.pop() if self._ready else None

    def add_ready(self, segment: Segment) -> None:
        with self._lock:
            self._ready.append(segment)

    def segments(self, numbers: Iterable[int] | None = None) -> list[Segment]:
        """Return the segments with these numbers that still exist; None: all."""
        with self._lock:
            wanted = self._segments if numbers is None else numbers
            return [self._segments[number] for number in wanted if number in self._segments]

    def begin(self, segment: Segment | None) -> Segment | None:
        """Write to this segment from now on (None: to none). Return the previous one if the caller must seal
        it and call `sealed`."""
        with self._lock:
            before, self.open_segment = self.open_segment, segment
            self._was_refused = False
            if segment is not None:
                self._segments[segment.number] = segment
            if before is None:
                return None
            before.is_full = True
            before.num_writing += 1
            return before if self._leave(before) else None

    def give_up(self, segment: Segment) -> None:
        """Write no more to a segment. Its writers have yet to `leave`."""
        with self._lock:
            segment.is_full = True
            if self.open_segment is segment:
                self.open_segment = None

    def removed(self, segment: Segment) -> None:
        """Forget a segment whose file is removed."""
        with self._lock:
            for offset in list(segment.live):
                self._forget(_ref(segment, offset, segment.live[offset]))
            self._segments.pop(segment.number, None)

    def oldest_over(self) -> Segment | None:
        """Return the oldest segment if all together exceed the capacity."""
        with self._lock:
            is_over = self._used_bytes() > self._capacity_bytes
            return self._segments[min(self._segments)] if is_over else None

    def unsealed(self) -> list[Segment]:
        """Return the segments without a directory, except the open one and segments that are being
        written."""
        with self._lock:
            found = [each for each in self._segments.values() if not (each.is_sealed or each.is_unread)]
            return [each for each in found if each is not self.open_segment and each.num_writing == 0]

    # ----------------------------------------------------------------------------------- compaction

    @property
    def needs_compaction(self) -> bool:
        """Whether space is short."""
        with self._lock:
            return self._needs_compaction()

    def choose_victim(self) -> Segment | None:
        """Return the segment to give up, if there must be one: of the mostly dead ones the one with the
        fewest wanted bytes, else the oldest. The open one is chosen only if there is no other, and takes no
        more records then."""
        with self._lock:
            if not self._needs_compaction():
                return None
            idle = [
                each
                for each in self._segments.values()
                if each.num_writing == 0 and each is not self.open_segment
            ]
            if idle:
                dead = [each for each in idle if self.is_mostly_dead(each)]
                return min(dead or idle, key=lambda each: (each.num_live_bytes if dead else 0, each.number))
            if self.open_segment is None or self.open_segment.num_writing or len(self._segments) > 1:
                return None
            victim, self.open_segment = self.open_segment, None
            victim.is_full = True
            return victim

    def is_mostly_dead(self, segment: Segment) -> bool:
        """Return whether all of its records may be written again: then the segment is given up because of
        dropped records, not for its age."""
        return segment.num_dead_bytes >= (1 - SURVIVING_SHARE) * self._segment_bytes

    def commit(self, victim: Segment, copies: Sequence[Moved]) -> Compacted:
        """Make durable copies count, except those of records that have been forgotten since."""
        with self._lock:
            self._moved.clear()
            moved = []
            for copy in copies:
                if victim.remove(copy.old.offset) is None:
                    self._shed(copy.new)
                    continue
                victim.stale.add(copy.old.offset)
                self._places[copy.info.id] = self._moved[copy.old] = copy.new
                moved.append(copy)
            dropped = [(info, _ref(victim, offset, info)) for offset, info in sorted(victim.live.items())]
            for _, ref in dropped:
                self._forget(ref)
            self._was_refused = False
            return Compacted(tuple(moved), tuple(dropped))

    def undo(self, copies: Iterable[Moved]) -> None:
        """Undo a compaction that failed: the old places stay."""
        with self._lock:
            for copy in copies:
                self._shed(copy.new)

    # -------------------------------------------------------------------------------------- erasure

    def with_remains(self) -> list[Segment]:
        """Return the segments, also empty ones, that may hold bytes of records that are not held."""
        with self._lock:
            known = [*self._segments.values(), *self._ready]
            return [each for each in known if each.has_remains and not each.is_unread]

    def begin_erasing(self, segment: Segment) -> tuple[list[tuple[int, int]], frozenset[int]]:
        """Return offset and size of each image that must stay, and the offsets of all others. Records that
        are forgotten from now on are left to the next call."""
        with self._lock:
            segment.has_remains = False
            live = [(offset, image_bytes(info.num_bytes)) for offset, info in segment.live.items()]
            return live, frozenset(segment.stale)

    def end_erasing(self, segment: Segment, erased: Iterable[int] | None) -> None:
        """Forget the offsets that were erased; None: that failed."""
        with self._lock:
            if erased is None:
                segment.has_remains = True
            else:
                segment.stale.difference_update(erased)

    def unread(self) -> list[Segment]:
        """Return the segments whose contents are unknown, so that a restart may bring them back."""
        with self._lock:
            return [each for each in self._segments.values() if each.is_unread]

    # ------------------------------------------------------------------------------- under the lock

    def _place(self, info: RecordInfo, ref: NvmeRef) -> None:
        before = self._places.get(info.id)
        if before is not None:
            self._forget(before)
        self._places[info.id] = ref
        self.num_bytes += ref.num_bytes

    def _forget(self, ref: NvmeRef) -> None:
        info = self._shed(ref)
        if info is not None and self._places.get(info.id) == ref:
            del self._places[info.id]
            self.num_bytes -= ref.num_bytes

    def _shed(self, ref: NvmeRef) -> RecordInfo | None:
        """Mark the record that is live there as stale; return it, or None when there is none."""
        segment = self._segments.get(ref.segment)
        info = None if segment is None else segment.remove(ref.offset)
        if segment is not None and info is not None:
            segment.stale.add(ref.offset)
        return info

    def _leave(self, segment: Segment) -> bool:
        """Remove a writer; True if it was the last one of a full segment, which keeps one until `sealed`."""
        segment.num_writing -= 1
        if segment.is_full and segment.num_writing == 0:
            segment.num_writing = 1
            return True
        return False

    def _used_bytes(self) -> int:
        return sum(each.num_bytes for each in self._segments.values())

    def _needs_compaction(self) -> bool:
        free_bytes = self._capacity_bytes - self._used_bytes()
        if free_bytes >= 2 * self._segment_bytes:
            return False
        if (
            free_bytes < self._segment_bytes
        ):  # a compaction's own segment is taken: it failed, or was cut short
            return True
        unused_bytes = 0 if self.open_segment is None else self.open_segment.num_unused_bytes
        return self._was_refused or unused_bytes < EARLY_SHARE * self._segment_bytes


def _ref(segment: Segment, offset: int, info: RecordInfo) -> NvmeRef:
    return NvmeRef(segment.number, offset, image_bytes(info.num_bytes))
