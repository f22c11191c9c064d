"""Frames: msgpack messages with a type tag, and the one codec that every connection uses.

A frame is a msgpack array `[tag, field, field, ...]`; decoding checks every field's type, so a frame of
another version or of garbage is a `WireError`, never a half-filled object. Nothing is pickled. On a byte
stream a frame lies behind its length in bytes, a little-endian uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import IO, Generic, TypeVar, cast

import msgspec

from kvtransfer.errors import MAX_REASON_CHARS, PeerGoneError, WireError, shown

# Of any kind of stream; most take less (`FrameStream`).
MAX_FRAME_BYTES = 64 << 20
# Of a connection that carries no data of requests: hellos, offers, announcements and acknowledgements.
CONTROL_FRAME_BYTES = 1 << 20
# What a frame lies behind on a byte stream.
LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that crosses a process boundary: immutable, slotted, tagged with its class name."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message: as `Message`, without a tag of its own."""


M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes one union of message types, fixed when the codec is made."""

    def __init__(self, union: object) -> None:
        self.union = union
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_listed)
        self._decoder = msgspec.msgpack.Decoder(cast(type[M], union))

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> M:
        """The message in `frame`; `WireError` when it is not one of this codec's types."""
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(f"frame refused: {shown(str(error), MAX_REASON_CHARS)}") from error


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
    """Read so many bytes, in parts where the stream is not buffered."""
    data = b""
    while len(data) < num_bytes:
        part = stream.read(num_bytes - len(data))
        if not part:
            raise PeerGoneError(f"the stream ended {num_bytes - len(data)} bytes before the end of a frame")
        data += part
    return data
