"""An NVMe tier on a folder of a test, the records it is given, and the reader who sums what comes back."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.config import StoreSettings
from kvtransfer.errors import StoreError
from kvtransfer.messages import Shard
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.log import Compacted, NvmeRef, NvmeTier
from kvtransfer.store.record import HEADER_BYTES, image_bytes

SHARD = Shard(0, 4, 0, 2)
SEGMENT_BYTES = 128 << 10
SPACE = b"space--1"


def payload_of(key: int, num_bytes: int) -> bytes:
    """Return bytes that no other record has."""
    return np.random.default_rng(key).bytes(num_bytes)


def info_of(key: int, num_bytes: int, group: str = "acme", space: bytes = SPACE) -> RecordInfo:
    """Return the record of `payload_of`."""
    identity = RecordId(space, key.to_bytes(16, "big"), SHARD)
    total = checksum(payload_of(key, num_bytes))
    return RecordInfo(identity, b"", identity.key, group, b"m" * 32, num_bytes, total)


def empty_image(num_payload: int) -> memoryview:
    """Return an empty image, page-aligned as the arena's."""
    return memoryview(mmap.mmap(-1, image_bytes(num_payload)))


def image_of(info: RecordInfo) -> memoryview:
    """Return an image with an empty header page: the tier writes its own."""
    image = empty_image(info.num_bytes)
    key = int.from_bytes(info.id.key, "big")
    image[HEADER_BYTES : HEADER_BYTES + info.num_bytes] = payload_of(key, info.num_bytes)
    return image


def settings_for(folder: Path, num_segments: int = 8, segment_bytes: int = SEGMENT_BYTES) -> StoreSettings:
    return StoreSettings(
        node_id="n",
        epoch=1,
        name="store",
        host="127.0.0.1",
        dram_bytes=0,
        nvme_path=str(folder),
        nvme_bytes=num_segments * segment_bytes,
        segment_bytes=segment_bytes,
    )


class NvmeHarness:
    """`held` is what the owner's books say: every record that was written or found, and where."""

    def __init__(self, settings: StoreSettings, faults: Faults | None = None) -> None:
        self.folder = Path(settings.nvme_path)
        self.clock = ManualClock()
        self.tier = NvmeTier(settings, self.clock, faults or Faults())
        self.held: dict[RecordId, tuple[RecordInfo, NvmeRef]] = {}
        self.open()

    def open(self) -> None:
        self.held = {info.id: (info, ref) for info, ref in self.tier.open()}

    def put(self, key: int, num_bytes: int = 10_000, group: str = "acme", space: bytes = SPACE) -> RecordInfo:
        info = info_of(key, num_bytes, group, space)
        self.held[info.id] = (info, self.tier.write(image_of(info), info))
        return info

    def get(self, record: RecordId) -> bytes | None:
        """Return the record's payload if its sum is right, as the rank that copies it sees it; else None."""
        if record not in self.held:
            return None
        info, ref = self.held[record]
        image = empty_image(info.num_bytes)
        try:
            self.tier.read(ref, info, image)
        except StoreError:
            return None
        payload = bytes(image[HEADER_BYTES : HEADER_BYTES + info.num_bytes])
        return payload if checksum(payload) == info.checksum else None

    def has(self, info: RecordInfo) -> bool:
        """Return whether the record comes back with its right bytes; other bytes are an `AssertionError`."""
        payload = self.get(info.id)
        key = int.from_bytes(info.id.key, "big")
        assert payload is None or payload == payload_of(key, info.num_bytes)
        return payload is not None

    def compact(self, *wanted: RecordInfo) -> Compacted:
        """Compact, and take over the result as the owner does."""
        ids = {info.id for info in wanted}
        compacted = self.tier.compact(lambda info: info.id in ids)
        self.take_over(compacted)
        return compacted

    def take_over(self, compacted: Compacted) -> None:
        for info, old, new in compacted.moved:
            if self.held.get(info.id, (info, None))[1] == old:
                self.held[info.id] = (info, new)
        for info, ref in compacted.dropped:
            if self.held.get(info.id, (info, None))[1] == ref:
                del self.held[info.id]

    def segments(self) -> list[Path]:
        """Return the files, the oldest first."""
        return sorted(self.folder.glob("*.seg"))


@contextmanager
def nvme_harness(folder: Path, num_segments: int = 8, faults: Faults | None = None) -> Iterator[NvmeHarness]:
    harness = NvmeHarness(settings_for(folder, num_segments), faults)
    yield harness
    harness.tier.close()


def crashed(folder: Path, copy: Path) -> Path:
    """Copy the present content of the disk, as the next owner finds it after this one died."""
    shutil.copytree(folder, copy)
    return copy
