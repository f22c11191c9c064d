"""What the log of records needs of the files that hold its segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.segment import Directory, NvmeRef, Segment

# Whole, page-aligned images; their header pages are not looked at.
Images = Sequence[tuple[memoryview, RecordInfo]]


class SegmentMedia(Protocol):
    """The segments of one log: `SegmentFiles`, or those of a simulation. Thread-safe; all that goes wrong is
    a `StoreIoError`, of `open`, `read` and `write` an `OSError`."""

    folder: Path

    def create(self, number: int, num_bytes: int) -> Segment:
        """Create a segment, with all of its space."""

    def rename(self, segment: Segment, number: int) -> Segment | None:
        """Reuse an unused segment as an empty one of another number; None: it cannot be."""

    def remove(self, segment: Segment) -> None:
        """Delete a segment; users that have it pinned can continue."""

    def pin(self, segment: Segment) -> None:
        """Keep it open, once it is, until `unpin`."""

    def unpin(self, segment: Segment) -> None: ...

    def open(self, segment: Segment) -> None:
        """Open a pinned segment, if it is not. `OSError`."""

    def is_unused(self, segment: Segment) -> bool:
        """Whether the segment is not pinned."""

    def image(self, num_bytes: int) -> memoryview:
        """Return memory for an image of a record that is copied."""

    def buffers(self, refs: Sequence[NvmeRef], records: Images) -> list[memoryview]:
        """Return what `write` takes to write the leading records to these places, in one run."""

    def write(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all buffers to a pinned segment, one after the other."""

    def read(self, segment: Segment, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all buffers from a pinned segment, one after the other."""

    def is_record(self, page: memoryview, info: RecordInfo, ref: NvmeRef) -> bool:
        """Whether the page, which was read, is the header of that record at that place."""

    def write_directory(self, segment: Segment, directory: Directory) -> int:
        """Seal a segment; return the bytes that were written for that."""

    def sync(self, segment: Segment) -> None:
        """Make all that was written to a segment durable."""

    def sync_folder(self) -> None:
        """Make renames and removals durable."""
