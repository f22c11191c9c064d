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
    CatalogHarness,
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
def harness() -> Iterator[CatalogHarness]:
    harness = CatalogHarness()
    yield harness
    harness.catalog.check()
    harness.close()


def info_of(name: str, *, tenant: str = "t", model: bytes = b"model") -> RecordInfo:
    total = checksum(payload_of(name))
    return RecordInfo(record_id(name), b"", b"chain", tenant, model, ONE_GRANULE, total)


# ---------------------------------------------------------------------------------------------------- puts


def test_a_record_is_found_only_when_it_is_committed(harness: CatalogHarness) -> None:
    offset = harness.allocate("a")
    assert harness.catalog.find(record_id("a")) is None
    assert harness.read("a") is None
    harness.write(offset, payload_of("a"))
    info = harness.catalog.commit(SESSION, offset, checksum(payload_of("a")))
    assert info == info_of("a")
    held = harness.catalog.lookup(SPACE, b"a")[WHOLE]
    assert (held.info, held.offset, held.nvme, held.tiers) == (info, offset, None, ("dram",))
    assert harness.read("a") == payload_of("a")
    assert harness.listener.take() == [("committed", "a"), ("touched", "a")]


def test_a_duplicate_is_held_whoever_writes_it(harness: CatalogHarness) -> None:
    offset = harness.allocate("a")
    assert harness.allocate("a") == HELD
    assert harness.allocate("a", session=OTHER) == HELD
    harness.catalog.commit(SESSION, offset, 1)
    assert harness.allocate("a", session=OTHER) == HELD
    assert harness.allocate("a", shard=LEFT) >= 0, "another shard of the block is another record"


def test_an_abandoned_record_leaves_nothing(harness: CatalogHarness) -> None:
    offset = harness.allocate("a")
    harness.catalog.abandon(SESSION, offset)
    assert harness.catalog.stat().num_bytes == 0
    assert harness.catalog.commit(SESSION, offset, 1) is None
    assert harness.allocate("a") >= 0


def test_offsets_that_a_session_was_not_granted_are_ignored(harness: CatalogHarness) -> None:
    offset = harness.allocate("a")
    kept = harness.put("b")
    for wrong in (kept, offset + 4096, 0, -1, 1 << 60):
        assert harness.catalog.commit(SESSION, wrong, 1) is None
        harness.catalog.abandon(SESSION, wrong)
    assert harness.catalog.commit(OTHER, offset, 1) is None
    harness.catalog.abandon(OTHER, offset)
    assert harness.read("b") == payload_of("b")
    assert harness.catalog.commit(SESSION, offset, 1) is not None


@pytest.mark.parametrize("num_bytes", [0, -1, ARENA_BYTES, 1 << 60])
def test_an_impossible_size_is_refused_and_evicts_nothing(harness: CatalogHarness, num_bytes: int) -> None:
    harness.put_chain("a", "b")
    assert harness.allocate("c", num_bytes=num_bytes) == REFUSED
    assert harness.names() == {"a", "b"}
    assert harness.catalog.stat().num_refused == 1


def test_a_tenant_whose_name_no_header_takes_is_refused(harness: CatalogHarness) -> None:
    assert harness.allocate("a", tenant="x" * (MAX_TENANT_BYTES + 1)) == REFUSED
    assert harness.catalog.stat().num_bytes == 0
    assert harness.allocate("a") >= 0


def test_without_an_arena_everything_is_refused_until_there_is_one() -> None:
    harness = CatalogHarness(with_arena=False)
    assert harness.catalog.arena is None
    assert harness.allocate("a") == REFUSED
    assert harness.catalog.begin_read(info_of("a")) == REFUSED
    assert harness.catalog.stat().capacity_bytes == 0
    harness.catalog.added_nvme(info_of("n"), REF)
    harness.catalog.attach(harness.arena)
    harness.put("a")
    assert harness.catalog.arena is harness.arena
    assert harness.catalog.lookup(SPACE, b"n")[WHOLE].nvme == REF
    harness.close()


# ------------------------------------------------------------------------------------------------ eviction


def test_a_full_arena_evicts_the_end_of_the_oldest_chain(harness: CatalogHarness) -> None:
    old = [f"old{n:02}" for n in range(10)]
    harness.put_chain(*old)
    harness.put_chain(*(f"new{n:02}" for n in range(NUM_SLOTS - 10)))
    harness.listener.take()
    harness.put_chain("x1", "x2", "x3")
    assert harness.names() & set(old) == set(old[:7])
    assert harness.listener.take() == [
        *[("evicted", "old09"), ("gone", "old09"), ("committed", "x1")],
        *[("evicted", "old08"), ("gone", "old08"), ("committed", "x2")],
        *[("evicted", "old07"), ("gone", "old07"), ("committed", "x3")],
    ]
    assert harness.catalog.stat().num_evictions == 3


def test_a_chain_that_was_asked_for_stays(harness: CatalogHarness) -> None:
    harness.put_chain("a1", "a2")
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    for name in ("a1", "a2"):
        assert harness.read(name) == payload_of(name)
    harness.put("x")
    assert {"a1", "a2"} <= harness.names()
    assert f"b{NUM_SLOTS - 3:02}" not in harness.names()


def test_a_put_of_what_is_there_makes_it_younger(harness: CatalogHarness) -> None:
    harness.put("a")
    harness.put("b")
    assert harness.allocate("a") == HELD
    harness.put_chain(*(f"c{n:02}" for n in range(NUM_SLOTS - 2)))
    harness.put("x")
    assert "a" in harness.names()
    assert "b" not in harness.names()


def test_the_owners_own_lease_makes_nothing_younger_and_counts_no_hit(harness: CatalogHarness) -> None:
    harness.put("a")
    harness.put("b")
    harness.listener.take()
    offset = harness.catalog.lease(record_id("a"), is_hit=False)
    assert offset is not None
    harness.catalog.release(offset)
    assert harness.listener.take() == []
    assert harness.catalog.stat().num_hits == 0
    assert [held.info.id.key for held in harness.catalog.records()] == [b"b", b"a"]
    harness.put_chain(*(f"c{n:02}" for n in range(NUM_SLOTS - 2)))
    harness.put("x")
    assert "a" not in harness.names()


def test_all_shards_of_a_block_leave_together(harness: CatalogHarness) -> None:
    harness.put("a", shard=LEFT)
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    harness.put("a", shard=RIGHT)
    for n in range(NUM_SLOTS - 2):
        harness.read(f"b{n:02}")
    harness.put("x")
    assert "a" not in harness.names()
    assert harness.catalog.stat().num_evictions == 2
    assert harness.catalog.lookup(SPACE, b"a") == {}


def test_leased_records_and_what_they_follow_stay_and_more_is_refused(harness: CatalogHarness) -> None:
    names = [f"a{n:02}" for n in range(NUM_SLOTS)]
    harness.put_chain(*names)
    offset = harness.catalog.lease(record_id(names[-1]))
    assert offset is not None
    assert harness.allocate("x") == REFUSED
    assert harness.catalog.stat().num_leases == 1
    again = harness.catalog.lease(record_id(names[-1]))
    harness.catalog.release(offset)
    assert harness.allocate("x") == REFUSED, "leases are counted"
    assert again == offset
    harness.catalog.release(offset)
    assert harness.allocate("x") == offset
    assert harness.catalog.stat().num_leases == 0


def test_one_leased_shard_keeps_the_block(harness: CatalogHarness) -> None:
    harness.put("a", shard=LEFT)
    harness.put("a", shard=RIGHT)
    offset = harness.catalog.lease(record_id("a", LEFT))
    assert offset is not None
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    harness.put("x")
    assert "a" in harness.names()
    assert f"b{NUM_SLOTS - 3:02}" not in harness.names()


def test_a_large_record_evicts_several_small_ones(harness: CatalogHarness) -> None:
    harness.put_chain(*(f"a{n:02}" for n in range(NUM_SLOTS)))
    harness.put("big", num_bytes=4 * GRANULE_BYTES - HEADER_BYTES)
    assert harness.names() == {"big", *(f"a{n:02}" for n in range(NUM_SLOTS - 4))}


def test_for_a_record_that_fits_in_no_free_range_not_everything_leaves(harness: CatalogHarness) -> None:
    for n in range(NUM_SLOTS):
        harness.put(f"a{n:02}")
    leased = [harness.catalog.lease(record_id(f"a{n:02}")) for n in range(1, NUM_SLOTS, 2)]
    assert harness.allocate("big", num_bytes=2 * ONE_GRANULE) == REFUSED
    assert NUM_SLOTS - 16 <= len(harness.names()) <= NUM_SLOTS - 8
    assert None not in leased


# ---------------------------------------------------------------------------------------------------- pins


def test_a_pin_keeps_a_record_for_its_time(harness: CatalogHarness) -> None:
    harness.put_chain("a1", "a2")
    assert harness.catalog.pin(record_id("a2"), 10.0)
    assert harness.catalog.pin(record_id("a2"), 5.0), "the longer one counts"
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 2)))
    harness.clock.advance(9.9)
    harness.put("x")
    assert {"a1", "a2"} <= harness.names()
    harness.clock.advance(0.1)
    harness.put("y")
    assert "a2" not in harness.names()
    assert not harness.catalog.pin(record_id("a2"), 20.0)


def test_a_pin_can_be_renewed(harness: CatalogHarness) -> None:
    harness.put("a")
    harness.catalog.pin(record_id("a"), 10.0)
    harness.catalog.pin(record_id("a"), 20.0)
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS - 1)))
    harness.clock.advance(15)
    harness.put("x")
    assert "a" in harness.names()
    harness.clock.advance(5)
    harness.put("y")
    assert "a" not in harness.names()


def test_pins_take_half_of_the_arena_at_most(harness: CatalogHarness) -> None:
    names = [f"a{n:02}" for n in range(NUM_SLOTS)]
    harness.put_chain(*names)
    pinned = [harness.catalog.pin(record_id(name), 10.0) for name in names]
    assert pinned.count(True) == NUM_SLOTS // 2
    harness.clock.advance(10)
    assert harness.catalog.pin(record_id(names[-1]), 20.0)
    harness.catalog.check()


def test_a_bad_or_purged_record_is_dropped_though_pinned(harness: CatalogHarness) -> None:
    harness.put("a")
    harness.put("b")
    for name in ("a", "b"):
        harness.catalog.pin(record_id(name), 10.0)
    offset = harness.catalog.lease(record_id("a"))
    assert offset is not None
    assert harness.catalog.bad(offset) is not None
    harness.catalog.release(offset)
    harness.catalog.purge(None, None)
    assert harness.catalog.stat().num_bytes == 0
    harness.put("c")  # perhaps where one of them was
    harness.clock.advance(10)
    harness.put_chain(*(f"d{n:02}" for n in range(NUM_SLOTS)))


# -------------------------------------------------------------------------------------------------- shares


def shared_harness() -> CatalogHarness:
    """The greedy tenant has 21 of 31 slots, the modest one 10, older ones; a share is 15."""
    harness = CatalogHarness(tenant_share=0.5)
    harness.put_chain(*(f"m{n:02}" for n in range(10)), tenant="modest")
    harness.put_chain(*(f"g{n:02}" for n in range(NUM_SLOTS - 10)), tenant="greedy")
    harness.listener.take()
    return harness


def evicted(harness: CatalogHarness) -> str:
    return "".join(name[0] for event, name in harness.listener.take() if event == "evicted")


def test_a_tenant_may_have_more_than_its_share_while_nobody_wants_it() -> None:
    harness = shared_harness()
    assert harness.catalog.bytes_by_tenant() == {"modest": 10 * GRANULE_BYTES, "greedy": 21 * GRANULE_BYTES}
    harness.close()


def test_the_greedy_tenant_is_evicted_first_though_it_is_younger() -> None:
    harness = shared_harness()
    harness.put_chain(*(f"x{n}" for n in range(6)), tenant="new")
    assert evicted(harness) == "gggggg"
    harness.put_chain(*(f"y{n}" for n in range(2)), tenant="new")
    assert evicted(harness) == "mm", "from here on nobody has too much: the oldest leave"
    harness.close()


def test_the_greedy_tenant_evicts_its_own_or_is_refused() -> None:
    harness = shared_harness()
    harness.put("g99", tenant="greedy")
    assert evicted(harness) == "g"
    for name in sorted(harness.names()):
        if name.startswith("g"):
            assert harness.catalog.lease(record_id(name)) is not None
    assert harness.allocate("g98", tenant="greedy") == REFUSED
    assert evicted(harness) == ""
    harness.put("x", tenant="new")
    assert evicted(harness) == "m", "the greedy one's cannot leave"
    harness.close()


def test_bytes_of_a_tenant_count_all_it_takes(harness: CatalogHarness) -> None:
    harness.put("a", tenant="one")
    harness.allocate("b", tenant="one")
    harness.catalog.added_nvme(info_of("c", tenant="two"), REF)
    harness.catalog.added_nvme(info_of("d", tenant="one"), NEWER)
    nvme_bytes = image_bytes(ONE_GRANULE)
    assert harness.catalog.bytes_by_tenant() == {"one": 2 * GRANULE_BYTES + nvme_bytes, "two": nvme_bytes}


# ------------------------------------------------------------------------------------------------ sessions


def test_what_a_lost_session_was_granted_is_free_when_its_ranks_have_ended(harness: CatalogHarness) -> None:
    offset = harness.allocate("a")
    mine = harness.put("b")
    harness.catalog.session_lost(SESSION)
    harness.catalog.check()
    assert harness.catalog.stat().num_quarantined == 1
    assert harness.catalog.commit(SESSION, offset, 1) is None, "it has no session any more"
    second = harness.allocate("a", session=OTHER)
    assert second not in (offset, HELD, REFUSED), "others may put it, elsewhere"
    assert harness.catalog.writers_gone(OTHER) == 0
    assert harness.catalog.writers_gone(SESSION) == 1
    assert harness.catalog.stat().num_quarantined == 0
    assert harness.catalog.writers_gone(SESSION) == 0
    assert harness.catalog.lookup(SPACE, b"b")[WHOLE].offset == mine
    assert harness.allocate("c", session=OTHER) == offset


def test_stray_slots_are_never_given_away_however_full_it_is(harness: CatalogHarness) -> None:
    stray = {harness.allocate(f"s{n}") for n in range(3)}
    harness.catalog.session_lost(SESSION)
    harness.clock.advance(1e9)  # no timer ends it
    seen = {harness.put(f"x{n:03}", session=OTHER) for n in range(3 * NUM_SLOTS)}
    assert not seen & stray
    assert len(seen) == NUM_SLOTS - 3
    harness.catalog.writers_gone(SESSION)
    seen = {harness.put(f"y{n:03}", session=OTHER) for n in range(3 * NUM_SLOTS)}
    assert seen >= stray


def test_ranks_that_end_before_their_engine_core_free_nothing_until_it_is_gone_too(
    harness: CatalogHarness,
) -> None:
    offset = harness.allocate("a")
    assert harness.catalog.writers_gone(SESSION) == 0
    assert harness.catalog.commit(SESSION, offset, 1) is not None
    harness.allocate("b")
    harness.catalog.session_lost(SESSION)
    assert harness.catalog.writers_gone(SESSION) == 1


def test_a_session_that_is_back_writes_no_more_of_what_it_had(harness: CatalogHarness) -> None:
    first = harness.allocate("a")
    harness.catalog.session_lost(SESSION)
    harness.catalog.session_opened(SESSION)
    assert harness.catalog.stat().num_bytes == 0
    assert harness.allocate("a") == first
    harness.catalog.session_opened(SESSION)  # the loss of the connection before was not noticed
    assert harness.catalog.stat().num_bytes == 0
    assert harness.catalog.commit(SESSION, first, 1) is None
    assert harness.allocate("a", session=OTHER) >= 0


# ------------------------------------------------------------------------------------------------ adoption


def test_a_new_owner_finds_what_was_committed(harness: CatalogHarness) -> None:
    harness.put_chain("a1", "a2")
    harness.put("b", tenant="other")
    harness.read("a1")
    harness.listener.take()
    harness.restart()
    assert harness.listener.take() == [("committed", "a1"), ("committed", "a2"), ("committed", "b")]
    for name in ("a1", "a2", "b"):
        assert harness.read(name) == payload_of(name)
    assert harness.catalog.bytes_by_tenant() == {"t": 2 * GRANULE_BYTES, "other": GRANULE_BYTES}
    harness.catalog.session_opened(SESSION)
    harness.put_chain(*(f"c{n:02}" for n in range(NUM_SLOTS)))
    harness.catalog.check()


def test_adopted_chains_leave_in_the_same_order(harness: CatalogHarness) -> None:
    harness.put_chain(*(f"old{n}" for n in range(5)))
    harness.put_chain(*(f"new{n:02}" for n in range(NUM_SLOTS - 5)))
    harness.restart()
    harness.catalog.session_opened(SESSION)
    harness.listener.take()
    harness.put("x")
    harness.put("y")
    assert [name for event, name in harness.listener.take() if event == "evicted"] == ["old4", "old3"]
    harness.restart()
    harness.catalog.session_opened(SESSION)
    harness.listener.take()
    harness.put("z")
    assert [name for event, name in harness.listener.take() if event == "evicted"] == ["old2"]


def adopted_with_stray(harness: CatalogHarness) -> int:
    """An owner died while a rank was writing `a`."""
    offset = harness.allocate("a", writer=Writer(4711, 99))
    harness.put("b")
    harness.restart()
    assert harness.names() == {"b"}
    assert harness.catalog.stat().num_quarantined == 1
    return offset


def test_an_adopted_stray_is_free_when_its_writer_is_dead(harness: CatalogHarness) -> None:
    asked: list[Writer] = []

    def is_running(writer: Writer) -> bool:
        asked.append(writer)
        return len(asked) < 2

    offset = adopted_with_stray(harness)
    assert harness.catalog.free_orphans(is_running) == 0
    assert harness.catalog.writers_gone(SESSION) == 0, (
        "a rank that never connected to this owner may write it"
    )
    assert harness.catalog.free_orphans(is_running) == 1
    assert asked == [Writer(4711, 99, SESSION)] * 2
    assert harness.catalog.free_orphans(is_running) == 0
    assert len(asked) == 2
    harness.catalog.session_opened(OTHER)
    assert harness.allocate("c", session=OTHER) == offset


def test_an_adopted_stray_is_free_when_its_session_is_back(harness: CatalogHarness) -> None:
    offset = adopted_with_stray(harness)
    harness.catalog.session_opened(OTHER)
    assert harness.catalog.stat().num_quarantined == 1
    harness.catalog.session_opened(SESSION)
    assert harness.catalog.stat().num_quarantined == 0
    assert harness.catalog.commit(SESSION, offset, 1) is None, "it was granted by another owner"


def test_a_session_that_said_hello_before_the_arena_came_has_no_strays_in_it(harness: CatalogHarness) -> None:
    harness.allocate("a")
    harness.allocate("b", session=OTHER)
    arena = Arena.adopt(os.dup(harness.arena.fd), GRANULE_BYTES)
    catalog = harness.make(None)
    catalog.session_opened(SESSION)
    catalog.attach(arena)
    catalog.check()
    assert catalog.stat().num_quarantined == 1
    arena.close()


def test_what_the_dead_owner_was_reading_in_is_free(harness: CatalogHarness) -> None:
    offset = harness.catalog.begin_read(info_of("a"))
    harness.write(offset, payload_of("a"))
    harness.restart()
    assert harness.names() == set()
    assert harness.catalog.stat().num_bytes == 0


def test_what_was_dropped_under_a_lease_is_not_adopted(harness: CatalogHarness) -> None:
    for name in ("a", "b"):
        harness.put(name)
        assert harness.catalog.lease(record_id(name)) is not None
    harness.catalog.bad(harness.catalog.lookup(SPACE, b"a")[WHOLE].offset or 0)
    harness.catalog.purge(None, None)
    harness.restart()
    assert harness.names() == set()


# ------------------------------------------------------------------------------------ reads by the owner


def test_a_record_read_from_another_tier_is_as_good_as_a_put(harness: CatalogHarness) -> None:
    harness.catalog.added_nvme(info_of("a"), REF)
    offset = harness.catalog.begin_read(info_of("a"))
    assert harness.catalog.begin_read(info_of("a")) == HELD
    image = harness.arena.image(offset, ONE_GRANULE)
    image[:HEADER_BYTES] = b"\xff" * HEADER_BYTES  # whatever header it had there
    harness.write(offset, payload_of("a"))
    assert harness.catalog.commit_read(offset, info_of("a").checksum) == info_of("a")
    assert harness.catalog.begin_read(info_of("a")) == HELD
    assert harness.catalog.lookup(SPACE, b"a")[WHOLE].tiers == ("dram", "nvme")
    stat = harness.catalog.stat()
    assert (stat.num_put_bytes, stat.num_written_bytes) == (0, GRANULE_BYTES)
    harness.restart()
    assert harness.read("a") == payload_of("a")


def test_a_read_that_fails_leaves_nothing(harness: CatalogHarness) -> None:
    offset = harness.catalog.begin_read(info_of("a"))
    harness.catalog.abandon_read(offset)
    assert harness.catalog.stat().num_bytes == 0
    assert harness.catalog.begin_read(info_of("a")) == offset


def test_of_a_put_and_a_read_the_first_one_done_is_kept(harness: CatalogHarness) -> None:
    put = harness.allocate("a")
    read = harness.catalog.begin_read(info_of("a"))
    harness.write(read, payload_of("a"))
    assert harness.catalog.commit_read(read, info_of("a").checksum) == info_of("a")
    assert harness.catalog.commit(SESSION, put, harness.write(put, payload_of("a", salt=1))) is None
    assert harness.read("a") == payload_of("a")
    put = harness.allocate("b")
    read = harness.catalog.begin_read(info_of("b"))
    total = harness.write(put, payload_of("b", salt=1))
    kept = harness.catalog.commit(SESSION, put, total)
    assert harness.catalog.commit_read(read, 1) == kept, (
        "the record that is there, not the one that came late"
    )
    assert harness.read("b") == payload_of("b", salt=1)
    assert harness.catalog.stat().num_bytes == 2 * GRANULE_BYTES


def test_whose_record_it_is_may_turn_out_at_the_end(harness: CatalogHarness) -> None:
    asked = replace(info_of("a", tenant="", model=b""), parent=b"", checksum=0)
    offset = harness.catalog.begin_read(asked)
    total = harness.write(offset, payload_of("a"))
    found = info_of("a", tenant="theirs")
    assert harness.catalog.commit_read(offset, total, found) == found
    assert harness.catalog.bytes_by_tenant() == {"theirs": GRANULE_BYTES}
    harness.restart()
    assert harness.catalog.bytes_by_tenant() == {"theirs": GRANULE_BYTES}


# ---------------------------------------------------------------------------------------------------- NVMe


def test_a_record_on_nvme_survives_its_eviction(harness: CatalogHarness) -> None:
    harness.put("a")
    assert harness.catalog.added_nvme(info_of("a"), REF) is None
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS)))
    assert harness.listener.take()[-3:-1] == [("committed", f"b{NUM_SLOTS - 2:02}"), ("evicted", "a")]
    held = harness.catalog.find(record_id("a"))
    assert held is not None
    assert (held.offset, held.nvme, held.tiers) == (None, REF, ("nvme",))
    assert harness.catalog.lease(record_id("a")) is None
    assert harness.catalog.removed_nvme(record_id("a"), REF)
    assert harness.listener.take()[-1] == ("gone", "a")
    assert harness.catalog.find(record_id("a")) is None
    assert not harness.catalog.removed_nvme(record_id("a"), REF)


def test_each_tier_has_the_sum_of_its_own_bytes(harness: CatalogHarness) -> None:
    on_nvme = replace(info_of("a"), checksum=1234)
    harness.catalog.added_nvme(on_nvme, REF)
    harness.put("a")
    held = harness.catalog.lookup(SPACE, b"a")[WHOLE]
    assert (held.info.checksum, held.nvme_info) == (checksum(payload_of("a")), on_nvme)
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS)))
    assert (held.offset, held.info) == (None, on_nvme)


def test_a_record_written_again_or_moved_is_where_it_was_last(harness: CatalogHarness) -> None:
    harness.catalog.added_nvme(info_of("a"), REF)
    assert harness.catalog.added_nvme(info_of("a"), NEWER) == REF
    assert not harness.catalog.removed_nvme(record_id("a"), REF), "that one was replaced"
    assert not harness.catalog.moved_nvme(record_id("a"), REF, NvmeRef(3, 0, 1))
    assert harness.catalog.moved_nvme(record_id("a"), NEWER, REF)
    assert harness.catalog.lookup(SPACE, b"a")[WHOLE].nvme == REF
    harness.catalog.purge(None, None)
    assert not harness.catalog.moved_nvme(record_id("a"), REF, NEWER), "what was purged does not come back"
    assert harness.catalog.bytes_by_tenant() == {}


# ---------------------------------------------------------------------------------------------- bad, purge


def test_a_bad_record_leaves_all_tiers_and_its_slot_after_the_last_lease(harness: CatalogHarness) -> None:
    offset = harness.put("a")
    harness.catalog.added_nvme(info_of("a"), REF)
    harness.listener.take()
    assert harness.catalog.lease(record_id("a")) == harness.catalog.lease(record_id("a")) == offset
    harness.arena.payload(offset, 1)[0] ^= 1
    dropped = harness.catalog.bad(offset)
    harness.catalog.check()
    assert dropped == (info_of("a"), REF)
    assert harness.listener.take()[-1] == ("gone", "a")
    assert harness.catalog.find(record_id("a")) is None
    assert not harness.catalog.is_findable(offset)
    assert harness.catalog.bad(offset) is None, "told twice, dropped once"
    again = harness.put("a")
    assert again != offset, "somebody still reads there"
    for _ in range(2):
        harness.catalog.release(offset)
        harness.catalog.check()
    assert harness.catalog.stat().num_bytes == GRANULE_BYTES
    assert harness.read("a") == payload_of("a")
    assert harness.catalog.stat().num_checksum_failures == 1


def test_bad_offsets_of_nothing_are_ignored(harness: CatalogHarness) -> None:
    harness.put("a")
    allocated = harness.allocate("b")
    for offset in (allocated, 0, -1, 4096, 1 << 60):
        assert harness.catalog.bad(offset) is None
    assert harness.catalog.stat().num_checksum_failures == 0
    assert harness.names() == {"a"}


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
    harness: CatalogHarness, tenant: str | None, model: str | None, left: set[str]
) -> None:
    harness.put("a", tenant="one", model=b"model-x")
    harness.put("b", tenant="one", model=b"model-y")
    harness.put("c", tenant="two", model=b"model-x")
    purged = harness.catalog.purge(tenant, model)
    harness.catalog.check()
    assert harness.names() == left
    assert purged.num_records == {"dram": 3 - len(left), "nvme": 0}
    assert purged.num_bytes == {"dram": (3 - len(left)) * GRANULE_BYTES, "nvme": 0}
    assert purged.num_pending == 0
    assert all(not is_meant(held.info, tenant, model) for held in harness.catalog.records())
    harness.restart()
    assert harness.names() == left


def test_a_purge_reaches_every_tier_and_every_state(harness: CatalogHarness) -> None:
    harness.put("kept")
    leased = harness.put("leased")
    harness.catalog.lease(record_id("leased"))
    harness.catalog.added_nvme(info_of("leased"), NEWER)
    harness.catalog.added_nvme(info_of("disk"), REF)
    written = harness.allocate("written")
    harness.allocate("stray", session=OTHER)
    harness.catalog.session_lost(OTHER)
    read = harness.catalog.begin_read(info_of("read"))
    unknown = harness.catalog.begin_read(info_of("unknown", tenant=""))
    purged = harness.catalog.purge("t", None)
    harness.catalog.check()
    assert purged.num_records == {"dram": 2, "nvme": 2}
    assert purged.num_bytes["nvme"] == 2 * image_bytes(ONE_GRANULE)
    assert sorted(purged.erase) == [REF, NEWER]
    assert purged.num_pending == 5, "leased, written, stray, and both that are read"
    assert harness.catalog.records() == []
    assert not harness.catalog.is_findable(leased)
    again = harness.allocate("written", session=SESSION)
    assert again != written
    assert harness.catalog.commit(SESSION, written, 1) is None
    assert harness.catalog.commit_read(read, 1) is None
    assert harness.catalog.commit_read(unknown, 1, info_of("unknown")) is None
    harness.catalog.release(leased)
    harness.catalog.writers_gone(OTHER)
    assert harness.catalog.commit(SESSION, again, harness.write(again, payload_of("written"))) is not None
    assert harness.catalog.stat().num_bytes == GRANULE_BYTES
    assert harness.read("written") == payload_of("written")


# ---------------------------------------------------------------------------------------- counts and faults


def test_what_happened_is_counted(harness: CatalogHarness) -> None:
    harness.put_chain("a", "b")
    harness.read("a")
    harness.read("b")
    harness.catalog.count_misses(3)
    stat = harness.catalog.stat()
    assert (stat.tier, stat.num_records, stat.num_hits, stat.num_misses) == ("dram", 2, 2, 3)
    assert (stat.num_bytes, stat.num_put_bytes) == (2 * GRANULE_BYTES, 2 * GRANULE_BYTES)
    assert stat.num_hit_bytes == 2 * ONE_GRANULE
    assert stat.capacity_bytes == NUM_SLOTS * GRANULE_BYTES
    assert [(held.info.id.key, held.num_hits) for held in harness.catalog.records()] == [(b"b", 1), (b"a", 1)]


POINTS = ("store.put.allocate", "store.put.commit", "store.get", "store.evict", "store.purge")


@pytest.mark.parametrize("point", POINTS)
def test_an_owner_killed_at_any_point_leaves_right_bytes_or_a_miss(
    harness: CatalogHarness, point: str, tmp_path: Path
) -> None:
    names = [f"a{n:02}" for n in range(NUM_SLOTS - 2)]
    harness.put_chain(*names)
    harness.put("purged", tenant="purged")
    harness.put("last")
    fd, marker = str(harness.arena.fd), str(tmp_path / "marker")
    owner = subprocess.run(
        [sys.executable, catalog_process.__file__, fd, point, marker],
        pass_fds=(harness.arena.fd,),
        timeout=60,
        check=False,
    )
    assert owner.returncode == -signal.SIGKILL
    harness.restart()
    harness.catalog.session_opened(OTHER)
    for name in [*names, "x", "y", "purged", "last"]:
        assert harness.read(name) in (None, payload_of(name))
    assert len(harness.names()) >= NUM_SLOTS - 2
    assert ("x" in harness.names()) == (point in ("store.get", "store.purge"))
    harness.catalog.free_orphans(lambda writer: False)
    assert harness.catalog.stat().num_bytes == len(harness.names()) * GRANULE_BYTES
    harness.put("z", session=OTHER)
