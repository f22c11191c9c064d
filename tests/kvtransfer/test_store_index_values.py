"""The index's values: their codec, and the script that changes them against a plain dict."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_harness import RawRedis
from slow_cases import examples

from kvtransfer.errors import StoreError
from kvtransfer.messages import Shard
from kvtransfer.store.index.values import (
    STALE_STAMPS,
    UPDATE_SCRIPT,
    Entry,
    NodeRecord,
    decode_entries,
    decode_node,
    encode_change,
    encode_epoch,
    encode_node,
    key_prefix,
    node_number,
    padded,
)
from kvtransfer.store.messages.records import Tier

SHORTS = st.integers(0, 2**16 - 1)
EPOCHS = st.integers(0, 2**64 - 1)
TIERS: st.SearchStrategy[Tier] = st.sampled_from(("dram", "nvme"))
ENTRIES = st.builds(
    Entry,
    node=st.binary(min_size=8, max_size=8),
    shard=st.builds(Shard, SHORTS, SHORTS, SHORTS, SHORTS),
    tier=TIERS,
    stamp=st.integers(0, 2**32 - 1),
    epoch=EPOCHS,
)
WORDS = st.text(st.characters(exclude_categories=("Cs", "Z", "C")), min_size=1)


def encode_entry(entry: Entry) -> bytes:
    """29 bytes of a value, as `UPDATE_SCRIPT` writes them."""
    shard = entry.shard
    numbers = shard.layer_start, shard.layer_end, shard.head_start, shard.head_end
    tier = ("dram", "nvme").index(entry.tier)
    return struct.pack(">8s4HBIQ", entry.node, *numbers, tier, entry.stamp, entry.epoch)


@given(st.lists(ENTRIES))
def test_a_value_is_read_as_it_was_written(entries: list[Entry]) -> None:
    assert list(decode_entries(b"".join(map(encode_entry, entries)))) == entries


@given(st.binary(max_size=200))
def test_any_bytes_are_entries_or_nothing(value: bytes) -> None:
    assert len(list(decode_entries(value))) <= len(value) // 29


@given(st.builds(NodeRecord, EPOCHS, EPOCHS, WORDS, st.text(st.characters(codec="utf-8"))))
def test_a_node_is_read_as_it_was_written(record: NodeRecord) -> None:
    assert decode_node(encode_node(record)) == record


@given(st.binary(max_size=60))
def test_any_bytes_are_a_node_or_refused(value: bytes) -> None:
    with suppress(StoreError):
        assert isinstance(decode_node(value), NodeRecord)


@pytest.mark.parametrize("value", [b"", b"1", b"1 2 address", b"one 2 address a", b"\xff 1 2 3"])
def test_a_node_of_someone_else_is_refused_in_words(value: bytes) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        decode_node(value)


@given(EPOCHS, EPOCHS)
def test_padded_epochs_have_the_order_of_epochs(one: int, other: int) -> None:
    assert (padded(one) < padded(other)) == (one < other)


def test_keys_of_a_chain_are_one_slot_and_those_of_others_are_spread() -> None:
    prefixes = {key_prefix("ns", bytes([number] * 16), b"space-01") for number in range(256)}
    assert len({redis.crc.key_slot(prefix) for prefix in prefixes}) > 200
    prefix = key_prefix("ns", b"\x01\x02\x03\x04" + bytes(12), b"}{space}")
    assert prefix == b"ns:{01020304}:}{space}"
    assert len({redis.crc.key_slot(prefix + bytes([number])) for number in range(256)}) == 1


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    with RawRedis(tmp_path_factory.mktemp("redis")) as server, server.client() as client:
        yield client


SHARDS = (Shard(0, 2, 0, 4), Shard(2, 4, 0, 4), Shard(0, 65535, 65535, 0))
STEP = st.tuples(
    st.sampled_from("ab"),
    st.integers(1, 2),
    st.integers(1000, 1000 + 2 * STALE_STAMPS),
    st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(SHARDS)), st.none() | TIERS, min_size=1, max_size=6
    ),
)


@settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(steps=st.lists(STEP, max_size=8))
def test_the_update_script_does_what_a_dict_does(
    client: redis.Redis,
    tmp_path: Path,
    steps: list[tuple[str, int, int, dict[tuple[int, Shard], Tier | None]]],
) -> None:
    client.flushdb()
    update = client.register_script(UPDATE_SCRIPT)
    books: dict[int, dict[tuple[str, Shard], tuple[Tier, int, int]]] = {}
    for node, epoch, stamp, changes in steps:
        numbers = sorted({number for number, _ in changes})
        packed = []
        for number in numbers:
            book = books.setdefault(number, {})
            mine = {shard: tier for (other, shard), tier in changes.items() if other == number}
            for (owner, shard), (_, at, told_epoch) in list(book.items()):
                is_over = told_epoch != epoch if owner == node else abs(at - stamp) > STALE_STAMPS
                if is_over:
                    del book[owner, shard]
            for shard, tier in mine.items():
                book.pop((node, shard), None)
                if tier is not None:
                    book[node, shard] = tier, stamp, epoch
            packed.append(b"".join(encode_change(shard, tier) for shard, tier in mine.items()))
        fixed: list[bytes | int] = [node_number(node), encode_epoch(epoch), stamp, STALE_STAMPS, 60_000]
        update(keys=[f"k{number}" for number in numbers], args=[*fixed, *packed])
    for number in range(3):
        value = client.get(f"k{number}")
        assert value is None or isinstance(value, bytes)
        stored = list(decode_entries(value or b""))
        expected = {
            Entry(node_number(node), shard, tier, stamp, epoch)
            for (node, shard), (tier, stamp, epoch) in books.get(number, {}).items()
        }
        assert set(stored) == expected
        assert len(stored) == len(expected)
        assert (value is None) == (not expected)
        assert value is None or 0 < int(str(client.pttl(f"k{number}"))) <= 60_000
