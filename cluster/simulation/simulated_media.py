"""The memory and the disk of a simulated node's store: they hold nothing, and copies take their time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cluster.simulation.virtual_loop import WorkTime
from kvtransfer.common.faults import Faults
from kvtransfer.store.dram.arena_space import ArenaSpace
from kvtransfer.store.messages.records import PurgeOrder, RecordInfo
from kvtransfer.store.nvme.page_io import padded
from kvtransfer.store.nvme.segment import Directory, NvmeRef, Segment
from kvtransfer.store.nvme.segment_media import Images
from kvtransfer.store.nvme.segment_table import Compacted
from kvtransfer.store.nvme.segmented_log import SegmentedLog
from kvtransfer.store.record import PAGE_BYTES, Header, State, Writer, image_bytes


class CopyLane:
    """Copies one after the other, at one rate."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self.free_at = 0.0

    def take(self, at: float, num_bytes: int) -> float:
        """Copy so much, not before that time; return when that is done."""
        self.free_at = max(at, self.free_at) + num_bytes / self._bytes_s
        return self.free_at


class _NoMemory:
    """Memory of any size that nobody touches: all images are the same one."""

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, 1 << 20))

    def image(self, num_bytes: int) -> memoryview:
        if len(self._view) < num_bytes:
            self._view = memoryview(mmap.mmap(-1, 2 * num_bytes))
        return self._view[:num_bytes]


class SimulatedArena(ArenaSpace):
    """The host tier of a node, which remembers what its records are."""

    def __init__(self, arena_id: bytes, num_bytes: int, granule_bytes: int) -> None:
        super().__init__(arena_id, num_bytes, granule_bytes)
        self._infos: dict[int, RecordInfo] = {}
        self._memory = _NoMemory()
        self.give_all()

    def write_header(
        self, offset: int, info: RecordInfo, state: State, sequence: int, writer: Writer | None = None
    ) -> None:
        self._infos[offset] = info

    def info_at(self, offset: int) -> RecordInfo | None:
        return self._infos.get(offset)

    def space(self, offset: int) -> memoryview:
        return self._memory.image(self._counts[offset] * self.granule_bytes)

    def payload(self, offset: int, num_bytes: int) -> memoryview:
        return self._memory.image(num_bytes)

    def image(self, offset: int, num_payload: int) -> memoryview:
        return self._memory.image(image_bytes(num_payload))

    def scan(self) -> Iterator[tuple[int, Header]]:
        return iter(())

    def close(self) -> None:
        """There is nothing to give back."""

    def _erase(self, offset: int) -> None:
        self._infos.pop(offset, None)


class SimulatedSegments:
    """The segments of a log (`kvtransfer.store.nvme.segment_media.SegmentMedia`), on a disk that reads and
    writes at once, each at its own rate."""

    def __init__(self, work: WorkTime, read_bytes_s: float, write_bytes_s: float) -> None:
        self.folder = Path("simulated")
        self.reads, self.writes = CopyLane(read_bytes_s), CopyLane(write_bytes_s)
        self._work = work
        self._memory = _NoMemory()

    def create(self, number: int, num_bytes: int) -> Segment:
        return Segment(number, self.folder, num_bytes)

    def rename(self, segment: Segment, number: int) -> Segment | None:
        return Segment(number, self.folder, segment.num_bytes)

    def remove(self, segment: Segment) -> None:
        """There is no file."""

    def pin(self, segment: Segment) -> None:
        segment.num_users += 1

    def unpin(self, segment: Segment) -> None:
        segment.num_users -= 1

    def open(self, segment: Segment) -> None:
        """There is no file."""

    def is_unused(self, segment: Segment) -> bool:
        return segment.num_users == 0

    def image(self, num_bytes: int) -> memoryview:
        return self._memory.image(num_bytes)

    def buffers(self, refs: Sequence[NvmeRef], records: Images) -> list[memoryview]:
        return [image for (image, _), _ in zip(records, refs, strict=False)]

    def write(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        self._work.pass_to(self.writes.take(self._work.now(), sum(map(len, buffers))))

    def read(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        self._work.pass_to(self.reads.take(self._work.now(), sum(map(len, buffers))))

    def is_record(self, page: memoryview, info: RecordInfo, ref: NvmeRef) -> bool:
        return True

    def write_directory(self, segment: Segment, directory: Directory) -> int:
        num_bytes = padded(segment.directory_bytes) + PAGE_BYTES
        self._work.pass_to(self.writes.take(self._work.now(), num_bytes))
        return num_bytes

    def sync(self, segment: Segment) -> None:
        """What is written is durable."""

    def sync_folder(self) -> None:
        """There is no folder."""


class SimulatedLog(SegmentedLog):
    """The log of records on such a disk, empty at first. Its reads wait for those before, and its writes for
    those: how long is no part of the rate that it measures."""

    def __init__(
        self, capacity_bytes: int, segment_bytes: int, disk: SimulatedSegments, work: WorkTime
    ) -> None:
        self._disk = disk
        self._work = work
        super().__init__(capacity_bytes, segment_bytes, disk, work, Faults())

    def open(self) -> list[tuple[RecordInfo, NvmeRef]]:
        return []

    def close(self) -> None:
        """There is nothing to make durable."""

    def erase(self, refs: Iterable[NvmeRef], order: PurgeOrder | None = None) -> None:
        for ref in refs:
            self.drop(ref)

    def end_purge(self, order: PurgeOrder) -> None:
        """No write outlives an order."""

    def read(self, ref: NvmeRef, info: RecordInfo, into: memoryview, is_check: bool = False) -> None:
        self._work.pass_to(self._disk.reads.free_at)
        super().read(ref, info, into, is_check)

    def write_run(self, records: Images) -> tuple[NvmeRef, ...]:
        self._work.pass_to(self._disk.writes.free_at)
        return super().write_run(records)

    def compact(self, is_wanted: Callable[[RecordInfo], bool]) -> Compacted:
        self._work.pass_to(self._disk.writes.free_at)
        return super().compact(is_wanted)
