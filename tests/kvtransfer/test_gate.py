"""The target's gate: who is let in, and in which order closing and the writer's end are reported."""

from __future__ import annotations

import threading

from transfer_harness import eventually

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.protocol.gate import Gate, RecentIds
from kvtransfer.transfer_orders import OpenLanding
from kvtransfer.transfer_reports import LandingClosed, TransferReport, WriterGone

WRITER = ReplicaIdentity("w", 1)
OTHER = ReplicaIdentity("w", 2)


def test_closing_names_the_admitted_connections_and_leaving_names_one() -> None:
    reports: list[TransferReport] = []
    gate = Gate(reports.append)
    first, second = gate.enter(WRITER), gate.enter(WRITER)
    for landing_id in (b"a", b"b"):
        gate.open(OpenLanding(landing_id, WRITER, (1,)))
    assert gate.admit(b"a", first)
    gate.close(b"a")
    gate.close(b"b")
    gate.leave(second)
    gate.leave(first)
    assert reports == [
        LandingClosed(b"a", (first,)),
        LandingClosed(b"b", ()),
        WriterGone(WRITER, second),
        WriterGone(WRITER, first),
    ]


def test_a_writer_that_left_before_the_closing_cannot_write() -> None:
    reports: list[TransferReport] = []
    gate = Gate(reports.append)
    connection = gate.enter(WRITER)
    gate.open(OpenLanding(b"a", WRITER, (1,)))
    assert gate.admit(b"a", connection)
    gate.leave(connection)
    gate.close(b"a")
    assert reports == [WriterGone(WRITER, connection), LandingClosed(b"a", ())]


def test_another_life_of_the_writer_is_another_writer() -> None:
    reports: list[TransferReport] = []
    gate = Gate(reports.append)
    old, new = gate.enter(WRITER), gate.enter(OTHER)
    gate.open(OpenLanding(b"a", WRITER, (1,)))
    assert not gate.admit(b"a", new)
    assert gate.find(b"a", OTHER) is None
    gate.leave(old)
    assert reports == [WriterGone(WRITER, old)]


def test_nobody_is_admitted_after_the_closing() -> None:
    gate = Gate(lambda report: None)
    connection = gate.enter(WRITER)
    gate.close(b"never opened")
    assert not gate.admit(b"never opened", connection)
    gate.open(OpenLanding(b"a", WRITER, (1,)))
    gate.close(b"a")
    assert not gate.admit(b"a", connection)


def test_who_waits_for_an_unknown_landing_is_woken() -> None:
    for wake in ("open", "close", "shut"):
        gate = Gate(lambda report: None)
        found: list[object] = []
        thread = threading.Thread(target=lambda gate=gate, found=found: found.append(gate.find(b"a", WRITER)))
        thread.start()
        if wake == "open":
            gate.open(OpenLanding(b"a", WRITER, (1,)))
        elif wake == "close":
            gate.close(b"a")
        else:
            gate.shut()
        thread.join(30)
        assert (found[0] is not None) is (wake == "open")


def test_opening_again_adds_blocks() -> None:
    gate = Gate(lambda report: None)
    gate.open(OpenLanding(b"a", WRITER, (1,), ((5,),)))
    gate.open(OpenLanding(b"a", WRITER, (2,), ((6,), (7,))))
    landing = gate.find(b"a", WRITER)
    assert landing is not None
    assert [set(block_ids) for block_ids in landing.block_ids] == [{1, 2}, {5, 6}, {7}]
    assert landing.has_blocks(1, (5, 6))
    assert not landing.has_blocks(1, (5, 7))
    assert not landing.has_blocks(3, ())


def test_the_last_ids_are_remembered_and_few_before_them() -> None:
    ids, limit = RecentIds(limit=4), 4
    for number in range(40):
        ids.add(b"%d" % number)
        assert all(b"%d" % last in ids for last in range(max(0, number - limit + 1), number + 1))
        assert len(ids) <= 2 * limit
    assert b"20" not in ids
    ids.add(b"33")
    ids.discard(b"33")
    assert b"33" not in ids


def test_what_is_remembered_takes_no_more_memory_after_two_minutes_of_an_ordinary_load() -> None:
    """Of 140 landings a second: an engine core that grows for ten minutes looks like a leak."""
    ids, sizes = RecentIds(), []
    for number in range(10 * 60 * 140):
        ids.add(number.to_bytes(16, "big"))
        sizes.append(len(ids))
    assert max(sizes) == max(sizes[: 2 * 60 * 140])


def test_closing_waits_for_who_is_just_receiving() -> None:
    reports: list[TransferReport] = []
    gate = Gate(reports.append)
    gate.open(OpenLanding(b"a", WRITER, (1,)))
    landing = gate.find(b"a", WRITER)
    assert landing is not None
    assert landing.start_receiving()
    assert landing.start_receiving()
    closing = threading.Thread(target=lambda: gate.close(b"a"))
    closing.start()
    eventually(lambda: not landing.is_open, "the closing")
    landing.end_receiving()
    assert not landing.start_receiving()
    assert reports == []
    landing.end_receiving()
    closing.join(30)
    assert reports == [LandingClosed(b"a", ())]
