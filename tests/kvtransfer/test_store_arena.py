"""The arena: its space against a naive map of granules, adoption by descriptor, and what no scan may find."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples

from kvtransfer.blocks.host_memory import mapping_bytes
from kvtransfer.errors import StoreError
from kvtransfer.messages import Shard
from kvtransfer.store.dram.arena import SEALS, Arena
from kvtransfer.store.dram.extents import Extents
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.record import HEADER_BYTES, RecordPlace, Writer, encode_header

GRANULE_BYTES = 16 << 10
NUM_BYTES = 2 << 20
# Payload that fills one granule.
FULL_GRANULE = GRANULE_BYTES - HEADER_BYTES


def info(number: int, num_bytes: int = 5000) -> RecordInfo:
    record_id = RecordId(b"s" * 8, number.to_bytes(16, "big"), Shard(0, 2, 0, 2))
    return RecordInfo(record_id, b"", b"chain", "group", b"model", num_bytes, number)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NUM_BYTES, GRANULE_BYTES, huge_pages=False)
    yield arena
    arena.close()


def put(arena: Arena, number: int, num_bytes: int = 5000) -> int:
    """A committed record whose payload repeats its number."""
    offset = arena.allocate(num_bytes)
    assert offset is not None
    arena.payload(offset, num_bytes)[:] = bytes([number]) * num_bytes
    arena.write_header(offset, info(number, num_bytes), "committed", number)
    return offset


def adopted(arena: Arena) -> Arena:
    again = Arena.adopt(os.dup(arena.fd), arena.granule_bytes)
    again.check()
    return again


# -------------------------------------------------------------------------------------------------- space


class ExtentsMachine(RuleBasedStateMachine):
    """Extents against a list of which granules are taken."""

    NUM_TOTAL = 40

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(self.NUM_TOTAL)
        self.extents.give(0, self.NUM_TOTAL)
        self.is_taken = [False] * self.NUM_TOTAL
        self.taken: list[tuple[int, int]] = []

    def ranges(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for position, is_taken in enumerate(self.is_taken):
            if is_taken:
                continue
            if found and sum(found[-1]) == position:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((position, 1))
        return found

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        sizes = [size for _, size in self.ranges() if size >= count]
        start = self.extents.take(count)
        assert (start is None) == (not sizes)
        if start is not None:
            assert (start, min(sizes)) in self.ranges(), "not the best fit"
            assert not any(self.is_taken[start : start + count])
            self.is_taken[start : start + count] = [True] * count
            self.taken.append((start, count))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start, count = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.extents.give(start, count)
        self.is_taken[start : start + count] = [False] * count

    @invariant()
    def the_free_ranges_are_those(self) -> None:
        assert self.extents.ranges() == self.ranges()
        assert self.extents.num_free == self.is_taken.count(False)
        largest = max((size for _, size in self.ranges()), default=0)
        assert self.extents.take(largest + 1) is None


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_hundred_thousand_records_come_and_go() -> None:
    """The cost of an operation must not grow with their number, or this does not end in time."""
    extents = Extents(1 << 20)
    extents.give(0, 1 << 20)
    draw = random.Random(1)
    taken: list[tuple[int, int]] = []
    for _ in range(300_000):
        count = draw.randint(1, 9)
        start = extents.take(count)
        if start is not None:
            taken.append((start, count))
        if start is None or len(taken) > 100_000:
            index = draw.randrange(len(taken))
            taken[index], taken[-1] = taken[-1], taken[index]
            extents.give(*taken.pop())
    assert len(taken) > 90_000
    for start, count in taken:
        extents.give(start, count)
    assert extents.ranges() == [(0, 1 << 20)]


def test_a_record_takes_whole_granules_and_gives_them_back(arena: Arena) -> None:
    assert arena.num_free_bytes == arena.capacity_bytes == NUM_BYTES - GRANULE_BYTES
    one, two = arena.allocate(FULL_GRANULE), arena.allocate(FULL_GRANULE + 1)
    assert one is not None
    assert two is not None
    assert one % GRANULE_BYTES == two % GRANULE_BYTES == 0
    assert min(one, two) >= GRANULE_BYTES, "the superblock is not given away"
    assert arena.num_free_bytes == arena.capacity_bytes - 3 * GRANULE_BYTES
    assert arena.record_bytes(FULL_GRANULE + 1) == 2 * GRANULE_BYTES
    arena.check()
    arena.free(one)
    arena.free(two)
    assert arena.num_free_bytes == arena.capacity_bytes
    assert arena.allocate(arena.capacity_bytes - HEADER_BYTES) == GRANULE_BYTES
    assert arena.allocate(1) is None
    arena.check()


def test_payload_and_image_are_where_they_should_be(arena: Arena) -> None:
    offset = put(arena, 7, 5000)
    assert bytes(arena.payload(offset, 5000)) == bytes([7]) * 5000
    image = arena.image(offset, 5000)
    assert len(image) == 3 * 4096
    assert bytes(image[HEADER_BYTES : HEADER_BYTES + 5000]) == bytes([7]) * 5000


# ------------------------------------------------------------------------------------------------- memory


def test_the_memory_is_sealed_and_shared(arena: Arena) -> None:
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    with mmap.mmap(arena.fd, arena.num_bytes) as other:
        offset = put(arena, 9)
        assert other[offset + HEADER_BYTES] == 9
        other[offset + HEADER_BYTES] = 8
    assert arena.payload(offset, 1)[0] == 8


def test_untouched_memory_is_not_taken_and_a_scan_takes_none() -> None:
    arena = Arena.create(1 << 30, 64 << 10, huge_pages=False)
    put(arena, 1)
    before = os.fstat(arena.fd).st_blocks
    assert before * 512 <= 4 << 20, "more than the huge pages that were written"
    again = Arena.adopt(os.dup(arena.fd), 64 << 10)
    assert [header.info.checksum for _, header in again.scan()] == [1]
    assert os.fstat(arena.fd).st_blocks == before
    again.close()
    arena.close()


def test_huge_pages_are_used_or_the_log_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtransfer.store.dram.arena"):
        arena = Arena.create(NUM_BYTES, GRANULE_BYTES, huge_pages=True)
    is_huge = os.fstat(arena.fd).st_blksize == 2 << 20
    assert is_huge == ("no reserved huge pages" not in caplog.text)
    offset = put(arena, 3)
    again = adopted(arena)
    assert [found for found, _ in again.scan()] == [offset]
    again.close()
    arena.close()


@pytest.mark.parametrize("granule_bytes", [0, 2048, 12 << 10, 2 << 20])
def test_an_impossible_granule_is_refused(granule_bytes: int) -> None:
    with pytest.raises(StoreError, match="powers of two from 4 KiB to 1 MiB"):
        Arena.create(NUM_BYTES, granule_bytes, huge_pages=False)


# ----------------------------------------------------------------------------------------------- adoption


def test_adoption_finds_what_was_there_and_the_rest_is_free(arena: Arena) -> None:
    offsets = [put(arena, number, number * 9000) for number in range(1, 8)]
    arena.free(offsets.pop(3))
    writer = Writer(4711, 815, b"session")
    allocated = arena.allocate(100)
    assert allocated is not None
    arena.write_header(allocated, info(50, 100), "allocated", 50, writer)
    again = adopted(arena)
    assert again.is_adopted
    assert not arena.is_adopted
    assert (again.id, again.num_bytes) == (arena.id, arena.num_bytes)
    assert again.num_free_bytes == arena.num_free_bytes
    found = dict(again.scan())
    assert sorted(found) == sorted([*offsets, allocated])
    assert (found[allocated].state, found[allocated].writer) == ("allocated", writer)
    for offset in offsets:
        record = found[offset].info
        payload = bytes(again.payload(offset, record.num_bytes))
        assert payload == bytes([record.checksum]) * record.num_bytes
    for offset in found:
        again.free(offset)
    assert again.num_free_bytes == again.capacity_bytes
    again.check()
    assert list(adopted(again).scan()) == []


def test_headers_that_are_not_where_they_were_written_are_not_taken_for_records(arena: Arena) -> None:
    offset = put(arena, 1)
    page = bytes(arena.view[offset : offset + HEADER_BYTES])
    copy = arena.allocate(5000)
    assert copy is not None
    arena.view[copy : copy + HEADER_BYTES] = (
        page  # as if read from NVMe, or left by a larger record's payload
    )
    foreign = arena.allocate(5000)
    assert foreign is not None
    arena.view[foreign : foreign + HEADER_BYTES] = encode_header(
        info(2), "committed", 2, None, RecordPlace(b"other arena here", foreign)
    )
    nowhere = arena.allocate(5000)
    assert nowhere is not None
    arena.view[nowhere : nowhere + HEADER_BYTES] = encode_header(info(3), "committed", 3)
    assert [found for found, _ in adopted(arena).scan()] == [offset]


def test_a_header_inside_a_records_payload_is_skipped_with_it(arena: Arena) -> None:
    offset = put(arena, 1, 5 * GRANULE_BYTES)
    inside = offset + 2 * GRANULE_BYTES
    arena.view[inside : inside + HEADER_BYTES] = encode_header(
        info(2), "committed", 2, None, RecordPlace(arena.id, inside)
    )
    assert [found for found, _ in adopted(arena).scan()] == [offset]


def test_what_was_freed_or_erased_is_never_found_again(arena: Arena) -> None:
    freed, erased, kept = put(arena, 1), put(arena, 2), put(arena, 3)
    arena.free(freed)
    arena.erase_header(erased)
    arena.check()
    assert [found for found, _ in adopted(arena).scan()] == [kept]
    larger = arena.allocate(100)
    assert larger == freed, "the same place, and only a part of a header was written when the owner died"
    arena.write_header(larger, info(4, 100), "committed", 4)
    arena.view[larger + 30] ^= 1
    assert [found for found, _ in adopted(arena).scan()] == [kept]


@pytest.mark.parametrize("num_bytes", [NUM_BYTES, 1 << 62, -5])
def test_a_record_that_ends_behind_the_arena_is_none(arena: Arena, num_bytes: int) -> None:
    offset = arena.allocate(100)
    assert offset is not None
    arena.write_header(offset, info(1, num_bytes), "committed", 1)
    again = adopted(arena)
    assert list(again.scan()) == []
    assert again.num_free_bytes == again.capacity_bytes


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_any_bytes_outside_the_superblock_can_be_adopted(data: st.DataObject) -> None:
    arena = Arena.create(NUM_BYTES, GRANULE_BYTES, huge_pages=False)
    for number in range(1, 6):
        put(arena, number, data.draw(st.integers(1, 60_000)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(GRANULE_BYTES, NUM_BYTES - 64))
        at = data.draw(st.sampled_from([at, at // GRANULE_BYTES * GRANULE_BYTES]))
        arena.view[at : at + 64] = data.draw(st.binary(min_size=64, max_size=64))
    again = adopted(arena)
    for offset, header in again.scan():
        assert header.place == RecordPlace(arena.id, offset)
    again.close()
    arena.close()


# ------------------------------------------------------------------------------------ what is not adopted


def memfd(num_bytes: int, *, is_sealed: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    if is_sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def refused(fd: int, match: str) -> None:
    with pytest.raises(StoreError, match=match):
        Arena.adopt(fd, GRANULE_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_that_is_no_arena_is_refused_and_closed() -> None:
    refused(memfd(mapping_bytes(NUM_BYTES)), "no arena")
    refused(memfd(0), "no arena")
    refused(memfd(4096), "no arena")
    refused(os.open(os.devnull, os.O_RDWR), "cannot be mapped")


def test_an_arena_that_could_shrink_is_refused(arena: Arena) -> None:
    fd = memfd(mapping_bytes(NUM_BYTES), is_sealed=False)
    os.pwrite(fd, arena.view[:4096], 0)
    refused(fd, "not sealed")


def test_an_arena_of_another_size_or_granule_is_refused(arena: Arena) -> None:
    fd = memfd(mapping_bytes(2 * NUM_BYTES))
    os.pwrite(fd, arena.view[:4096], 0)
    refused(fd, "no arena of 4194304 bytes")
    with pytest.raises(StoreError, match="in granules of 4096"):
        Arena.adopt(os.dup(arena.fd), 4096)


def test_a_damaged_superblock_is_refused(arena: Arena) -> None:
    arena.view[25] ^= 1  # the id
    refused(os.dup(arena.fd), "no arena")


def test_a_closed_arena_gives_its_descriptor_back() -> None:
    arena = Arena.create(NUM_BYTES, GRANULE_BYTES, huge_pages=False)
    fd = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
