"""What happens to a rank's KV when the process at the other end dies or stalls, over every transport."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from agent_process import HOLD
from transfer_harness import (
    LAYOUT,
    ONE_SIDED,
    Rank,
    TransferHarness,
    eventually,
    lane,
)

from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.transfer_orders import CloseLanding, ClosePeer, StopPush
from kvtransfer.transfer_reports import (
    LandingClosed,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    PushStopped,
    WriterGone,
)

HALF = LAYOUT.block_bytes // 2
FILL = 0xA5
OTHER = ReplicaIdentity("other", 1)


def halted(harness: TransferHarness, target: Rank, action: str, folder: Path) -> tuple[Rank, bytes]:
    """A writer that is stopped or killed in the middle of its second block; and the landing's id."""
    process = harness.victim()
    writer = harness.writer(process, faults=[FaultRule("push.half", action, str(folder / "marker"), after=2)])
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, 1, 2, 3)
    writer.push(1, connection_id, landing_id, [(4, 1), (5, 2), (6, 3)])
    process.await_state("T" if action == "stop" else "Z")
    return writer, landing_id


def is_one_sided(harness: TransferHarness) -> bool:
    return harness.transport in ONE_SIDED


# ------------------------------------------------------------------------------------- the writer dies


def test_a_writer_killed_mid_write_is_proven_gone(harness: TransferHarness, tmp_path: Path) -> None:
    target = harness.target()
    writer, landing_id = halted(harness, target, "kill", tmp_path)
    if is_one_sided(harness):
        assert target.reports.take(WriterGone).writer == writer.identity
    assert target.close_landing(landing_id) == ()
    assert not target.reports.has(WriterGone)
    assert set(target.pool[2].tolist()) != {0} or not is_one_sided(harness)
    np.testing.assert_array_equal(target.pool[3], 0)
    fresh = harness.writer(identity=OTHER, seed=3)
    fresh.move(target, fresh.connected(target, harness.transport), 1, [(0, 1), (1, 2), (2, 3)])
    np.testing.assert_array_equal(target.pool[1:4], fresh.pool[:3])


@pytest.mark.parametrize("processes", ONE_SIDED, indirect=True)
def test_each_connection_of_a_writer_is_proven_gone_by_itself(harness: TransferHarness) -> None:
    """A writer that reconnects before its old connection has ended must not hide the old one's end. Of
    two-sided connections nothing has to be proven."""
    target, writer, second = harness.target(), harness.writer(), harness.writer()
    landing_id = target.open(writer, 1)
    connection_id = writer.connected(target, harness.transport)
    writer.push(1, connection_id, landing_id, [(4, 1)])
    writer.reports.take(PushDone)
    second.connected(target, harness.transport)
    (admitted,) = target.close_landing(landing_id)
    writer.handle(ClosePeer(connection_id))
    gone = target.reports.take(WriterGone)
    assert (gone.writer, gone.connection) == (writer.identity, admitted)
    second.end()
    assert target.reports.take(WriterGone).connection != admitted


# ------------------------------------------------------------------------------------- the target dies


def test_a_target_killed_mid_write_fails_the_push(harness: TransferHarness, tmp_path: Path) -> None:
    process = harness.victim()
    target = harness.target(process)
    writer = harness.writer(faults=[FaultRule("push.half", HOLD, str(tmp_path / "marker"))])
    connection_id = writer.connected(target, harness.transport)
    writer.push(1, connection_id, target.open(writer, 1, 2), [(4, 1), (5, 2)])
    eventually((tmp_path / "marker").exists, "the middle of the first block")
    process.signal(signal.SIGKILL)
    process.await_death()
    (tmp_path / "marker.go").touch()
    assert writer.reports.take(PeerLost).connection_id == connection_id
    # In memory that both map the rest may be written before the writer notices.
    assert writer.reports.has(PushFailed) or (harness.transport == "shm" and writer.reports.has(PushDone))
    other = harness.target(identity=OTHER)
    landing_id = other.open(writer, 7)
    writer.push(2, writer.connected(other, harness.transport), landing_id, [(7, 7)])
    eventually(lambda: bool((other.pool[7] == writer.pool[7]).all()), "the next target's block")


def test_a_dead_target_is_reported_to_an_idle_writer(harness: TransferHarness) -> None:
    process = harness.victim()
    target, writer = harness.target(process), harness.writer()
    connection_id = writer.connected(target, harness.transport)
    process.signal(signal.SIGKILL)
    lost = writer.reports.take(PeerLost)
    assert lost.connection_id == connection_id
    assert lost.reason
    writer.push(1, connection_id, bytes(16), [(0, 0)])
    assert writer.reports.take(PushFailed).push_id == 1


def test_when_one_of_two_lanes_dies_the_push_fails_and_the_other_stays_fenced(
    harness: TransferHarness, tmp_path: Path
) -> None:
    process = harness.victim()
    alive, dying = harness.target(rank=0), harness.target(process, rank=1)
    writer = harness.writer(faults=[FaultRule("push.half", HOLD, str(tmp_path / "marker"), after=4)])
    connection_id = writer.connect([lane(alive), lane(dying)], harness.transport)
    writer.reports.take(PeerConnected)
    landing_id = alive.open(writer, *range(6))
    dying.open(writer, *range(6), landing_id=landing_id)
    writer.push(1, connection_id, landing_id, [(0, 0), (1, 1), (2, 2), (3, 3)])
    eventually((tmp_path / "marker").exists, "the middle of a block")
    process.signal(signal.SIGKILL)
    process.await_death()
    alive.handle(CloseLanding(landing_id))
    admitted = alive.reports.take(LandingClosed).connections
    assert len(admitted) == is_one_sided(harness)
    assert not alive.reports.has(WriterGone)  # it stands in the middle of a block
    (tmp_path / "marker.go").touch()
    assert writer.reports.take(PushFailed).push_id == 1
    assert not writer.reports.has(PushDone)
    writer.reports.take(PeerLost)
    if is_one_sided(harness):
        assert alive.reports.take(WriterGone).connection == admitted[0]
    alive.pool[:] = FILL
    fresh = harness.writer(identity=OTHER, seed=4)
    fresh.move(alive, fresh.connected(alive, harness.transport), 1, [(0, 5)])
    np.testing.assert_array_equal(alive.pool[5], fresh.pool[0])
    assert (alive.pool[:5] == FILL).all()


# ----------------------------------------------------------------------------------------- one stalls


def test_a_stopped_writer_cannot_touch_blocks_that_are_reused(
    harness: TransferHarness, tmp_path: Path
) -> None:
    """Those of a one-sided writer stay in quarantine until it is proven gone."""
    target = harness.target()
    writer, landing_id = halted(harness, target, "stop", tmp_path)
    admitted = target.close_landing(landing_id)
    assert len(admitted) == is_one_sided(harness)
    if is_one_sided(harness):
        assert not target.reports.has(WriterGone)
        writer.process.signal(signal.SIGKILL)
        assert target.reports.take(WriterGone).connection == admitted[0]
    target.pool[:] = FILL
    if not is_one_sided(harness):
        writer.process.signal(signal.SIGCONT)
        assert "does not accept" in writer.reports.take(PushFailed).reason
        # The connection is in step again: a new landing goes through it or through a new one.
        writer.move(target, writer.connected(target, harness.transport), 2, [(7, 7)])
        np.testing.assert_array_equal(target.pool[7], writer.pool[7])
    assert (target.pool[:7] == FILL).all()


def test_a_stop_ends_a_push_to_a_stopped_target(harness: TransferHarness) -> None:
    """It is answered, at the cost of the connection where need be. Over sockets that a one-sided writer
    cannot take back it is answered when the target runs again: what lies in them still counts as written."""
    process = harness.victim()
    num_blocks = 2048
    target = harness.target(process, num_blocks=num_blocks)
    writer = harness.writer(num_blocks=num_blocks)
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, *range(num_blocks))
    writer.push(1, connection_id, landing_id, [(0, 0)])
    writer.reports.take(PushDone)
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.push(2, connection_id, landing_id, [(block, block) for block in range(num_blocks)])
    writer.handle(StopPush(landing_id))
    if harness.transport == "rdma":
        process.signal(signal.SIGCONT)
    writer.reports.take(PushStopped)
    assert not writer.reports.has(PushDone)
    if harness.transport != "rdma":
        process.signal(signal.SIGCONT)
    if not is_one_sided(harness):
        target.close_landing(landing_id)
    target.pool[:] = FILL
    writer.move(target, writer.connected(target, harness.transport), 3, [(7, 7)])
    np.testing.assert_array_equal(target.pool[7], writer.pool[7])
    assert (np.delete(target.pool, 7, axis=0) == FILL).all()


def test_a_stopped_target_and_its_death_end_a_stopped_push(harness: TransferHarness) -> None:
    process = harness.victim()
    target = harness.target(process, num_blocks=2048)
    writer = harness.writer(num_blocks=2048)
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, *range(2048))
    writer.push(1, connection_id, landing_id, [(0, 0)])
    writer.reports.take(PushDone)
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.push(2, connection_id, landing_id, [(block, block) for block in range(2048)])
    writer.handle(StopPush(landing_id))
    process.signal(signal.SIGKILL)
    writer.reports.take(PushStopped)
    writer.reports.take(PeerLost)


def test_a_target_that_is_stopped_while_a_writer_connects_costs_only_that(harness: TransferHarness) -> None:
    process = harness.victim()
    stopped, target, writer = harness.target(process), harness.target(), harness.writer()
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.connect([lane(stopped)], harness.transport)
    writer.move(target, writer_connection(writer, target, harness.transport), 1, [(3, 3)])
    np.testing.assert_array_equal(target.pool[3], writer.pool[3])
    process.signal(signal.SIGKILL)
    writer.reports.take(PeerConnectFailed)


def writer_connection(writer: Rank, target: Rank, transport: str) -> bytes:
    connection_id = writer.connect([lane(target)], transport)
    writer.reports.take(PeerConnected)
    return connection_id
