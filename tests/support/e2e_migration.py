"""Migrate a stream between two real replicas by hand, as a gateway would have it, and what must come of
it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from e2e_harness import E2eHarness, Heard, Replica, until

from kvtransfer.common.faults import FaultRule
from workers.messages import Move, Submission

NUM_TOKENS = 160


def prompt(seed: int, num_tokens: int = 100) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


async def started(harness: E2eHarness, at: Replica, submission: Submission, num_tokens: int = 5) -> Heard:
    """The request runs there and has told so many tokens."""
    at.send(submission)
    heard = harness.heard.setdefault((submission.request_id, submission.attempt), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) >= num_tokens, f"{num_tokens} tokens")
    return heard


async def joined(source: Replica, target: Replica) -> None:
    """The path is measured: a short stream would end before that on a busy machine."""
    source.core.join_peers([target.target])
    name = target.core.identity
    await until(lambda: source.core.peers.connection(name) is not None, f"a path to {name.replica_id}")


def move(submission: Submission, source: Replica, target: Replica) -> None:
    source.send(Move(submission.request_id, submission.attempt, target.target))


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


def fired(fault: FaultRule) -> bool:
    return Path(fault.marker).exists() and Path(fault.marker).read_text() != ""


async def moved_and_right(
    harness: E2eHarness, heard: Heard, submission: Submission, num_moves: int = 1
) -> None:
    """It ended well after so many moves, with what one engine gives."""
    await harness.ended(submission)
    assert heard.failure is None, heard.failure
    assert [ended.error for ended in heard.moves] == [""] * num_moves
    assert heard.hand_over is not None
    sampling = {name: getattr(submission.sampling, name) for name in submission.sampling.__struct_fields__}
    alone = harness.submission(
        f"{submission.request_id}-alone",
        [int(it) for it in memoryview(submission.prompt).cast("I")],
        seed=submission.samples[0].seed,
        **sampling,
    )
    wanted = await harness.run(harness.replicas["b0"], alone)
    assert heard.sequence() == wanted.sequence()
    assert heard.logprobs.keys() == wanted.logprobs.keys()
    for index, logprob in wanted.logprobs.items():
        assert heard.logprobs[index].logprob == pytest.approx(logprob.logprob, abs=1e-4)
        assert [token for token, _ in heard.logprobs[index].top] == [token for token, _ in logprob.top]
