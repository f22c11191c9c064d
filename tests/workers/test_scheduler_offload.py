"""What the scheduler promises of blocks in host memory and in the store; the walk mixes it with the rest."""

from __future__ import annotations

import pytest
from staged_engine import BLOCK_TOKENS, StagedEngine, ask, engine, finish, plan, right, step, unpack

from kvtransfer.blocks.keys import extend_keys
from workers.errors import CapacityError
from workers.messages.rank_channel import BlockCopy, StepPlan
from workers.scheduler.offload import most_local_tokens
from workers.scheduler.sequence import HeldBack
from workers.scheduler.step import PromptDone


def sequence_of(side: StagedEngine, name: str, sample: int = 0) -> list[int]:
    """The block table of a running sequence; empty when it does not run."""
    for sequence in side.scheduler.life.running:
        if sequence.request.submission.request_id == name and sequence.index == sample:
            return sequence.block_ids
    return []


def places(side: StagedEngine, name: str) -> str:
    """The table as letters: in host memory, or on the device."""
    return "".join("h" if block >= side.num_blocks else "d" for block in sequence_of(side, name))


def moves(side: StagedEngine, made: StepPlan) -> list[BlockCopy]:
    return [copy for copy in made.copies if copy.dst_block >= side.num_blocks]


def test_a_prompt_of_four_times_the_device_is_computed() -> None:
    side = engine(num_blocks=2, offload=8, chunk_tokens=8)
    submission = ask(prompt=list(range(1, 33)), max_tokens=6)
    side.scheduler.submit(submission, 0.0)
    assert finish(side) == {("a", 0): right(submission)}
    assert side.scheduler.life.num_preemptions == 0
    assert side.scheduler.life.tables.host.num_used == 0, "its blocks in host memory are free"


def test_the_oldest_blocks_move_and_the_chunk_computes_into_their_place() -> None:
    side = engine(num_blocks=4, offload=8, chunk_tokens=8, offload_at=1.0)
    side.scheduler.submit(ask(prompt=list(range(1, 25)), max_tokens=1), 0.0)
    step(side)
    step(side)
    before = list(sequence_of(side, "a"))
    third = plan(side)
    (entry,) = side.works(third)
    assert [copy.src_block for copy in moves(side, third)] == before[:2]
    assert entry.block_ids[:2] == tuple(copy.dst_block for copy in moves(side, third))
    assert entry.block_ids[2:4] == tuple(before[2:])
    assert set(entry.block_ids[4:]) == set(before[:2]), "the places that the copies left"
    assert side.scheduler.life.tables.host.num_used == 2
    side.settle(0.0)
    side.check()


def test_a_chunk_that_does_not_fit_the_device_is_cut() -> None:
    side = engine(num_blocks=2, offload=8, chunk_tokens=16, max_batch_tokens=16)
    side.scheduler.submit(ask(prompt=list(range(1, 21)), max_tokens=1), 0.0)
    sizes = []
    while side.plan(0.0):
        sizes.append(side.plans[-1].num_tokens)
        side.settle(0.0)
    assert sizes == [8, 8, 4]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_blocks_that_are_still_computed_are_waited_for(num_blocks: int) -> None:
    side = engine(num_blocks=num_blocks, offload=8, chunk_tokens=8)
    side.scheduler.submit(ask(prompt=list(range(1, 33)), max_tokens=1), 0.0)
    plan(side)
    assert not side.plan(0.0), "nothing may move, and nobody is preempted"
    assert side.scheduler.life.num_preemptions == 0
    side.settle(0.0)
    assert moves(side, plan(side))


def test_the_lowest_priority_and_latest_arrival_gives_first() -> None:
    side = engine(num_blocks=12, offload=12, max_sequences=3, offload_at=1.0, offload_share=0.5)
    for name, priority in (("a", 0), ("b", 1), ("c", 0)):
        side.scheduler.submit(ask(name, [ord(name)] * 8, max_tokens=20, priority=priority), 0.0)
    order: list[str] = []
    while len(order) < 3:
        step(side)
        tables = {name: places(side, name) for name in "abc"}
        moved = [name for name in "abc" if name not in order and "h" in tables[name]]
        for name in order if moved else ():
            assert tables[name].count("h") == len(tables[name]) // 2, "it had more to give"
        order += moved
    assert order == ["c", "a", "b"]
    assert side.scheduler.life.num_preemptions == 0
    finish(side)


def test_no_more_than_its_share_of_a_sequence_moves_and_then_the_last_is_preempted() -> None:
    side = engine(num_blocks=8, offload=40, offload_at=1.0, offload_share=0.5)
    asked = [ask(name, [ord(name)] * 8, max_tokens=28) for name in "ab"]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    outputs: dict[str, list[int]] = {"a": [], "b": []}
    tables: list[str] = []
    while side.scheduler.counts.num_running or side.scheduler.counts.num_waiting:
        if side.scheduler.life.num_preemptions == 0:
            tables = [places(side, name) for name in "ab" if outputs[name]]
        for delta in step(side).tokens:
            outputs[delta.request_id] += unpack(delta.tokens)
    assert tables == ["hhhhdddd", "hhhhdddd"], "half of each, and the device is full"
    assert side.scheduler.life.num_preemptions == 1
    assert outputs == {submission.request_id: right(submission) for submission in asked}


@pytest.mark.parametrize("offload_at", [0.5, 0.75])
def test_above_the_mark_blocks_move_before_anyone_needs_them(offload_at: float) -> None:
    side = engine(num_blocks=8, offload=8, chunk_tokens=16, offload_at=offload_at)
    side.scheduler.submit(ask(prompt=list(range(1, 33)), max_tokens=4), 0.0)
    num_used = []
    for _ in range(3):
        made = plan(side)
        sources = [copy.src_block for copy in moves(side, made)]
        assert all(side.pool.is_referenced(source) for source in sources), "free only when it is reported"
        side.settle(0.0)
        side.check()
        num_used.append(side.pool.num_referenced)
    assert num_used[-1] == 8 * offload_at
    finish(side)


def test_shared_blocks_stay_and_the_next_ones_move() -> None:
    side = engine(num_blocks=6, offload=8, offload_at=1.0)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    side.scheduler.submit(ask("a", [*shared, 9], max_tokens=16), 0.0)
    step(side)
    side.scheduler.submit(ask("b", [*shared, 10], max_tokens=16), 0.0)
    while side.scheduler.life.tables.host.num_used < 2:
        step(side)
    assert sequence_of(side, "a")[:2] == sequence_of(side, "b")[:2]
    assert places(side, "b").startswith("ddh")
    assert side.scheduler.life.num_preemptions == 0
    finish(side)


def test_samples_share_what_their_prompt_has_in_host_memory() -> None:
    side = engine(num_blocks=4, offload=12, chunk_tokens=8)
    submission = ask(prompt=list(range(1, 26)), n=3, max_tokens=5)
    side.scheduler.submit(submission, 0.0)
    while len(side.scheduler.life.running) < 3:
        step(side)
    tables = [sequence_of(side, "a", index)[:3] for index in range(3)]
    assert tables[0] == tables[1] == tables[2]
    assert side.scheduler.life.tables.host.num_used < 9
    assert finish(side) == {("a", index): right(submission, index)[1:] for index in range(3)}


def test_a_prompt_to_hand_over_stays_on_the_device() -> None:
    side = engine(num_blocks=8, offload=20, chunk_tokens=16, offload_at=0.5)
    side.scheduler.submit(ask("out", list(range(1, 21)), decode="d", max_tokens=3), 0.0)
    side.scheduler.grant_landing("out", 1)
    step(side)
    side.scheduler.submit(ask("local", list(range(31, 51)), max_tokens=4), 0.0)
    done: list[PromptDone] = []
    while not done:
        made = plan(side)
        assert places(side, "out") == "ddddd"
        assert all(copy.src_block not in sequence_of(side, "out") for copy in moves(side, made))
        done = side.settle(0.0).prompts
        side.check()
    while side.plan(0.0):
        side.settle(0.0)
        side.check()
    assert side.scheduler.counts.num_running == 0
    assert side.scheduler.finish_hand_over("out", 1)


def test_a_prompt_to_hand_over_waits_for_what_runs_and_reserves_its_blocks() -> None:
    """Device blocks that a prompt in chunks will still need are not given away."""
    side = engine(num_blocks=4, offload=4, chunk_tokens=4, offload_share=0.5)
    local = ask("local", list(range(1, 25)), max_tokens=2)
    side.scheduler.submit(local, 0.0)
    step(side)
    side.scheduler.submit(ask("out", [5] * 8, decode="d", max_tokens=3), 0.0)
    side.scheduler.grant_landing("out", 1)
    outputs = []
    while side.scheduler.counts.num_running:
        outcome = step(side)
        outputs += [delta.request_id for delta in outcome.tokens]
    assert outputs[:2] == ["local", "local"]
    assert side.scheduler.life.num_preemptions == 0
    while side.plan(0.0):
        side.settle(0.0)
    assert side.scheduler.finish_hand_over("out", 1)


def test_a_prompt_waits_until_the_rest_of_those_before_it_fits_too() -> None:
    side = engine(num_blocks=4, offload=6, chunk_tokens=4)
    asked = [ask(name, list(range(at, at + 24)), max_tokens=2) for name, at in (("a", 1), ("b", 31))]
    for submission in asked:
        side.scheduler.submit(submission, 0.0)
    step(side)
    assert (side.scheduler.counts.num_running, side.scheduler.counts.num_waiting) == (1, 1)
    assert finish(side) == {(it.request_id, 0): right(it) for it in asked}
    assert side.scheduler.life.num_preemptions == 0


def test_blocks_come_back_when_others_have_left() -> None:
    side = engine(num_blocks=12, offload=16, chunk_tokens=16, offload_at=1.0)
    side.scheduler.submit(ask("a", [1] * 16, max_tokens=20, priority=-1), 0.0)
    side.scheduler.submit(ask("b", list(range(1, 13)) * 3, max_tokens=2), 0.0)
    step(side)
    while side.scheduler.is_here("b", 1):
        step(side)
        assert side.scheduler.life.num_preemptions == 0
    assert "h" in places(side, "a")
    expected = right(ask("a", [1] * 16, max_tokens=20, priority=-1))
    for _ in range(4):
        step(side)
    assert "h" not in places(side, "a")
    (rest,) = finish(side).values()
    assert rest == expected[-len(rest) :]


def test_the_place_of_a_block_that_comes_back_is_held_until_it_is_there() -> None:
    """The sequence may end meanwhile: it need not be in the plan that brings its blocks."""
    side = engine(num_blocks=12, num_stages=2, offload=16, chunk_tokens=16, offload_at=1.0)
    for name in "ab":
        side.scheduler.submit(ask(name, [ord(name)] * 16, max_tokens=20, priority=-1), 0.0)
    while not (places(side, "a") and places(side, "b")):
        step(side)
    side.scheduler.submit(ask("c", list(range(1, 13)) * 2, max_tokens=2), 0.0)
    while side.scheduler.is_here("c", 1):
        step(side)
    brought: dict[str, set[int]] = {}
    while not brought:
        made = plan(side)
        back = {copy.dst_block for copy in made.copies if copy.src_block >= side.num_blocks}
        named = {block for work in side.works(made) for block in work.block_ids}
        for name in "ab":
            if not named.issuperset(sequence_of(side, name)) and back & set(sequence_of(side, name)):
                brought[name] = back & set(sequence_of(side, name))
        if not brought:
            side.settle(0.0)
    ((name, blocks),) = brought.items()
    assert side.scheduler.cancel(name, 1)
    assert all(side.pool.is_referenced(block) for block in blocks)
    side.settle(0.0)
    side.check()
    assert not any(side.pool.is_referenced(block) for block in blocks)
    finish(side)


def test_a_cancelled_or_preempted_sequence_leaves_host_memory_when_its_plans_are_reported() -> None:
    side = engine(num_blocks=2, offload=8, chunk_tokens=8)
    side.scheduler.submit(ask(prompt=list(range(1, 29)), max_tokens=8), 0.0)
    for _ in range(3):
        step(side)
    plan(side)
    assert side.scheduler.life.tables.host.num_used >= 4
    assert side.scheduler.cancel("a", 1)
    assert side.scheduler.life.tables.host.num_used >= 4, "a plan that is out reads them"
    side.settle(0.0)
    side.check()
    assert side.scheduler.life.tables.host.num_used == 0


def test_the_request_takes_what_device_and_host_have_and_not_more() -> None:
    side = engine(num_blocks=4, offload=2, max_sequences=4)
    with pytest.raises(CapacityError, match="24 tokens and a new one exceed the 24 tokens of KV blocks"):
        side.scheduler.submit(ask(prompt=[1] * 24), 0.0)
    with pytest.raises(CapacityError, match="17 tokens and a new one exceed the 17 tokens of KV blocks"):
        side.scheduler.submit(ask(prompt=[1] * 17, decode="d"), 0.0)
    submission = ask(prompt=[1] * 20, max_tokens=1000)
    side.scheduler.submit(submission, 0.0)
    assert len(finish(side)["a", 0]) == 24 - 20
    assert side.scheduler.limits.max_local_tokens == 24


@pytest.mark.parametrize(
    ("share", "device", "host", "blocks"),
    [
        (0.9, 4, 0, 4),
        (0.9, 4, 6, 10),
        (0.9, 4, 100, 40),
        (0.5, 4, 100, 8),
        (0.0, 4, 100, 4),
        (1.0, 4, 100, 104),
    ],
)
def test_the_longest_context(share: float, device: int, host: int, blocks: int) -> None:
    tokens = most_local_tokens(share, device, host, BLOCK_TOKENS)
    assert tokens // BLOCK_TOKENS in (blocks, blocks + 1), "a share of a block counts down"
    assert tokens // BLOCK_TOKENS - min(host, int(share * (tokens // BLOCK_TOKENS))) <= device


# ------------------------------------------------------------------------------------------- the store


def test_a_moved_block_leaves_the_index_and_what_follows_still_goes_to_the_store() -> None:
    side = engine(num_blocks=4, offload=8, chunk_tokens=8, has_store=True)
    submission = ask(prompt=list(range(1, 29)), max_tokens=1)
    side.scheduler.submit(submission, 0.0)
    (need,) = side.scheduler.loads_wanted()
    side.scheduler.end_load(need, {})
    finished = []
    outputs: list[int] = []
    while not outputs:
        outcome = step(side)
        outputs += [token for delta in outcome.tokens for token in unpack(delta.tokens)]
        for block in side.scheduler.life.tables.take_finished():
            finished.append(block)
            if not outputs:
                held = side.pool.find(block.key)
                assert held is not None, "it is the newest: it has not moved"
                assert held < side.num_blocks
    assert [block.key for block in finished] == list(submission.block_keys)
    assert [block.parent for block in finished] == [b"", *submission.block_keys[:-1]]
    assert {block.chain for block in finished} == {submission.block_keys[0]}
    assert [part.keys for part in side.pool.snapshot()] == [], "nothing of it can be found any more"


def test_a_load_is_asked_once_and_waited_for_and_only_so_many_at_a_time() -> None:
    side = engine(has_store=True, max_loading=2, chunk_tokens=16)
    for name in "abc":
        side.scheduler.submit(ask(name, [ord(name)] * 9, max_tokens=1), 0.0)
    needs = side.scheduler.loads_wanted()
    assert [(need.request_id, len(need.keys), need.num_held) for need in needs] == [("a", 2, 0), ("b", 2, 0)]
    assert side.scheduler.loads_wanted() == []
    assert not side.plan(0.0), "all wait for the store"
    side.scheduler.end_load(needs[1], {"dram": 4})
    assert [need.request_id for need in side.scheduler.loads_wanted()] == ["c"]
    outcome = step(side)
    assert [delta.request_id for delta in outcome.tokens] == ["b"]
    assert outcome.prompts[0].num_loaded_tokens == {"dram": 4}
    side.scheduler.cancel("c", 1)
    side.scheduler.end_load(needs[0], {})
    assert list(finish(side)) == [("a", 0)]


def test_those_behind_a_load_overtake_it_until_it_lacks_blocks_for_long() -> None:
    side = engine(has_store=True, max_loading=2, chunk_tokens=16)
    for name in "abc":
        side.scheduler.submit(ask(name, [ord(name)] * 9, max_tokens=1), 0.0)
    first, second = side.scheduler.loads_wanted()
    side.scheduler.end_load(second, {})
    side.scheduler.hold_back(first, HeldBack.EVERYBODY)
    assert not side.plan(0.0), "b would take the blocks that a waits for"
    side.scheduler.hold_back(first, HeldBack.NOBODY)
    assert [delta.request_id for delta in step(side).tokens] == ["b"]
    side.scheduler.hold_back(first, HeldBack.EVERYBODY)
    side.scheduler.cancel("a", 1)
    (third,) = side.scheduler.loads_wanted()
    side.scheduler.end_load(first, {})
    side.scheduler.end_load(third, {})
    assert list(finish(side)) == [("c", 0)]


def test_what_the_device_holds_needs_no_load() -> None:
    side = engine(has_store=True)
    prompt = list(range(1, 13))
    keys = extend_keys(b"root", ask(prompt=prompt).prompt, BLOCK_TOKENS)
    side.scheduler.submit(ask("a", prompt, max_tokens=1), 0.0)
    (need,) = side.scheduler.loads_wanted()
    assert need.keys == tuple(keys[:2]), "the block of the last token is computed"
    side.scheduler.end_load(need, {})
    finish(side)
    assert [block.key for block in side.scheduler.life.tables.take_finished()] == list(keys)
    assert side.scheduler.life.tables.take_finished() == []
    side.scheduler.submit(ask("b", prompt, max_tokens=1), 0.0)
    assert side.scheduler.loads_wanted() == []
    assert step(side).prompts[0].num_cached_tokens == 8
    assert side.scheduler.life.tables.take_finished() == []
