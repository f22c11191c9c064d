"""Landings between any numbers of ranks: who must have answered before what, under every interleaving."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from landing_interleaving import EVENTS, Interleaving, repeat
from landing_world import BLOCK, DECODE, PREFILL, Ranks, World, request
from slow_cases import examples

from kvtransfer.messages import Shard
from kvtransfer.peer_messages import LandingAbort, Manifest, PieceSum
from kvtransfer.protocol.actions import KillRanks, Landed, ToPeer
from kvtransfer.transfer_orders import VerifyOrder
from kvtransfer.transfer_reports import LandingClosed, PushFailed, PushStopped, Verified, WriterGone
from workers.scheduler.block_pool import BlockPool

# A model of two layers with two heads.
WHOLE = (Shard(0, 2, 0, 2),)
# The same, as two stages hold it.
HALVES = Shard(0, 1, 0, 2), Shard(1, 2, 0, 2)
# The same, as two tensor-parallel ranks hold it.
COLUMNS = Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
QUARTER = Shard(0, 1, 0, 1)
# Two stages write to two tensor-parallel ranks: each of the four pairs has a lane of a quarter.
CROSS: dict[str, Ranks] = {"sources": tuple(enumerate(HALVES)), "readers": tuple(enumerate(COLUMNS))}
LANDING = bytes([1]) * 16


def crossed(num_blocks: int = 8) -> World:
    """A landing of two blocks that is open between two and two ranks."""
    world = World(BlockPool(num_blocks, BLOCK), **CROSS)  # type: ignore[arg-type]
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    return world


def test_a_hand_over_waits_for_every_rank_of_both_sides() -> None:
    world = crossed()
    world.compute(1, 2 * BLOCK)
    first, second = world.writers
    while first.handle() or first.write() or world.hear_writer(0):
        pass
    assert world.ready == {}, "the other rank has not written"
    while world.deliver_to_decode():
        pass
    assert [len(target.orders) for target in world.targets] == [1, 1], "what is there is verified"
    while second.handle() or second.write() or world.hear_writer(1):
        pass
    ready = world.ready[LANDING]
    assert (ready.num_moved_bytes, ready.transport) == (64, "shm")
    assert (ready.push_started_at, ready.push_seconds) == (1.0, 0.1), "the longest rank, not the sum"
    assert [(it.started_at, it.seconds) for it in world.pushed] == [(1.0, 0.1)]
    while world.deliver_to_decode():
        pass
    while world.targets[0].run() or world.hear_target(0):
        pass
    assert world.joined == {}, "the other rank has not verified"
    world.settle()
    assert (world.joined[LANDING].num_valid_tokens, world.ended) == (2 * BLOCK, {"r1": ""})


def test_each_rank_verifies_its_own_pieces() -> None:
    world = crossed()
    sums = tuple(PieceSum(0, target, piece, number) for number, (_, target, piece) in enumerate(world.pieces))
    world.do_landing(world.landing.manifest(PREFILL, Manifest(LANDING, sums), 0.0))
    for target in world.targets:
        (order,) = target.orders
        assert isinstance(order, VerifyOrder)
        lanes = [
            (number, piece) for number, (_, rank, piece) in enumerate(world.pieces) if rank == target.rank
        ]
        assert [(check.checksum, check.shard) for check in order.pieces] == lanes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_piece_of_any_rank_makes_the_block_bad(rank: int) -> None:
    world = crossed()
    world.compute(1, BLOCK)
    world.settle()
    world.writers[rank].num_flips = 1
    world.compute(1, 2 * BLOCK)
    world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, landed.num_bad_pieces) == (BLOCK, 2), "one lane to each target rank"


def test_answers_belong_to_orders_in_turn() -> None:
    world = crossed()
    for block in (0, 1):
        sums = tuple(PieceSum(block, target, piece, 0) for _, target, piece in world.pieces)
        world.do_landing(world.landing.manifest(PREFILL, Manifest(LANDING, sums), 0.0))
    world.do_landing(world.landing.hand_over(PREFILL, LANDING, ("r1", 0), 2 * BLOCK, 0.0))
    for rank, bad in ((0, ()), (1, ()), (1, (1,)), (0, ())):
        actions = world.landing.verified(rank, Verified(LANDING, bad))
    (landed,) = (action for action in actions if isinstance(action, Landed))
    assert (landed.num_valid_tokens, landed.num_bad_pieces) == (BLOCK, 2)


def test_a_block_of_which_a_piece_was_not_told_does_not_count() -> None:
    world = crossed()
    sums = [PieceSum(block, target, piece, 0) for block in (0, 1) for _, target, piece in world.pieces]
    world.do_landing(world.landing.manifest(PREFILL, Manifest(LANDING, tuple(sums[:-1])), 0.0))
    world.do_landing(world.landing.hand_over(PREFILL, LANDING, ("r1", 0), 2 * BLOCK, 0.0))
    assert world.landing.verified(0, Verified(LANDING, ())) == []
    landed = world.landing.verified(1, Verified(LANDING, ()))[-1]
    assert isinstance(landed, Landed)
    assert landed.num_valid_tokens == BLOCK


@pytest.mark.parametrize(
    ("sums", "word"),
    [
        ([(0, 0, QUARTER)] * 2, r"block 0, Shard\(.*\) at rank 0 a second time"),
        ([(0, 1, QUARTER)], "at rank 1, which has no such lane"),
        ([(0, 2, QUARTER)], "at rank 2, which has no such lane"),
        ([(0, 0, COLUMNS[0])], "at rank 0, which has no such lane"),
        ([(2, 0, QUARTER)], "names block 2"),
        ([(-1, 0, QUARTER)], "names block -1"),
    ],
)
def test_a_manifest_that_names_what_is_not_due_ends_the_landing(
    sums: list[tuple[int, int, Shard]], word: str
) -> None:
    world = crossed()
    for block, rank, shard in sums:
        assert world.lost == []
        manifest = Manifest(LANDING, (PieceSum(block, rank, shard, 1),))
        world.do_landing(world.landing.manifest(PREFILL, manifest, 0.0))
    assert re.search(word, world.lost[0])
    assert world.pool.num_quarantined == 2
    world.settle()
    assert (world.ended, world.pool.num_quarantined, world.pool.num_references) == ({"r1": "peer"}, 0, 0)


def test_a_stop_is_acknowledged_when_every_rank_has_stopped() -> None:
    world = crossed()
    world.compute(1, BLOCK)
    world.do_push(world.push.push_failed(1, PushFailed(1, LANDING, "no route"), 0.0))
    assert world.push.push_stopped(0, PushStopped(LANDING)) == []
    assert world.push.push_stopped(0, PushStopped(LANDING)) == [], "one rank does not speak for the other"
    (kill,) = world.push.tick(5.1)
    assert kill == KillRanks("rank 1 did not acknowledge a stop within 5.0 s")
    actions = world.push.push_stopped(1, PushStopped(LANDING))
    assert ToPeer(DECODE, LandingAbort(LANDING, "rank 1: no route", True)) in actions


def test_quarantine_ends_when_every_rank_is_closed_and_every_writer_of_each_is_gone() -> None:
    world = crossed()
    world.do_landing(world.landing.writer_lost(PREFILL))
    world.landing.closed(0, LandingClosed(LANDING, (b"c",)))
    world.landing.writer_gone(0, WriterGone(PREFILL, b"c"))
    assert world.pool.num_quarantined == 2, "rank 1 has not answered"
    world.landing.closed(0, LandingClosed(LANDING, (b"a",)))
    world.landing.closed(1, LandingClosed(LANDING, (b"a", b"b")))
    for rank, connection in ((0, b"a"), (0, b"b"), (1, b"b")):
        world.landing.writer_gone(rank, WriterGone(PREFILL, connection))
        assert world.pool.num_quarantined == 2, "the same connection is open to rank 1"
    world.landing.writer_gone(1, WriterGone(PREFILL, b"a"))
    assert (world.pool.num_quarantined, world.pool.num_referenced) == (0, 0)


def test_an_acknowledgement_that_a_link_has_lost_is_asked_for_again_on_the_next() -> None:
    """A rank that then stands still closes no connection, which would end the quarantine as well."""
    world = crossed()
    world.compute(1, BLOCK)
    world.writers_work()
    world.do_push(world.push.stop("r1", 0, "cancelled", world.now))
    for writer in world.writers:
        assert writer.handle(), "the stop"
        writer.is_frozen = True
    world.link_breaks()
    world.settle()
    world.decode_notices()
    world.settle()
    assert (world.ended, world.pool.num_quarantined) == ({"r1": "peer"}, 2), "nobody knows that it has ended"
    world.connect()
    world.settle()
    assert (world.pool.num_quarantined, world.pool.num_referenced) == (0, 0)


def test_landings_are_aborted_again_only_while_a_writer_may_write_them() -> None:
    world = crossed()
    world.compute(1, BLOCK)
    world.writers_work()
    world.writers[0].is_frozen = True
    world.link_breaks()
    world.connect()
    while world.deliver_to_prefill() or world.deliver_to_decode():
        pass
    assert world.pool.num_quarantined == 2, "rank 0 has not acknowledged its stop"
    world.writers[0].is_frozen = False
    world.settle()
    assert (world.pool.num_quarantined, world.pool.num_referenced) == (0, 0)


def test_a_rank_without_lanes_answers_without_a_manifest() -> None:
    world = World(BlockPool(8, BLOCK), sources=tuple(enumerate(WHOLE * 3)), readers=tuple(enumerate(WHOLE)))
    assert [len(writer.lanes) for writer in world.writers] == [1, 0, 1], "two layers for three copies"
    world.ask(request(1, BLOCK))
    world.settle()
    world.compute(1, BLOCK)
    world.writers_work()
    manifests = [message for message in world.to_decode if isinstance(message, Manifest)]
    assert [len(manifest.pieces) for manifest in manifests] == [1, 1]
    world.settle()
    assert world.ended == {"r1": ""}


# -------------------------------------------------------------------------------- every interleaving

SHAPES: list[tuple[Shard, ...]] = [
    WHOLE,
    WHOLE * 3,
    HALVES,
    COLUMNS,
    (*COLUMNS, *COLUMNS),
    tuple(Shard(layer, layer + 1, head, head + 1) for layer in (0, 1) for head in (0, 1)),
]


@given(
    begin=st.sampled_from(["nothing", "granted", "pushing"]),
    events=EVENTS,
    one_sided=st.booleans(),
    sources=st.sampled_from(SHAPES),
    readers=st.sampled_from(SHAPES),
)
@example(
    "pushing", [("stop", 0, 0), ("breaks", 0, 0), ("handle", 0, 1), ("freeze", 0, 0)], True, WHOLE, WHOLE
)
@settings(max_examples=examples(500), deadline=None)
def test_no_interleaving_writes_into_a_foreign_block_or_joins_what_is_not_there_or_leaks(
    begin: str,
    events: list[tuple[str, int, int]],
    one_sided: bool,
    sources: tuple[Shard, ...],
    readers: tuple[Shard, ...],
) -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool, one_sided, tuple(enumerate(sources)), tuple(enumerate(readers)))
    interleaving = Interleaving(world)
    if begin != "nothing":
        interleaving.do("ask", 0, 5 * BLOCK - 1)
        world.settle()
    if begin == "pushing":
        interleaving.do("compute", 0, 3 * BLOCK)
        for writer in world.writers:
            repeat(1, writer.handle, writer.write)
    for event in events:
        interleaving.do(*event)
    interleaving.end()
    assert (pool.num_quarantined, pool.num_referenced) == (0, 0)
    assert world.landing.num_open == world.landing.num_waiting == 0
    if world.prefill_lives:
        assert world.push.num_active == 0
        assert set(world.ended) == {f"r{number}" for number in interleaving.sizes}
