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
    TransferHouse,
    eventually,
    lane,
)

from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import (
    CloseLanding,
    ClosePeer,
    LandingClosed,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    PushStopped,
    ReplicaIdentity,
    StopPush,
    WriterGone,
)

HALF = LAYOUT.block_bytes // 2
FILL = 0xA5
OTHER = ReplicaIdentity("other", 1)


def halted(house: TransferHouse, target: Rank, action: str, folder: Path) -> tuple[Rank, bytes]:
    """A writer that is stopped or killed in the middle of its second block; and the landing's id."""
    process = house.victim()
    writer = house.writer(process, faults=[FaultRule("push.half", action, str(folder / "marker"), after=2)])
    connection_id = writer.connected(target, house.transport)
    landing_id = target.open(writer, 1, 2, 3)
    writer.push(1, connection_id, landing_id, [(4, 1), (5, 2), (6, 3)])
    process.await_state("T" if action == "stop" else "Z")
    return writer, landing_id


def is_one_sided(house: TransferHouse) -> bool:
    return house.transport in ONE_SIDED


# ------------------------------------------------------------------------------------- the writer dies


def test_a_writer_killed_mid_write_is_proven_gone(house: TransferHouse, tmp_path: Path) -> None:
    target = house.target()
    writer, landing_id = halted(house, target, "kill", tmp_path)
    if is_one_sided(house):
        assert target.reports.take(WriterGone).writer == writer.identity
    assert target.close_landing(landing_id) == ()
    assert not target.reports.has(WriterGone)
    assert set(target.pool[2].tolist()) != {0} or not is_one_sided(house)
    np.testing.assert_array_equal(target.pool[3], 0)
    fresh = house.writer(identity=OTHER, seed=3)
    fresh.move(target, fresh.connected(target, house.transport), 1, [(0, 1), (1, 2), (2, 3)])
    np.testing.assert_array_equal(target.pool[1:4], fresh.pool[:3])


def test_each_connection_of_a_writer_is_proven_gone_by_itself(house: TransferHouse) -> None:
    """A writer that reconnects before its old connection has ended must not hide the old one's end."""
    if not is_one_sided(house):
        pytest.skip("of two-sided connections nothing has to be proven")
    target, writer, second = house.target(), house.writer(), house.writer()
    landing_id = target.open(writer, 1)
    connection_id = writer.connected(target, house.transport)
    writer.push(1, connection_id, landing_id, [(4, 1)])
    writer.reports.take(PushDone)
    second.connected(target, house.transport)
    (admitted,) = target.close_landing(landing_id)
    writer.handle(ClosePeer(connection_id))
    gone = target.reports.take(WriterGone)
    assert (gone.writer, gone.connection) == (writer.identity, admitted)
    second.end()
    assert target.reports.take(WriterGone).connection != admitted


# ------------------------------------------------------------------------------------- the target dies


def test_a_target_killed_mid_write_fails_the_push(house: TransferHouse, tmp_path: Path) -> None:
    process = house.victim()
    target = house.target(process)
    writer = house.writer(faults=[FaultRule("push.half", HOLD, str(tmp_path / "marker"))])
    connection_id = writer.connected(target, house.transport)
    writer.push(1, connection_id, target.open(writer, 1, 2), [(4, 1), (5, 2)])
    eventually((tmp_path / "marker").exists, "the middle of the first block")
    process.signal(signal.SIGKILL)
    process.await_death()
    (tmp_path / "marker.go").touch()
    assert writer.reports.take(PeerLost).connection_id == connection_id
    # In memory that both map the rest may be written before the writer notices.
    assert writer.reports.has(PushFailed) or (house.transport == "shm" and writer.reports.has(PushDone))
    other = house.target(identity=OTHER)
    landing_id = other.open(writer, 7)
    writer.push(2, writer.connected(other, house.transport), landing_id, [(7, 7)])
    eventually(lambda: bool((other.pool[7] == writer.pool[7]).all()), "the next target's block")


def test_a_dead_target_is_reported_to_an_idle_writer(house: TransferHouse) -> None:
    process = house.victim()
    target, writer = house.target(process), house.writer()
    connection_id = writer.connected(target, house.transport)
    process.signal(signal.SIGKILL)
    lost = writer.reports.take(PeerLost)
    assert lost.connection_id == connection_id
    assert lost.reason
    writer.push(1, connection_id, bytes(16), [(0, 0)])
    assert writer.reports.take(PushFailed).push_id == 1


def test_when_one_of_two_lanes_dies_the_push_fails_and_the_other_stays_fenced(
    house: TransferHouse, tmp_path: Path
) -> None:
    process = house.victim()
    alive, dying = house.target(rank=0), house.target(process, rank=1)
    writer = house.writer(faults=[FaultRule("push.half", HOLD, str(tmp_path / "marker"), after=4)])
    connection_id = writer.connect([lane(alive), lane(dying)], house.transport)
    writer.reports.take(PeerConnected)
    landing_id = alive.open(writer, *range(6))
    dying.open(writer, *range(6), landing_id=landing_id)
    writer.push(1, connection_id, landing_id, [(0, 0), (1, 1), (2, 2), (3, 3)])
    eventually((tmp_path / "marker").exists, "the middle of a block")
    process.signal(signal.SIGKILL)
    process.await_death()
    alive.handle(CloseLanding(landing_id))
    admitted = alive.reports.take(LandingClosed).connections
    assert len(admitted) == is_one_sided(house)
    assert not alive.reports.has(WriterGone)  # it stands in the middle of a block
    (tmp_path / "marker.go").touch()
    assert writer.reports.take(PushFailed).push_id == 1
    assert not writer.reports.has(PushDone)
    writer.reports.take(PeerLost)
    if is_one_sided(house):
        assert alive.reports.take(WriterGone).connection == admitted[0]
    alive.pool[:] = FILL
    fresh = house.writer(identity=OTHER, seed=4)
    fresh.move(alive, fresh.connected(alive, house.transport), 1, [(0, 5)])
    np.testing.assert_array_equal(alive.pool[5], fresh.pool[0])
    assert (alive.pool[:5] == FILL).all()


# ----------------------------------------------------------------------------------------- one stalls


def test_a_stopped_writer_cannot_touch_blocks_that_are_reused(house: TransferHouse, tmp_path: Path) -> None:
    """Those of a one-sided writer stay in quarantine until it is proven gone."""
    target = house.target()
    writer, landing_id = halted(house, target, "stop", tmp_path)
    admitted = target.close_landing(landing_id)
    assert len(admitted) == is_one_sided(house)
    if is_one_sided(house):
        assert not target.reports.has(WriterGone)
        writer.process.signal(signal.SIGKILL)
        assert target.reports.take(WriterGone).connection == admitted[0]
    target.pool[:] = FILL
    if not is_one_sided(house):
        writer.process.signal(signal.SIGCONT)
        assert "does not accept" in writer.reports.take(PushFailed).reason
        # The connection is in step again: a new landing goes through it or through a new one.
        writer.move(target, writer.connected(target, house.transport), 2, [(7, 7)])
        np.testing.assert_array_equal(target.pool[7], writer.pool[7])
    assert (target.pool[:7] == FILL).all()


def test_a_stop_ends_a_push_to_a_stopped_target(house: TransferHouse) -> None:
    """It is answered, at the cost of the connection where need be. Over sockets that a one-sided writer
    cannot take back it is answered when the target runs again: what lies in them still counts as written."""
    process = house.victim()
    num_blocks = 2048
    target = house.target(process, num_blocks=num_blocks)
    writer = house.writer(num_blocks=num_blocks)
    connection_id = writer.connected(target, house.transport)
    landing_id = target.open(writer, *range(num_blocks))
    writer.push(1, connection_id, landing_id, [(0, 0)])
    writer.reports.take(PushDone)
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.push(2, connection_id, landing_id, [(block, block) for block in range(num_blocks)])
    writer.handle(StopPush(landing_id))
    if house.transport == "rdma":
        process.signal(signal.SIGCONT)
    writer.reports.take(PushStopped)
    assert not writer.reports.has(PushDone)
    if house.transport != "rdma":
        process.signal(signal.SIGCONT)
    if not is_one_sided(house):
        target.close_landing(landing_id)
    target.pool[:] = FILL
    writer.move(target, writer.connected(target, house.transport), 3, [(7, 7)])
    np.testing.assert_array_equal(target.pool[7], writer.pool[7])
    assert (np.delete(target.pool, 7, axis=0) == FILL).all()


def test_a_stopped_target_and_its_death_end_a_stopped_push(house: TransferHouse) -> None:
    process = house.victim()
    target = house.target(process, num_blocks=2048)
    writer = house.writer(num_blocks=2048)
    connection_id = writer.connected(target, house.transport)
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


def test_a_target_that_is_stopped_while_a_writer_connects_costs_only_that(house: TransferHouse) -> None:
    process = house.victim()
    stopped, target, writer = house.target(process), house.target(), house.writer()
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    writer.connect([lane(stopped)], house.transport)
    writer.move(target, writer_connection(writer, target, house.transport), 1, [(3, 3)])
    np.testing.assert_array_equal(target.pool[3], writer.pool[3])
    process.signal(signal.SIGKILL)
    writer.reports.take(PeerConnectFailed)


def writer_connection(writer: Rank, target: Rank, transport: str) -> bytes:
    connection_id = writer.connect([lane(target)], transport)
    writer.reports.take(PeerConnected)
    return connection_id
