"""The headers of records in segments, each valid at its place only."""

from __future__ import annotations

import struct

from kvtransfer.codec import Codec
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.record import VERSION, Header, RecordPlace, encode_header

_HEADERS: Codec[Header] = Codec(Header)
_HEADER_FRONT = struct.Struct("<II")
# Version and length of the fields, then the fields: see `record`.
_HEADER_SUMMED_FROM = 16


def header_page(info: RecordInfo, number: int, offset: int) -> bytes:
    """Return the header page of the record at this place."""
    return encode_header(info, "committed", 0, None, place_of(number, offset))


def is_header_of(page: memoryview, info: RecordInfo, number: int, offset: int) -> bool:
    """Whether the page holds that header. Its checksum is ignored, as all that it covers is compared."""
    fields = _HEADERS.encode(Header(info, "committed", 0, None, place_of(number, offset)))
    expected = _HEADER_FRONT.pack(VERSION, len(fields)) + fields
    return page[_HEADER_SUMMED_FROM : _HEADER_SUMMED_FROM + len(expected)] == expected


def place_of(number: int, offset: int) -> RecordPlace:
    """Return the place that a header at this offset of that segment names."""
    return RecordPlace(number.to_bytes(8, "big"), offset)
