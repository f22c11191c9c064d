"""The books of a node, row by row: puts, leases, eviction, pins, sessions, adoption, purge, NVMe, faults.

It is over 400 lines because every row of the catalog's contract stands here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import catalog_process
import pytest
from catalog_harness import (
    ARENA_BYTES,
    GRANULE_BYTES,
    LEFT,
    NUM_SLOTS,
    ONE_GRANULE,
    OTHER,
    RIGHT,
    SESSION,
    SPACE,
    WHOLE,
    CatalogHouse,
    payload_of,
    record_id,
)
from msgspec.structs import replace

from kvtransfer.blocks.checksum import checksum
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.dram.catalog import is_meant
from kvtransfer.store.messages import HEADER_BYTES, HELD, REFUSED, RecordInfo
from kvtransfer.store.nvme.segments import NvmeRef
from kvtransfer.store.record import MAX_TENANT_BYTES, Writer, image_bytes

REF, NEWER = NvmeRef(1, 4096, 65536), NvmeRef(2, 8192, 65536)


@pytest.fixture
def house() -> Iterator[CatalogHouse]:
    house = CatalogHouse()
    yield house
    house.catalog.check()
    house.close()


def info_of(name: str, *, tenant: str = "t", model: bytes = b"model") -> RecordInfo:
    total = checksum(payload_of(name))
    return RecordInfo(record_id(name), b"", b"chain", tenant, model, ONE_GRANULE, total)


# ---------------------------------------------------------------------------------------------------- puts


def test_a_record_is_found_only_when_it_is_committed(house: CatalogHouse) -> None:
    offset = house.allocate("a")
    assert house.catalog.find(record_id("a")) is None
    assert house.read("a") is None
    house.write(offset, payload_of("a"))
    info = house.catalog.commit(SESSION, offset, checksum(payload_of("a")))
    assert info == info_of("a")
    held = house.catalog.lookup(SPACE, b"a")[WHOLE]
    assert (held.info, held.offset, held.nvme, held.tiers) == (info, offset, None, ("dram",))
    assert house.read("a") == payload_of("a")
    assert house.listener.take() == [("committed", "a"), ("touched", "a")]


def test_a_duplicate_is_held_whoever_writes_it(house: CatalogHouse) -> None:
    offset = house.allocate("a")
    assert house.allocate("a") == HELD
    assert house.allocate("a", session=OTHER) == HELD
    house.catalog.commit(SESSION, offset, 1)
    assert house.allocate("a", session=OTHER) == HELD
    assert house.allocate("a", shard=LEFT) >= 0, "another shard of the block is another record"


def test_an_abandoned_record_leaves_nothing(house: CatalogHouse) -> None:
    offset = house.allocate("a")
    house.catalog.abandon(SESSION, offset)
    assert house.catalog.stat().num_bytes == 0
    assert house.catalog.commit(SESSION, offset, 1) is None
    assert house.allocate("a") >= 0


def test_offsets_that_a_session_was_not_granted_are_ignored(house: CatalogHouse) -> None:
    offset = house.allocate("a")
    kept = house.put("b")
    for wrong in (kept, offset + 4096, 0, -1, 1 << 60):
        assert house.catalog.commit(SESSION, wrong, 1) is None
        house.catalog.abandon(SESSION, wrong)
    assert house.catalog.commit(OTHER, offset, 1) is None
    house.catalog.abandon(OTHER, offset)
    assert house.read("b") == payload_of("b")
    assert house.catalog.commit(SESSION, offset, 1) is not None


@pytest.mark.parametrize("num_bytes", [0, -1, ARENA_BYTES, 1 << 60])
def test_an_impossible_size_is_refused_and_evicts_nothing(house: CatalogHouse, num_bytes: int) -> None:
    house.put_chain("a", "b")
    assert house.allocate("c", num_bytes=num_bytes) == REFUSED
    assert house.names() == {"a", "b"}
    assert house.catalog.stat().num_refused == 1


def test_a_tenant_whose_name_no_header_takes_is_refused(house: CatalogHouse) -> None:
    assert house.allocate("a", tenant="x" * (MAX_TENANT_BYTES + 1)) == REFUSED
    assert house.catalog.stat().num_bytes == 0
    assert house.allocate("a") >= 0


def test_without_an_arena_everything_is_refused_until_there_is_one() -> None:
    house = CatalogHouse(with_arena=False)
    assert house.catalog.arena is None
    assert house.allocate("a") == REFUSED
    assert house.catalog.begin_read(info_of("a")) == REFUSED
    assert house.catalog.stat().capacity_bytes == 0
    house.catalog.added_nvme(info_of("n"), REF)
    house.catalog.attach(house.arena)
    house.put("a")
    assert house.catalog.arena is house.arena
    assert house.catalog.lookup(SPACE, b"n")[WHOLE].nvme == REF
    house.close()


# ------------------------------------------------------------------------------------------------ eviction


def test_a_full_arena_evicts_the_end_of_the_oldest_chain(house: CatalogHouse) -> None:
    old = [f"old{n:02}" for n in range(10)]
    house.put_chain(*old)
    house.put_chain(*(f"new{n:02}" for n in range(NUM_SLOTS - 10)))
    house.listener.take()
    house.put_chain("x1", "x2", "x3")
    assert house.names() & set(old) == set(old[:7])
    assert house.listener.take() == [
        *[("evicted", "old09"), ("gone", "old09"), ("committed", "x1")],
        *[("evicted", "old08"), ("gone", "old08"), ("committed", "x2")],
        *[("evicted", "old07"), ("gone", "old07"), ("committed", "x3")],
    ]
    assert house.catalog.stat().num_evictions == 3


def test_a_chain_that_was_asked_for_stays(house: CatalogHouse) -> None:
    house.put_chain("a1", "a2")
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    for name in ("a1", "a2"):
        assert house.read(name) == payload_of(name)
    house.put("x")
    assert {"a1", "a2"} <= house.names()
    assert f"b{NUM_SLOTS - 3:02}" not in house.names()


def test_a_put_of_what_is_there_makes_it_younger(house: CatalogHouse) -> None:
    house.put("a")
    house.put("b")
    assert house.allocate("a") == HELD
    house.put_chain(*(f"c{n:02}" for n in range(NUM_SLOTS - 2)))
    house.put("x")
    assert "a" in house.names()
    assert "b" not in house.names()


def test_the_owners_own_lease_makes_nothing_younger_and_counts_no_hit(house: CatalogHouse) -> None:
    house.put("a")
    house.put("b")
    house.listener.take()
    offset = house.catalog.lease(record_id("a"), is_hit=False)
    assert offset is not None
    house.catalog.release(offset)
    assert house.listener.take() == []
    assert house.catalog.stat().num_hits == 0
    assert [held.info.id.key for held in house.catalog.records()] == [b"b", b"a"]
    house.put_chain(*(f"c{n:02}" for n in range(NUM_SLOTS - 2)))
    house.put("x")
    assert "a" not in house.names()


def test_all_shards_of_a_block_leave_together(house: CatalogHouse) -> None:
    house.put("a", shard=LEFT)
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    house.put("a", shard=RIGHT)
    for n in range(NUM_SLOTS - 2):
        house.read(f"b{n:02}")
    house.put("x")
    assert "a" not in house.names()
    assert house.catalog.stat().num_evictions == 2
    assert house.catalog.lookup(SPACE, b"a") == {}


def test_leased_records_and_what_they_follow_stay_and_more_is_refused(house: CatalogHouse) -> None:
    names = [f"a{n:02}" for n in range(NUM_SLOTS)]
    house.put_chain(*names)
    offset = house.catalog.lease(record_id(names[-1]))
    assert offset is not None
    assert house.allocate("x") == REFUSED
    assert house.catalog.stat().num_leases == 1
    again = house.catalog.lease(record_id(names[-1]))
    house.catalog.release(offset)
    assert house.allocate("x") == REFUSED, "leases are counted"
    assert again == offset
    house.catalog.release(offset)
    assert house.allocate("x") == offset
    assert house.catalog.stat().num_leases == 0


def test_one_leased_shard_keeps_the_block(house: CatalogHouse) -> None:
    house.put("a", shard=LEFT)
    house.put("a", shard=RIGHT)
    offset = house.catalog.lease(record_id("a", LEFT))
    assert offset is not None
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    house.put("x")
    assert "a" in house.names()
    assert f"b{NUM_SLOTS - 3:02}" not in house.names()


def test_a_large_record_evicts_several_small_ones(house: CatalogHouse) -> None:
    house.put_chain(*(f"a{n:02}" for n in range(NUM_SLOTS)))
    house.put("big", num_bytes=4 * GRANULE_BYTES - HEADER_BYTES)
    assert house.names() == {"big", *(f"a{n:02}" for n in range(NUM_SLOTS - 4))}


def test_for_a_record_that_finds_no_room_in_one_piece_not_everything_leaves(house: CatalogHouse) -> None:
    for n in range(NUM_SLOTS):
        house.put(f"a{n:02}")
    leased = [house.catalog.lease(record_id(f"a{n:02}")) for n in range(1, NUM_SLOTS, 2)]
    assert house.allocate("big", num_bytes=2 * ONE_GRANULE) == REFUSED
    assert NUM_SLOTS - 16 <= len(house.names()) <= NUM_SLOTS - 8
    assert None not in leased


# ---------------------------------------------------------------------------------------------------- pins


def test_a_pin_keeps_a_record_for_its_time(house: CatalogHouse) -> None:
    house.put_chain("a1", "a2")
    assert house.catalog.pin(record_id("a2"), 10.0)
    assert house.catalog.pin(record_id("a2"), 5.0), "the longer one counts"
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    house.clock.advance(9.9)
    house.put("x")
    assert {"a1", "a2"} <= house.names()
    house.clock.advance(0.1)
    house.put("y")
    assert "a2" not in house.names()
    assert not house.catalog.pin(record_id("a2"), 20.0)


def test_a_pin_can_be_renewed(house: CatalogHouse) -> None:
    house.put("a")
    house.catalog.pin(record_id("a"), 10.0)
    house.catalog.pin(record_id("a"), 20.0)
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 1)))
    house.clock.advance(15)
    house.put("x")
    assert "a" in house.names()
    house.clock.advance(5)
    house.put("y")
    assert "a" not in house.names()


def test_pins_take_half_of_the_arena_at_most(house: CatalogHouse) -> None:
    names = [f"a{n:02}" for n in range(NUM_SLOTS)]
    house.put_chain(*names)
    pinned = [house.catalog.pin(record_id(name), 10.0) for name in names]
    assert pinned.count(True) == NUM_SLOTS // 2
    house.clock.advance(10)
    assert house.catalog.pin(record_id(names[-1]), 20.0)
    house.catalog.check()


def test_a_bad_or_purged_record_is_dropped_though_pinned(house: CatalogHouse) -> None:
    house.put("a")
    house.put("b")
    for name in ("a", "b"):
        house.catalog.pin(record_id(name), 10.0)
    offset = house.catalog.lease(record_id("a"))
    assert offset is not None
    assert house.catalog.bad(offset) is not None
    house.catalog.release(offset)
    house.catalog.purge(None, None)
    assert house.catalog.stat().num_bytes == 0
    house.put("c")  # perhaps where one of them was
    house.clock.advance(10)
    house.put_chain(*(f"d{n:02}" for n in range(NUM_SLOTS)))


# -------------------------------------------------------------------------------------------------- shares


def shared_house() -> CatalogHouse:
    """The greedy tenant has 21 of 31 slots, the modest one 10, older ones; a share is 15."""
    house = CatalogHouse(tenant_share=0.5)
    house.put_chain(*(f"m{n:02}" for n in range(10)), tenant="modest")
    house.put_chain(*(f"g{n:02}" for n in range(NUM_SLOTS - 10)), tenant="greedy")
    house.listener.take()
    return house


def evicted(house: CatalogHouse) -> str:
    return "".join(name[0] for event, name in house.listener.take() if event == "evicted")


def test_a_tenant_may_have_more_than_its_share_while_nobody_wants_it() -> None:
    house = shared_house()
    assert house.catalog.bytes_by_tenant() == {"modest": 10 * GRANULE_BYTES, "greedy": 21 * GRANULE_BYTES}
    house.close()


def test_the_greedy_tenant_is_evicted_first_though_it_is_younger() -> None:
    house = shared_house()
    house.put_chain(*(f"x{n}" for n in range(6)), tenant="new")
    assert evicted(house) == "gggggg"
    house.put_chain(*(f"y{n}" for n in range(2)), tenant="new")
    assert evicted(house) == "mm", "from here on nobody has too much: the oldest leave"
    house.close()


def test_the_greedy_tenant_evicts_its_own_or_is_refused() -> None:
    house = shared_house()
    house.put("g99", tenant="greedy")
    assert evicted(house) == "g"
    for name in sorted(house.names()):
        if name.startswith("g"):
            assert house.catalog.lease(record_id(name)) is not None
    assert house.allocate("g98", tenant="greedy") == REFUSED
    assert evicted(house) == ""
    house.put("x", tenant="new")
    assert evicted(house) == "m", "the greedy one's cannot leave"
    house.close()


def test_bytes_of_a_tenant_count_all_it_takes(house: CatalogHouse) -> None:
    house.put("a", tenant="one")
    house.allocate("b", tenant="one")
    house.catalog.added_nvme(info_of("c", tenant="two"), REF)
    house.catalog.added_nvme(info_of("d", tenant="one"), NEWER)
    nvme_bytes = image_bytes(ONE_GRANULE)
    assert house.catalog.bytes_by_tenant() == {"one": 2 * GRANULE_BYTES + nvme_bytes, "two": nvme_bytes}


# ------------------------------------------------------------------------------------------------ sessions


def test_what_a_lost_session_was_granted_is_free_when_its_ranks_have_ended(house: CatalogHouse) -> None:
    offset = house.allocate("a")
    mine = house.put("b")
    house.catalog.session_lost(SESSION)
    house.catalog.check()
    assert house.catalog.stat().num_quarantined == 1
    assert house.catalog.commit(SESSION, offset, 1) is None, "it has no session any more"
    second = house.allocate("a", session=OTHER)
    assert second not in (offset, HELD, REFUSED), "others may put it, elsewhere"
    assert house.catalog.writers_gone(OTHER) == 0
    assert house.catalog.writers_gone(SESSION) == 1
    assert house.catalog.stat().num_quarantined == 0
    assert house.catalog.writers_gone(SESSION) == 0
    assert house.catalog.lookup(SPACE, b"b")[WHOLE].offset == mine
    assert house.allocate("c", session=OTHER) == offset


def test_stray_slots_are_never_given_away_however_full_it_is(house: CatalogHouse) -> None:
    stray = {house.allocate(f"s{n}") for n in range(3)}
    house.catalog.session_lost(SESSION)
    house.clock.advance(1e9)  # no timer ends it
    seen = {house.put(f"x{n:03}", session=OTHER) for n in range(3 * NUM_SLOTS)}
    assert not seen & stray
    assert len(seen) == NUM_SLOTS - 3
    house.catalog.writers_gone(SESSION)
    seen = {house.put(f"y{n:03}", session=OTHER) for n in range(3 * NUM_SLOTS)}
    assert seen >= stray


def test_ranks_that_end_before_their_brain_free_nothing_until_it_is_gone_too(house: CatalogHouse) -> None:
    offset = house.allocate("a")
    assert house.catalog.writers_gone(SESSION) == 0
    assert house.catalog.commit(SESSION, offset, 1) is not None
    house.allocate("b")
    house.catalog.session_lost(SESSION)
    assert house.catalog.writers_gone(SESSION) == 1


def test_a_session_that_is_back_writes_no_more_of_what_it_had(house: CatalogHouse) -> None:
    first = house.allocate("a")
    house.catalog.session_lost(SESSION)
    house.catalog.session_opened(SESSION)
    assert house.catalog.stat().num_bytes == 0
    assert house.allocate("a") == first
    house.catalog.session_opened(SESSION)  # the loss of the connection before was not noticed
    assert house.catalog.stat().num_bytes == 0
    assert house.catalog.commit(SESSION, first, 1) is None
    assert house.allocate("a", session=OTHER) >= 0


# ------------------------------------------------------------------------------------------------ adoption


def test_a_new_owner_finds_what_was_committed(house: CatalogHouse) -> None:
    house.put_chain("a1", "a2")
    house.put("b", tenant="other")
    house.read("a1")
    house.listener.take()
    house.restart()
    assert house.listener.take() == [("committed", "a1"), ("committed", "a2"), ("committed", "b")]
    for name in ("a1", "a2", "b"):
        assert house.read(name) == payload_of(name)
    assert house.catalog.bytes_by_tenant() == {"t": 2 * GRANULE_BYTES, "other": GRANULE_BYTES}
    house.catalog.session_opened(SESSION)
    house.put_chain(*(f"c{n:02}" for n in range(NUM_SLOTS)))
    house.catalog.check()


def test_adopted_chains_leave_in_the_same_order(house: CatalogHouse) -> None:
    house.put_chain(*(f"old{n}" for n in range(5)))
    house.put_chain(*(f"new{n:02}" for n in range(NUM_SLOTS - 5)))
    house.restart()
    house.catalog.session_opened(SESSION)
    house.listener.take()
    house.put("x")
    house.put("y")
    assert [name for event, name in house.listener.take() if event == "evicted"] == ["old4", "old3"]
    house.restart()
    house.catalog.session_opened(SESSION)
    house.listener.take()
    house.put("z")
    assert [name for event, name in house.listener.take() if event == "evicted"] == ["old2"]


def adopted_with_stray(house: CatalogHouse) -> int:
    """An owner died while a rank was writing `a`."""
    offset = house.allocate("a", writer=Writer(4711, 99))
    house.put("b")
    house.restart()
    assert house.names() == {"b"}
    assert house.catalog.stat().num_quarantined == 1
    return offset


def test_an_adopted_stray_is_free_when_its_writer_is_dead(house: CatalogHouse) -> None:
    asked: list[Writer] = []

    def is_running(writer: Writer) -> bool:
        asked.append(writer)
        return len(asked) < 2

    offset = adopted_with_stray(house)
    assert house.catalog.free_orphans(is_running) == 0
    assert house.catalog.writers_gone(SESSION) == 0, "a rank that never connected to this owner may write it"
    assert house.catalog.free_orphans(is_running) == 1
    assert asked == [Writer(4711, 99, SESSION)] * 2
    assert house.catalog.free_orphans(is_running) == 0
    assert len(asked) == 2
    house.catalog.session_opened(OTHER)
    assert house.allocate("c", session=OTHER) == offset


def test_an_adopted_stray_is_free_when_its_session_is_back(house: CatalogHouse) -> None:
    offset = adopted_with_stray(house)
    house.catalog.session_opened(OTHER)
    assert house.catalog.stat().num_quarantined == 1
    house.catalog.session_opened(SESSION)
    assert house.catalog.stat().num_quarantined == 0
    assert house.catalog.commit(SESSION, offset, 1) is None, "it was granted by another owner"


def test_a_session_that_said_hello_before_the_arena_came_has_no_strays_in_it(house: CatalogHouse) -> None:
    house.allocate("a")
    house.allocate("b", session=OTHER)
    arena = Arena.adopt(os.dup(house.arena.fd), GRANULE_BYTES)
    catalog = house.make(None)
    catalog.session_opened(SESSION)
    catalog.attach(arena)
    catalog.check()
    assert catalog.stat().num_quarantined == 1
    arena.close()


def test_what_the_dead_owner_was_reading_in_is_free(house: CatalogHouse) -> None:
    offset = house.catalog.begin_read(info_of("a"))
    house.write(offset, payload_of("a"))
    house.restart()
    assert house.names() == set()
    assert house.catalog.stat().num_bytes == 0


def test_what_was_dropped_under_a_lease_is_not_adopted(house: CatalogHouse) -> None:
    for name in ("a", "b"):
        house.put(name)
        assert house.catalog.lease(record_id(name)) is not None
    house.catalog.bad(house.catalog.lookup(SPACE, b"a")[WHOLE].offset or 0)
    house.catalog.purge(None, None)
    house.restart()
    assert house.names() == set()


# ------------------------------------------------------------------------------------ reads by the owner


def test_a_record_read_from_another_tier_is_as_good_as_a_put(house: CatalogHouse) -> None:
    house.catalog.added_nvme(info_of("a"), REF)
    offset = house.catalog.begin_read(info_of("a"))
    assert house.catalog.begin_read(info_of("a")) == HELD
    image = house.arena.image(offset, ONE_GRANULE)
    image[:HEADER_BYTES] = b"\xff" * HEADER_BYTES  # whatever header it had there
    house.write(offset, payload_of("a"))
    assert house.catalog.commit_read(offset, info_of("a").checksum) == info_of("a")
    assert house.catalog.begin_read(info_of("a")) == HELD
    assert house.catalog.lookup(SPACE, b"a")[WHOLE].tiers == ("dram", "nvme")
    stat = house.catalog.stat()
    assert (stat.num_put_bytes, stat.num_written_bytes) == (0, GRANULE_BYTES)
    house.restart()
    assert house.read("a") == payload_of("a")


def test_a_read_that_fails_leaves_nothing(house: CatalogHouse) -> None:
    offset = house.catalog.begin_read(info_of("a"))
    house.catalog.abandon_read(offset)
    assert house.catalog.stat().num_bytes == 0
    assert house.catalog.begin_read(info_of("a")) == offset


def test_of_a_put_and_a_read_the_first_one_done_is_kept(house: CatalogHouse) -> None:
    put = house.allocate("a")
    read = house.catalog.begin_read(info_of("a"))
    house.write(read, payload_of("a"))
    assert house.catalog.commit_read(read, info_of("a").checksum) == info_of("a")
    assert house.catalog.commit(SESSION, put, house.write(put, payload_of("a", salt=1))) is None
    assert house.read("a") == payload_of("a")
    put = house.allocate("b")
    read = house.catalog.begin_read(info_of("b"))
    total = house.write(put, payload_of("b", salt=1))
    kept = house.catalog.commit(SESSION, put, total)
    assert house.catalog.commit_read(read, 1) == kept, "the record that is there, not the one that came late"
    assert house.read("b") == payload_of("b", salt=1)
    assert house.catalog.stat().num_bytes == 2 * GRANULE_BYTES


def test_whose_record_it_is_may_turn_out_at_the_end(house: CatalogHouse) -> None:
    asked = replace(info_of("a", tenant="", model=b""), parent=b"", checksum=0)
    offset = house.catalog.begin_read(asked)
    total = house.write(offset, payload_of("a"))
    found = info_of("a", tenant="theirs")
    assert house.catalog.commit_read(offset, total, found) == found
    assert house.catalog.bytes_by_tenant() == {"theirs": GRANULE_BYTES}
    house.restart()
    assert house.catalog.bytes_by_tenant() == {"theirs": GRANULE_BYTES}


# ---------------------------------------------------------------------------------------------------- NVMe


def test_a_record_on_nvme_survives_its_eviction(house: CatalogHouse) -> None:
    house.put("a")
    assert house.catalog.added_nvme(info_of("a"), REF) is None
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS)))
    assert house.listener.take()[-3:-1] == [("committed", f"b{NUM_SLOTS - 2:02}"), ("evicted", "a")]
    held = house.catalog.find(record_id("a"))
    assert held is not None
    assert (held.offset, held.nvme, held.tiers) == (None, REF, ("nvme",))
    assert house.catalog.lease(record_id("a")) is None
    assert house.catalog.removed_nvme(record_id("a"), REF)
    assert house.listener.take()[-1] == ("gone", "a")
    assert house.catalog.find(record_id("a")) is None
    assert not house.catalog.removed_nvme(record_id("a"), REF)


def test_each_tier_has_the_sum_of_its_own_bytes(house: CatalogHouse) -> None:
    on_nvme = replace(info_of("a"), checksum=1234)
    house.catalog.added_nvme(on_nvme, REF)
    house.put("a")
    held = house.catalog.lookup(SPACE, b"a")[WHOLE]
    assert (held.info.checksum, held.nvme_info) == (checksum(payload_of("a")), on_nvme)
    house.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS)))
    assert (held.offset, held.info) == (None, on_nvme)


def test_a_record_written_again_or_moved_is_where_it_was_last(house: CatalogHouse) -> None:
    house.catalog.added_nvme(info_of("a"), REF)
    assert house.catalog.added_nvme(info_of("a"), NEWER) == REF
    assert not house.catalog.removed_nvme(record_id("a"), REF), "that one was replaced"
    assert not house.catalog.moved_nvme(record_id("a"), REF, NvmeRef(3, 0, 1))
    assert house.catalog.moved_nvme(record_id("a"), NEWER, REF)
    assert house.catalog.lookup(SPACE, b"a")[WHOLE].nvme == REF
    house.catalog.purge(None, None)
    assert not house.catalog.moved_nvme(record_id("a"), REF, NEWER), "what was purged does not come back"
    assert house.catalog.bytes_by_tenant() == {}


# ---------------------------------------------------------------------------------------------- bad, purge


def test_a_bad_record_leaves_all_tiers_and_its_slot_after_the_last_lease(house: CatalogHouse) -> None:
    offset = house.put("a")
    house.catalog.added_nvme(info_of("a"), REF)
    house.listener.take()
    assert house.catalog.lease(record_id("a")) == house.catalog.lease(record_id("a")) == offset
    house.arena.payload(offset, 1)[0] ^= 1
    dropped = house.catalog.bad(offset)
    house.catalog.check()
    assert dropped == (info_of("a"), REF)
    assert house.listener.take()[-1] == ("gone", "a")
    assert house.catalog.find(record_id("a")) is None
    assert not house.catalog.is_findable(offset)
    assert house.catalog.bad(offset) is None, "told twice, dropped once"
    again = house.put("a")
    assert again != offset, "somebody still reads there"
    for _ in range(2):
        house.catalog.release(offset)
        house.catalog.check()
    assert house.catalog.stat().num_bytes == GRANULE_BYTES
    assert house.read("a") == payload_of("a")
    assert house.catalog.stat().num_checksum_failures == 1


def test_bad_offsets_of_nothing_are_ignored(house: CatalogHouse) -> None:
    house.put("a")
    allocated = house.allocate("b")
    for offset in (allocated, 0, -1, 4096, 1 << 60):
        assert house.catalog.bad(offset) is None
    assert house.catalog.stat().num_checksum_failures == 0
    assert house.names() == {"a"}


@pytest.mark.parametrize(
    ("tenant", "model", "left"),
    [
        (None, None, set()),
        ("one", None, {"c"}),
        (None, b"model-x".hex(), {"b"}),
        (None, b"mod".hex(), set()),
        ("one", b"model-y".hex(), {"a", "c"}),
        ("nobody", None, {"a", "b", "c"}),
    ],
)
def test_a_purge_takes_what_is_meant(
    house: CatalogHouse, tenant: str | None, model: str | None, left: set[str]
) -> None:
    house.put("a", tenant="one", model=b"model-x")
    house.put("b", tenant="one", model=b"model-y")
    house.put("c", tenant="two", model=b"model-x")
    purged = house.catalog.purge(tenant, model)
    house.catalog.check()
    assert house.names() == left
    assert purged.num_records == {"dram": 3 - len(left), "nvme": 0}
    assert purged.num_bytes == {"dram": (3 - len(left)) * GRANULE_BYTES, "nvme": 0}
    assert purged.num_pending == 0
    assert all(not is_meant(held.info, tenant, model) for held in house.catalog.records())
    house.restart()
    assert house.names() == left


def test_a_purge_reaches_every_tier_and_every_state(house: CatalogHouse) -> None:
    house.put("kept")
    leased = house.put("leased")
    house.catalog.lease(record_id("leased"))
    house.catalog.added_nvme(info_of("leased"), NEWER)
    house.catalog.added_nvme(info_of("disk"), REF)
    written = house.allocate("written")
    house.allocate("stray", session=OTHER)
    house.catalog.session_lost(OTHER)
    read = house.catalog.begin_read(info_of("read"))
    unknown = house.catalog.begin_read(info_of("unknown", tenant=""))
    purged = house.catalog.purge("t", None)
    house.catalog.check()
    assert purged.num_records == {"dram": 2, "nvme": 2}
    assert purged.num_bytes["nvme"] == 2 * image_bytes(ONE_GRANULE)
    assert sorted(purged.erase) == [REF, NEWER]
    assert purged.num_pending == 5, "leased, written, stray, and both that are read"
    assert house.catalog.records() == []
    assert not house.catalog.is_findable(leased)
    again = house.allocate("written", session=SESSION)
    assert again != written
    assert house.catalog.commit(SESSION, written, 1) is None
    assert house.catalog.commit_read(read, 1) is None
    assert house.catalog.commit_read(unknown, 1, info_of("unknown")) is None
    house.catalog.release(leased)
    house.catalog.writers_gone(OTHER)
    assert house.catalog.commit(SESSION, again, house.write(again, payload_of("written"))) is not None
    assert house.catalog.stat().num_bytes == GRANULE_BYTES
    assert house.read("written") == payload_of("written")


# ---------------------------------------------------------------------------------------- counts and faults


def test_what_happened_is_counted(house: CatalogHouse) -> None:
    house.put_chain("a", "b")
    house.read("a")
    house.read("b")
    house.catalog.count_misses(3)
    stat = house.catalog.stat()
    assert (stat.tier, stat.num_records, stat.num_hits, stat.num_misses) == ("dram", 2, 2, 3)
    assert (stat.num_bytes, stat.num_put_bytes) == (2 * GRANULE_BYTES, 2 * GRANULE_BYTES)
    assert stat.num_hit_bytes == 2 * ONE_GRANULE
    assert stat.capacity_bytes == NUM_SLOTS * GRANULE_BYTES
    assert [(held.info.id.key, held.num_hits) for held in house.catalog.records()] == [(b"b", 1), (b"a", 1)]


POINTS = ("store.put.allocate", "store.put.commit", "store.get", "store.evict", "store.purge")


@pytest.mark.parametrize("point", POINTS)
def test_an_owner_killed_at_any_point_leaves_right_bytes_or_a_miss(
    house: CatalogHouse, point: str, tmp_path: Path
) -> None:
    names = [f"a{n:02}" for n in range(NUM_SLOTS - 2)]
    house.put_chain(*names)
    house.put("purged", tenant="purged")
    house.put("last")
    fd, marker = str(house.arena.fd), str(tmp_path / "marker")
    owner = subprocess.run(
        [sys.executable, catalog_process.__file__, fd, point, marker],
        pass_fds=(house.arena.fd,),
        timeout=60,
        check=False,
    )
    assert owner.returncode == -signal.SIGKILL
    house.restart()
    house.catalog.session_opened(OTHER)
    for name in [*names, "x", "y", "purged", "last"]:
        assert house.read(name) in (None, payload_of(name))
    assert len(house.names()) >= NUM_SLOTS - 2
    assert ("x" in house.names()) == (point in ("store.get", "store.purge"))
    house.catalog.free_orphans(lambda writer: False)
    assert house.catalog.stat().num_bytes == len(house.names()) * GRANULE_BYTES
    house.put("z", session=OTHER)
