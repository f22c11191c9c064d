"""Every transport between ranks whose layers form groups: each has a pool, and channels, of its own."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_harness import NUM_BLOCKS, ONE_SIDED, Rank, TransferHarness, lane

from kvtransfer.blocks.layout import plan_pieces
from kvtransfer.messages import Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import ClosePeer, PushOrder
from kvtransfer.transfer_reports import PeerConnected, PeerConnectFailed, PushDone, PushFailed, WriterGone

# The groups of a model with four layers and four heads. Of two stages, the first has no layer of the second
# group.
GROUPS = ((0, 1, 3), (2,))
WHOLE = (Shard(0, 4, 0, 4),)
STAGES = Shard(0, 2, 0, 4), Shard(2, 4, 0, 4)
COLUMNS = Shard(0, 4, 0, 2), Shard(0, 4, 2, 4)
# (source block, target block) of each group: the numbers are the group's own.
MOVES = [[(2, 7), (9, 0), (3, 23)], [(9, 7), (5, 2)]]


def connect(harness: TransferHarness, writer: Rank, target: Rank) -> bytes:
    """Connect two ranks that hold the same by a lane for each group."""
    lanes = [lane(target, group=group) for group in range(len(GROUPS))]
    connection_id = writer.connect(lanes, harness.transport)
    (path,) = writer.reports.take(PeerConnected).paths
    assert path.transport == harness.transport
    return connection_id


@pytest.mark.parametrize(
    ("sources", "targets"),
    [(WHOLE, WHOLE), (STAGES, COLUMNS), (COLUMNS, STAGES)],
    ids=["equal shapes", "stages to columns", "columns to stages"],
)
def test_each_group_lands_in_its_pool_as_one_rank_would_hold_it(
    harness: TransferHarness, sources: tuple[Shard, ...], targets: tuple[Shard, ...]
) -> None:
    """The reference is the whole model's block, cut by numpy, with no code of the transfer."""
    writers = [harness.writer(rank=rank, shard=shard, groups=GROUPS) for rank, shard in enumerate(sources)]
    readers = [harness.target(rank=rank, shard=shard, groups=GROUPS) for rank, shard in enumerate(targets)]
    head_bytes = writers[0].layout.head_bytes
    whole = np.random.default_rng(5).integers(0, 256, (NUM_BLOCKS, 4, 2, 4, head_bytes), dtype=np.uint8)

    def held(shard: Shard, group: int) -> np.ndarray:
        layers = [it for it in GROUPS[group] if shard.layer_start <= it < shard.layer_end]
        return whole[:, layers, :, shard.head_start : shard.head_end].reshape(NUM_BLOCKS, -1)

    pieces = plan_pieces(list(enumerate(sources)), list(enumerate(targets)))
    landing_id = draw_id()
    for reader in readers:
        block_ids, window = ([dst for _, dst in moves] for moves in MOVES)
        reader.open(writers[0], *block_ids, landing_id=landing_id, windows=(tuple(window),))
    for rank, (writer, shard) in enumerate(zip(writers, sources, strict=True)):
        for group, pool in enumerate(writer.pools):
            pool[:] = held(shard, group)
        lanes = [
            lane(readers[it.target_rank], it.piece, group)
            for group, layers in enumerate(GROUPS)
            for it in pieces
            if it.source_rank == rank
            and any(it.piece.layer_start <= at < it.piece.layer_end for at in layers)
        ]
        connection_id = writer.connect(lanes, harness.transport)
        for group, moves in enumerate(MOVES):
            writer.push(group, connection_id, landing_id, moves, group=group)
    done = [[writer.reports.take(PushDone) for _ in MOVES] for writer in writers]
    for group, moves in enumerate(MOVES):
        block_bytes = 2 * len(GROUPS[group]) * 4 * head_bytes
        assert sum(it[group].num_bytes for it in done) == len(moves) * block_bytes
        for rank, (reader, shard) in enumerate(zip(readers, targets, strict=True)):
            expected = np.zeros_like(reader.pools[group])
            for src, dst in moves:
                expected[dst] = held(shard, group)[src]
            np.testing.assert_array_equal(reader.pools[group], expected)
            mine = [piece for it in done for piece in it[group].pieces if piece.rank == rank]
            assert reader.verify(landing_id, mine, dict(moves), group).bad_block_indices == ()


def test_a_sum_is_of_the_block_in_the_pool_of_its_group(harness: TransferHarness) -> None:
    writer, target = (make(groups=GROUPS) for make in (harness.writer, harness.target))
    connection_id = connect(harness, writer, target)
    landing_id = target.open(writer, 1, 2, windows=((1, 2),))
    writer.push(1, connection_id, landing_id, [(5, 1), (6, 2)], group=1)
    pieces = writer.reports.take(PushDone).pieces
    target.pools[1][2, 0] ^= 1
    assert target.verify(landing_id, pieces, {5: 1, 6: 2}, group=1).bad_block_indices == (6,)
    assert target.verify(landing_id, pieces, {5: 1, 6: 2}, group=0).bad_block_indices == (5, 6)


def test_a_landing_has_blocks_of_its_own_in_each_group(harness: TransferHarness) -> None:
    """A one-sided writer is asked once for each channel, and trusted with the blocks."""
    writer, target = (make(groups=GROUPS) for make in (harness.writer, harness.target))
    connection_id = connect(harness, writer, target)
    landing_id = target.open(writer, 1, windows=((2,),))
    if harness.transport not in ONE_SIDED:
        for group, block in ((0, 2), (1, 1)):
            other_id = target.open(writer, 1, windows=((2,),))
            writer.push(9, connection_id, other_id, [(5, block)], group=group)
            assert "does not accept" in writer.reports.take(PushFailed).reason
        assert not any(pool.any() for pool in target.pools)
    for group, block in ((0, 1), (1, 2)):
        writer.push(group, connection_id, landing_id, [(5, block)], group=group)
        writer.reports.take(PushDone)
        np.testing.assert_array_equal(target.pools[group][block], writer.pools[group][5])


def test_every_channel_that_was_let_in_is_awaited(harness: TransferHarness) -> None:
    writer, target = (make(groups=GROUPS) for make in (harness.writer, harness.target))
    connection_id = connect(harness, writer, target)
    landing_id = target.open(writer, 1, windows=((2,),))
    for group, block in ((0, 1), (1, 2)):
        writer.push(group, connection_id, landing_id, [(5, block)], group=group)
        writer.reports.take(PushDone)
    admitted = target.close_landing(landing_id)
    assert len(admitted) == (2 if harness.transport in ONE_SIDED else 0)
    writer.handle(ClosePeer(connection_id))
    assert {target.reports.take(WriterGone).connection for _ in admitted} == set(admitted)


def test_a_rank_without_lanes_of_a_group_has_nothing_to_write(harness: TransferHarness) -> None:
    writer, target = (make(groups=GROUPS) for make in (harness.writer, harness.target))
    connection_id = writer.connect([lane(target)], harness.transport)
    writer.handle(PushOrder(1, connection_id, target.open(writer, 1), (), group=1))
    done = writer.reports.take(PushDone)
    assert (done.pieces, done.num_bytes, done.transport) == ((), 0, "")


@pytest.mark.parametrize(
    ("groups", "piece", "reason"),
    [
        ((GROUPS[0], (1, 2)), WHOLE[0], "group: (1, 2) at the source, (2,) there"),
        (GROUPS, Shard(0, 2, 0, 4), "is of group 1"),
        ((*GROUPS, (2,)), WHOLE[0], "rank 0 has no blocks of group 2"),
    ],
    ids=["other layers", "no layer of the group", "no such group"],
)
def test_a_channel_of_a_group_that_does_not_fit_is_refused_with_the_reason(
    harness: TransferHarness, groups: tuple[tuple[int, ...], ...], piece: Shard, reason: str
) -> None:
    writer, target = harness.writer(groups=groups), harness.target(groups=GROUPS)
    writer.connect([lane(target, piece, len(groups) - 1)], harness.transport)
    assert reason in writer.reports.take(PeerConnectFailed).reason
