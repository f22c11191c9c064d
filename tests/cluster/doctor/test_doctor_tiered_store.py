"""Symptoms of the tiered store, both ways."""

from __future__ import annotations

import pytest
from doctor_harness import live, only, said

from cluster.doctor import tiered_store
from cluster.doctor.checks import Severity
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

OK, NOTE, WARNING, ERROR = Severity


def test_a_store_that_does_not_answer_is_an_error() -> None:
    def away(node: admin_pb.StoreNodeStat) -> None:
        node.error = "not reached, nothing was done: refused"

    result = only(tiered_store.stores, live(store=away))
    assert result.severity is ERROR
    assert "node-a (process 77)" in result.seen
    assert not said(tiered_store.index, live(store=away))


@pytest.mark.parametrize(("state", "severity"), [("slow", WARNING), ("down", WARNING), ("up", OK)])
def test_the_state_of_the_index_is_reported(state: str, severity: Severity) -> None:
    def change(node: admin_pb.StoreNodeStat) -> None:
        node.index.state = state
        node.index.note = "start it, or correct tiers.redis_url" if state == "down" else ""

    assert only(tiered_store.index, live(store=change)).severity is severity


def test_no_index_is_wanted_where_it_is_off() -> None:
    def off(node: admin_pb.StoreNodeStat) -> None:
        node.index.state = "off"

    assert not said(tiered_store.index, live(store=off))


def test_late_look_ups_count_while_we_look() -> None:
    def late(node: admin_pb.StoreNodeStat) -> None:
        node.index.num_late = 9

    assert only(tiered_store.index, live(store=late, store_before=lambda node: None)).severity is WARNING
    assert only(tiered_store.index, live(store=late)).severity is OK


@pytest.mark.parametrize(
    ("field", "value", "grown", "lasting"),
    [
        ("num_io_errors", 3, ERROR, NOTE),
        ("num_refused", 3, WARNING, None),
        ("num_quarantined", 3, None, WARNING),
        ("num_checksum_failures", 3, WARNING, WARNING),
        ("note", "the file system refuses O_DIRECT", WARNING, WARNING),
    ],
)
def test_tiers_report_what_fails(
    field: str, value: object, grown: Severity | None, lasting: Severity | None
) -> None:
    def change(node: admin_pb.StoreNodeStat) -> None:
        setattr(node.tiers[0], field, value)

    for seen, expected in (
        (live(store=change, store_before=lambda node: None), grown),
        (live(store=change), lasting),
    ):
        assert [severity for severity, _ in said(tiered_store.tiers, seen)] == (
            [expected] if expected else []
        )
    assert not said(tiered_store.tiers, live())


def test_blocks_that_are_not_stored_are_noted_by_cause() -> None:
    def unstored(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_unstored_blocks["queue"] = 12

    result = only(tiered_store.unstored, live(unstored, before=lambda status: None))
    assert result.severity is NOTE
    assert result.seen.startswith("d0: 12 finished blocks")
    assert "engine.write_queue" in result.why
    assert not said(tiered_store.unstored, live(unstored))
