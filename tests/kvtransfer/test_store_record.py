"""Header pages of records: read as they were written, or an error of ours; and whether a writer lives."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from slow_cases import examples

from kvtransfer.blocks.checksum import checksum
from kvtransfer.errors import OtherVersionError, StoreError
from kvtransfer.messages import CompatibilityRecord, Shard
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.record import (
    HEADER_BYTES,
    MAX_GROUP_BYTES,
    Header,
    RecordPlace,
    State,
    Writer,
    decode_header,
    encode_header,
    image_bytes,
    space_id,
)
from kvtransfer.store.server.writer_process import is_running, writer_of

SHARD = Shard(0, 28, 0, 8)
INFO = RecordInfo(
    RecordId(b"s" * 8, b"k" * 16, SHARD), b"p" * 16, b"c" * 16, "group", b"m" * 32, 1 << 20, (1 << 64) - 1
)
PAGE = encode_header(INFO, "allocated", 7, Writer(12, 34, b"session"), RecordPlace(b"a" * 16, 1 << 40))
COMPATIBILITY = CompatibilityRecord(3, b"f" * 32, "bfloat16", "bfloat16", 16, 28, 8, 128)

counts = st.integers(0, (1 << 63) - 1)
infos = st.builds(
    RecordInfo,
    st.builds(RecordId, st.binary(max_size=32), st.binary(max_size=32), st.builds(Shard, *[counts] * 4)),
    st.binary(max_size=32),
    st.binary(max_size=32),
    st.text(st.characters(codec="utf-8"), max_size=200),
    st.binary(max_size=64),
    counts,
    st.integers(0, (1 << 64) - 1),
)
writers = st.none() | st.builds(Writer, counts, counts, st.binary(max_size=32))
places = st.none() | st.builds(RecordPlace, st.binary(max_size=16), counts)
states = st.sampled_from(("allocated", "committed"))


def read(page: bytes) -> Header | None:
    """The header, or None when there is none; any error but ours is a defect."""
    try:
        return decode_header(memoryview(page))
    except StoreError:
        return None


@given(infos, states, counts, writers, places)
def test_a_header_is_read_as_it_was_written(
    info: RecordInfo, state: State, sequence: int, writer: Writer | None, place: RecordPlace | None
) -> None:
    page = encode_header(info, state, sequence, writer, place)
    assert len(page) == HEADER_BYTES
    assert decode_header(memoryview(page)) == Header(info, state, sequence, writer, place)


@settings(max_examples=examples(300))
@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_gives_the_same_fields_or_an_error(bit: int) -> None:
    page = bytearray(PAGE)
    page[bit // 8] ^= 1 << bit % 8
    assert read(bytes(page)) in (None, decode_header(PAGE))


def test_every_bit_of_the_fields_matters() -> None:
    num_used = len(PAGE.rstrip(b"\0"))
    for bit in range(num_used * 8):
        page = bytearray(PAGE)
        page[bit // 8] ^= 1 << bit % 8
        assert read(bytes(page)) is None, f"bit {bit}"


@given(st.binary(max_size=200), st.integers(0, HEADER_BYTES), st.booleans())
def test_garbage_is_an_error_of_ours(garbage: bytes, at: int, is_over_a_header: bool) -> None:
    page = bytearray(PAGE if is_over_a_header else bytes(HEADER_BYTES))
    page[at : at + len(garbage)] = garbage
    page = page.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    assert read(bytes(page)) in (None, decode_header(PAGE))


@given(st.binary(max_size=300), st.integers(0, 1 << 32))
def test_garbage_with_a_right_sum_is_an_error_too(fields: bytes, length: int) -> None:
    length = min(length, len(fields)) if length % 2 else len(fields)
    rest = struct.pack("<II", 1, length) + fields[:length]
    page = PAGE[:8] + struct.pack("<Q", checksum(rest)) + rest
    assert read(page.ljust(HEADER_BYTES, b"\0")) is None


def test_half_a_page_is_an_error() -> None:
    with pytest.raises(StoreError, match="4096 bytes, not 4095"):
        decode_header(PAGE[:-1])


def test_another_version_is_distinguished_from_damage() -> None:
    rest = struct.pack("<II", 3, 3) + b"new"
    page = (PAGE[:8] + struct.pack("<Q", checksum(rest)) + rest).ljust(HEADER_BYTES, b"\0")
    with pytest.raises(OtherVersionError, match="version 3; this is version 2"):
        decode_header(page)
    damaged = page[:24] + b"N" + page[25:]
    with pytest.raises(StoreError, match="its checksum is wrong") as caught:
        decode_header(damaged)
    assert not isinstance(caught.value, OtherVersionError)


def test_the_format_stays_as_it_is() -> None:
    """Disks hold what earlier versions wrote: a change of this page needs another `VERSION`."""
    record_id = RecordId(b"spaceid8", b"0123456789abcdef", SHARD)
    info = RecordInfo(record_id, b"", b"chain", "acme", b"model", 8192, 99)
    page = encode_header(info, "committed", 5, None, RecordPlace(b"arena", 65536))
    assert page == bytes.fromhex(
        "74616e64656d9d52784da65816951c820200000056000000959793c4087370616365696438c410303132333435363738396162"
        "63646566" + "94001c0008c400c405636861696ea461636d65c4056d6f64656ccd200063a9636f6d6d697474656405c092"
        "c4056172656e61ce00010000"
    ).ljust(HEADER_BYTES, b"\0")
    assert space_id(COMPATIBILITY).hex() == "026145d37a8bb1ec"


def test_a_tenant_whose_name_is_too_long_is_refused_by_name() -> None:
    encode_header(replace(INFO, sharing_group="x" * MAX_GROUP_BYTES), "committed", 1)
    with pytest.raises(StoreError, match=r"group's name has 1026 bytes; a record takes 1024"):
        encode_header(replace(INFO, sharing_group="é" * 513), "committed", 1)
    with pytest.raises(StoreError, match="fields take"):
        encode_header(replace(INFO, model=bytes(HEADER_BYTES)), "committed", 1)


@pytest.mark.parametrize(("num_payload", "pages"), [(0, 1), (1, 2), (4096, 2), (4097, 3), (1 << 20, 257)])
def test_an_image_is_the_header_and_whole_pages(num_payload: int, pages: int) -> None:
    assert image_bytes(num_payload) == pages * 4096


def test_a_space_is_all_of_compatibility_but_the_protocol() -> None:
    assert len(space_id(COMPATIBILITY)) == 8
    assert space_id(replace(COMPATIBILITY, protocol=4)) == space_id(COMPATIBILITY)
    changed = [
        replace(COMPATIBILITY, model_fingerprint=b"g" * 32),
        replace(COMPATIBILITY, dtype="float32"),
        replace(COMPATIBILITY, weight_dtype="float32"),
        replace(COMPATIBILITY, kv_dtype="int8"),
        replace(COMPATIBILITY, num_kinds=1),
        *(
            replace(COMPATIBILITY, **{name: 7})
            for name in (
                "block_tokens",
                "num_layers",
                "num_kv_heads",
                "head_dim",
                "scale_bytes",
                "token_parts",
            )
        ),
    ]
    assert len({space_id(each) for each in [COMPATIBILITY, *changed]}) == 1 + len(changed)


# ------------------------------------------------------------------------------------------------ writers


def test_this_process_runs_and_its_number_alone_is_not_enough() -> None:
    me = writer_of(os.getpid(), b"session")
    assert me is not None
    assert me.session == b"session"
    assert is_running(me)
    assert not is_running(me._replace(started_at=me.started_at - 1))


def test_a_dead_writer_does_not_run_not_even_as_a_zombie() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        writer = writer_of(process.pid)
        assert writer is not None
        assert is_running(writer)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead and not yet waited for
        assert not is_running(writer)
    assert writer_of(process.pid) is None
    assert not is_running(writer)
