"""The catalog of a node, row by row: puts, leases, eviction, pins, groups' shares and sessions."""

from __future__ import annotations

from collections.abc import Iterator

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

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.store.messages.engine_session import HELD, REFUSED
from kvtransfer.store.messages.records import HEADER_BYTES, PurgeOrder, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.record import MAX_GROUP_BYTES, image_bytes

REF, NEWER = NvmeRef(1, 4096, 65536), NvmeRef(2, 8192, 65536)


@pytest.fixture
def harness() -> Iterator[CatalogHarness]:
    harness = CatalogHarness()
    yield harness
    harness.catalog.check()
    harness.close()


def info_of(name: str, *, group: str = "t", model: bytes = b"model") -> RecordInfo:
    total = checksum(payload_of(name))
    return RecordInfo(record_id(name), b"", b"chain", group, model, ONE_GRANULE, total)


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


@pytest.mark.parametrize("num_bytes", [-1, ARENA_BYTES, 1 << 60])
def test_an_impossible_size_is_refused_and_evicts_nothing(harness: CatalogHarness, num_bytes: int) -> None:
    harness.put_chain("a", "b")
    assert harness.allocate("c", num_bytes=num_bytes) == REFUSED
    assert harness.names() == {"a", "b"}
    assert harness.catalog.stat().num_refused == 1


def test_a_record_of_no_bytes_is_kept(harness: CatalogHarness) -> None:
    """A rank may have no layer of the group."""
    offset = harness.allocate("c", num_bytes=0)
    assert offset >= 0
    assert harness.catalog.commit(SESSION, offset, 1) is not None
    assert harness.names() == {"c"}
    harness.catalog.check()


def test_a_tenant_whose_name_no_header_takes_is_refused(harness: CatalogHarness) -> None:
    assert harness.allocate("a", group="x" * (MAX_GROUP_BYTES + 1)) == REFUSED
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
    harness.catalog.purge(PurgeOrder(None, None))
    assert harness.catalog.stat().num_bytes == 0
    harness.put("c")  # perhaps where one of them was
    harness.clock.advance(10)
    harness.put_chain(*(f"d{n:02}" for n in range(NUM_SLOTS)))


# -------------------------------------------------------------------------------------------------- shares


def shared_harness() -> CatalogHarness:
    """The greedy group has 21 of 31 slots, the modest one 10, older ones; a share is 15."""
    harness = CatalogHarness(shares=GroupShares(0.5))
    harness.put_chain(*(f"m{n:02}" for n in range(10)), group="modest")
    harness.put_chain(*(f"g{n:02}" for n in range(NUM_SLOTS - 10)), group="greedy")
    harness.listener.take()
    return harness


def evicted(harness: CatalogHarness) -> str:
    return "".join(name[0] for event, name in harness.listener.take() if event == "evicted")


def test_a_group_may_have_more_than_its_share_while_nobody_wants_it() -> None:
    harness = shared_harness()
    assert harness.catalog.bytes_by_group() == {"modest": 10 * GRANULE_BYTES, "greedy": 21 * GRANULE_BYTES}
    harness.close()


def test_the_greedy_group_is_evicted_first_though_it_is_younger() -> None:
    harness = shared_harness()
    harness.put_chain(*(f"x{n}" for n in range(6)), group="new")
    assert evicted(harness) == "gggggg"
    harness.put_chain(*(f"y{n}" for n in range(2)), group="new")
    assert evicted(harness) == "mm", "from here on nobody has too much: the oldest leave"
    harness.close()


def test_the_greedy_group_evicts_its_own_or_is_refused() -> None:
    harness = shared_harness()
    harness.put("g99", group="greedy")
    assert evicted(harness) == "g"
    for name in sorted(harness.names()):
        if name.startswith("g"):
            assert harness.catalog.lease(record_id(name)) is not None
    assert harness.allocate("g98", group="greedy") == REFUSED
    assert evicted(harness) == ""
    harness.put("x", group="new")
    assert evicted(harness) == "m", "the greedy one's cannot leave"
    harness.close()


def test_bytes_of_a_group_count_all_it_takes(harness: CatalogHarness) -> None:
    harness.put("a", group="one")
    harness.allocate("b", group="one")
    harness.catalog.added_nvme(info_of("c", group="two"), REF)
    harness.catalog.added_nvme(info_of("d", group="one"), NEWER)
    nvme_bytes = image_bytes(ONE_GRANULE)
    assert harness.catalog.bytes_by_group() == {"one": 2 * GRANULE_BYTES + nvme_bytes, "two": nvme_bytes}


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
