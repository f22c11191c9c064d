"""The files of the NVMe tier after damage: what the disk lost or mixed up, and what somebody wrote there."""

from __future__ import annotations

import shutil
import struct
import zlib
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from nvme_harness import NvmeHarness, info_of, settings_for

from kvtransfer.blocks.checksum import checksum
from kvtransfer.errors import StoreError
from kvtransfer.store.record import Header, decode_header
from tests.fuzz.message_grammar import MessageGrammar
from tests.fuzz.mutation import EDGE_INTS, mutate_bytes
from tests.fuzz.target import FindingError, Target, outcome

PAGE_BYTES = 4096
SEGMENT_BYTES = 16 * PAGE_BYTES
NUM_SEGMENTS = 4
_FRONT = struct.Struct("<8sQII")
_TRAILER = struct.Struct("<8sIIQQQQ")


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return the targets of header pages and of whole folders."""
    segments = _Segments(folder)
    return [
        Target("record header", _Headers(folder / "headers").run, 600),
        Target("segment files", segments.damaged, 50),
        Target("segment files, forged", segments.forged, 50),
    ]


def _forged_page(page: bytes, fields: bytes, version: int = 1) -> bytes:
    """Return a header page with these fields and the right checksum."""
    summed = struct.pack("<II", version, len(fields)) + fields
    return (page[:8] + struct.pack("<Q", checksum(summed)) + summed).ljust(PAGE_BYTES, b"\0")[:PAGE_BYTES]


class _Headers:
    """Header pages as they stand in an arena and in segments."""

    def __init__(self, folder: Path) -> None:
        harness = NvmeHarness(settings_for(folder, NUM_SEGMENTS, SEGMENT_BYTES))
        harness.put(1, 5000)
        harness.tier.close()
        self._page = harness.segments()[0].read_bytes()[:PAGE_BYTES]
        decode_header(self._page)
        self._grammar = MessageGrammar(Header)

    def run(self, rng: Random) -> str:
        page = self._page
        if rng.random() < 0.7:
            page = _forged_page(page, self._grammar.frame(rng), rng.choice((1, 1, 1, 1, 0, 2)))
        if rng.random() < 0.5:
            page = mutate_bytes(rng, page)
        return outcome(lambda: decode_header(page), StoreError)


class _Segments:
    """A folder of two segments, one of them sealed, of which each case gets a copy."""

    def __init__(self, folder: Path) -> None:
        self._settings = settings_for(folder / "now", NUM_SEGMENTS, SEGMENT_BYTES)
        self._folder = folder / "now"
        harness = NvmeHarness(self._settings)
        for key in range(1, 9):
            harness.put(key, 6000)
        harness.tier.close()
        self._files = {path.name: path.read_bytes() for path in harness.segments()}
        self._infos = [info_of(key, 6000) for key in range(1, 9)]
        self._grammar = MessageGrammar(Header)

    def damaged(self, rng: Random) -> str:
        """Bytes of a file are lost, changed or in the wrong place."""
        return self._open(
            self._changed(rng, lambda data: mutate_bytes(rng, data, list(self._files.values())))
        )

    def forged(self, rng: Random) -> str:
        """A file holds what no store writes, with the right checksums."""
        forge = self._with_header if rng.random() < 0.5 else self._with_directory
        return self._open(self._changed(rng, lambda data: forge(rng, data)))

    def _changed(self, rng: Random, change: Any) -> dict[str, bytes]:
        files = dict(self._files)
        name = rng.choice(sorted(files))
        files[name] = change(files[name])
        if rng.random() < 0.1:
            files[rng.choice(("0000000009.seg", "9999999999.seg", "00000000x9.seg", "lock"))] = files[name]
        return files

    def _open(self, files: dict[str, bytes]) -> str:
        """Open the folder and use it: no record has other bytes than its own, and the folder can be used by
        the next owner too."""
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        for name, data in files.items():
            (self._folder / name).write_bytes(data)

        def use() -> None:
            harness = NvmeHarness(self._settings)
            try:
                known = {info.id: info for info in self._infos}
                found = [info for info, _ in harness.held.values()]
                for info in found:
                    if known.get(info.id) == info:
                        harness.has(info)
                    elif info.num_bytes < 1 << 20:
                        harness.get(info.id)
                new = harness.put(100, 6000)
                harness.compact(*found)
                if new.id in harness.held and not harness.has(new):
                    raise FindingError("what was written cannot be read")
                harness.tier.erase([ref for info, ref in harness.held.values() if info.id != new.id])
            finally:
                harness.tier.close()
            again = NvmeHarness(self._settings)
            again.tier.close()
            if any(info.id in again.held for info in found if info.id != new.id):
                raise FindingError("what was erased is found again")

        return outcome(use, StoreError)

    def _with_header(self, rng: Random, data: bytes) -> bytes:
        """Put a header page of odd contents where one may stand, in a segment without directory."""
        offset = rng.randrange(len(data) // PAGE_BYTES) * PAGE_BYTES
        place = [(1).to_bytes(8, "big"), offset]
        info = self._odd_info(rng)
        fields = msgspec.msgpack.encode([info, "committed", 0, None, place])
        changed = data[:offset] + _forged_page(data[:8], fields) + data[offset + PAGE_BYTES :]
        return changed[:-PAGE_BYTES] + bytes(PAGE_BYTES)

    def _with_directory(self, rng: Random, data: bytes) -> bytes:
        """Put a directory of odd contents behind the records."""
        live = [
            [rng.choice((*EDGE_INTS, 0, PAGE_BYTES, 3 * PAGE_BYTES)), self._odd_info(rng)]
            for _ in range(rng.randrange(4))
        ]
        stale = [rng.choice((*EDGE_INTS, 0, PAGE_BYTES)) for _ in range(rng.randrange(3))]
        encoded = msgspec.msgpack.encode([live, stale])
        magic, _, version, number, end, _, _ = _TRAILER.unpack_from(data, len(data) - PAGE_BYTES)
        if rng.random() < 0.3:
            end = rng.choice(EDGE_INTS) % (1 << 64)
        front = _TRAILER.pack(magic, 0, version, number, end, len(encoded), checksum(encoded))
        page = bytearray(front.ljust(PAGE_BYTES, b"\0"))
        struct.pack_into("<I", page, 8, zlib.crc32(page[12:]))
        tail = encoded.ljust(-(-len(encoded) // PAGE_BYTES) * PAGE_BYTES, b"\0") + bytes(page)
        return data[: len(data) - len(tail)] + tail

    def _odd_info(self, rng: Random) -> list[Any]:
        info = msgspec.msgpack.decode(msgspec.msgpack.encode(rng.choice(self._infos)))
        assert isinstance(info, list)
        # Space, key and shard; parent, chain, tenant, model; the payload's size and checksum.
        for at in rng.sample(range(len(info)), rng.randrange(3)):
            if isinstance(info[at], int):
                info[at] = rng.choice(EDGE_INTS)
            elif isinstance(info[at], bytes):
                info[at] = rng.randbytes(rng.choice((0, 1, 16, 300)))
        return info
