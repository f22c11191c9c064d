"""Messages of the API as JSON, against protobuf's own conversion."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from cluster.api.json_text import as_dict
from cluster.proto.enums import names_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

KINDS = {name: kind for api in (pb, admin_pb) for name, kind in vars(api).items() if isinstance(kind, type)}
DOUBLES = 0.0, -1.5, 1e300, 0.1, float("inf"), float("-inf")


def fill(message: Any, rng: random.Random, depth: int = 0) -> None:
    """With random values; about half of the fields stay as they are."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            for _ in range(2):
                key = (
                    rng.randrange(1 << 31) if field.message_type.fields[0].type != field.TYPE_STRING else "ü"
                )
                getattr(message, field.name)[key] = scalar(value, rng)
        elif field.message_type is not None:
            part = getattr(message, field.name)
            for item in [part.add(), part.add()] if field.is_repeated else [part]:
                item.SetInParent()
                fill(item, rng, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(scalar(field, rng) for _ in range(2))
        else:
            setattr(message, field.name, scalar(field, rng))


def scalar(field: Any, rng: random.Random) -> Any:
    if field.type == field.TYPE_STRING:
        return rng.choice(["", "a", "é\n<"])
    if field.type == field.TYPE_BYTES:
        return rng.choice([b"", b"\xff\x00"])
    if field.type == field.TYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    if field.type == field.TYPE_FLOAT:
        return rng.choice([0.0, -1.5])
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == field.TYPE_DOUBLE:
        return rng.choice(DOUBLES)
    return rng.choice([0, 1, (1 << 31) - 1, *([(1 << 64) - 1] if field.type == field.TYPE_UINT64 else [])])


def keys(value: Any) -> Any:
    """The shape without the values."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    return [keys(item) for item in value] if isinstance(value, list) else None


def with_enum_values(made: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """With the names of enum values that the .proto has in place of the short ones."""
    whole = {}
    for name, value in made.items():
        field = descriptor.fields_by_name[name]
        kind = field.message_type

        def convert(item: Any, field: Any = field, kind: Any = kind) -> Any:
            if field.enum_type is not None:
                numbers = {short: number for number, short in names_of(field.enum_type).items()}
                return numbers[item]
            return with_enum_values(item, kind) if kind is not None else item

        is_map = kind is not None and kind.GetOptions().map_entry
        is_list = field.is_repeated and not is_map
        whole[name] = value if is_map else [convert(it) for it in value] if is_list else convert(value)
    return whole


@pytest.mark.parametrize("name", sorted(KINDS))
def test_any_message_is_what_protobuf_makes_of_it_with_numbers(name: str) -> None:
    for seed in range(20):
        message = KINDS[name]()
        fill(message, random.Random(seed))
        made = as_dict(message)
        read = with_enum_values(json.loads(json.dumps(made, allow_nan=False)), message.DESCRIPTOR)
        assert ParseDict(read, type(message)()) == message
        own = MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        assert keys(made) == keys(own)


def test_large_integers_are_numbers() -> None:
    status = admin_pb.StatusResponse(num_finished_requests=(1 << 64) - 1)
    status.replicas.add(epoch=1 << 60).load.num_loaded_tokens["dram"] = 1 << 50
    made = as_dict(status)
    (replica,) = made["replicas"]
    assert made["num_finished_requests"] == (1 << 64) - 1
    assert (replica["epoch"], replica["load"]["num_loaded_tokens"]) == (1 << 60, {"dram": 1 << 50})
    assert "load" not in as_dict(admin_pb.StatusResponse(replicas=[admin_pb.Replica()]))["replicas"][0]
