"""Messages of the API as JSON for programs: every field under its own name, integers as numbers."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cluster.proto.enums import names_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb


def status_json(
    status: admin_pb.StatusResponse,
    stores: Sequence[admin_pb.StoreNodeStat],
    paths: Sequence[admin_pb.ReplicaPaths] | None = None,
) -> dict[str, Any]:
    """Return the status, with the stores' tiers as `store_stats` and, if given, `paths`."""
    whole = {**as_dict(status), "store_stats": [as_dict(node) for node in stores]}
    return whole if paths is None else {**whole, "paths": [as_dict(replica) for replica in paths]}


def as_dict(message: Any) -> dict[str, Any]:
    """Return every field, also those at 0, under its name in the .proto; 64-bit integers as numbers, enums by
    their short names, bytes in base64. Fields that may be absent, and are, are left out.

    protobuf's own MessageToDict writes 64-bit integers as strings and takes ten times the time, which is too
    slow for a gateway whose status is read every second.
    """
    return {
        name: convert(getattr(message, name))
        for name, has_presence, convert in _fields(message.DESCRIPTOR)
        if not has_presence or message.HasField(name)
    }


class _Field(NamedTuple):
    name: str
    has_presence: bool
    convert: Callable[[Any], Any]


@functools.cache
def _fields(descriptor: Any) -> tuple[_Field, ...]:
    return tuple(_Field(field.name, field.has_presence, _converter(field)) for field in descriptor.fields)


def _converter(field: Any) -> Callable[[Any], Any]:
    """Return the converter of one of the API's kinds of fields: numbers, texts, messages, lists and maps of
    these."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        convert = _converter(field.message_type.fields_by_name["value"])
        return lambda entries: {str(key): convert(value) for key, value in entries.items()}
    single = _single(field)
    return (lambda items: [single(item) for item in items]) if field.is_repeated else single


def _single(field: Any) -> Callable[[Any], Any]:
    if field.message_type is not None:
        return as_dict
    if field.enum_type is not None:
        names = names_of(field.enum_type)
        return lambda value: names.get(value, value)
    if field.type == field.TYPE_BYTES:
        return lambda value: base64.b64encode(value).decode()
    return _finite if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT) else lambda value: value


def _finite(value: float) -> float | str:
    """Return the number, or where JSON has no such number, the text that protobuf writes and reads for it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
