"""Symptoms of the transfer of KV between replicas."""

from __future__ import annotations

from collections.abc import Callable

from doctor_harness import live, only, said

from cluster.doctor import kv_transfers
from cluster.doctor.checks import Severity
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

OK, NOTE, WARNING, ERROR = Severity


def test_paths_are_there_fast_enough_and_preferred() -> None:
    def having(**fields: object) -> Callable[[admin_pb.Path], None]:
        def change(path: admin_pb.Path) -> None:
            for name, value in fields.items():
                setattr(path, name, value)

        return change

    refused = having(transport="", gb_s=0.0, instead_of="shm: other host; tcp: refused")
    none = only(kv_transfers.paths, live(path=refused))
    assert none.severity is ERROR
    assert "tcp: refused" in none.why
    slow_path = only(kv_transfers.paths, live(min_gb_s=8.0))
    assert slow_path.severity is WARNING
    assert "5.00 GB/s" in slow_path.seen
    by_tcp = having(transport="tcp", instead_of="shm: 0.1 GB/s")
    assert only(kv_transfers.paths, live(path=by_tcp)).severity is WARNING
    assert only(kv_transfers.paths, live(min_gb_s=4.0)).severity is OK


def test_blocks_in_quarantine_or_leaked_are_reported_when_they_stay() -> None:
    def held(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_quarantined_blocks = 4
        status.replicas[1].load.num_leaked_blocks = 2

    assert [severity for severity, _ in said(kv_transfers.blocks, live(held))] == [WARNING, WARNING]
    assert not said(kv_transfers.blocks, live(held, before=lambda status: None))


def test_landings_that_wait_are_noted() -> None:
    def waiting(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_waiting_landings = 2

    assert only(kv_transfers.landings, live(waiting)).severity is NOTE
    assert not said(kv_transfers.landings, live())
