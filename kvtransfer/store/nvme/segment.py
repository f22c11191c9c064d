"""One segment file of the NVMe tier and its state: the records in it, and the space left for more."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtransfer.codec import Part
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.page_io import padded
from kvtransfer.store.record import PAGE_BYTES, image_bytes

# The most bytes that an entry of the directory takes in addition to its `RecordInfo`.
_ENTRY_BYTES = 16

_encoder = msgspec.msgpack.Encoder()


class NvmeRef(NamedTuple):
    """The place of a record's image; valid until the tier reports that the record was moved or dropped."""

    segment: int
    offset: int
    num_bytes: int


class Directory(Part, frozen=True):
    """The contents of a segment: records by offset, and the offsets of dropped records whose headers a scan
    of every page would still find."""

    live: list[tuple[int, RecordInfo]]
    stale: list[int]


@dataclass(eq=False)
class Segment:
    """One file and its state. `SegmentFiles` maintains `fd`, `num_users` and `is_gone`, `SegmentTable` the
    rest."""

    number: int
    path: Path
    num_bytes: int
    # The offset of the next image.
    end: int = 0
    live: dict[int, RecordInfo] = field(default_factory=dict)
    # The bytes of the live records' images.
    num_live_bytes: int = 0
    # Offsets of records that are not wanted any more and whose headers still stand on the disk.
    stale: set[int] = field(default_factory=set)
    # The most bytes that the directory of all records takes.
    directory_bytes: int = _ENTRY_BYTES
    num_writing: int = 0
    is_full: bool = False
    # A directory stands behind its records.
    is_sealed: bool = False
    # Whether something was written to it that is not yet durable.
    is_dirty: bool = False
    # Bytes of records that are not held may stand between those that are, or behind them.
    has_remains: bool = False
    # It could not be read when the tier was opened: its contents are unknown.
    is_unread: bool = False
    directory_lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    open_lock: threading.Lock = field(default_factory=threading.Lock)
    num_users: int = 0
    is_gone: bool = False

    def take(self, num_bytes: int, info: RecordInfo) -> int | None:
        """Reserve space for an image of `info`; None when it does not fit before the directory."""
        entry_bytes = len(_encoder.encode(info)) + _ENTRY_BYTES
        if self.end + num_bytes + padded(self.directory_bytes + entry_bytes) + PAGE_BYTES > self.num_bytes:
            return None
        self.directory_bytes += entry_bytes
        offset, self.end = self.end, self.end + num_bytes
        return offset

    def adopt(self, found: Directory) -> None:
        """Take in the contents found in the file."""
        self.live = dict(found.live)
        self.num_live_bytes = sum(image_bytes(info.num_bytes) for info in self.live.values())
        self.stale = set(found.stale)
        self.has_remains = True  # nobody knows
        self.directory_bytes = len(_encoder.encode(found)) + _ENTRY_BYTES * (len(found.live) + 1)

    @property
    def takes_directory(self) -> bool:
        """Whether the directory fits behind the records; never in a file that was cut."""
        tail_bytes = padded(self.directory_bytes) + PAGE_BYTES
        return self.num_bytes % PAGE_BYTES == 0 and self.end + tail_bytes <= self.num_bytes

    def add(self, offset: int, info: RecordInfo) -> None:
        """Count the record that stands at this offset."""
        self.live[offset] = info
        self.num_live_bytes += image_bytes(info.num_bytes)

    def remove(self, offset: int) -> RecordInfo | None:
        """Count the record at this offset no more; None: none is counted there."""
        info = self.live.pop(offset, None)
        if info is not None:
            self.num_live_bytes -= image_bytes(info.num_bytes)
            self.has_remains = True
        return info

    @property
    def num_dead_bytes(self) -> int:
        """Bytes of images that are not wanted any more."""
        return self.end - self.num_live_bytes

    @property
    def num_unused_bytes(self) -> int:
        """About how many more bytes fit."""
        return max(0, self.num_bytes - PAGE_BYTES - padded(self.directory_bytes) - self.end)
