"""Replicas of several ranks when one dies, stops or is lied to: no wrong token, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_harness import E2eHarness, Heard, Replica, until
from family_checkpoints import CASES, write_family_checkpoint

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel
from workers.errors import RankDiedError

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77}
WIDE, DEEP = Parallel(tp=2), Parallel(pp=2, devices=("cpu", "cpu"))


def prompt(seed: int, num_tokens: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


async def tokens_alone(harness: E2eHarness, tokens: list[int]) -> list[int]:
    alone = await harness.add("alone", "both")
    return (
        await harness.run(alone, harness.submission("alone", tokens, max_tokens=16, **SAMPLING))
    ).sequence()


async def run_again(
    harness: E2eHarness, first: Heard, tokens: list[int], at: Replica, decode: Replica
) -> list[int]:
    """What the client has in the end, when the attempt `first` failed and the next goes to `at`."""
    assert first.failure is not None
    again = harness.submission(
        "r", tokens, decode=decode, attempt=1, output=first.sequence(), max_tokens=16, **SAMPLING
    )
    second = await harness.run(at, again)
    assert second.failure is None
    return first.sequence() + [second.tokens[0][i] for i in sorted(second.tokens[0])]


async def all_ranks_end(replica: Replica) -> None:
    def ended() -> bool:
        try:
            replica.core.check_health()
        except RankDiedError:
            return all(not _runs(process_id) for process_id in replica.core.rank_process_ids)
        return False

    await until(ended, f"{replica.core.identity.replica_id} is unhealthy and all its ranks have ended")


def _runs(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("writer", "target"), [(WIDE, DEEP), (DEEP, WIDE)], ids=["wide-deep", "deep-wide"])
async def test_a_writer_rank_killed_in_mid_push(
    harness: E2eHarness, tmp_path: Path, writer: Parallel, target: Parallel
) -> None:
    kill = rule("push.half", "kill", tmp_path, after=3)
    prefill = await harness.add("p0", "prefill", parallel=writer, faults=[kill])
    decode = await harness.add("d0", "decode", parallel=target)
    spare = await harness.add("p1", "prefill")
    wanted = await tokens_alone(harness, prompt(2))
    first = await harness.run(
        prefill, harness.submission("r", prompt(2), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert await run_again(harness, first, prompt(2), spare, decode) == wanted
    await all_ranks_end(prefill)
    await harness.quiet(decode, spare)
    lost = decode.core.reports.load().num_lost_landings
    assert sum(lost.values()) == 1, "the reason is counted"


@pytest.mark.parametrize("after", [1, 3])
async def test_a_rank_killed_that_alone_has_some_experts(tmp_path: Path, after: int) -> None:
    """In the first step of a prompt, and in a later one."""
    model_dir = tmp_path / "model"
    write_family_checkpoint(model_dir, **CASES["qwen3_moe-1"])
    kill = rule("rank.step.prefill", "kill", tmp_path, after=after)
    async with E2eHarness(model_dir) as harness:
        prefill = await harness.add("p0", "prefill", parallel=Parallel(tp=2, ep=2), faults=[kill])
        decode = await harness.add("d0", "decode", parallel=Parallel(tp=2, ep=2))
        spare = await harness.add("p1", "prefill")
        wanted = await tokens_alone(harness, prompt(4))
        first = await harness.run(
            prefill, harness.submission("r", prompt(4), decode=decode, max_tokens=16, **SAMPLING)
        )
        assert await run_again(harness, first, prompt(4), spare, decode) == wanted
        await all_ranks_end(prefill)
        await harness.quiet(decode, spare)


async def test_a_target_rank_killed_while_it_verifies(harness: E2eHarness, tmp_path: Path) -> None:
    kill = rule("verify", "kill", tmp_path, after=2)
    prefill = await harness.add("p0", "prefill", parallel=DEEP)
    decode = await harness.add("d0", "decode", parallel=WIDE, faults=[kill])
    spare = await harness.add("d1", "decode", parallel=DEEP)
    wanted = await tokens_alone(harness, prompt(3))
    first = await harness.run(
        prefill, harness.submission("r", prompt(3), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert await run_again(harness, first, prompt(3), prefill, spare) == wanted
    await all_ranks_end(decode)
    await harness.quiet(prefill, spare)


async def test_a_flipped_bit_on_one_lane_spoils_one_block(harness: E2eHarness, tmp_path: Path) -> None:
    corrupt = rule("push.corrupt", "corrupt", tmp_path, after=4)
    prefill = await harness.add("p0", "prefill", parallel=WIDE, faults=[corrupt])
    decode = await harness.add("d0", "decode", parallel=DEEP)
    wanted = await tokens_alone(harness, prompt(1))
    heard = await harness.run(
        prefill, harness.submission("r", prompt(1), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert heard.sequence() == wanted
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 1
    await harness.quiet()


async def test_one_stopped_writer_rank_holds_the_blocks_until_it_is_killed(
    harness: E2eHarness, tmp_path: Path
) -> None:
    stop = rule("push.half", "stop", tmp_path, after=2)
    prefill = await harness.add(
        "p0",
        "prefill",
        parallel=WIDE,
        transfer={"writer_ack_s": 2.0},
        engine={"stall_s": 60.0},
        faults=[stop],
    )
    decode = await harness.add("d0", "decode", parallel=DEEP, engine={"kv_tokens": 256})
    spare = await harness.add("p1", "prefill")
    wanted = await tokens_alone(harness, prompt(5, 190))
    prefill.send(harness.submission("stuck", prompt(4, 190), decode=decode, **SAMPLING))
    await until(
        lambda: Path(stop.marker).exists() and Path(stop.marker).read_text() != "", "one writer rank stops"
    )
    prefill.core.requests.cancel(("stuck", 0))
    await until(lambda: decode.core.pool.num_quarantined > 0 or _died(prefill), "its blocks are held")
    heard = await harness.run(
        spare, harness.submission("r", prompt(5, 190), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert heard.sequence() == wanted
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 0
    await all_ranks_end(prefill)
    await harness.quiet(decode, spare)


def _died(replica: Replica) -> bool:
    try:
        replica.core.check_health()
    except RankDiedError:
        return True
    return False


async def test_one_stopped_rank_takes_its_replica_down(harness: E2eHarness) -> None:
    """Its peers wait for it in a collective; the engine core sees a step that does not end."""
    wide = await harness.add("w", parallel=WIDE, engine={"stall_s": 2.0})
    heard = await harness.run(wide, harness.submission("first", prompt(6), max_tokens=4))
    assert heard.failure is None
    os.kill(wide.core.rank_process_ids[1], signal.SIGSTOP)
    hung = harness.submission("hung", prompt(7), max_tokens=4)
    wide.send(hung)
    await all_ranks_end(wide)
    assert (await harness.ended(hung)).failure is not None
