"""Streams that move between decode replicas while they run: the same tokens, nothing computed twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from walk_house import BLOCK_TOKENS, Heard, House, Replica, until

from kvtransfer.faults import FaultRule
from workers.config import Parallel
from workers.messages import Cancel, Move, Submission

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLINGS: list[dict[str, Any]] = [
    {"num_logprobs": 2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "num_logprobs": 1, "seed": 12},
    {"temperature": 1.2, "frequency_penalty": 0.7, "logit_bias": {5: 2.0}, "min_p": 0.05, "seed": 13},
]
NUM_TOKENS = 160


def prompt(seed: int, num_tokens: int = 100) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


async def started(house: House, at: Replica, submission: Submission, num_tokens: int = 5) -> Heard:
    """The request runs there and has told so many tokens."""
    at.send(submission)
    heard = house.heard.setdefault((submission.request_id, submission.attempt), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) >= num_tokens, f"{num_tokens} tokens")
    return heard


def move(submission: Submission, source: Replica, target: Replica) -> None:
    source.send(Move(submission.request_id, submission.attempt, target.target))


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


def fired(fault: FaultRule) -> bool:
    return Path(fault.marker).exists() and Path(fault.marker).read_text() != ""


async def moved_and_right(house: House, heard: Heard, submission: Submission, num_moves: int = 1) -> None:
    """It ended well after so many moves, with what one engine gives."""
    await house.ended(submission)
    assert heard.failure is None, heard.failure
    assert [ended.error for ended in heard.moves] == [""] * num_moves
    assert heard.hand_over is not None
    sampling = {name: getattr(submission.sampling, name) for name in submission.sampling.__struct_fields__}
    alone = house.submission(
        f"{submission.request_id}-alone",
        [int(it) for it in memoryview(submission.prompt).cast("I")],
        seed=submission.samples[0].seed,
        **sampling,
    )
    wanted = await house.run(house.replicas["b0"], alone)
    assert heard.sequence() == wanted.sequence()
    assert heard.logprobs.keys() == wanted.logprobs.keys()
    for index, logprob in wanted.logprobs.items():
        assert heard.logprobs[index].logprob == pytest.approx(logprob.logprob, abs=1e-4)
        assert [token for token, _ in heard.logprobs[index].top] == [token for token, _ in logprob.top]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_moved_stream_has_the_tokens_of_one_that_stays(
    shared_house: House, sampling: dict[str, Any]
) -> None:
    house, at, number = shared_house, shared_house.replicas, SAMPLINGS.index(sampling)
    submission = house.submission(f"move{number}", prompt(number), max_tokens=NUM_TOKENS, **sampling)
    heard = await started(house, at["d0"], submission)
    num_before = at["d0"].brain.moving.num_moved
    move(submission, at["d0"], at["b0"])
    await moved_and_right(house, heard, submission)
    assert at["d0"].brain.moving.num_moved == num_before + 1
    assert heard.hand_over is not None
    first = heard.hand_over.first_index
    assert 5 <= first < NUM_TOKENS
    assert heard.hand_over.num_moved_bytes > 0
    await house.quiet()


async def test_a_stream_that_was_handed_over_moves_on_and_back(shared_house: House) -> None:
    """From a prefill replica to a decode replica, on to another, back, and to the prefill replica."""
    house, at = shared_house, shared_house.replicas
    submission = house.submission("tour", prompt(10), decode=at["d0"], max_tokens=1400, temperature=1.0)
    heard = await started(house, at["p0"], submission)
    for number, (source, target) in enumerate([("d0", "b0"), ("b0", "d0"), ("d0", "p0")], 1):
        move(submission, at[source], at[target])
        await until(lambda number=number: len(heard.moves) == number, f"move {number}")  # type: ignore[misc]
    await moved_and_right(house, heard, submission, num_moves=3)
    await house.quiet()


async def test_what_the_target_holds_is_not_sent(shared_house: House) -> None:
    house, at = shared_house, shared_house.replicas
    await house.run(at["b0"], house.submission("before", prompt(20)))
    submission = house.submission("held", prompt(20), max_tokens=NUM_TOKENS)
    heard = await started(house, at["d0"], submission)
    move(submission, at["d0"], at["b0"])
    await moved_and_right(house, heard, submission)
    assert heard.hand_over is not None
    assert heard.hand_over.num_held_tokens >= 96
    token_bytes = at["d0"].brain.compatibility.token_bytes
    num_moved_tokens = heard.hand_over.num_moved_bytes // token_bytes
    assert num_moved_tokens <= 4 + heard.hand_over.first_index + BLOCK_TOKENS
    await house.quiet()


async def test_a_target_that_is_too_small_leaves_the_stream_where_it_is(house: House) -> None:
    source = await house.add("d0", "decode")
    small = await house.add("d1", "decode", engine={"kv_tokens": 256})
    submission = house.submission("big", prompt(30, 300), max_tokens=NUM_TOKENS)
    heard = await started(house, source, submission)
    move(submission, source, small)
    await house.ended(submission)
    assert heard.failure is None
    assert len(heard.sequence()) == NUM_TOKENS
    assert heard.hand_over is None
    (ended,) = heard.moves
    assert "this replica has 16" in ended.error
    assert (source.brain.moving.num_moved, source.brain.moving.num_failed) == (0, 1)
    await house.quiet()


async def test_a_flipped_bit_on_the_way_is_computed_again(house: House, tmp_path: Path) -> None:
    fault = rule("push.corrupt", "corrupt", tmp_path, 4)
    source = await house.add("d0", "decode", faults=[fault])
    target = await house.add("b0", "both")
    submission = house.submission("flip", prompt(40), max_tokens=NUM_TOKENS, temperature=1.0)
    heard = await started(house, source, submission)
    move(submission, source, target)
    await moved_and_right(house, heard, submission)
    assert fired(fault)
    assert target.brain.inbound.num_checksum_failures == 1
    await house.quiet()


async def test_a_cancel_in_the_middle_of_a_move_frees_everything(house: House, tmp_path: Path) -> None:
    fault = rule("push.half", "stop", tmp_path, 2)
    source = await house.add("d0", "decode", faults=[fault])
    target = await house.add("d1", "decode")
    submission = house.submission("cancel", prompt(50), max_tokens=NUM_TOKENS)
    await started(house, source, submission)
    move(submission, source, target)
    await until(lambda: fired(fault), "the writer stops in the middle")
    for replica in (source, target):
        replica.send(Cancel(submission.request_id, submission.attempt))
    await until(lambda: target.brain.pool.num_quarantined > 0, "its blocks wait for the writer")
    house.wake_all()
    await house.quiet()
    assert len(source.brain.moving) == 0


async def test_a_target_that_dies_in_the_middle_of_a_move_is_not_missed(house: House, tmp_path: Path) -> None:
    fault = rule("verify", "kill", tmp_path)
    source = await house.add("b0", "both")
    target = await house.add("d1", "decode", faults=[fault])
    submission = house.submission("orphan", prompt(60), max_tokens=NUM_TOKENS)
    heard = await started(house, source, submission)
    move(submission, source, target)
    await until(lambda: fired(fault), "the target dies")
    await until(lambda: bool(heard.moves or heard.failure), "the gateway hears of it")
    if heard.failure is None:  # the state was not on its way yet
        await house.ended(submission)
        assert len(heard.sequence()) == NUM_TOKENS
    else:
        assert heard.failure.code == "leaving"
    await house.quiet(source)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Parallel(tp=2), Parallel(pp=2, devices=("cpu", "cpu"))])
async def test_a_stream_moves_to_a_replica_of_another_shape(house: House, shape: Parallel) -> None:
    source = await house.add("d0", "decode")
    target = await house.add("d1", "decode", parallel=shape)
    await house.add("b0", "both")
    submission = house.submission("shape", prompt(70), max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
    heard = await started(house, source, submission)
    move(submission, source, target)
    await moved_and_right(house, heard, submission)
    back = house.submission("back", prompt(71), max_tokens=NUM_TOKENS)
    heard = await started(house, target, back)
    move(back, target, source)
    await moved_and_right(house, heard, back)
    await house.quiet()
