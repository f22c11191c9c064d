"""Frames: msgpack messages with a type tag, and the one codec that every connection uses.

A frame is a msgpack array `[tag, field, field, ...]`; decoding checks every field's type, so garbage is a
`WireError`, never a half-filled object. Nothing is pickled. On a byte stream a frame lies behind its length
in bytes, a little-endian uint32.

Processes of neighboring versions talk to each other while a cluster is rolled. Fields that a frame has beyond
the known ones are ignored, and those that it lacks take their defaults; a connection skips messages that it
does not know (`Codec.decode_known`). What a change of a message may do is in docs/upgrades.md, and
`tests/cluster/test_wire_image.py` compares every message with its recorded image.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import IO, Generic, TypeVar, cast, get_args

import msgspec

from kvtransfer.errors import MAX_REASON_CHARS, PeerGoneError, UnknownMessageError, WireError, shown

# The largest frame of any kind of stream; most take less (`FrameStream`).
MAX_FRAME_BYTES = 64 << 20
# The largest frame of a connection that carries no data of requests: hellos, offers, announcements,
# acknowledgements.
CONTROL_FRAME_BYTES = 1 << 20
# The length that precedes a frame on a byte stream.
LENGTH = struct.Struct("<I")
# No message has a longer name.
_MAX_TAG_BYTES = 64

_log = logging.getLogger("tandem.links")
# Names of messages that were skipped, each of which is logged once.
_skipped: set[str] = set()
_MAX_LOGGED_NAMES = 64


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of everything that crosses a process boundary: immutable, slotted, tagged with its class name."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of a message: as `Message`, without a tag of its own."""


M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes one union of message types, fixed when the codec is made."""

    def __init__(self, union: object) -> None:
        self.union = union
        self._tags = _tags(union)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_listed)
        self._decoder = msgspec.msgpack.Decoder(cast(type[M], union))

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> M:
        """Return the message in `frame`; `WireError` when it is not one of this codec's types,
        `UnknownMessageError` when it is a message of a name that none of them has."""
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            name = _message_name(frame) if self._tags else None
            if name is not None and name not in self._tags:
                raise UnknownMessageError(name) from error
            raise WireError(f"frame refused: {shown(str(error), MAX_REASON_CHARS)}") from error

    def decode_known(self, frame: bytes | memoryview) -> M | None:
        """Return the message in `frame`; None, to be skipped, when another version has added its name.
        `WireError` as in `decode`."""
        try:
            return self.decode(frame)
        except UnknownMessageError as error:
            if error.name not in _skipped and len(_skipped) < _MAX_LOGGED_NAMES:
                _skipped.add(error.name)
                _log.warning("%s; such messages are skipped", error)
            return None


def _tags(union: object) -> frozenset[str]:
    """Return the names of the messages of a union; none where it has a type that is no message."""
    kinds = get_args(union) or (union,)
    if not all(isinstance(kind, type) and issubclass(kind, Message) for kind in kinds):
        return frozenset()
    return frozenset(kind.__name__ for kind in kinds)


def _message_name(frame: bytes | memoryview) -> str | None:
    """Return the name of the message in a frame; None where the frame does not begin as one."""
    head = bytes(frame[: 7 + _MAX_TAG_BYTES])
    if not head:
        return None
    # The first byte of an array: short, with a length of 2 bytes, or with one of 4 bytes.
    start = 1 if 0x91 <= head[0] <= 0x9F else {0xDC: 3, 0xDD: 5}.get(head[0], 0)
    kind = head[start : start + 1]
    if not start or not kind:
        return None
    if 0xA0 <= kind[0] <= 0xBF:
        first, length = start + 1, kind[0] & 0x1F
    elif kind[0] == 0xD9 and len(head) > start + 1:
        first, length = start + 2, head[start + 1]
    else:
        return None
    name = head[first : first + length]
    if len(name) < length or length > _MAX_TAG_BYTES or not name.isascii():
        return None
    text = name.decode()
    return text if text.isidentifier() else None


def _listed(value: object) -> list[object]:
    """Return the items of a sequence that is not a built-in one, such as one that is made when it is read."""
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def framed(frame: bytes) -> bytes:
    """Return the frame behind its length."""
    return LENGTH.pack(len(frame)) + frame


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the next frame of a blocking stream; None at its end. Raises `PeerGoneError` if the stream ends
    within a frame."""
    header = stream.read(LENGTH.size)
    if not header:
        return None
    (length,) = LENGTH.unpack(header + _read(stream, LENGTH.size - len(header)))
    return _read(stream, length)


def _read(stream: IO[bytes], num_bytes: int) -> bytes:
    """Read `num_bytes` bytes, in parts where the stream is not buffered."""
    data = b""
    while len(data) < num_bytes:
        part = stream.read(num_bytes - len(data))
        if not part:
            raise PeerGoneError(f"the stream ended {num_bytes - len(data)} bytes before the end of a frame")
        data += part
    return data
