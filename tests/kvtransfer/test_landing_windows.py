"""Landings of models whose layers form groups: which blocks are asked for, written, and valid in the end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from landing_interleaving import EVENTS, NUMBERS, Interleaving, block_key
from landing_world import BLOCK, DECODE, PREFILL, Ranks, World, request, source_block, state_value
from slow_cases import examples

from kvtransfer.messages import BlockSpan, Shard
from kvtransfer.peer_messages import LandingGrant, LandingRefusal, Manifest, PieceSum
from kvtransfer.protocol.actions import Landed
from kvtransfer.transfer_orders import PushOrder, VerifyOrder
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.group_pool import GroupPool

# A model of three layers with two heads, as one rank holds it, as two stages and as two tensor-parallel
# ranks do. The first stage has no layer of the last group.
WHOLE = (Shard(0, 3, 0, 2),)
STAGES = Shard(0, 2, 0, 2), Shard(2, 3, 0, 2)
COLUMNS = Shard(0, 3, 0, 1), Shard(0, 3, 1, 2)
TWO_GROUPS: list[tuple[int, ...]] = [(0, 2), (1,)]
THREE_GROUPS: list[tuple[int, ...]] = [(0,), (1,), (2,)]
ONE_RANK: Ranks = ((0, WHOLE[0]),)
LANDING = bytes([1]) * 16


class WindowWorld(World):
    """A world whose decode side may hold blocks of prompts, and which checks what counts as valid against a
    search of all borders between blocks."""

    def hold(self, number: int, num_blocks: int, held: list[set[int]]) -> None:
        """Hold the first blocks of a prompt in the first group, and some in each other group."""
        full = self.pool.allocate(num_blocks)
        for index, block in enumerate(full):
            parent = block_key(number, index - 1) if index else ROOT
            self.pool.register(block, parent, block_key(number, index), "t")
            self._remember(number, 0, index, block)
        for group, (window, indices) in enumerate(zip(self.group_pools, held, strict=True), start=1):
            for index in indices:
                (block,) = window.allocate(1)
                window.register(block, block_key(number, index), "t")
                self._remember(number, group, index, block)

    def _remember(self, number: int, group: int, index: int, block: int) -> None:
        for _, target, piece in self.pieces_by_group[group]:
            value = source_block(number, group, index)
            self.targets[target].memory[group, block, piece] = value

    def check_joined(self, landed: Landed) -> None:
        super().check_joined(landed)
        wanted = self.asked[landed.landing_id]
        num_tokens = self.num_handed_over.get(wanted.request_id, wanted.num_tokens)
        longest = self._longest_valid(landed, num_tokens)
        if wanted.is_growing:  # what the writer may have freed meanwhile does not count
            assert landed.num_valid_tokens <= longest
        else:
            assert landed.num_valid_tokens == longest
            assert self.ready[landed.landing_id].num_moved_bytes == self._granted_bytes(landed.landing_id)
        assert (landed.num_valid_tokens == num_tokens) == (longest == num_tokens)
        assert landed.num_bad_pieces or landed.num_valid_tokens == num_tokens
        num_blocks = -(-wanted.num_tokens // BLOCK)
        for window, blocks in zip(self.group_pools, landed.windows, strict=True):
            if landed.num_valid_tokens and window.has_states:
                last = (landed.num_valid_tokens - 1) // BLOCK
                assert (blocks.first, len(blocks.block_ids)) == (last, 1)
            elif landed.num_valid_tokens:
                assert blocks.first == first_seen(landed.num_valid_tokens, window.window)
                assert blocks.first + len(blocks.block_ids) == num_blocks
            else:
                assert blocks == BlockSpan(0, ())

    def _granted_bytes(self, landing_id: bytes) -> int:
        """Eight bytes for each lane of each block that was granted: each is written once."""
        grant = self.granted[landing_id]
        blocks = [grant.block_ids, *(it.block_ids for it in grant.windows)]
        lanes = self.pieces_by_group
        return sum(8 * len(ids) * len(pieces) for ids, pieces in zip(blocks, lanes, strict=True))

    def _longest_valid(self, landed: Landed, num_tokens: int) -> int:
        """Try every border: the longest behind which all groups have what a token sees."""
        borders = [num_tokens, *range(num_tokens // BLOCK * BLOCK, 0, -BLOCK)]
        return next((end for end in borders if self._can_continue(landed, end)), 0)

    def _can_continue(self, landed: Landed, end: int) -> bool:
        windows = [10**9, *(window.window for window in self.group_pools if not window.has_states)]
        states = range(len(windows), 1 + len(self.group_pools))
        return (
            all(self._has_state(landed, group, end) for group in states)
            and all(
                self._is_right(landed, group, index)
                for group, window in enumerate(windows)
                for index in range(first_seen(end, window), -(-end // BLOCK))
            )
            and all(
                first_seen(end, window) >= self._lowest(landed, group)
                for group, window in enumerate(windows[1:], start=1)
            )
        )

    def _has_state(self, landed: Landed, group: int, num_tokens: int) -> bool:
        grant = self.granted[landed.landing_id].windows[group - 1]
        return self.has(group, grant.block_ids[-1], state_value(landed.landing_id[0], num_tokens))

    def _lowest(self, landed: Landed, group: int) -> int:
        """The first block that the landing has of the group: held ones are taken as far as the end needs."""
        wanted, grant = self.asked[landed.landing_id], self.granted[landed.landing_id]
        num_held = grant.num_held_tokens // BLOCK
        least = len(wanted.block_keys) * BLOCK if wanted.is_growing else wanted.num_tokens
        first = first_seen(least, self.group_pools[group - 1].window)
        return min(first, num_held) if first < num_held else grant.windows[group - 1].first

    def _is_right(self, landed: Landed, group: int, index: int) -> bool:
        number, grant = landed.landing_id[0], self.granted[landed.landing_id]
        expected = source_block(number, group, index)
        if group == 0:
            return self.has(0, landed.block_ids[index], expected)
        granted = grant.windows[group - 1]
        if index < granted.first:  # held
            block = self.group_pools[group - 1].find(block_key(number, index))
            return block is not None and index < grant.num_held_tokens // BLOCK
        return self.has(group, granted.block_ids[index - granted.first], expected)


def first_seen(num_tokens: int, window: int) -> int:
    """The block of the first token that the token behind `num_tokens` sees."""
    return max(0, num_tokens - window + 1) // BLOCK


def opened(num_tokens: int, *windows: int, num_blocks: int = 8, is_growing: bool = False) -> WindowWorld:
    """A world with a landing of request 1 that is open."""
    pools = [GroupPool(window, num_blocks) for window in windows]
    layers = TWO_GROUPS if len(windows) == 1 else THREE_GROUPS
    world = WindowWorld(BlockPool(16, BLOCK), True, ONE_RANK, ONE_RANK, pools, layers)
    world.ask(request(1, num_tokens, is_growing=is_growing))
    world.settle()
    return world


def is_empty(world: World) -> bool:
    """Whether nothing is referenced or in quarantine."""
    return world.pool.num_referenced == world.pool.num_quarantined == 0 and not any(
        window.num_references or window.num_quarantined for window in world.group_pools
    )


def test_only_blocks_within_the_windows_are_asked_for_and_moved_once() -> None:
    world = opened(6 * BLOCK + 3, BLOCK + 4, 1)
    grant = world.granted[LANDING]
    assert [(it.first, len(it.block_ids)) for it in grant.windows] == [(5, 2), (6, 1)]
    assert len(grant.block_ids) == 7
    for num_tokens in (BLOCK, 3 * BLOCK + 1, 6 * BLOCK, 6 * BLOCK + 3):
        world.compute(1, num_tokens)
        world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, landed.num_bad_pieces) == (6 * BLOCK + 3, 0)
    assert landed.windows == grant.windows
    assert world.push.counters.num_bytes.total() == 8 * (7 + 2 + 1)
    assert is_empty(world)


def test_what_is_cached_for_all_groups_is_not_moved_again() -> None:
    world = WindowWorld(
        BlockPool(16, BLOCK),
        group_pools=[GroupPool(2 * BLOCK + 1, 8)],
        layers=TWO_GROUPS,
        sources=ONE_RANK,
        readers=ONE_RANK,
    )
    world.hold(1, 4, [{2, 3}])
    keys = tuple(block_key(1, index) for index in range(5))
    world.ask(request(1, 5 * BLOCK + 1, block_keys=keys))
    world.settle()
    grant = world.granted[LANDING]
    assert (grant.num_held_tokens, len(grant.block_ids)) == (4 * BLOCK, 2)
    assert [(it.first, len(it.block_ids)) for it in grant.windows] == [(4, 2)]
    assert world.landing.num_group_references == (3,), "block 3 is held, 2 is behind the window at the end"
    world.compute(1, 5 * BLOCK + 1)
    world.settle()
    (blocks,) = world.joined[LANDING].windows
    assert (blocks.first, len(blocks.block_ids)) == (3, 3)
    assert blocks.block_ids[0] == world.group_pools[0].find(keys[3])


def test_a_prompt_that_is_held_whole_moves_nothing() -> None:
    world = WindowWorld(
        BlockPool(16, BLOCK),
        group_pools=[GroupPool(BLOCK, 8)],
        layers=TWO_GROUPS,
        sources=ONE_RANK,
        readers=ONE_RANK,
    )
    world.hold(1, 3, [{2}])
    world.ask(request(1, 3 * BLOCK, block_keys=tuple(block_key(1, index) for index in range(3))))
    world.settle()
    assert world.granted[LANDING].windows == (BlockSpan(3, ()),)
    world.compute(1, 3 * BLOCK)
    world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, world.ended) == (3 * BLOCK, {"r1": ""})
    assert world.push.counters.num_bytes.total() == 0


@pytest.mark.parametrize(
    "windows",
    [
        (),
        (BlockSpan(1, (5,)),),
        (BlockSpan(0, (5,)),),
        (BlockSpan(1, (5, 6)),),
        (BlockSpan(-1, (5, 6, 7)),),
        (BlockSpan(1, (5,)), BlockSpan(1, (5,))),
    ],
)
def test_a_grant_whose_windows_do_not_fit_is_given_back(windows: tuple[BlockSpan, ...]) -> None:
    world = WindowWorld(BlockPool(8, BLOCK), group_pools=[GroupPool(BLOCK, 8)], layers=TWO_GROUPS)
    world.ask(request(1, 2 * BLOCK))
    world.do_push(world.push.granted(DECODE, LandingGrant(LANDING, 0, (0, 1), windows), 0.0))
    assert world.ended == ({} if windows == (BlockSpan(1, (5,)),) else {"r1": "peer"})


def test_a_landing_waits_for_free_blocks_of_every_group() -> None:
    pools = [GroupPool(4 * BLOCK, 4), GroupPool(BLOCK, 4)]
    world = WindowWorld(BlockPool(16, BLOCK), group_pools=pools, layers=THREE_GROUPS)
    taken = world.group_pools[0].allocate(2)
    world.ask(request(1, 2 * BLOCK))
    world.settle()
    assert (world.landing.num_waiting, world.pool.num_referenced) == (1, 0)
    assert not world.group_pools[1].num_references, "all is taken together"
    world.group_pools[0].release(taken)
    world.settle()
    assert world.landing.num_open == 1
    world.ask(request(2, 4 * BLOCK))
    world.deliver_to_decode()
    refusal = world.to_prefill[-1]
    assert isinstance(refusal, LandingRefusal)
    assert refusal.reason == "a window of 64 tokens needs 5 blocks, of 4"


def test_a_refusal_for_want_of_states_names_them() -> None:
    pool = GroupPool(2, 1, has_states=True)
    world = WindowWorld(BlockPool(16, BLOCK), group_pools=[pool], layers=TWO_GROUPS)
    world.ask(request(1, 2 * BLOCK))
    world.deliver_to_decode()
    refusal = world.to_prefill[-1]
    assert isinstance(refusal, LandingRefusal)
    assert refusal.reason == "a recurrent state needs 2 blocks, of 1"


def flip_block(world: World, group: int, index: int) -> None:
    """Let a block of request 1 arrive with a wrong value."""
    grant = world.granted[LANDING]
    blocks = (BlockSpan(0, grant.block_ids), *grant.windows)[group]
    block = blocks.block_ids[index - blocks.first]
    while world.writers[0].write():
        for target in world.targets:
            for key in [key for key in target.memory if key[:2] == (group, block)]:
                target.memory[key] = -1


@pytest.mark.parametrize(
    ("group", "index", "num_valid"),
    [
        (0, 5, 5 * BLOCK),  # the window at that border is the same
        (0, 2, 0),  # nobody has the windows before that border
        (1, 5, 5 * BLOCK),
        (1, 4, 0),
        (2, 5, 5 * BLOCK),
        (1, 3, 0),
    ],
)
def test_what_is_valid_ends_where_every_group_can_continue(group: int, index: int, num_valid: int) -> None:
    world = opened(5 * BLOCK + 3, 2 * BLOCK, 4 * BLOCK)
    world.compute(1, 5 * BLOCK + 3)
    for writer in world.writers:
        while writer.handle():
            pass
    flip_block(world, group, index)
    world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, landed.num_bad_pieces) == (num_valid, 1)
    assert is_empty(world)


@pytest.mark.parametrize(
    "sums",
    [
        Manifest(LANDING, (PieceSum(0, 0, WHOLE[0], 1),), 1),
        Manifest(LANDING, (PieceSum(2, 0, WHOLE[0], 1),), 2),
        Manifest(LANDING, (PieceSum(2, 0, WHOLE[0], 1),), -1),
        Manifest(LANDING, (PieceSum(3, 0, WHOLE[0], 1),), 1),
    ],
)
def test_a_manifest_of_blocks_that_a_group_does_not_await_ends_the_landing(sums: Manifest) -> None:
    world = opened(3 * BLOCK, BLOCK + 1)
    world.do_landing(world.landing.manifest(PREFILL, sums, 0.0))
    assert "the manifest names" in world.lost[0]
    assert world.group_pools[0].num_quarantined == len(world.granted[LANDING].windows[0].block_ids)
    world.settle()
    assert is_empty(world)


def test_the_ranks_open_and_verify_the_blocks_of_each_group() -> None:
    world = opened(3 * BLOCK, BLOCK + 1)
    grant = world.granted[LANDING]
    (target,) = world.targets
    target.orders.clear()
    actions = world.landing.manifest(PREFILL, Manifest(LANDING, (PieceSum(2, 0, WHOLE[0], 7),), 1), 0.0)
    world.do_landing(actions)
    (order,) = target.orders
    assert isinstance(order, VerifyOrder)
    assert (order.group, order.pieces[0].block_id) == (1, grant.windows[0].block_ids[0])


def test_blocks_that_a_growing_sequence_no_longer_has_are_not_pushed() -> None:
    world = opened(8 * BLOCK, BLOCK + 1, num_blocks=16, is_growing=True)
    (granted,) = world.granted[LANDING].windows
    assert (granted.first, len(granted.block_ids)) == (0, 8), "nobody knows yet where it ends"
    world.compute(1, 4 * BLOCK)
    pushes = [order for order in world.writers[0].orders if isinstance(order, PushOrder)]
    moves = {push.group: [(it.src_block, it.block_index) for it in push.moves] for push in pushes}
    assert moves == {
        0: [(source_block(1, 0, index), index) for index in range(4)],
        1: [(source_block(1, 1, 3), 3)],
    }
    world.settle()
    world.push.end_at("r1", 0, 5 * BLOCK)
    world.num_handed_over["r1"] = 5 * BLOCK
    world.compute(1, 5 * BLOCK)
    world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, landed.windows) == (
        5 * BLOCK,
        (BlockSpan(4, granted.block_ids[4:]),),
    )
    assert is_empty(world)


def test_what_the_writer_freed_while_it_was_pushed_does_not_count() -> None:
    """The sums of such a block hold, since they are of what was sent; but that may be another sequence's."""
    world = opened(8 * BLOCK, BLOCK + 1, num_blocks=16, is_growing=True)
    world.compute(1, 2 * BLOCK)
    world.compute(1, 4 * BLOCK)  # nothing is written yet, and the first blocks are behind the window
    assert (1, source_block(1, 1, 0)) in world.reused
    world.settle()
    world.push.end_at("r1", 0, 5 * BLOCK)
    world.num_handed_over["r1"] = 5 * BLOCK
    world.writers[0].num_flips = 1  # the last block of the first group
    world.compute(1, 5 * BLOCK)
    world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_bad_pieces, landed.num_valid_tokens) == (1, 0)
    assert is_empty(world)


def with_state(num_tokens: int, *, is_growing: bool = False) -> WindowWorld:
    """A world with a landing of request 1, of layers with a state beside those without a window."""
    pools = [GroupPool(2, 4, has_states=True)]
    world = WindowWorld(BlockPool(16, BLOCK), True, ONE_RANK, ONE_RANK, pools, TWO_GROUPS)
    world.ask(request(1, num_tokens, is_growing=is_growing))
    world.settle()
    return world


def test_a_state_is_pushed_once_when_its_sequence_rests() -> None:
    world = with_state(3 * BLOCK + 5)
    (granted,) = world.granted[LANDING].windows
    assert (granted.first, len(granted.block_ids)) == (3, 1)
    for num_tokens in (BLOCK, 2 * BLOCK, 3 * BLOCK + 5):
        world.compute(1, num_tokens)
        world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, landed.windows) == (3 * BLOCK + 5, (granted,))
    assert world.push.counters.num_bytes.total() == 8 * (4 + 1)
    assert is_empty(world)


def test_a_growing_sequence_has_one_place_for_its_state_wherever_it_ends() -> None:
    world = with_state(9 * BLOCK, is_growing=True)
    (granted,) = world.granted[LANDING].windows
    assert (granted.first, len(granted.block_ids)) == (8, 1)
    world.compute(1, 4 * BLOCK)
    world.settle()
    world.push.end_at("r1", 0, 4 * BLOCK + 3)
    world.num_handed_over["r1"] = 4 * BLOCK + 3
    world.compute(1, 4 * BLOCK + 3)
    world.settle()
    landed = world.joined[LANDING]
    assert landed.windows == (BlockSpan(4, granted.block_ids),)
    assert is_empty(world)


@pytest.mark.parametrize("group", [0, 1])
def test_behind_a_bad_piece_nothing_of_a_state_is_valid(group: int) -> None:
    """The state behind an earlier token is gone: the sequence is computed from its first token on."""
    world = with_state(3 * BLOCK + 5)
    world.compute(1, 3 * BLOCK + 5)
    for writer in world.writers:
        while writer.handle():
            pass
    flip_block(world, group, 3)
    world.settle()
    landed = world.joined[LANDING]
    assert (landed.num_valid_tokens, landed.windows) == (0, (BlockSpan(0, ()),))
    assert is_empty(world)


# -------------------------------------------------------------------------------- every interleaving

SHAPES: list[tuple[Shard, ...]] = [WHOLE, WHOLE * 2, STAGES, COLUMNS]
GROWING = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), NUMBERS, st.integers(17, 80)),
        st.tuples(st.just("end"), NUMBERS, st.integers(1, 20)),
        st.tuples(st.just("compute"), NUMBERS, st.integers(1, 80)),
        st.tuples(st.just("flip"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("writers"), st.just(0), st.just(0)),
    ),
    max_size=12,
)
WINDOWS = st.lists(st.sampled_from([1, 16, 17, 20, 33, 40, 100]), min_size=1, max_size=2)


@given(
    windows=WINDOWS,
    held=st.tuples(st.integers(0, 4), st.lists(st.sets(st.integers(0, 4)), min_size=2, max_size=2)),
    events=st.tuples(GROWING, EVENTS, GROWING).map(lambda it: [*it[0], *it[1], *it[2]]),
    one_sided=st.booleans(),
    ranks=st.tuples(st.sampled_from(SHAPES), st.sampled_from(SHAPES)),
    is_finished=st.booleans(),
    has_state=st.booleans(),
)
@settings(max_examples=examples(500), deadline=None)
def test_no_interleaving_joins_what_is_not_there_or_leaks_in_any_group(
    windows: list[int],
    held: tuple[int, list[set[int]]],
    events: list[tuple[str, int, int]],
    one_sided: bool,
    ranks: tuple[tuple[Shard, ...], tuple[Shard, ...]],
    is_finished: bool,
    has_state: bool,
) -> None:
    """With a state, that is the second group behind the first, or the only one."""
    pool, num_held = BlockPool(14, BLOCK), held[0]
    pools = [GroupPool(window, 14) for window in (windows[1:] if has_state else windows)]
    pools += [GroupPool(2, 4, has_states=True)] * has_state
    layers = TWO_GROUPS if len(pools) == 1 else THREE_GROUPS
    sources, readers = (tuple(enumerate(shards)) for shards in ranks)
    world = WindowWorld(pool, one_sided, sources, readers, pools, layers)
    held_windows = [set() if it.has_states else its for it, its in zip(pools, held[1], strict=False)]
    world.hold(0, num_held, held_windows)
    interleaving = Interleaving(world, num_keys=4)
    for event in events:
        interleaving.do(*event)
        check_references(world, num_held, held_windows)
    if is_finished:
        for number in interleaving.sizes:
            interleaving.do("compute", number, 80)
            world.settle()
    interleaving.end()
    check_references(world, num_held, held_windows)
    assert pool.num_quarantined == 0
    assert not any(window.num_quarantined for window in pools)
    assert world.landing.num_group_references == (0,) * len(pools)
    assert world.landing.num_open == world.landing.num_waiting == 0
    if world.prefill_lives:
        assert set(world.ended) == {f"r{number}" for number in interleaving.sizes}


def check_references(world: WindowWorld, num_held: int, held: list[set[int]]) -> None:
    """Every reference is a landing's, or of a block that the test holds."""
    assert world.pool.num_references == world.landing.num_references + num_held
    of_landings = world.landing.num_group_references
    for window, count, indices in zip(world.group_pools, of_landings, held, strict=True):
        assert window.num_references == count + len(indices)
