"""The landing protocol, both sides, under every interleaving: no byte is written where it must not be."""

from __future__ import annotations

import pytest
from landing_world import BLOCK, DECODE, PREFILL, World, request

from kvtransfer.peer_messages import LandingAbort, LandingGrant, LandingRefusal, LandingRequest, LandingResult
from kvtransfer.protocol.actions import KillRanks, ToWriter
from kvtransfer.transfer_reports import LandingClosed, WriterGone
from workers.scheduler.block_pool import BlockPool


def test_a_hand_over_moves_only_what_the_decode_side_lacks() -> None:
    pool = BlockPool(8, BLOCK)
    keys = tuple(bytes([i]) * 16 for i in range(3))
    held = pool.allocate(2)
    pool.register(held[0], b"", keys[0], "t")
    pool.register(held[1], keys[0], keys[1], "t")
    pool.release(held)
    world = World(pool)
    world.ask(request(1, 3 * BLOCK + 5, block_keys=keys))
    world.settle()
    world.compute(1, 2 * BLOCK)
    world.settle()
    assert world.push.counters.num_bytes.total() == 0, "the first two blocks are held and must not move"
    world.compute(1, 3 * BLOCK)
    assert len(world.writers[0].orders) == 1, "a finished chunk is pushed before the prompt is complete"
    world.compute(1, 3 * BLOCK + 5)
    world.settle()
    landed = world.joined[bytes([1]) * 16]
    assert landed.block_ids[:2] == tuple(held)
    assert (landed.num_held_tokens, landed.num_valid_tokens, landed.num_bad_pieces) == (32, 53, 0)
    assert world.ended == {"r1": ""}
    assert pool.num_referenced == 0


def test_a_bad_piece_ends_what_counts_as_valid() -> None:
    world = World(BlockPool(8, BLOCK))
    world.ask(request(6, 4 * BLOCK))
    world.settle()
    world.compute(6, BLOCK)
    world.settle()
    world.writers[0].num_flips = 1
    world.compute(6, 4 * BLOCK)
    world.settle()
    landed = world.joined[bytes([6]) * 16]
    assert (landed.num_bad_pieces, landed.num_valid_tokens) == (1, BLOCK)


def test_landings_wait_in_order_and_old_ones_gain_priority() -> None:
    pool = BlockPool(4, BLOCK)
    blocker = pool.allocate(4)
    world = World(pool)
    world.ask(request(1, BLOCK, priority=0))
    world.settle()
    world.now = 100.0
    world.ask(request(2, BLOCK, priority=5))
    world.settle()
    assert world.landing.num_waiting == 2
    group = request(1, BLOCK).sharing_group
    assert [world.landing.num_of(each) for each in (None, group, "somebody else")] == [2, 2, 0]
    pool.release(blocker[:2])
    world.do_landing(world.landing.grant(world.now, idle=True))
    granted = [m.landing_id[0] for m in world.to_prefill if isinstance(m, LandingGrant)]
    assert granted == [1], "a hundred seconds of waiting outweigh five levels of priority"


def test_the_growth_reserve_is_kept_while_the_replica_is_busy() -> None:
    world = World(BlockPool(10, BLOCK))
    world.do_landing(world.landing.request(PREFILL, request(1, 9 * BLOCK), 0.0, idle=False))
    assert world.landing.num_open == 1
    assert world.landing.num_waiting == 0
    world = World(BlockPool(20, BLOCK))
    world.do_landing(world.landing.request(PREFILL, request(1, 19 * BLOCK), 0.0, idle=False))
    assert (world.landing.num_open, world.landing.num_waiting) == (0, 1)
    world.do_landing(world.landing.grant(0.0, idle=True))
    assert world.landing.num_open == 1


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (request(1, 100 * BLOCK), "needs 101 blocks"),
        (request(2, BLOCK, deadline_s=0.001), "deadline"),
        (request(3, 4 * BLOCK, num_samples=3), "needs 7 blocks"),
        (request(4, 0), "0 tokens"),
        (request(5, BLOCK, num_samples=0), "0 samples"),
        (request(6, BLOCK, block_keys=(b"k", b"l")), "2 block keys"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(wanted: LandingRequest, word: str) -> None:
    pool = BlockPool(6, BLOCK)
    world = World(pool)
    pool.allocate(6)
    for number in (10, 11):  # a measured wait is needed before a deadline can be judged
        world.do_landing(world.landing.request(PREFILL, request(number, BLOCK), 0.0, idle=True))
    world.landing._seconds_per_grant = 1.0
    world.do_landing(world.landing.request(PREFILL, wanted, 0.0, idle=True))
    refusal = world.to_prefill[-1]
    assert isinstance(refusal, LandingRefusal)
    assert word in refusal.reason


def test_a_full_queue_refuses() -> None:
    pool = BlockPool(2, BLOCK)
    pool.allocate(2)
    world = World(pool)
    for number in range(9):
        world.do_landing(world.landing.request(PREFILL, request(number, BLOCK), 0.0, idle=True))
    assert world.landing.num_waiting == 8
    assert isinstance(world.to_prefill[-1], LandingRefusal)


def test_a_lease_without_progress_ends_in_quarantine_until_the_writer_acknowledges() -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    world.compute(1, BLOCK)
    world.writers_work()
    world.now = 9.0
    world.do_push(world.push.tick(world.now))
    world.settle()
    world.now = 18.0
    assert world.landing.expire(world.now) == [], "the heartbeat renewed the lease"
    world.now = 30.0
    world.do_landing(world.landing.expire(world.now))
    world.targets_work()
    assert pool.num_quarantined == 2
    world.deliver_to_prefill()
    assert pool.num_quarantined == 2
    world.settle()
    assert (pool.num_quarantined, pool.num_referenced) == (0, 0)
    assert world.ended == {"r1": "peer"}


def test_a_writer_that_does_not_acknowledge_is_killed() -> None:
    world = World(BlockPool(8, BLOCK))
    world.ask(request(1, BLOCK))
    world.settle()
    world.compute(1, BLOCK)
    world.do_push(world.push.stop("r1", 0, "cancelled", 0.0))
    assert not any(isinstance(action, KillRanks) for action in world.push.tick(4.9))
    assert any(isinstance(action, KillRanks) for action in world.push.tick(5.1))


def test_two_sided_writers_need_no_quarantine() -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool, one_sided=False)
    world.ask(request(1, BLOCK))
    world.settle()
    world.compute(1, BLOCK)  # the push is queued at the writer and will come late
    world.do_landing(world.landing.abort(bytes([1]) * 16, "cancelled"))
    world.targets_work()
    assert (pool.num_quarantined, pool.num_referenced) == (0, 0)
    world.settle()


def test_a_prompt_whose_samples_never_fit_does_not_hold_up_the_others() -> None:
    world = World(BlockPool(6, BLOCK))
    world.ask(request(1, 5 * BLOCK, num_samples=4))
    world.ask(request(2, BLOCK))
    world.settle()
    assert world.ended == {"r1": "refused"}
    assert world.landing.num_open == 1


def test_a_landing_asked_for_twice_keeps_its_blocks() -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    for _ in range(2):
        world.do_landing(world.landing.request(PREFILL, request(1, 2 * BLOCK), 0.0, idle=True))
    assert pool.num_references == world.landing.num_references == 2


def test_a_leaving_replica_grants_nothing_and_lets_open_landings_join() -> None:
    pool = BlockPool(3, BLOCK)
    world = World(pool)
    for number in (1, 2):  # the second one waits for free blocks
        world.ask(request(number, 2 * BLOCK))
    world.settle()
    world.do_landing(world.landing.refuse_all("it leaves"))
    world.ask(request(3, BLOCK))
    world.compute(1, 2 * BLOCK)
    world.settle()
    assert world.ended == {"r2": "refused", "r3": "refused", "r1": ""}
    assert pool.num_references == 0


def quarantined(pool: BlockPool, *connections: bytes) -> World:
    """A landing of two blocks that was aborted while `connections` may write it."""
    world = World(pool)
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    world.do_landing(world.landing.writer_lost(PREFILL))
    assert pool.num_quarantined == 2
    world.landing.closed(0, LandingClosed(bytes([1]) * 16, connections))
    return world


def test_quarantine_ends_with_the_connections_that_could_write_whatever_else_the_writer_opened() -> None:
    pool = BlockPool(8, BLOCK)
    world = quarantined(pool, b"old", b"older")
    for connection in (b"old", b"new"):
        world.landing.writer_gone(0, WriterGone(PREFILL, connection))
        assert pool.num_quarantined == 2
    world.landing.writer_gone(0, WriterGone(PREFILL, b"older"))
    assert (pool.num_quarantined, pool.num_referenced) == (0, 0)


def test_the_end_of_an_old_connection_does_not_free_what_a_new_one_may_write() -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    world.landing.writer_gone(0, WriterGone(PREFILL, b"old"))
    assert (world.landing.num_open, pool.num_references) == (1, 2)


def test_a_hand_over_to_a_landing_that_is_gone_is_answered() -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    world.ask(request(1, BLOCK))
    world.settle()
    world.compute(1, BLOCK)
    world.writers_work()
    world.landing.aborted_by_writer(PREFILL, LandingAbort(bytes([1]) * 16, "lost on the way", True))
    world.settle()
    assert world.ended == {"r1": "peer"}, "the prefill side would wait for ever"
    assert pool.num_references == 0


def test_an_id_that_was_used_is_refused_for_late_reports_would_be_taken_for_news_of_it() -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    for number, end in enumerate(("given up", "joined"), 1):
        wanted = request(number, BLOCK)
        world.ask(wanted)
        world.settle()
        if end == "joined":
            world.compute(number, BLOCK)
            world.settle()
            assert bytes([number]) * 16 in world.joined
        else:
            stopped = LandingAbort(bytes([number]) * 16, "given up", True)
            world.do_landing(world.landing.aborted_by_writer(PREFILL, stopped))
        (action,) = world.landing.request(PREFILL, wanted, 0.0, idle=True)
        assert isinstance(action, ToWriter)
        assert isinstance(action.message, LandingRefusal)
        assert "has ended" in action.message.reason


def test_a_result_before_the_hand_over_does_not_free_what_is_being_read() -> None:
    world = World(BlockPool(8, BLOCK))
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    world.compute(1, BLOCK)
    world.do_push(world.push.joined(DECODE, LandingResult(bytes([1]) * 16, BLOCK, 0), 0.0))
    assert world.ended == {}, "a rank may be reading the prompt's blocks"
    world.settle()
    assert world.ended == {"r1": "peer"}


@pytest.mark.parametrize(("name", "num_tokens"), [(("r2", 0), BLOCK), (("r1", 1), BLOCK), (("r1", 0), 5)])
def test_a_hand_over_that_does_not_match_its_landing_is_refused(
    name: tuple[str, int], num_tokens: int
) -> None:
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    world.ask(request(1, BLOCK))
    world.settle()
    world.do_landing(world.landing.hand_over(PREFILL, bytes([1]) * 16, name, num_tokens, 0.0))
    assert world.joined == {}
    assert pool.num_quarantined == 1
    world.settle()
    assert (world.ended, pool.num_quarantined, pool.num_references) == ({"r1": "peer"}, 0, 0)


def test_a_prompt_that_does_not_move_on_loses_its_lease() -> None:
    """Two replicas that wait for each other's blocks must not keep each other waiting by heartbeats."""
    pool = BlockPool(8, BLOCK)
    world = World(pool)
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    for second in range(100):
        world.now = float(second)
        world.do_push(world.push.tick(world.now))
        world.settle()
        world.do_landing(world.landing.expire(world.now))
        if second == 35:
            assert world.landing.num_open == 1
    world.settle()
    assert (world.ended, pool.num_references) == ({"r1": "peer"}, 0)


@pytest.mark.parametrize(("num_held_tokens", "num_blocks"), [(0, 1), (0, 3), (5, 1), (-BLOCK, 3), (BLOCK, 2)])
def test_a_grant_that_does_not_fit_the_prompt_is_given_back(num_held_tokens: int, num_blocks: int) -> None:
    world = World(BlockPool(8, BLOCK))
    world.ask(request(1, 2 * BLOCK))
    grant = LandingGrant(bytes([1]) * 16, num_held_tokens, tuple(range(num_blocks)))
    world.do_push(world.push.granted(DECODE, grant, 0.0))
    world.compute(1, 2 * BLOCK)
    assert world.ended == {"r1": "peer"}
    assert list(world.writers[0].queue) == []


def test_a_lease_is_renewed_four_times_while_it_runs_not_at_every_tick() -> None:
    world = World(BlockPool(8, BLOCK))
    world.ask(request(1, BLOCK))
    world.settle()
    for tick in range(40):
        world.do_push(world.push.tick(tick * 0.25))
    assert len(world.to_decode) == 4


# ------------------------------------------------------------------- a sequence that goes on meanwhile


@pytest.mark.parametrize("num_tokens", [2 * BLOCK + 3, 3 * BLOCK, 4 * BLOCK])
def test_a_growing_sequence_is_handed_over_with_what_it_has_by_then(num_tokens: int) -> None:
    pool = BlockPool(16, BLOCK)
    world = World(pool)
    world.ask(request(1, 4 * BLOCK, is_growing=True))
    world.settle()
    world.compute(1, BLOCK + 5)
    assert not world.push.has_caught_up("r1", 0)
    world.settle()
    assert world.push.has_caught_up("r1", 0)
    world.push.end_at("r1", 0, num_tokens)
    world.num_handed_over["r1"] = num_tokens
    world.compute(1, num_tokens)
    world.settle()
    (joined,) = world.joined.values()
    assert joined.num_valid_tokens == num_tokens
    assert len(joined.block_ids) == 4, "the capacity that it did not use is its own"
    assert (world.ended, pool.num_references) == ({"r1": ""}, 0)
    assert world.push.counters.num_bytes.total() == 8 * -(-num_tokens // BLOCK)


def test_only_a_growing_sequence_may_be_handed_over_with_less() -> None:
    for is_growing, num_tokens in ((False, BLOCK), (True, 0), (True, 3 * BLOCK)):
        pool = BlockPool(8, BLOCK)
        world = World(pool)
        world.ask(request(1, 2 * BLOCK, is_growing=is_growing))
        world.settle()
        landing_id = bytes([1]) * 16
        world.do_landing(world.landing.hand_over(PREFILL, landing_id, ("r1", 0), num_tokens, 0.0))
        assert world.joined == {}
        assert pool.num_quarantined == 2
