"""The format of a record, in the arena and on NVMe alike: one header page, then the padded payload.

The page starts with magic, checksum, version and length, at the same places in every version of the format;
the checksum (`kvtransfer.blocks.checksum`) covers version, length and fields. The headers alone suffice to
rebuild the tables of a tier.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from typing import Literal, NamedTuple

import msgspec

from kvtransfer.blocks.checksum import Checksummer
from kvtransfer.codec import Codec, Part
from kvtransfer.errors import OtherVersionError, StoreError, WireError
from kvtransfer.messages import CompatibilityRecord, KvGroup
from kvtransfer.store.messages.records import HEADER_BYTES as HEADER_BYTES
from kvtransfer.store.messages.records import RecordInfo

PAGE_BYTES = 4096
MAGIC = b"tandem\x9dR"
VERSION = 2
SPACE_BYTES = 8
MAX_GROUP_BYTES = 1024

State = Literal["allocated", "committed"]

# Magic, checksum, version, number of bytes of the fields.
_FRONT = struct.Struct("<8sQII")
_SUMMED_FROM = 16
_MAX_FIELDS_BYTES = HEADER_BYTES - _FRONT.size


class Writer(NamedTuple):
    """A process that may write the payload of an allocated record: its id, its start time (clock ticks since
    boot) and the session for which it writes (b"": the owner itself)."""

    process_id: int
    started_at: int
    session: bytes = b""


class RecordPlace(NamedTuple):
    """The arena (or segment) and offset for which a header was written: at any other place the header is a
    copy, or left over."""

    arena: bytes
    offset: int


class Header(Part, frozen=True):
    """The contents of a header page. `sequence` grows with every header that an owner writes; `writer` is
    None when nobody writes (any more), `place` is None when the header was not made for an arena."""

    info: RecordInfo
    state: State
    sequence: int
    writer: Writer | None
    place: RecordPlace | None


_CODEC: Codec[Header] = Codec(Header)
_THREAD = threading.local()


def space_id(compatibility: CompatibilityRecord) -> bytes:
    """Return the 8-byte name of the space of a model, dtype and block layout. KV is shared within a space.
    A field with its default is left out: one that a later version added changes no name that it need not."""
    fields = msgspec.structs.asdict(compatibility)
    del fields["protocol"]
    for field in msgspec.structs.fields(CompatibilityRecord):
        if not field.required and fields[field.name] == field.default:
            del fields[field.name]
    return hashlib.sha256(msgspec.msgpack.encode(fields)).digest()[:SPACE_BYTES]


def stored_form(
    compatibility: CompatibilityRecord, kv_dtype: str = "", scale_bytes: int = 0
) -> CompatibilityRecord:
    """Return what decides the bytes of a replica's records. Records of KV have all layers, whatever windows
    these have on a device; groups of layers with states have records of their own, each beside that of a
    block (`kvtransfer.blocks.keys.state_key`). Where records have other elements of KV than the device, these
    are given with `kv_dtype`, and `scale_bytes` as in the record; states stay as they are."""
    if kv_dtype:
        compatibility = msgspec.structs.replace(compatibility, kv_dtype=kv_dtype, scale_bytes=scale_bytes)
    groups = compatibility.groups
    states = tuple(group for group in groups if group.state_size)
    if not states:
        return msgspec.structs.replace(compatibility, groups=())
    layers = sorted(layer for group in groups if not group.state_size for layer in group.layers)
    return msgspec.structs.replace(compatibility, groups=(KvGroup(tuple(layers), 0), *states))


def image_bytes(num_payload: int) -> int:
    """Return the size of a whole record with a payload of `num_payload` bytes: header page and padded
    payload."""
    return HEADER_BYTES + -(-num_payload // PAGE_BYTES) * PAGE_BYTES


def encode_header(
    info: RecordInfo,
    state: State,
    sequence: int,
    writer: Writer | None = None,
    place: RecordPlace | None = None,
) -> bytes:
    """Return the header page, of `HEADER_BYTES`. `StoreError` when the group's name or the rest is too
    long."""
    num_group_bytes = len(info.sharing_group.encode())
    if num_group_bytes > MAX_GROUP_BYTES:
        raise StoreError(
            f"the sharing group's name has {num_group_bytes} bytes; a record takes {MAX_GROUP_BYTES}"
        )
    fields = _CODEC.encode(Header(info, state, sequence, writer, place))
    if len(fields) > _MAX_FIELDS_BYTES:
        raise StoreError(f"the record's fields take {len(fields)} bytes; a header takes {_MAX_FIELDS_BYTES}")
    front = _FRONT.pack(MAGIC, 0, VERSION, len(fields))
    total = _summer().sum((front[_SUMMED_FROM:] + fields,))
    page = _FRONT.pack(MAGIC, total, VERSION, len(fields)) + fields
    return page.ljust(HEADER_BYTES, b"\0")


def decode_header(page: memoryview | bytes) -> Header:
    """Return the header in the first `HEADER_BYTES` of `page`. Raises only `StoreError` when there is no
    intact header, and `OtherVersionError` when there is one of another version of the format."""
    if len(page) < HEADER_BYTES:
        raise StoreError(f"a header page has {HEADER_BYTES} bytes, not {len(page)}")
    magic, total, version, num_fields_bytes = _FRONT.unpack_from(page)
    if magic != MAGIC:
        raise StoreError("no record starts here")
    if num_fields_bytes > _MAX_FIELDS_BYTES:
        raise StoreError("the record's header is damaged: impossible length")
    # A copy: the page may be shared memory, and the bytes that are verified must be those that are decoded.
    summed = bytes(page[_SUMMED_FROM : _FRONT.size + num_fields_bytes])
    if _summer().sum((summed,)) != total:
        raise StoreError("the record's header is damaged: its checksum is wrong")
    if version != VERSION:
        raise OtherVersionError(f"the record has format version {version}; this is version {VERSION}")
    try:
        return _CODEC.decode(summed[_FRONT.size - _SUMMED_FROM :])
    except WireError as error:
        raise StoreError(f"the record's header is damaged: {error}") from error


def _summer() -> Checksummer:
    """Return the checksummer of this thread: headers are also read on the threads of the I/O pool."""
    summer: Checksummer | None = getattr(_THREAD, "summer", None)
    if summer is None:
        summer = _THREAD.summer = Checksummer()
    return summer
