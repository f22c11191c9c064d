"""What processes of neighboring versions send each other: each message beside its recorded images."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
import pytest
import wire_image

from kvtransfer.codec import Codec, Message, Part
from kvtransfer.errors import UnknownMessageError, WireError

NOW = wire_image.image()
STRUCTS = wire_image.structs()
RECORDED = [pytest.param(json.loads(path.read_text()), id=path.stem) for path in wire_image.recorded_images()]
REMEDY = (
    "docs/upgrades.md says how a message may change; a new version has its image recorded by make wire-image"
)
Image = dict[str, Any]
# Where a codec is now that an image has elsewhere: its connection is the same.
MOVED = {
    "cluster.gateway.fleet.ANSWER_CODEC": "cluster.gateway.fleet.messages.ANSWER_CODEC",
    "cluster.gateway.fleet.QUERY_CODEC": "cluster.gateway.fleet.messages.QUERY_CODEC",
    "cluster.gateway.placement_exchange.FOLLOW_CODEC": "cluster.gateway.fleet.messages.QUERY_CODEC",
    "cluster.gateway.placement_exchange.PLACEMENT_CODEC": "cluster.gateway.fleet.messages.PLACEMENT_CODEC",
    "cluster.scaling.counts.COUNTS_CODEC": "cluster.scaling.redis_counts.COUNTS_CODEC",
    "cluster.serve.rollout._CODEC": "cluster.serve.deployed._CODEC",
    "kvtransfer.store.messages.FROM_OWNER_CODEC": "kvtransfer.store.messages.owner_codec.FROM_OWNER_CODEC",
    "kvtransfer.store.messages.TO_OWNER_CODEC": "kvtransfer.store.messages.owner_codec.TO_OWNER_CODEC",
    "kvtransfer.store.nvme.segments._HEADERS": "kvtransfer.store.nvme.segment_headers._HEADERS",
    "kvtransfer.transports.base.ACK_CODEC": "kvtransfer.transports.stream_sockets.ACK_CODEC",
    "kvtransfer.transports.base.HELLO_CODEC": "kvtransfer.transports.stream_sockets.HELLO_CODEC",
}


def test_this_version_is_recorded() -> None:
    assert (wire_image.FOLDER / f"{wire_image.version()}.json").exists(), REMEDY


def test_every_message_with_a_codec_is_in_the_image() -> None:
    """A message that no codec names has no neighbor, such as the samples of the autoscaler."""
    expected = {"LoadReport", "AdmissionStats", "GatewayRecord", "HandOver", "QuotaRecord", "Deployed"}
    assert expected <= set(NOW["messages"])
    assert "kvtransfer.store.messages.owner_codec.TO_OWNER_CODEC" in NOW["codecs"]


@pytest.mark.parametrize("recorded", RECORDED)
def test_messages_have_changed_as_they_may(recorded: Image) -> None:
    """No message is gone, and fields keep their places, names and types; new ones are last and have
    defaults. Named tuples, which have a fixed length, and literals do not change at all."""
    problems = []
    for name, before in recorded["messages"].items():
        after = NOW["messages"].get(name)
        if after is None:
            problems.append(f"{name}: is gone")
            continue
        first = dict(list(after["fields"].items())[: len(before["fields"])])
        if list(first.items()) != list(before["fields"].items()):
            problems.append(f"{name}: has {first}, and had {before['fields']}")
        if after["num_required"] > before["num_required"]:
            problems.append(f"{name}: more fields have no default")
        if after["tag"] != before["tag"]:
            problems.append(f"{name}: has another tag")
    assert problems == [], REMEDY


@pytest.mark.parametrize("recorded", RECORDED)
def test_connections_take_all_that_they_took(recorded: Image) -> None:
    lost = {
        name: sorted(set(kinds) - set(NOW["codecs"].get(MOVED.get(name, name), ())))
        for name, kinds in recorded["codecs"].items()
        if not set(kinds) <= set(NOW["codecs"].get(MOVED.get(name, name), ()))
    }
    assert lost == {}, REMEDY


@pytest.mark.parametrize("recorded", RECORDED)
def test_the_index_is_read_as_it_was_written(recorded: Image) -> None:
    assert recorded["index"] == NOW["index"], "the values in Redis are shared by the nodes of both versions"


@pytest.mark.parametrize("recorded", RECORDED)
@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_recorded_bytes_are_read(recorded: Image, name: str) -> None:
    before = recorded["messages"].get(name)
    if before is None:
        return  # the message is new
    frame = bytes.fromhex(before["frame"])
    found = msgspec.msgpack.decode(frame, type=STRUCTS[name])
    assert begins_with(msgspec.msgpack.decode(msgspec.msgpack.encode(found)), msgspec.msgpack.decode(frame))


def begins_with(found: Any, wanted: Any) -> bool:
    """Whether they are equal but for what lists of the first have at their ends."""
    if isinstance(wanted, list):
        return len(found) >= len(wanted) and all(map(begins_with, found, wanted))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(begins_with(found[key], wanted[key]) for key in wanted)
    return bool(found == wanted)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_fields_of_a_newer_version_are_ignored(name: str) -> None:
    kind = STRUCTS[name]
    frame = msgspec.msgpack.encode(wire_image.example(kind))
    fields = msgspec.msgpack.decode(frame)
    for more in ([7], ["text", {"a": [1]}, None]):
        found = msgspec.msgpack.decode(msgspec.msgpack.encode(fields + more), type=kind)
        assert msgspec.msgpack.encode(found) == frame


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_fields_that_an_older_version_lacks_have_their_defaults(name: str) -> None:
    kind = STRUCTS[name]
    message = wire_image.example(kind)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    num_tags = 1 if kind.__struct_config__.tag else 0
    num_required = wire_image.num_required(kind)
    for num_fields in range(num_required, len(kind.__struct_fields__)):
        sent = fields[: num_tags + num_fields]
        found = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=kind)
        for field in msgspec.structs.fields(kind)[num_fields:]:
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            assert getattr(found, field.name) == default
    if num_required:
        short = msgspec.msgpack.encode(fields[: num_tags + num_required - 1])
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(short, type=kind)


# ------------------------------------------------------------------------------- messages that are not known


class Known(Message, frozen=True):
    """Represents a message that both versions have."""

    number: int
    kind: Literal["old"] = "old"


class Added(Message, frozen=True):
    """Represents a message that the newer version has added, with so long a name that msgpack counts it in a
    byte of its own."""

    number: int


class AddedLaterWithALongNameThatIsNeverOverSixtyFourBytes(Added, frozen=True, tag=True):
    """Represents another one."""


class Bare(Part, frozen=True):
    """Represents a record without a tag."""

    number: int


@pytest.mark.parametrize("message", [Added(1), AddedLaterWithALongNameThatIsNeverOverSixtyFourBytes(1)])
def test_messages_of_another_version_are_skipped(message: Message) -> None:
    older, newer = Codec[Any](Known), Codec[Any](Known | type(message))
    frame = newer.encode(message)
    assert newer.decode_known(frame) == message
    assert older.decode_known(frame) is None
    with pytest.raises(UnknownMessageError, match=type(message).__name__):
        older.decode(frame)
    many = msgspec.msgpack.encode([type(message).__name__, *range(20)])
    assert older.decode_known(many) is None


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91",
        b"\xdc\x00",
        b"\x92\xa5Kno",
        b"\x92\xd9",
        b"\x91\x01",
        b"\x81\xa1a\x01",
        msgspec.msgpack.encode(["Known", "no number"]),
        msgspec.msgpack.encode(["not a name", 1]),
        msgspec.msgpack.encode(["A" * 65, 1]),
        msgspec.msgpack.encode(["Known", 1, "new"]),
    ],
)
def test_what_is_no_message_is_not_skipped(frame: bytes) -> None:
    with pytest.raises(WireError) as refused:
        Codec[Any](Known).decode_known(frame)
    assert not isinstance(refused.value, UnknownMessageError)


def test_a_record_without_a_name_is_never_skipped() -> None:
    with pytest.raises(WireError, match="frame refused"):
        Codec[Any](Bare).decode_known(msgspec.msgpack.encode(["Other", 1]))
