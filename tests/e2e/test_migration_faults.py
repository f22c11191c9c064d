"""Moves that something prevents: the stream goes on where it was, or its gateway hears that it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_harness import (
    NUM_TOKENS,
    SHAPES,
    SINGLE,
    E2eHarness,
    fired,
    joined,
    move,
    moved_and_right,
    prompt,
    rule,
    started,
    until,
)

from workers.config import Parallel
from workers.messages.link import Cancel

pytestmark = pytest.mark.parametrize("shape", SHAPES, indirect=True)


async def test_a_target_that_is_too_small_leaves_the_stream_where_it_is(harness: E2eHarness) -> None:
    source = await harness.add("d0", "decode")
    small = await harness.add("d1", "decode", engine={"kv_tokens": 256})
    await joined(source, small)
    submission = harness.submission("big", prompt(30, 300), max_tokens=NUM_TOKENS)
    heard = await started(harness, source, submission)
    move(submission, source, small)
    await harness.ended(submission)
    assert heard.failure is None
    assert len(heard.sequence()) == NUM_TOKENS
    assert heard.hand_over is None
    (ended,) = heard.moves
    assert "this replica has 16" in ended.error
    assert (source.core.migration.num_migrated, source.core.migration.num_failed) == (0, 1)
    await harness.quiet()


async def test_a_flipped_bit_on_the_way_is_computed_again(harness: E2eHarness, tmp_path: Path) -> None:
    fault = rule("push.corrupt", "corrupt", tmp_path, 4)
    source = await harness.add("d0", "decode", faults=[fault])
    target = await harness.add("b0", "both")
    await joined(source, target)
    submission = harness.submission("flip", prompt(40), max_tokens=NUM_TOKENS, temperature=1.0)
    heard = await started(harness, source, submission)
    move(submission, source, target)
    await moved_and_right(harness, heard, submission)
    assert fired(fault)
    assert target.core.kv_receiver.num_checksum_failures == 1
    await harness.quiet()


async def test_a_cancel_in_the_middle_of_a_move_frees_everything(harness: E2eHarness, tmp_path: Path) -> None:
    fault = rule("push.half", "stop", tmp_path, 2)
    source = await harness.add("d0", "decode", faults=[fault])
    target = await harness.add("d1", "decode")
    await joined(source, target)
    submission = harness.submission("cancel", prompt(50), max_tokens=NUM_TOKENS)
    await started(harness, source, submission)
    move(submission, source, target)
    await until(lambda: fired(fault), "the writer stops in the middle")
    for replica in (source, target):
        replica.send(Cancel(submission.request_id, submission.attempt))
    await until(lambda: target.core.pool.num_quarantined > 0, "its blocks wait for the writer")
    harness.wake_all()
    await harness.quiet()
    assert len(source.core.migration) == 0


async def test_a_target_that_dies_in_the_middle_of_a_move_is_not_missed(
    harness: E2eHarness, tmp_path: Path
) -> None:
    fault = rule("verify", "kill", tmp_path)
    source = await harness.add("b0", "both")
    target = await harness.add("d1", "decode", faults=[fault])
    await joined(source, target)
    submission = harness.submission("orphan", prompt(60), max_tokens=NUM_TOKENS)
    heard = await started(harness, source, submission)
    move(submission, source, target)
    await until(lambda: fired(fault), "the target dies")
    await until(lambda: bool(heard.moves or heard.failure), "the gateway hears of it")
    if heard.failure is None:  # the state was not on its way yet
        await harness.ended(submission)
        assert len(heard.sequence()) == NUM_TOKENS
    else:
        assert heard.failure.code == "leaving"
    await harness.quiet(source)


@pytest.mark.slow
@pytest.mark.parametrize("other", [Parallel(tp=2), Parallel(pp=2, devices=("cpu", "cpu"))])
async def test_a_stream_moves_to_a_replica_of_another_shape(harness: E2eHarness, other: Parallel) -> None:
    source = await harness.add("d0", "decode")
    target = await harness.add("d1", "decode", parallel=other)
    await joined(source, target)
    await harness.add("b0", "both", parallel=SINGLE)
    submission = harness.submission("shape", prompt(70), max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
    heard = await started(harness, source, submission)
    move(submission, source, target)
    await moved_and_right(harness, heard, submission)
    await joined(target, source)
    back = harness.submission("back", prompt(71), max_tokens=NUM_TOKENS)
    heard = await started(harness, target, back)
    move(back, target, source)
    await moved_and_right(harness, heard, back)
    await harness.quiet()
