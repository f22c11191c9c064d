"""Moves that something prevents: the stream goes on where it was, or its gateway hears that it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import SHAPES, SINGLE, House, until
from e2e_migration import NUM_TOKENS, fired, joined, move, moved_and_right, prompt, rule, started

from workers.config import Parallel
from workers.messages import Cancel

pytestmark = pytest.mark.parametrize("shape", SHAPES, indirect=True)


async def test_a_target_that_is_too_small_leaves_the_stream_where_it_is(house: House) -> None:
    source = await house.add("d0", "decode")
    small = await house.add("d1", "decode", engine={"kv_tokens": 256})
    await joined(source, small)
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
    await joined(source, target)
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
    await joined(source, target)
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
    await joined(source, target)
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
@pytest.mark.parametrize("other", [Parallel(tp=2), Parallel(pp=2, devices=("cpu", "cpu"))])
async def test_a_stream_moves_to_a_replica_of_another_shape(house: House, other: Parallel) -> None:
    source = await house.add("d0", "decode")
    target = await house.add("d1", "decode", parallel=other)
    await joined(source, target)
    await house.add("b0", "both", parallel=SINGLE)
    submission = house.submission("shape", prompt(70), max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
    heard = await started(house, source, submission)
    move(submission, source, target)
    await moved_and_right(house, heard, submission)
    await joined(target, source)
    back = house.submission("back", prompt(71), max_tokens=NUM_TOKENS)
    heard = await started(house, target, back)
    move(back, target, source)
    await moved_and_right(house, heard, back)
    await house.quiet()
