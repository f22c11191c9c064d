"""Frames: msgpack messages with a type tag, and the one codec that every connection uses.

A frame is a msgpack array `[tag, field, field, ...]`; decoding checks every field's type, so a frame of
another version or of garbage is a `WireError`, never a half-filled object. Nothing is pickled.
"""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import msgspec

from kvtransfer.errors import WireError

MAX_FRAME_BYTES = 64 << 20


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that crosses a process boundary: immutable, slotted, tagged with its class name."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A piece of a message: as `Message`, without a tag of its own."""


M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes one union of message types, fixed when the codec is made."""

    def __init__(self, union: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(cast(type[M], union))

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> M:
        """The message in `frame`; `WireError` when it is not one of this codec's types."""
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise WireError(f"frame refused: {error}") from error
