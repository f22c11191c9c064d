"""How many fields and values a gRPC message may have. Parsing makes an object of every one, in one call that
nothing interrupts: 5 MB of empty messages take some 0.2 s. They are counted in its bytes before."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from cluster.errors import FieldViolation, InvalidRequestError
from kvtransfer.common.clock import give_way

# A shorter message is parsed within a few milliseconds, whatever is in it.
SHORT_MESSAGE_BYTES = 128 << 10
# Fields in a message and all within it: a chat of the most messages and tools has fewer.
MAX_FIELDS = 1 << 16
# Numbers in lists, such as token ids; more of them where the context and its samples are larger.
MAX_VALUES = 5 << 17
# Bytes counted before the event loop may run again.
_FIELDS_AT_ONCE = 1024
_MAX_VARINT_BYTES = 10
# Bits of a tag: how the field is written. Bit of any byte of a varint: another byte follows.
_WIRE_TYPE, _IS_LONG = 7, 128
_IS_LONG_OR_WIRE_TYPE = _IS_LONG | _WIRE_TYPE

# The content of a field: a message, or numbers of this many bytes ("varint": of any number).
_Held = Any | Literal["varint", 4, 8]  # the descriptors of protobuf's runtimes have no type in common
_WIDTHS: Mapping[int, Literal["varint", 4, 8] | None] = {
    FieldDescriptor.TYPE_STRING: None,
    FieldDescriptor.TYPE_BYTES: None,
    FieldDescriptor.TYPE_GROUP: None,
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32), 4),
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64), 8),
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_SFIXED64: 8,
}


class _MalformedError(Exception):
    """The bytes are no message; parsing fails on them, too."""


async def check_fields(message: bytes, kind: Any, max_values: int) -> None:
    """Raise `InvalidRequestError` for a message of this kind with more fields, or more numbers in lists, than
    any request has."""
    num_fields = num_values = 0
    pending = [(0, len(message), kind)]
    while pending:
        at, end, parent = pending.pop()
        held_by = _fields_of(parent)
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise _too_many(MAX_FIELDS, "fields")
            if num_fields % _FIELDS_AT_ONCE == 0:
                await give_way()
            tag = message[at]
            if tag & _IS_LONG_OR_WIRE_TYPE == 2 and at + 2 <= end and message[at + 1] < _IS_LONG:
                begin = at + 2  # the usual case, which may be there many times
                at = begin + message[at + 1]
                if at > end:
                    break
            else:
                try:
                    tag, begin, at = _field_at(message, at, end)
                except _MalformedError:
                    break
                if tag & _WIRE_TYPE != 2:
                    continue
            if begin == at or (held := held_by.get(tag >> 3)) is None:
                continue
            if held == "varint":
                # The last byte of each is below 128.
                num_values += int((np.frombuffer(message, np.uint8, at - begin, begin) < _IS_LONG).sum())
            elif isinstance(held, int):
                num_values += (at - begin) // held
            else:
                pending.append((begin, at, held))
            if num_values > max_values:
                raise _too_many(max_values, "numbers in lists")


def _too_many(most: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        FieldViolation("request", f"has more than {most} {what}; send several requests")
    )


@functools.cache
def _fields_of(kind: Any) -> Mapping[int, _Held]:
    """Return the contents of the fields of a message that have a length, by number; texts are not among
    them."""
    found: dict[int, _Held] = {}
    for field in kind.fields:
        held = field.message_type or _WIDTHS.get(field.type, "varint")
        if held is not None:
            found[field.number] = held
    return found


def _field_at(message: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the tag of the field that begins here, and where its content begins and ends."""
    tag, at = _varint_at(message, at, end)
    match tag & _WIRE_TYPE:
        case 0:
            return tag, at, _varint_at(message, at, end)[1]
        case 1:
            size = 8
        case 2:
            size, at = _varint_at(message, at, end)
        case 3 | 4:  # the fields of a group count as those of what it is in
            size = 0
        case 5:
            size = 4
        case _:
            raise _MalformedError
    if at + size > end:
        raise _MalformedError
    return tag, at, at + size


def _varint_at(message: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        if at >= end:
            raise _MalformedError
        byte = message[at]
        at += 1
        value |= (byte & ~_IS_LONG) << shift
        if byte < _IS_LONG:
            return value, at
    raise _MalformedError
