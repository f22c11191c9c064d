"""Replicas of models with recurrent states when a rank dies, a piece is spoiled or a client goes: no wrong
token, nothing left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from e2e_harness import BLOCK_TOKENS, NUM_TOKENS, E2eHarness, Replica, prompt, started
from paged_model import continued
from slow_cases import slow_but
from state_families import STATE_FAMILIES, write_state_checkpoint

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel
from workers.messages.link import Cancel

PROMPT = prompt(5)
# Those of the KV of the layers that attend, and that of the state.
NUM_PIECES = -(-len(PROMPT) // BLOCK_TOKENS) + 1


@pytest.fixture(params=slow_but(STATE_FAMILIES, "lfm2"))
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_state_checkpoint(tmp_path / "model", request.param)
    return tmp_path / "model"


@pytest.fixture
def expected(model_dir: Path) -> list[int]:
    return continued(model_dir, PROMPT, NUM_TOKENS)


@pytest_asyncio.fixture
async def harness(model_dir: Path) -> AsyncIterator[E2eHarness]:
    async with E2eHarness(model_dir) as made:
        yield made


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


async def answer(harness: E2eHarness, name: str, at: Replica, decode: Replica) -> list[int]:
    submission = harness.submission(name, PROMPT, decode=decode, max_tokens=NUM_TOKENS)
    heard = await harness.run(at, submission)
    assert heard.failure is None, heard.failure
    return heard.sequence()


async def test_a_writer_rank_killed_amid_its_push(
    harness: E2eHarness, expected: list[int], tmp_path: Path
) -> None:
    kill = rule("push.half", "kill", tmp_path, after=3)
    prefill = await harness.add("p0", "prefill", parallel=Parallel(tp=2), faults=[kill])
    decode = await harness.add("d0", "decode")
    spare = await harness.add("p1", "prefill")
    first = await harness.run(prefill, harness.submission("r", PROMPT, decode=decode, max_tokens=NUM_TOKENS))
    assert first.failure is not None
    assert await answer(harness, "again", spare, decode) == expected
    await harness.quiet(decode, spare)


@pytest.mark.parametrize("after", slow_but(range(1, NUM_PIECES + 1), 1, NUM_PIECES))
async def test_a_spoiled_piece_of_any_group_is_computed(
    harness: E2eHarness, expected: list[int], tmp_path: Path, after: int
) -> None:
    corrupt = rule("push.corrupt", "corrupt", tmp_path, after)
    prefill = await harness.add("p0", "prefill", faults=[corrupt])
    decode = await harness.add("d0", "decode")
    submission = harness.submission("r", PROMPT, decode=decode, max_tokens=NUM_TOKENS)
    heard = await harness.run(prefill, submission)
    assert heard.failure is None, heard.failure
    assert heard.sequence() == expected
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 1
    assert await answer(harness, "again", prefill, decode) == expected
    await harness.quiet()


async def test_clients_that_go_at_any_step_leave_nothing(harness: E2eHarness, expected: list[int]) -> None:
    """Amid others of the same prompt, whose states they share."""
    prefill = await harness.add("p0", "prefill")
    decode = await harness.add("d0", "decode")
    for num_tokens in (1, 2, 7, 16, 17, 30):
        gone = harness.submission(f"gone-{num_tokens}", PROMPT, decode=decode, max_tokens=NUM_TOKENS)
        await started(harness, prefill, gone, num_tokens)
        decode.send(Cancel(gone.request_id, gone.attempt))
        assert await answer(harness, f"stays-{num_tokens}", prefill, decode) == expected
    await harness.quiet()
