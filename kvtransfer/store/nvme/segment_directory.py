"""The directory of a segment: what stands in it, written behind its records when it is full, and read when
the tier is opened.

| image | image | ... | unused | directory, padded to a page | trailer page |

A trailer is valid only in its segment, and a header only in the segment and at the offset for which it was
written (`record.RecordPlace`): so a file can be reused under a new number without being cleared.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from kvtransfer.blocks.checksum import checksum
from kvtransfer.errors import OtherVersionError
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.page_io import PageBuffer, erase_page, padded, read_at, write_at
from kvtransfer.store.nvme.segment import Directory, Segment
from kvtransfer.store.record import PAGE_BYTES, image_bytes

VERSION = 2

_MAGIC = b"tandem\x9dS"
# Magic, CRC-32 of the rest of the page, version, segment number, end of the images, length and checksum of
# the directory. The first three stand there in every version.
_TRAILER = struct.Struct("<8sIIQQQQ")
_CRC = struct.Struct("<I")
_SUMMED_FROM = 12
# Read at once when a segment is opened: with the usual sizes that is all of its directory.
_TAIL_BYTES = 256 << 10
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Directory)


def write_directory(fd: int, segment: Segment, directory: Directory) -> int:
    """Write directory and trailer; return the number of bytes. `OSError`. After a crash of the machine the
    directory may name records that are not there: reading them fails, as if they were damaged."""
    encoded = _encoder.encode(directory)
    tail = PageBuffer(padded(len(encoded)) + PAGE_BYTES).view
    tail[: len(encoded)] = encoded
    page = tail[-PAGE_BYTES:]
    _TRAILER.pack_into(
        page, 0, _MAGIC, 0, VERSION, segment.number, segment.end, len(encoded), checksum(encoded)
    )
    _CRC.pack_into(page, _SUMMED_FROM - _CRC.size, zlib.crc32(page[_SUMMED_FROM:]))
    write_at(fd, [tail], segment.num_bytes - len(tail))
    return len(tail)


def clear_directory(fd: int, segment: Segment) -> None:
    """Erase the directory of a segment that will get more records. `OSError`."""
    erase_page(fd, segment.num_bytes - PAGE_BYTES)


def read_directory(fd: int, segment: Segment) -> Directory | None:
    """Return the directory of a sealed segment, and set the segment's `end`; None when there is no whole
    directory of this segment. `OtherVersionError` when it is of another version, `OSError`."""
    if segment.num_bytes % PAGE_BYTES or segment.num_bytes < 2 * PAGE_BYTES:
        return None
    tail = PageBuffer(min(segment.num_bytes, _TAIL_BYTES)).view
    read_at(fd, [tail], segment.num_bytes - len(tail))
    page = tail[-PAGE_BYTES:]
    magic, crc, version, number, end, num_encoded, total = _TRAILER.unpack_from(page)
    if magic != _MAGIC or crc != zlib.crc32(page[_SUMMED_FROM:]):
        return None
    if version != VERSION:
        raise OtherVersionError(f"{segment.path} has format version {version}; this is version {VERSION}")
    start = segment.num_bytes - PAGE_BYTES - padded(num_encoded)
    if number != segment.number or not end <= start:
        return None
    if padded(num_encoded) + PAGE_BYTES > len(tail):
        tail = PageBuffer(padded(num_encoded) + PAGE_BYTES).view
        read_at(fd, [tail], start)
    encoded = tail[-PAGE_BYTES - padded(num_encoded) :][:num_encoded]
    if checksum(encoded) != total:
        return None
    try:
        directory = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not all(_fits(offset, info, end) for offset, info in directory.live):
        return None
    if not all(_is_page(offset, end) for offset in directory.stale):
        return None
    segment.end = end
    return directory


def _fits(offset: int, info: RecordInfo, end: int) -> bool:
    """Whether the image of the record lies before the end of the images."""
    return _is_page(offset, end) and info.num_bytes >= 0 and offset + image_bytes(info.num_bytes) <= end


def _is_page(offset: int, end: int) -> bool:
    return 0 <= offset < end and offset % PAGE_BYTES == 0
