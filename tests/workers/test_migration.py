"""Streams that move between two replicas while they run: the same tokens, each told once, nothing left."""

from __future__ import annotations

import asyncio

import pytest
from group_kv import NO_GROUPS, GroupSizes
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_harness import MigrationPair, Side, Stream
from slow_cases import examples
from staged_engine import BLOCK_TOKENS

from kvtransfer.common.group_shares import GroupShares
from kvtransfer.peer_messages import LandingRefusal, LandingRequest
from kvtransfer.transfer_orders import StopPush
from workers.disagg.migration import AHEAD_S, MAX_TRIES
from workers.messages.peer_link import HandOver

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def decoding(pair: MigrationPair, num_tokens: int = 3, max_tokens: int = 20) -> Stream:
    """A stream that has some tokens and runs at `a`."""
    stream = pair.submit(PROMPT, max_tokens, pair.a)
    while len(stream.tokens) < num_tokens:
        step(pair.a)
        pair.listen()
    return stream


def step(side: Side) -> None:
    side.plan()
    side.settle()


async def test_a_stream_moves_with_the_blocks_that_it_has() -> None:
    pair = MigrationPair()
    stream = decoding(pair)
    pair.move(stream)
    pair.run()
    assert stream.at is pair.b
    assert stream.finish == "length"
    assert (pair.a.replica.migration.num_migrated, pair.a.replica.migration.num_failed) == (1, 0)
    pair.check_over()


@pytest.mark.parametrize("hands_over", [False, True])
async def test_only_blocks_within_a_window_move(hands_over: bool) -> None:
    pair = MigrationPair(groups=GroupSizes([(4, 16)]))
    stream = pair.submit(PROMPT * 2, 20, pair.a, hands_over=hands_over)
    while not hands_over and len(stream.tokens) < 4:
        step(pair.a)
        pair.listen()
    if not hands_over:
        pair.move(stream)
    pair.run()
    assert (stream.at, stream.finish) == (pair.b, "length")
    num_bytes = pair.a.replica.kv_sender.sends.counters.num_bytes.total()
    # Blocks have four tokens: the last three of 14 lie in two. Of a sequence that decodes meanwhile, it is
    # those that were within the window at some time since it was asked for.
    assert num_bytes == 8 * (4 + 2) if hands_over else num_bytes <= 8 * (6 + 3)
    pair.check_over()


async def test_it_decodes_while_its_blocks_are_copied() -> None:
    pair = MigrationPair()
    stream = decoding(pair)
    pair.move(stream)
    assert pair.a.send(True)
    assert pair.b.send(False)
    num_tokens = len(stream.tokens)
    for _ in range(4):
        step(pair.a)
        pair.listen()
    assert len(stream.tokens) >= num_tokens + 3, "the push is not done, and it does not wait for it"
    pair.run()
    assert stream.at is pair.b
    pair.check_over()


async def test_what_the_target_holds_is_not_sent() -> None:
    pair = MigrationPair()
    before = pair.submit(PROMPT, 6, pair.b)
    pair.run()
    assert before.finish
    stream = decoding(pair)
    pair.move(stream)
    pair.run()
    assert stream.at is pair.b
    num_blocks = (len(PROMPT) + len(stream.tokens)) // 4
    assert 0 < pair.a.replica.kv_sender.sends.counters.num_bytes.total() // 8 < num_blocks
    pair.check_over()


async def test_a_refused_landing_leaves_it_where_it_is() -> None:
    pair = MigrationPair()
    stream = decoding(pair)
    pair.b.replica.kv_receiver.leave("it leaves too")
    pair.move(stream)
    assert pair.a.send(True)
    assert isinstance(pair.b.replica.peers.to_writer[0], LandingRefusal)
    pair.run()
    assert stream.at is pair.a
    assert stream.finish
    assert pair.a.replica.migration.num_failed == 1
    pair.check_over()


async def test_a_bad_piece_is_computed_again_at_the_target() -> None:
    pair = MigrationPair()
    stream = decoding(pair, num_tokens=6)
    pair.b.num_flips = 1
    pair.move(stream)
    pair.run()
    assert stream.at is pair.b
    assert pair.b.replica.kv_receiver.num_checksum_failures == 1
    pair.check_over()


async def test_a_push_that_breaks_leaves_it_where_it_is() -> None:
    pair = MigrationPair()
    stream = decoding(pair, num_tokens=6)
    pair.a.num_broken_pushes = 1
    pair.move(stream)
    pair.run()
    assert stream.at is pair.a
    assert stream.finish
    pair.check_over()


async def test_there_and_back() -> None:
    pair = MigrationPair()
    stream = decoding(pair, max_tokens=30)
    pair.move(stream)
    while stream.at is pair.a:
        for side in pair.sides:
            step(side)
            while side.transfer() | side.send(True) | side.send(False):
                pass
        pair.listen()
    pair.move(stream)
    pair.run()
    assert stream.at is pair.a
    assert pair.b.replica.migration.num_migrated == 1
    pair.check_over()


async def test_only_so_many_move_at_a_time() -> None:
    pair = MigrationPair((40, 40))
    streams = [pair.submit([*PROMPT, 12 + i], 24, pair.a) for i in range(4)]
    while any(len(stream.tokens) < 2 for stream in streams):
        step(pair.a)
        pair.listen()
    for stream in streams:
        pair.move(stream)
    asked = [it for it in pair.a.replica.peers.to_reader if isinstance(it, LandingRequest)]
    assert [it.request_id for it in asked] == ["r0", "r1"]
    pair.run()
    assert all(stream.at is pair.b for stream in streams)
    pair.check_over()


async def test_one_that_ends_before_it_has_moved_gives_its_landing_back() -> None:
    pair = MigrationPair()
    stream = decoding(pair, max_tokens=9)
    pair.move(stream)
    while not stream.is_over:
        step(pair.a)
        pair.listen()
    pair.run()
    assert stream.at is pair.a
    assert pair.a.replica.migration.num_migrated == 0
    pair.check_over()


async def test_samples_of_one_request_stay_together() -> None:
    pair = MigrationPair()
    stream = pair.submit(PROMPT, 12, pair.a, num_samples=2)
    while len(stream.tokens) < 3:
        step(pair.a)
        pair.listen()
    pair.move(stream)
    assert pair.a.replica.peers.to_reader == []
    pair.run()
    assert stream.at is pair.a


async def test_a_target_without_capacity_in_time_is_asked_a_few_times_and_left() -> None:
    pair = MigrationPair((16, 40))
    blocker = pair.b.replica.pool.allocate(39)
    stream = decoding(pair, max_tokens=33)
    pair.move(stream)
    num_asked = 0
    while not (pair.a.replica.migration.num_failed or stream.is_over):
        step(pair.a)
        while pair.a.replica.peers.to_reader:
            num_asked += isinstance(pair.a.replica.peers.to_reader[0], LandingRequest)
            pair.a.send(True)
        pair.listen()
    assert num_asked == MAX_TRIES
    assert not stream.is_over
    pair.b.replica.pool.release(blocker)
    pair.run()
    assert stream.at is pair.a
    pair.check_over()


async def test_a_stream_with_blocks_in_host_memory_waits_until_they_are_back() -> None:
    """It runs beside another one that needs the blocks; when that is over it moves, with all its blocks."""
    pair = MigrationPair((8, 16), num_offload_blocks=8)
    other = pair.submit([1, 2, 3], 17, pair.a)
    stream = pair.submit(PROMPT, 30, pair.a)
    while not pair.a.replica.scheduler.life.tables.host.num_used:
        step(pair.a)
        pair.listen()
    assert not other.is_over
    pair.move(stream)
    pair.run()
    assert stream.at is pair.b
    pair.check_over()


@pytest.mark.parametrize("num_offload_blocks", [0, 8])
async def test_a_lack_of_blocks_takes_a_move_back(num_offload_blocks: int) -> None:
    """What waits to be pushed is preempted, or moved to host memory: what is pushed then is not its KV."""
    pair = MigrationPair((8, 16), num_offload_blocks)
    if not num_offload_blocks:
        pair.submit([1, 2, 3, 4], 24, pair.a)
    stream = pair.submit(PROMPT, 30 if num_offload_blocks else 24, pair.a)
    replica = pair.a.replica
    replica.rates.decode_step_s = AHEAD_S / 10  # a landing has blocks for ten tokens
    while replica.pool.num_free > 1:
        step(pair.a)
        pair.listen()
    pair.move(stream)
    pair.a.send(True)
    pair.b.send(False)
    num_waiting = len(replica.orders)
    assert num_waiting > 0, "its blocks wait to be pushed"
    for _ in range(30):
        if replica.scheduler.migration.is_on_its_way(stream.key):
            step(pair.a)
            pair.listen()
    assert replica.scheduler.life.num_preemptions or replica.scheduler.life.tables.host.num_used
    assert any(isinstance(order, StopPush) for order in replica.orders[num_waiting:])
    for _ in range(6):
        step(pair.a)
        pair.listen()
    pair.run()
    assert all(stream.finish == "length" for stream in pair.streams.values())
    pair.check_over()


async def test_a_link_lost_with_the_state_on_it_ends_the_attempt_at_both_ends() -> None:
    """The state may have arrived: the stream must not go on at two places, so its gateway resumes it."""
    pair = MigrationPair()
    stream = decoding(pair)
    pair.move(stream)
    while not any(isinstance(it, HandOver) for it in pair.a.replica.peers.to_reader):
        for side in pair.sides:
            step(side)
        pair.a.transfer()
        if not any(isinstance(it, HandOver) for it in pair.a.replica.peers.to_reader):
            pair.a.send(True)
        pair.b.send(False)
        pair.b.transfer()
        pair.listen()
    pair.a.lose_link()
    pair.run()
    assert stream.failure is not None
    assert stream.failure.code == "leaving"
    pair.check_over()


async def test_a_link_lost_before_leaves_it_where_it_is() -> None:
    pair = MigrationPair()
    stream = decoding(pair)
    pair.move(stream)
    pair.a.send(True)
    pair.b.send(False)
    pair.a.lose_link()
    pair.run()
    assert (stream.at, stream.finish) == (pair.a, "length")
    pair.check_over()


async def test_a_leaving_replica_returns_what_has_not_begun() -> None:
    pair = MigrationPair()
    first = decoding(pair)
    second = pair.submit([1, 2, 3], 8, pair.a)
    pair.a.replica.requests.leave("it leaves")
    late = pair.submit([3, 2, 1], 8, pair.a)
    pair.listen()
    for stream in (second, late):
        assert stream.failure is not None
        assert stream.failure.code == "leaving"
    pair.move(first)
    pair.run()
    assert first.at is pair.b
    pair.check_over()


async def test_at_the_end_of_the_drain_the_rest_is_handed_back() -> None:
    pair = MigrationPair()
    stream = decoding(pair)
    pair.a.replica.requests.leave("it leaves")
    pair.move(stream)
    pair.a.replica.requests.hand_back_all()
    pair.run()
    assert stream.failure is not None
    assert stream.failure.code == "leaving"
    pair.check_over()


NUM_BLOCKS = st.tuples(st.integers(7, 20), st.integers(7, 20))
NUM_OFFLOAD_BLOCKS = st.sampled_from([0, 0, 3, 8])
# Windows, with enough blocks for all sequences that run at a time.
GROUPS = st.builds(
    GroupSizes,
    st.lists(st.tuples(st.integers(1, 16), st.integers(30, 40)), max_size=2),
    st.lists(st.integers(6, 30), max_size=1),
).filter(lambda groups: groups.num_groups > 0)
SHARES = st.sampled_from([GroupShares(), GroupShares(1.0, {"a": 0.6}), GroupShares(0.6)])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_blocks=NUM_BLOCKS, num_offload_blocks=NUM_OFFLOAD_BLOCKS, shares=SHARES)
def test_whatever_happens_every_stream_gets_its_tokens(
    data: st.DataObject, num_blocks: tuple[int, int], num_offload_blocks: int, shares: GroupShares
) -> None:
    """Few blocks, so that sequences are preempted; events of both sides in any order; links that break."""
    asyncio.run(play(data, num_blocks, num_offload_blocks, shares))


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(data=st.data(), num_blocks=NUM_BLOCKS, num_offload_blocks=NUM_OFFLOAD_BLOCKS, shares=SHARES)
def test_whatever_happens_for_long(
    data: st.DataObject, num_blocks: tuple[int, int], num_offload_blocks: int, shares: GroupShares
) -> None:
    asyncio.run(play(data, num_blocks, num_offload_blocks, shares))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_blocks=NUM_BLOCKS, groups=GROUPS)
def test_whatever_happens_every_stream_has_what_its_groups_need(
    data: st.DataObject, num_blocks: tuple[int, int], groups: GroupSizes
) -> None:
    """The ranks compare what each token sees in each group of layers with its context."""
    asyncio.run(play(data, num_blocks, 0, GroupShares(), groups))


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(data=st.data(), num_blocks=NUM_BLOCKS, groups=GROUPS)
def test_whatever_happens_for_long_to_groups(
    data: st.DataObject, num_blocks: tuple[int, int], groups: GroupSizes
) -> None:
    asyncio.run(play(data, num_blocks, 0, GroupShares(), groups))


async def play(
    data: st.DataObject,
    num_blocks: tuple[int, int],
    num_offload_blocks: int,
    shares: GroupShares,
    groups: GroupSizes = NO_GROUPS,
) -> None:
    pair = MigrationPair(num_blocks, num_offload_blocks, shares, groups)

    def submit(prompt: list[int], max_tokens: int, at: Side) -> None:
        """For one of two groups, and what fits its share at both sides."""
        group = data.draw(st.sampled_from(["a", "b"]))
        pools = [side.replica.pool for side in pair.sides]
        if any(pool.has_limit(group) for pool in pools):
            most = min(pool.limit(group) * BLOCK_TOKENS for pool in pools)
            max_tokens = min(max_tokens, most - len(prompt))
        pair.submit(prompt, max_tokens, at, group=group)

    for number in range(data.draw(st.integers(1, 4))):
        submit([number + 1] * data.draw(st.integers(1, 6)), data.draw(st.integers(6, 20)), pair.a)
    for _ in range(data.draw(st.integers(0, 8))):
        step(pair.a)
    for _ in range(data.draw(st.integers(20, 120))):
        pair.listen()
        side = data.draw(st.sampled_from(pair.sides))
        match data.draw(st.integers(0, 17)):
            case 0 if len(pair.streams) < 7:
                prompt = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
                submit(prompt, data.draw(st.integers(1, 17)), side)
            case 1 | 2 if pair.streams:
                stream = data.draw(st.sampled_from(list(pair.streams.values())))
                if stream.target is None and not stream.is_over:
                    pair.move(stream)
            case 3 if pair.streams:
                stream = data.draw(st.sampled_from(list(pair.streams.values())))
                if not stream.is_over and data.draw(st.integers(0, 2)) == 0:
                    pair.cancel(stream)
            case 4:
                if data.draw(st.integers(0, 2)) == 0:
                    side.lose_link()
            case 5:
                side.num_flips += data.draw(st.integers(0, 1))
                side.num_broken_pushes += data.draw(st.integers(0, 1))
            case 6:
                side.replica.clock.advance(1.0)
                side.replica.kv_receiver.tick()
                side.replica.kv_sender.tick()
            case 7 | 8 | 9:
                side.plan()
            case 10 | 11 | 12:
                side.settle()
            case 13:
                side.send(False)
            case 14:
                side.send(True)
            case _:
                side.transfer()
        side.check()
    pair.run()
    pair.check_over()
