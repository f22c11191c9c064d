"""One behaviour suite for every transport; the writer is a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_house import LAYOUT, NUM_BLOCKS, SHARD, TARGET, WAIT_S, Reports, TargetRankHouse, eventually

from kvtransfer.checksum import checksum
from kvtransfer.clock import SystemClock
from kvtransfer.faults import FaultRule, Faults
from kvtransfer.memory import KvMemory
from kvtransfer.messages import (
    BlockMove,
    ClosePeer,
    ConnectPeer,
    OpenLanding,
    PeerConnected,
    PeerConnectFailed,
    PieceCheck,
    PushDone,
    PushFailed,
    PushOrder,
    PushStopped,
    ReplicaIdentity,
    Shard,
    StopPush,
    Verified,
    VerifyOrder,
)
from kvtransfer.service import TransferAgent

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def house() -> Iterator[TargetRankHouse]:
    with TargetRankHouse() as house:
        yield house


def test_a_round_trip_is_exact_and_its_sums_hold(house: TargetRankHouse, transport: str) -> None:
    files_before = set(Path("/dev/shm").iterdir())
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    moves = [(2, 7), (9, 0), (3, 23)]
    landing_id = house.open(writer, 7, 0, 23)
    writer.push(1, connection_id, landing_id, moves)
    done = writer.reports.take(PushDone)
    for src, dst in moves:
        assert house.block(dst) == writer.block(src)
    assert house.block(1) == bytes(LAYOUT.block_bytes)
    assert (done.push_id, done.landing_id, done.transport) == (1, landing_id, transport)
    assert done.num_bytes == 3 * LAYOUT.block_bytes
    assert [piece.block_index for piece in done.pieces] == [2, 9, 3]
    assert [piece.checksum for piece in done.pieces] == [checksum(writer.block(src)) for src, _ in moves]
    verified = house.verify(landing_id, done.pieces, dict(moves))
    assert verified.bad_block_indices == ()
    assert set(Path("/dev/shm").iterdir()) == files_before


def test_pushes_end_in_order_and_a_path_is_measured(house: TargetRankHouse, transport: str) -> None:
    writer = house.writer()
    connection_id = writer.connect(house, transport)
    landing_id = house.open(writer, *range(NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        writer.push(number, connection_id, landing_id, [(number, NUM_BLOCKS - 1 - number)])
    connected = writer.reports.take(PeerConnected)
    assert (connected.peer_rank, connected.transport) == (0, transport)
    assert connected.gb_s > 0
    assert connected.latency_us > 0
    assert [writer.reports.take(PushDone).push_id for _ in range(NUM_BLOCKS)] == list(range(NUM_BLOCKS))
    assert all(house.block(NUM_BLOCKS - 1 - number) == writer.block(number) for number in range(NUM_BLOCKS))


def test_two_writers_do_not_disturb_each_other(house: TargetRankHouse, transport: str) -> None:
    writers = [house.writer(name=f"w{number}", seed=number) for number in range(2)]
    connections = [writer.connect(house, transport) for writer in writers]
    landings = [house.open(writer, number, number + 2) for number, writer in enumerate(writers)]
    for number, writer in enumerate(writers):
        writer.push(1, connections[number], landings[number], [(4, number), (5, number + 2)])
    for number, writer in enumerate(writers):
        writer.reports.take(PushDone)
        assert (house.block(number), house.block(number + 2)) == (writer.block(4), writer.block(5))


def test_another_shape_gets_the_part_it_holds(transport: str) -> None:
    with TargetRankHouse(shard=Shard(1, 3, 1, 2)) as house:
        writer = house.writer()
        connection_id = writer.connected(house, transport)
        landing_id = house.open(writer, 5)
        writer.push(1, connection_id, landing_id, [(4, 5)])
        done = writer.reports.take(PushDone)
        head_bytes = LAYOUT.head_bytes
        block = writer.block(4)
        expected = b"".join(
            block[((layer * 2 + kind) * 2 + 1) * head_bytes :][:head_bytes]
            for layer in (1, 2)
            for kind in (0, 1)
        )
        assert house.block(5) == expected
        assert done.pieces[0].shard == Shard(1, 3, 1, 2)
        assert done.num_bytes == len(expected)
        assert house.verify(landing_id, done.pieces, {4: 5}).bad_block_indices == ()


def test_a_flipped_bit_is_found(house: TargetRankHouse, transport: str, tmp_path: Path) -> None:
    rule = FaultRule("push.corrupt", "corrupt", str(tmp_path / "marker"), after=2)
    writer = house.writer(faults=[rule])
    connection_id = writer.connected(house, transport)
    landing_id = house.open(writer, 1, 2, 3)
    writer.push(1, connection_id, landing_id, [(5, 1), (6, 2), (7, 3)])
    done = writer.reports.take(PushDone)
    verified = house.verify(landing_id, done.pieces, {5: 1, 6: 2, 7: 3})
    assert verified.bad_block_indices == (6,)
    assert house.block(1) == writer.block(5)
    assert sum(one != two for one, two in zip(house.block(2), writer.block(6), strict=True)) == 1


def test_pieces_that_a_peer_makes_up_are_bad(house: TargetRankHouse, transport: str) -> None:
    good = PieceCheck(1, 0, SHARD, checksum(house.block(1)))
    beyond = PieceCheck(NUM_BLOCKS, 1, SHARD, 0)
    negative = PieceCheck(-1, 2, SHARD, 0)
    not_held = PieceCheck(1, 3, Shard(0, 99, 0, 2), 0)
    house.agent.handle(VerifyOrder(bytes(16), (good, beyond, negative, not_held)))
    assert house.reports.take(Verified).bad_block_indices == (1, 2, 3)


class HeldFaults(Faults):
    """Holds the writing thread in the middle of its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def at(self, point: str) -> bool:
        if point == "push.half":
            self.entered.set()
            assert self.released.wait(WAIT_S)
        return False


def test_stop_waits_for_the_copy_and_fails_all_else_of_the_landing(
    house: TargetRankHouse, transport: str
) -> None:
    faults, reports = HeldFaults(), Reports()
    writer = ReplicaIdentity("here", 1)
    memory = KvMemory.allocate(house.memory.num_bytes)
    memory.buffer[:] = b"\x77" * memory.num_bytes
    agent = TransferAgent(
        identity=writer,
        rank=0,
        layout=LAYOUT,
        memory=memory,
        secret=house.secret,
        clock=SystemClock(),
        faults=faults,
        report=reports.put,
        transports=(),
        data_host="",
    )
    landing_id, other_id, connection_id = b"1" * 16, b"2" * 16, b"c" * 16
    house.agent.handle(OpenLanding(landing_id, writer, tuple(range(6))))
    house.agent.handle(OpenLanding(other_id, writer, (10,)))
    agent.handle(ConnectPeer(connection_id, writer, TARGET, (house.agent.endpoints(),), (transport,), 0.0))
    reports.take(PeerConnected)

    def push(push_id: int, landing_id: bytes, *blocks: int) -> None:
        moves = tuple(BlockMove(block, block, block) for block in blocks)
        agent.handle(PushOrder(push_id, connection_id, landing_id, moves))

    push(1, landing_id, 0, 1, 2)
    assert faults.entered.wait(WAIT_S)
    push(2, landing_id, 3)
    push(3, other_id, 10)
    agent.handle(StopPush(landing_id))
    push(4, landing_id, 5)
    assert [reports.take(PushFailed).push_id for _ in range(2)] == [2, 4]
    assert not reports.has(PushStopped)  # a thread is inside a copy
    faults.released.set()
    reports.take(PushDone)
    ends = [(type(each), getattr(each, "push_id", None)) for each in reports.all[-3:]]
    assert ends == [(PushFailed, 1), (PushStopped, None), (PushDone, 3)]
    for block in (1, 2, 3, 5):
        assert house.block(block) == bytes(LAYOUT.block_bytes)
    assert house.block(10) == b"\x77" * LAYOUT.block_bytes
    agent.close()


def test_stopping_an_unknown_landing_is_answered_and_remembered(
    house: TargetRankHouse, transport: str
) -> None:
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    landing_id = house.open(writer, 1)
    writer.handle(StopPush(landing_id))
    assert writer.reports.take(PushStopped).landing_id == landing_id
    writer.push(1, connection_id, landing_id, [(1, 1)])
    assert "stopped" in writer.reports.take(PushFailed).reason
    assert house.block(1) == bytes(LAYOUT.block_bytes)


def test_a_landing_may_be_opened_after_the_first_bytes_came(house: TargetRankHouse, transport: str) -> None:
    """The order that opens it and the writer's bytes travel on different connections."""
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    landing_id = bytes(range(16))
    writer.push(1, connection_id, landing_id, [(1, 1)])
    house.agent.handle(OpenLanding(landing_id, writer.identity, (1,)))
    writer.reports.take(PushDone)
    assert house.block(1) == writer.block(1)


def test_a_closed_landing_takes_nothing_and_others_go_on(house: TargetRankHouse, transport: str) -> None:
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    landing_id = house.open(writer, 1)
    assert house.close_landing(landing_id) is False
    writer.push(1, connection_id, landing_id, [(1, 1)])
    assert "does not accept" in writer.reports.take(PushFailed).reason
    assert house.block(1) == bytes(LAYOUT.block_bytes)
    house.move(writer, connection_id, 2, [(2, 2)])
    assert house.block(2) == writer.block(2)


def test_a_landing_is_its_writers_alone(house: TargetRankHouse, transport: str) -> None:
    owner, thief = house.writer(name="owner"), house.writer(name="thief", seed=9)
    connection_id = thief.connected(house, transport)
    landing_id = house.open(owner, 1)
    thief.push(1, connection_id, landing_id, [(1, 1)])
    assert "does not accept" in thief.reports.take(PushFailed).reason
    assert house.block(1) == bytes(LAYOUT.block_bytes)


def test_blocks_outside_the_pools_are_refused(house: TargetRankHouse, transport: str) -> None:
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    landing_id = house.open(writer, 1)
    for number, move in enumerate([BlockMove(NUM_BLOCKS, 1, 0), BlockMove(0, NUM_BLOCKS + 99, 0)]):
        writer.handle(PushOrder(number, connection_id, landing_id, (move,)))
        assert writer.reports.take(PushFailed).push_id == number
    house.move(writer, connection_id, 9, [(2, 2)])


def test_pushes_on_a_closed_or_unknown_connection_fail(house: TargetRankHouse, transport: str) -> None:
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    landing_id = house.open(writer, 1)
    writer.handle(ClosePeer(connection_id))
    writer.push(1, connection_id, landing_id, [(1, 1)])
    writer.push(2, bytes(16), landing_id, [(1, 1)])
    assert [writer.reports.take(PushFailed).push_id for _ in range(2)] == [1, 2]
    house.move(writer, writer.connected(house, transport), 3, [(2, 2)])


def test_a_path_below_the_floor_is_refused_by_name(house: TargetRankHouse, transport: str) -> None:
    writer = house.writer()
    writer.connect(house, transport, min_gb_s=1e6)
    reason = writer.reports.take(PeerConnectFailed).reason
    assert f"{transport}: " in reason
    assert "below the floor" in reason


def test_a_wrong_secret_is_refused(house: TargetRankHouse, transport: str) -> None:
    writer = house.writer(secret=b"x" * 32)
    writer.connect(house, transport)
    assert "does not know the cluster secret" in writer.reports.take(PeerConnectFailed).reason


def test_an_orderly_end_leaves_no_thread_and_no_connection(house: TargetRankHouse, transport: str) -> None:
    before = threading.active_count()
    writer = house.writer()
    house.move(writer, writer.connected(house, transport), 1, [(1, 1)])
    assert writer.close() == 0
    eventually(lambda: threading.active_count() <= before, "the serving thread's end")
