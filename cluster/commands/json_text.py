"""Messages of the API as JSON for programs: every field under its own name, integers as numbers."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict


def as_dict(message: Any) -> dict[str, Any]:
    """Every field, also those at 0, under its name in the .proto; 64-bit integers as numbers."""
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_numbers(message, fields)


def _with_numbers(message: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """protobuf's JSON writes 64-bit integers as strings; JSON numbers are meant here."""
    for descriptor in message.DESCRIPTOR.fields:
        value = fields.get(descriptor.name)
        own = getattr(message, descriptor.name)
        if descriptor.message_type is None and isinstance(value, str) and isinstance(own, int):
            fields[descriptor.name] = own
        elif descriptor.message_type is not None and isinstance(value, dict):
            if hasattr(own, "DESCRIPTOR"):
                _with_numbers(own, value)
            else:  # a map, whose keys are texts in JSON
                fields[descriptor.name] = {
                    str(key): item
                    if isinstance(item, int | float | str)
                    else _with_numbers(item, value[str(key)])
                    for key, item in own.items()
                }
        elif descriptor.message_type is not None and isinstance(value, list):
            for item, part in zip(own, value, strict=True):
                _with_numbers(item, part)
    return fields
