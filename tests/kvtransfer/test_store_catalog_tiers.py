"""The catalog over its tiers, row by row: adoption, reads by the owner, NVMe, purges, counts and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import catalog_harness
import pytest
from catalog_harness import (
    GRANULE_BYTES,
    NUM_SLOTS,
    ONE_GRANULE,
    OTHER,
    SESSION,
    SPACE,
    WHOLE,
    CatalogHarness,
    payload_of,
    record_id,
)
from msgspec.structs import replace

from kvtransfer.blocks.checksum import checksum
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.store.dram.arena import Arena, fill_with_zeros
from kvtransfer.store.messages.engine_session import HELD
from kvtransfer.store.messages.records import HEADER_BYTES, PurgeOrder, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.record import Writer, image_bytes

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


# ------------------------------------------------------------------------------------------------ adoption


def test_a_new_owner_finds_what_was_committed(harness: CatalogHarness) -> None:
    harness.put_chain("a1", "a2")
    harness.put("b", group="other")
    harness.read("a1")
    harness.listener.take()
    harness.restart()
    assert harness.listener.take() == [("committed", "a1"), ("committed", "a2"), ("committed", "b")]
    for name in ("a1", "a2", "b"):
        assert harness.read(name) == payload_of(name)
    assert harness.catalog.bytes_by_group() == {"t": 2 * GRANULE_BYTES, "other": GRANULE_BYTES}
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
    harness.catalog.purge(PurgeOrder(None, None))
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
    asked = replace(info_of("a", group="", model=b""), parent=b"", checksum=0)
    offset = harness.catalog.begin_read(asked)
    total = harness.write(offset, payload_of("a"))
    found = info_of("a", group="theirs")
    assert harness.catalog.commit_read(offset, total, found) == found
    assert harness.catalog.bytes_by_group() == {"theirs": GRANULE_BYTES}
    harness.restart()
    assert harness.catalog.bytes_by_group() == {"theirs": GRANULE_BYTES}


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
    assert harness.catalog.removed_nvme(record_id("a"), REF, "corrupt")
    assert harness.listener.take()[-1] == ("gone", "a")
    assert harness.catalog.find(record_id("a")) is None
    assert not harness.catalog.removed_nvme(record_id("a"), REF, "corrupt")


def test_a_record_that_is_gone_has_the_reason_for_which_it_left_the_last_tier() -> None:
    shares = GroupShares(by_group={"greedy": 0.25})
    harness = CatalogHarness(shares=shares, nvme_shares=shares, nvme_bytes=4 * GRANULE_BYTES)
    catalog, reasons = harness.catalog, harness.listener.reasons
    harness.put("corrupt")
    assert catalog.bad(catalog.lease(record_id("corrupt")) or 0) is not None
    harness.put("unreadable")
    catalog.added_nvme(info_of("unreadable"), REF)
    catalog.added_nvme(info_of("greedy0", group="greedy"), NvmeRef(5, 0, 2 * GRANULE_BYTES))
    assert catalog.make_nvme_space(info_of("greedy1", group="greedy"))
    harness.put("purged", group="purged")
    catalog.purge(PurgeOrder("purged", None))
    for number in range(NUM_SLOTS // 4 + 1):
        harness.put(f"share{number}", group="greedy")
    harness.put_chain(*(f"b{n:02}" for n in range(NUM_SLOTS)))
    assert record_id("unreadable") not in reasons, "it is on NVMe"
    catalog.removed_nvme(record_id("unreadable"), REF, "corrupt")
    names = ("corrupt", "unreadable", "greedy0", "purged", "share0")
    assert [reasons[record_id(name)] for name in names] == ["corrupt", "corrupt", "share", "purged", "share"]
    for number in range(3):
        harness.put(f"last{number}")
    assert {reason for gone, reason in reasons.items() if gone.key.startswith(b"b")} == {"space"}
    harness.close()


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
    assert not harness.catalog.removed_nvme(record_id("a"), REF, "corrupt"), "that one was replaced"
    assert not harness.catalog.moved_nvme(record_id("a"), REF, NvmeRef(3, 0, 1))
    assert harness.catalog.moved_nvme(record_id("a"), NEWER, REF)
    assert harness.catalog.lookup(SPACE, b"a")[WHOLE].nvme == REF
    harness.catalog.purge(PurgeOrder(None, None))
    assert not harness.catalog.moved_nvme(record_id("a"), REF, NEWER), "what was purged does not come back"
    assert harness.catalog.bytes_by_group() == {}


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
    ("group", "model", "left"),
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
    harness: CatalogHarness, group: str | None, model: str | None, left: set[str]
) -> None:
    harness.put("a", group="one", model=b"model-x")
    harness.put("b", group="one", model=b"model-y")
    harness.put("c", group="two", model=b"model-x")
    purged = harness.catalog.purge(PurgeOrder(group, model))
    harness.catalog.check()
    assert harness.names() == left
    assert purged.num_records == {"dram": 3 - len(left), "nvme": 0}
    assert purged.num_bytes == {"dram": (3 - len(left)) * GRANULE_BYTES, "nvme": 0}
    assert purged.num_pending == 0
    assert all(not PurgeOrder(group, model).includes(held.info) for held in harness.catalog.records())
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
    other = harness.catalog.begin_read(info_of("other", group="u"))
    purged = harness.catalog.purge(PurgeOrder("t", None))
    harness.catalog.check()
    assert purged.num_records == {"dram": 2, "nvme": 2}
    assert purged.num_bytes["nvme"] == 2 * image_bytes(ONE_GRANULE)
    assert sorted(purged.erase) == [REF, NEWER]
    assert purged.num_pending == 4, "leased, written, stray, and the one of the group that is read"
    assert harness.catalog.records() == []
    assert not harness.catalog.is_findable(leased)
    again = harness.allocate("written", session=SESSION)
    assert again != written
    assert harness.catalog.commit(SESSION, written, 1) is None
    assert harness.catalog.commit_read(read, 1) is None
    assert harness.catalog.commit_read(other, 1) is not None
    harness.catalog.release(leased)
    harness.catalog.writers_gone(OTHER)
    assert harness.catalog.commit(SESSION, again, harness.write(again, payload_of("written"))) is not None
    assert harness.catalog.stat().num_bytes == 2 * GRANULE_BYTES, "the record and that of the other group"
    assert harness.read("written") == payload_of("written")


def test_a_purge_clears_the_memory_before_anybody_else_gets_it(harness: CatalogHarness) -> None:
    for name in ("kept", "leased"):
        harness.put(name)
    other = harness.put("other", group="u")
    leased = harness.catalog.lease(record_id("leased"))
    assert leased is not None
    written = harness.allocate("written")
    harness.write(written, payload_of("written"))
    harness.catalog.purge(PurgeOrder("t", None))
    assert b"kept|" not in bytes(harness.arena.view)
    assert b"leased|" in bytes(harness.arena.view)  # it is being read
    harness.catalog.release(leased)
    harness.catalog.commit(SESSION, written, 1)
    held = bytes(harness.arena.view)
    assert [name for name in (b"kept|", b"leased|", b"written|", b"\x01t") if name in held] == []
    assert bytes(harness.arena.payload(other, ONE_GRANULE)) == payload_of("other")
    harness.catalog.check()


def test_a_purge_may_leave_the_clearing_to_its_caller(harness: CatalogHarness) -> None:
    for name in ("a", "b"):
        harness.put(name)
    harness.catalog.lease(record_id("b"))
    purged = harness.catalog.purge(PurgeOrder("t", None), keeps_slots=True)
    harness.catalog.check()
    (kept,) = purged.slots
    assert purged.num_pending == 1  # the one that is read
    assert harness.names() == set()
    assert harness.put("c") not in (kept, None)
    memory = harness.catalog.unread_memory(kept)
    assert memory is not None
    fill_with_zeros(memory)
    harness.catalog.cleared(kept)
    harness.catalog.release(kept)
    harness.catalog.check()
    assert b"a|" not in bytes(harness.arena.view).replace(b"b|", b"")
    assert harness.catalog.stat().num_bytes == 2 * GRANULE_BYTES


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
    harness.put("purged", group="purged")
    harness.put("last")
    fd, marker = str(harness.arena.fd), str(tmp_path / "marker")
    owner = subprocess.run(
        [sys.executable, catalog_harness.__file__, fd, point, marker],
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
