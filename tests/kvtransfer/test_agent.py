"""The transfer agent of a rank: its lanes and paths, verification, and pushes of several classes."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

import msgspec
import numpy as np
import pytest
from patience import WAIT_S
from service_harness import BOTH, LAYOUT, NUM_BLOCKS, TARGET, WHOLE, WRITER, Rank
from transfer_harness import eventually

from kvtransfer.blocks.checksum import Checksummer
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import Endpoint, Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import ClosePeer, Lane, OpenLanding, PieceCheck, StopPush
from kvtransfer.transfer_reports import PeerConnectFailed, PushDone, PushFailed, PushStopped, TransferReport


def check_sum(data: bytes) -> int:
    return Checksummer().sum([memoryview(data)])


# ------------------------------------------------------------------------------------------- lanes


def test_a_rank_without_lanes_is_connected_and_done_at_once(writer: Rank) -> None:
    connection_id = writer.connect(lanes=())
    assert writer.paths() == ()
    writer.push(connection_id, draw_id(), [(1, 2)])
    done = writer.reports.take(PushDone)
    assert (done.pieces, done.num_bytes, done.transport) == ((), 0, "")


@pytest.mark.parametrize("transport", BOTH)
def test_each_target_rank_gets_its_piece_of_every_block(writer: Rank, transport: str) -> None:
    shards = [Shard(0, 4, 0, 1), Shard(0, 3, 1, 2), Shard(3, 4, 1, 2)]
    moves = [(src, (7 * src) % NUM_BLOCKS) for src in range(5)]
    with contextlib.ExitStack() as stack:
        targets = [
            stack.enter_context(Rank(TARGET, rank=rank, shard=shard)) for rank, shard in enumerate(shards)
        ]
        connection_id = writer.connect(*targets, transports=[transport])
        assert [(path.peer_rank, path.transport) for path in writer.paths()] == [
            (rank, transport) for rank in range(3)
        ]
        landing_id = draw_id()
        for each in targets:
            each.agent.handle(OpenLanding(landing_id, WRITER, tuple(dst for _, dst in moves)))
        writer.push(connection_id, landing_id, moves)
        done = writer.reports.take(PushDone)
        assert done.num_bytes == len(moves) * LAYOUT.block_bytes
        sums = {(piece.block_index, piece.rank): (piece.shard, piece.checksum) for piece in done.pieces}
        assert len(sums) == len(done.pieces) == 15
        for src, dst in moves:
            for each in targets:
                expected = writer.piece(src, each.layout.shard)
                assert each.piece(dst, each.layout.shard) == expected
                assert sums[src, each.rank] == (each.layout.shard, check_sum(expected))
        writer.agent.handle(ClosePeer(connection_id))


def test_ranks_of_one_peer_on_two_hosts_are_reached_over_two_transports(writer: Rank) -> None:
    """And what breaks one of the lanes leaves the other as it is."""
    near, far = Shard(0, 4, 0, 1), Shard(0, 4, 1, 2)
    with Rank(TARGET, shard=near) as first, Rank(TARGET, rank=1, shard=far) as second:
        elsewhere = msgspec.structs.replace(second.agent.endpoints(), host_id="elsewhere")
        lanes = [Lane(first.agent.endpoints(), near), Lane(elsewhere, far)]
        connection_id = writer.connect(lanes=lanes)
        assert [(path.transport, path.instead_of) for path in writer.paths()] == [("shm", ""), ("tcp", "")]
        stays = writer.agent._connections[connection_id]._lanes[0]
        landing_id = draw_id()
        for each in (first, second):
            each.agent.handle(OpenLanding(landing_id, WRITER, (1, 2)))
        writer.faults.hooks["push.half"] = lambda count: writer.break_channel(1) if count == 2 else None
        writer.push(connection_id, landing_id, [(4, 1), (5, 2)])
        assert writer.reports.take(PushDone).transport == "shm+tcp"
        assert [(path.transport, path.instead_of) for path in writer.paths()] == [("shm", ""), ("tcp", "")]
        assert writer.agent._connections[connection_id]._lanes[0] is stays
        for src, dst in ((4, 1), (5, 2)):
            assert first.piece(dst, near) == writer.piece(src, near)
            assert second.piece(dst, far) == writer.piece(src, far)


def test_a_piece_with_another_sum_or_that_is_not_held_is_bad(target: Rank) -> None:
    target.bytes[:] = np.random.default_rng(2).integers(0, 256, target.bytes.shape, dtype=np.uint8)
    head, layer = Shard(0, 4, 1, 2), Shard(2, 3, 0, 2)

    def check(index: int, shard: Shard, block_id: int, wrong: int = 0) -> PieceCheck:
        return PieceCheck(block_id, index, shard, check_sum(target.piece(3, shard)) ^ wrong)

    good = [check(1, head, 3), check(1, layer, 3), check(2, WHOLE, 3)]
    assert target.verify(*good) == ()
    assert target.verify() == ()
    bad = [
        check(5, head, 4),
        check(4, head, 3, wrong=1),
        PieceCheck(NUM_BLOCKS, 6, head, 0),
        PieceCheck(-1, 7, head, 0),
        PieceCheck(3, 8, Shard(0, 5, 0, 1), 0),
        PieceCheck(3, 9, Shard(2, 2, 0, 1), 0),
    ]
    assert target.verify(*good, *bad) == (4, 5, 6, 7, 8, 9)


def test_an_agent_that_is_closed_has_no_thread_left_that_reads_its_pool(target: Rank) -> None:
    """Also of a connection that was closed just before, in the middle of a block."""
    writing, going_on = threading.Event(), threading.Event()
    with Rank(WRITER, seed=1) as writer:
        connection_id = writer.connect(target)
        writer.paths()

        def halt(count: int) -> None:
            writing.set()
            assert going_on.wait(WAIT_S)

        writer.faults.hooks["push.half"] = halt
        writer.push(connection_id, target.open(1), [(1, 1)])
        assert writing.wait(WAIT_S)
        connection = writer.agent._connections[connection_id]
        writer.agent.handle(ClosePeer(connection_id))
        closing = threading.Thread(target=writer.agent.close)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive(), "the block is not written yet"
        going_on.set()
        closing.join(WAIT_S)
        assert connection.has_ended


def test_only_transports_that_can_listen_here_are_offered() -> None:
    with Rank(TARGET, transports=("cuda_ipc", "tcp", "nccl", "shm")) as rank:
        assert [each.transport for each in rank.agent.endpoints().endpoints] == ["tcp", "shm"]
    with pytest.raises(ValueError, match="pigeon"):
        Rank(TARGET, transports=("pigeon",))


# ------------------------------------------------------------------------------------------- paths


def test_what_is_not_applicable_is_no_news(
    writer: Rank, target: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = msgspec.structs.replace(target.agent.endpoints(), host_id="elsewhere")
    with caplog.at_level(logging.INFO, "kvtransfer.agent.lanes"):
        writer.connect(lanes=[Lane(elsewhere, WHOLE)], transports=("cuda_ipc", "shm", "tcp"))
        (path,) = writer.paths()
    assert (path.transport, path.instead_of) == ("tcp", "")
    assert path.gb_s > 0
    assert path.latency_us > 0
    assert path.device.startswith("lo")
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "shm: another host" in record.getMessage()
    assert "cuda_ipc: not for KV on cpu" in record.getMessage()


def test_what_is_passed_over_is_told(writer: Rank, target: Rank, caplog: pytest.LogCaptureFixture) -> None:
    endpoints = target.agent.endpoints()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    shm = next(each for each in endpoints.endpoints if each.transport == "shm")
    broken = msgspec.structs.replace(endpoints, endpoints=(Endpoint("tcp", f"127.0.0.1:{port}"), shm))
    with caplog.at_level(logging.INFO, "kvtransfer.agent.lanes"):
        writer.connect(lanes=[Lane(broken, WHOLE)], transports=("rdma", "tcp", "shm"))
        (path,) = writer.paths()
    assert (path.transport, path.device) == ("shm", "memory")
    assert path.instead_of.startswith(f"rdma: not offered; tcp: 127.0.0.1:{port}: ")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    only_shm = msgspec.structs.replace(endpoints, endpoints=(shm,))
    caplog.clear()
    with caplog.at_level(logging.INFO, "kvtransfer.agent.lanes"):
        writer.connect(lanes=[Lane(only_shm, WHOLE)], transports=("tcp", "shm"))
        assert writer.paths()[0].instead_of == "tcp: not offered by the peer"
        writer.connect(lanes=[Lane(only_shm, WHOLE)], transports=("rdma", "shm"))
        assert writer.paths()[0].instead_of == "rdma: not offered"  # nor has this rank's host got it
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]


def test_a_transport_that_this_rank_cannot_offer_is_told_with_the_reason(target: Rank) -> None:
    with Rank(WRITER, transports=("rdma", "shm")) as writer:
        writer.connect(target, transports=("rdma", "shm"))
        (path,) = writer.paths()
        assert path.instead_of.startswith("rdma: not offered: ")
        assert any(reason in path.instead_of for reason in ("InfiniBand", "NIXL"))


def test_paths_below_the_floor_are_refused_each_with_its_figure(writer: Rank, target: Rank) -> None:
    writer.connect(target, min_gb_s=1e6)
    reason = writer.reports.take(PeerConnectFailed).reason
    shm, tcp = reason.removeprefix("no path to rank 0: ").split("; ")
    for name, text in (("shm", shm), ("tcp", tcp)):
        figure = text.removeprefix(f"{name}: ").removesuffix(" GB/s is below the floor of 1e+06 GB/s")
        assert 0 < float(figure) < 1e6


def test_a_path_below_the_floor_is_used_with_a_warning_when_it_may(
    writer: Rank, target: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    writer.connect(target, min_gb_s=1e6, refuse_slow=False)
    (path,) = writer.paths()
    assert path.transport == "shm"
    assert path.instead_of == (
        f"shm: {path.gb_s:.3g} GB/s is below the floor of 1e+06 GB/s, but used as configured"
    )
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# --------------------------------------------------------------------------------- traffic classes


@pytest.fixture
def no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting threads are woken by what happens, or not at all."""
    monkeypatch.setattr("kvtransfer.agent.qos.STALLED_S", 1e6)


def test_a_write_back_lets_a_hand_over_through_after_its_batch(
    writer: Rank, target: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.agent.qos.BATCH_BYTES", 3 * LAYOUT.block_bytes)
    connection_id = writer.connect(target)
    writer.paths()
    low_landing, high_landing = target.open(*range(10)), target.open(20, 21)

    def submit(count: int) -> None:
        if count == 2:  # the second block of a batch of three
            writer.push(connection_id, high_landing, [(20, 20), (21, 21)], push_id=2)

    written: list[tuple[int, int]] = []

    def look(report: TransferReport) -> None:
        if isinstance(report, PushDone):
            written.append((report.push_id, int(target.bytes[:10].any(axis=1).sum())))

    writer.faults.hooks["push.copy"] = submit
    writer.on_report = look
    writer.push(connection_id, low_landing, [(src, src) for src in range(10)], traffic="write_back")
    eventually(lambda: len(written) == 2, "both pushes")
    assert written == [(2, 3), (1, 10)]
    assert (target.bytes[:10] == writer.bytes[:10]).all()
    assert (target.bytes[20:22] == writer.bytes[20:22]).all()
    pieces = next(each for each in writer.reports.all if isinstance(each, PushDone) and each.push_id == 1)
    assert [piece.block_index for piece in pieces.pieces] == list(range(10))
    assert pieces.traffic == "write_back"


@pytest.mark.usefixtures("no_stall")
def test_a_write_back_waits_while_another_connection_makes_a_hand_over(writer: Rank, target: Rank) -> None:
    """A stop reaches it while it waits, and a hand-over does not wait behind it."""
    connection_id = writer.connect(target)
    writer.paths()
    landings = [target.open(1), target.open(2)]
    with writer.agent.governor.flow("hand_over"):
        for push_id, landing_id in enumerate(landings, start=1):
            writer.push(
                connection_id, landing_id, [(push_id, push_id)], push_id=push_id, traffic="write_back"
            )
        flows = writer.agent.governor._rules._flows
        eventually(lambda: len(flows) == 2, "the first push waits for its turn")
        writer.agent.handle(StopPush(landings[0]))
        writer.reports.take(PushStopped)
        assert writer.reports.take(PushFailed).push_id == 1
        writer.push(connection_id, target.open(3), [(3, 3)], push_id=3)
        assert writer.reports.take(PushDone).push_id == 3
        assert not writer.reports.has(PushDone)
    assert writer.reports.take(PushDone).push_id == 2
    assert writer.agent.governor.counted()["write_back"].num_bytes == LAYOUT.block_bytes


def test_closing_ends_a_wait_for_the_limit_at_once(target: Rank) -> None:
    with Rank(WRITER, seed=1, clock=ManualClock(), hand_over_gb_s=1e-9) as writer:
        connection_id = writer.connect(target)
        writer.paths()
        for push_id in (1, 2):
            writer.push(connection_id, target.open(push_id), [(push_id, push_id)], push_id=push_id)
        assert writer.reports.take(PushDone).push_id == 1
        writer.agent.handle(ClosePeer(connection_id))
        assert writer.reports.take(PushFailed).push_id == 2
    assert not target.bytes[2].any()
