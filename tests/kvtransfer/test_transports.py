"""One behaviour suite for every transport: bytes cross processes, and land as one rank would hold them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from agent_process import HOLD
from transfer_harness import (
    LAYOUT,
    NUM_BLOCKS,
    SHARD,
    Rank,
    TransferHarness,
    eventually,
    lane,
)

from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.layout import plan_pieces
from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import PieceSum
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import BlockMove, ClosePeer, PieceCheck, PushOrder, StopPush, VerifyOrder
from kvtransfer.transfer_reports import PeerConnected, PushDone, PushFailed, PushStopped, Verified

# ------------------------------------------------------------------------------------------- it lands


def test_a_round_trip_is_exact_and_its_sums_hold(harness: TransferHarness) -> None:
    files_before = set(Path("/dev/shm").iterdir())
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    moves = [(2, 7), (9, 0), (3, 23)]
    landing_id = target.open(writer, 7, 0, 23)
    writer.push(1, connection_id, landing_id, moves)
    done = writer.reports.take(PushDone)
    expected = np.zeros_like(target.pool)
    for src, dst in moves:
        expected[dst] = writer.pool[src]
    np.testing.assert_array_equal(target.pool, expected)
    assert (done.push_id, done.landing_id, done.transport) == (1, landing_id, harness.transport)
    assert done.num_bytes == 3 * LAYOUT.block_bytes
    assert done.pieces == tuple(
        PieceSum(src, 0, SHARD, checksum(writer.pool[src].tobytes())) for src, _ in moves
    )
    assert target.verify(landing_id, done.pieces, dict(moves)).bad_block_indices == ()
    assert set(Path("/dev/shm").iterdir()) == files_before


def parts(tp: int, pp: int, *, num_layers: int = 6, num_heads: int = 4) -> list[Shard]:
    """The shards of a replica in rank order: stages of `num_layers` / pp, heads cut (or replicated) by tp."""
    layers = [stage * num_layers // pp for stage in range(pp + 1)]
    heads = [
        (rank * num_heads // tp, (rank + 1) * num_heads // tp)
        if tp <= num_heads
        else (rank * num_heads // tp, rank * num_heads // tp + 1)
        for rank in range(tp)
    ]
    return [Shard(*stage, *head) for stage, head in itertools.product(itertools.pairwise(layers), heads)]


@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 1), (4, 1)), ((4, 1), (1, 1)), ((1, 2), (1, 1)), ((8, 1), (3, 2)), ((2, 2), (8, 1))],
    ids=["tp1-tp4", "tp4-tp1", "pp2-pp1", "tp8 replicated-tp3pp2", "tp2pp2-tp8 replicated"],
)
def test_any_shape_lands_as_one_rank_would_hold_it(
    harness: TransferHarness, source: tuple[int, int], target: tuple[int, int]
) -> None:
    """The reference is the whole model's block, cut by numpy, with no code of the transfer."""
    whole = np.random.default_rng(5).integers(
        0, 256, (NUM_BLOCKS, 6, 2, 4, LAYOUT.head_bytes), dtype=np.uint8
    )

    def held(shard: Shard) -> np.ndarray:
        cut = whole[:, shard.layer_start : shard.layer_end, :, shard.head_start : shard.head_end]
        return cut.reshape(NUM_BLOCKS, -1)

    sources, targets = parts(*source), parts(*target)
    writers = [harness.writer(rank=rank, shard=shard) for rank, shard in enumerate(sources)]
    for writer, shard in zip(writers, sources, strict=True):
        writer.pool[:] = held(shard)
    readers = [harness.target(rank=rank, shard=shard) for rank, shard in enumerate(targets)]
    planned = plan_pieces(list(enumerate(sources)), list(enumerate(targets)))
    landing_id = draw_id()
    for reader in readers:
        reader.open(writers[0], *range(NUM_BLOCKS), landing_id=landing_id)
    moves = [(block, (7 * block + 3) % NUM_BLOCKS) for block in range(NUM_BLOCKS)]
    for rank, writer in enumerate(writers):
        lanes = [lane(readers[each.target_rank], each.piece) for each in planned if each.source_rank == rank]
        writer.push(rank, writer.connect(lanes, harness.transport), landing_id, moves)
    pieces = [piece for writer in writers for piece in writer.reports.take(PushDone).pieces]
    for rank, reader in enumerate(readers):
        for src, dst in moves:
            np.testing.assert_array_equal(reader.pool[dst], held(targets[rank])[src])
        mine = [piece for piece in pieces if piece.rank == rank]
        assert reader.verify(landing_id, mine, dict(moves)).bad_block_indices == ()


def test_pushes_of_a_landing_end_in_order_and_each_is_visible_then(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connect([lane(target)], harness.transport)
    landing_id = target.open(writer, *range(NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        writer.push(number, connection_id, landing_id, [(number, NUM_BLOCKS - 1 - number)])
    (path,) = writer.reports.take(PeerConnected).paths
    assert (path.peer_rank, path.transport, path.instead_of) == (0, harness.transport, "")
    assert path.device
    assert path.gb_s > 0
    assert path.latency_us > 0
    for number in range(NUM_BLOCKS):
        assert writer.reports.take(PushDone).push_id == number
        np.testing.assert_array_equal(target.pool[NUM_BLOCKS - 1 - number], writer.pool[number])


def test_landings_of_several_writers_do_not_disturb_each_other(harness: TransferHarness) -> None:
    target = harness.target()
    names = [ReplicaIdentity(f"w{number}", 1) for number in range(3)]
    writers = [harness.writer(identity=name, seed=number) for number, name in enumerate(names)]
    connections = [writer.connect([lane(target)], harness.transport) for writer in writers]
    landings = [
        [target.open(writer, *range(6 * number + half, 6 * number + 6, 2)) for half in (0, 1)]
        for number, writer in enumerate(writers)
    ]
    for step in range(6):
        for number, writer in enumerate(writers):
            block = 6 * number + step
            writer.push(step, connections[number], landings[number][step % 2], [(step, block)])
    for number, writer in enumerate(writers):
        done = [writer.reports.take(PushDone) for _ in range(6)]
        assert [each.landing_id for each in done] == landings[number] * 3
        np.testing.assert_array_equal(target.pool[6 * number : 6 * number + 6], writer.pool[:6])


def test_a_flipped_bit_is_found(harness: TransferHarness, tmp_path: Path) -> None:
    rule = FaultRule("push.corrupt", "corrupt", str(tmp_path / "marker"), after=2)
    target = harness.target(shard=Shard(0, 4, 1, 3))
    writer = harness.writer(faults=[rule])
    piece = Shard(1, 3, 1, 2)
    connection_id = writer.connect([lane(target, piece)], harness.transport)
    landing_id = target.open(writer, 1, 2, 3)
    writer.push(1, connection_id, landing_id, [(5, 1), (6, 2), (7, 3)])
    done = writer.reports.take(PushDone)
    assert target.verify(landing_id, done.pieces, {5: 1, 6: 2, 7: 3}).bad_block_indices == (6,)
    sent, arrived = (
        np.frombuffer(rank.piece(block, piece), dtype=np.uint8) for rank, block in ((writer, 6), (target, 2))
    )
    assert int(np.unpackbits(sent ^ arrived).sum()) == 1
    for src, dst in ((5, 1), (7, 3)):
        assert target.piece(dst, piece) == writer.piece(src, piece)


def test_pieces_that_a_peer_makes_up_are_bad(harness: TransferHarness) -> None:
    target = harness.target()
    checks = (
        PieceCheck(1, 0, SHARD, checksum(bytes(LAYOUT.block_bytes))),
        PieceCheck(NUM_BLOCKS, 1, SHARD, 0),
        PieceCheck(-1, 2, SHARD, 0),
        PieceCheck(1, 3, Shard(0, 99, 0, 2), 0),
    )
    target.handle(VerifyOrder(bytes(16), checks))
    assert target.reports.take(Verified).bad_block_indices == (1, 2, 3)


# -------------------------------------------------------------------------------------------- it ends


def held_writer(harness: TransferHarness, target: Rank, marker: Path) -> tuple[Rank, bytes, bytes]:
    """A writer that stands in the middle of its first block (until `let_go`), its connection and landing."""
    writer = harness.writer(faults=[FaultRule("push.half", HOLD, str(marker))])
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, *range(6))
    writer.push(1, connection_id, landing_id, [(block, block) for block in range(3)])
    eventually(marker.exists, "the middle of the first block")
    return writer, connection_id, landing_id


def let_go(marker: Path) -> None:
    Path(f"{marker}.go").touch()


def test_a_stop_waits_for_what_is_being_written_and_fails_all_else(
    harness: TransferHarness, tmp_path: Path
) -> None:
    target = harness.target()
    writer, connection_id, landing_id = held_writer(harness, target, tmp_path / "marker")
    other_id = target.open(writer, 10)
    writer.push(2, connection_id, landing_id, [(3, 3)])
    writer.push(3, connection_id, other_id, [(10, 10)])
    writer.handle(StopPush(landing_id))
    writer.push(4, connection_id, landing_id, [(5, 5)])
    assert [writer.reports.take(PushFailed).push_id for _ in range(2)] == [2, 4]
    assert not writer.reports.has(PushStopped)  # a thread is inside a block
    let_go(tmp_path / "marker")
    writer.reports.take(PushDone)
    ends = [(type(each), getattr(each, "push_id", None)) for each in writer.reports.all[-3:]]
    assert ends == [(PushFailed, 1), (PushStopped, None), (PushDone, 3)]
    assert not target.pool[[1, 2, 3, 5]].any()
    np.testing.assert_array_equal(target.pool[10], writer.pool[10])


def test_blocks_of_a_stopped_landing_can_be_reused_at_once(harness: TransferHarness, tmp_path: Path) -> None:
    target = harness.target()
    writer, connection_id, landing_id = held_writer(harness, target, tmp_path / "marker")
    other = harness.writer(identity=ReplicaIdentity("other", 1), seed=2)
    other_connection = other.connected(target, harness.transport)
    writer.handle(StopPush(landing_id))
    let_go(tmp_path / "marker")
    writer.reports.take(PushStopped)
    target.close_landing(landing_id)  # what a two-sided writer left on its way is dropped by this
    other.move(target, other_connection, 1, [(block, block) for block in range(3)])
    np.testing.assert_array_equal(target.pool[:3], other.pool[:3])
    # Whatever the first writer had under way would have to come before this.
    writer.move(target, connection_id, 2, [(20, 20)])
    np.testing.assert_array_equal(target.pool[:3], other.pool[:3])


def test_stopping_an_unknown_landing_is_answered_and_remembered(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, 1)
    writer.handle(StopPush(landing_id))
    assert writer.reports.take(PushStopped).landing_id == landing_id
    writer.push(1, connection_id, landing_id, [(1, 1)])
    assert "stopped" in writer.reports.take(PushFailed).reason
    assert not target.pool.any()


def test_a_landing_may_be_opened_after_the_first_bytes_came(harness: TransferHarness) -> None:
    """The order that opens it and the writer's bytes travel on different connections."""
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    landing_id = draw_id()
    writer.push(1, connection_id, landing_id, [(1, 1)])
    target.open(writer, 1, landing_id=landing_id)
    writer.reports.take(PushDone)
    np.testing.assert_array_equal(target.pool[1], writer.pool[1])


def test_a_closed_landing_takes_nothing_and_others_go_on(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, 1)
    assert target.close_landing(landing_id) == ()
    writer.push(1, connection_id, landing_id, [(1, 1)])
    assert "does not accept" in writer.reports.take(PushFailed).reason
    assert not target.pool.any()
    writer.move(target, connection_id, 2, [(2, 2)])
    np.testing.assert_array_equal(target.pool[2], writer.pool[2])


def test_a_landing_is_its_writers_alone(harness: TransferHarness) -> None:
    owner, target = harness.writer(), harness.target()
    thief = harness.writer(identity=ReplicaIdentity("thief", 1), seed=9)
    connection_id = thief.connected(target, harness.transport)
    thief.push(1, connection_id, target.open(owner, 1), [(1, 1)])
    assert "does not accept" in thief.reports.take(PushFailed).reason
    assert not target.pool.any()


def test_blocks_outside_the_pools_are_refused(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, 1)
    for number, move in enumerate([BlockMove(NUM_BLOCKS, 1, 0), BlockMove(0, NUM_BLOCKS, 0)]):
        writer.handle(PushOrder(number, connection_id, landing_id, (move,)))
        assert writer.reports.take(PushFailed).push_id == number
    writer.move(target, connection_id, 9, [(2, 2)])
    assert not target.pool[[0, 1, *range(3, NUM_BLOCKS)]].any()


def test_pushes_on_a_closed_or_unknown_connection_fail(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    landing_id = target.open(writer, 1)
    writer.handle(ClosePeer(connection_id))
    writer.push(1, connection_id, landing_id, [(1, 1)])
    writer.push(2, bytes(16), landing_id, [(1, 1)])
    assert [writer.reports.take(PushFailed).push_id for _ in range(2)] == [1, 2]
    writer.move(target, writer.connected(target, harness.transport), 3, [(2, 2)])


def test_connections_leave_no_thread_and_no_descriptor(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()

    def used() -> list[int]:
        return [
            count
            for process in (harness.writers, harness.targets)
            for count in (process.num_threads(), process.num_descriptors())
        ]

    before, num_visits = used(), 6
    for _ in range(num_visits):
        connection_id = writer.connected(target, harness.transport)
        writer.move(target, connection_id, 1, [(1, 1)])
        writer.handle(ClosePeer(connection_id))
    # Less than one of anything for each: libraries make some things once.
    eventually(
        lambda: all(now < then + num_visits for now, then in zip(used(), before, strict=True)),
        f"threads and descriptors near {before}",
    )
