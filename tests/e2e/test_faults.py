"""Breaking things at named points: the tokens stay right or the failure is honest; nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import BLOCK_TOKENS, SHAPES, SINGLE, E2eHarness, Heard, Replica, until

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.faults import FaultRule
from workers.errors import RankDiedError
from workers.messages.link import Cancel

pytestmark = pytest.mark.parametrize("shape", SHAPES, indirect=True)

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77}


def prompt(seed: int, num_tokens: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


async def tokens_alone(harness: E2eHarness, tokens: list[int], max_tokens: int) -> list[int]:
    alone = await harness.add("alone", "both", parallel=SINGLE)
    return (
        await harness.run(alone, harness.submission("alone", tokens, max_tokens=max_tokens, **SAMPLING))
    ).sequence()


async def unhealthy(replica: Replica) -> None:
    def died() -> bool:
        try:
            replica.core.check_health()
        except RankDiedError:
            return True
        return False

    await until(died, f"{replica.core.identity.replica_id} notices that its rank died")


async def test_a_flipped_bit_is_recomputed_not_used(harness: E2eHarness, tmp_path: Path) -> None:
    prefill = await harness.add("p0", "prefill", faults=[rule("push.corrupt", "corrupt", tmp_path, after=4)])
    decode = await harness.add("d0", "decode")
    wanted = await tokens_alone(harness, prompt(1), 16)
    heard = await harness.run(
        prefill, harness.submission("r", prompt(1), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert (tmp_path / "push.corrupt.corrupt").exists()
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 1
    assert heard.sequence() == wanted
    await until(lambda: decode.load is not None and decode.load.num_checksum_failures == 1, "it is counted")
    await harness.quiet()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_rank_killed_while_it_writes_leaves_no_block_behind(
    harness: E2eHarness, tmp_path: Path, transport: str
) -> None:
    transfer = {"transports": (transport,)}
    rules = [rule("push.half", "kill", tmp_path, after=3)]
    prefill = await harness.add("p0", "prefill", transfer=transfer, faults=rules)
    decode = await harness.add("d0", "decode", transfer=transfer)
    spare = await harness.add("p1", "prefill", transfer=transfer)
    wanted = await tokens_alone(harness, prompt(2), 16)
    first = await harness.run(
        prefill, harness.submission("r", prompt(2), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert first.failure is not None
    assert first.failure.code == "internal"
    again = harness.submission(
        "r", prompt(2), decode=decode, attempt=1, output=first.sequence(), max_tokens=16, **SAMPLING
    )
    second = await harness.run(spare, again)
    tokens = first.sequence() + [second.tokens[0][i] for i in sorted(second.tokens[0])]
    assert tokens == wanted
    await unhealthy(prefill)
    await harness.quiet(decode, spare)


async def test_a_stream_of_a_killed_decode_rank_resumes_at_another_replica(
    harness: E2eHarness, tmp_path: Path
) -> None:
    prefill = await harness.add("p0", "prefill")
    decode = await harness.add("d0", "decode", faults=[rule("rank.step.decode", "kill", tmp_path, after=10)])
    spare = await harness.add("d1", "decode")
    wanted = await tokens_alone(harness, prompt(3), 40)
    first = await harness.run(
        prefill, harness.submission("r", prompt(3), decode=decode, max_tokens=40, **SAMPLING)
    )
    assert first.failure is not None
    heard = first.sequence()
    assert 5 < len(heard) < 40
    again = harness.submission(
        "r", prompt(3), decode=spare, attempt=1, output=heard, max_tokens=40, **SAMPLING
    )
    second = await harness.run(prefill, again)
    assert heard + [second.tokens[0][i] for i in sorted(second.tokens[0])] == wanted
    assert second.prefill is not None
    assert second.prefill.num_cached_tokens >= 192, "the prefill side still holds the prompt"
    await unhealthy(decode)
    await harness.quiet(prefill, spare)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_stopped_writer_cannot_spoil_a_reused_block(
    harness: E2eHarness, tmp_path: Path, transport: str
) -> None:
    """SIGSTOP inside the copy loop, abort, reuse of the memory, then SIGCONT or the kill that follows."""
    transfer = {"transports": (transport,), "writer_ack_s": 2.0}
    engine = {"kv_tokens": 256, "stall_s": 60.0}
    stop = rule("push.half", "stop", tmp_path, after=2)
    prefill = await harness.add("p0", "prefill", transfer=transfer, faults=[stop])
    decode = await harness.add("d0", "decode", transfer=transfer, engine=engine)
    spare = await harness.add("p1", "prefill", transfer=transfer)
    wanted = await tokens_alone(harness, prompt(5, 190), 20)
    prefill.send(harness.submission("stuck", prompt(4, 190), decode=decode, **SAMPLING))
    await until(
        lambda: Path(stop.marker).exists() and Path(stop.marker).read_text() != "", "the writer stops"
    )
    writer = int(Path(stop.marker).read_text())
    decode.send(Cancel("stuck", 0))
    pool = decode.core.pool
    if transport == "shm":
        await until(lambda: pool.num_quarantined == 12, "a one-sided writer's blocks are in quarantine")
        again = asyncio.ensure_future(
            harness.run(
                spare, harness.submission("r", prompt(5, 190), decode=decode, max_tokens=20, **SAMPLING)
            )
        )
        await until(lambda: decode.core.kv_receiver.landings.num_waiting == 1, "the next landing waits")
        await unhealthy(prefill)  # it did not acknowledge in time: its own engine core killed it
        heard = await again
    else:
        await until(
            lambda: pool.num_referenced == pool.num_quarantined == 0, "the receiver drops late frames"
        )
        heard = await harness.run(
            spare, harness.submission("r", prompt(5, 190), decode=decode, max_tokens=20, **SAMPLING)
        )
        try:
            os.kill(writer, signal.SIGCONT)
        except ProcessLookupError:
            await unhealthy(prefill)
    assert heard.sequence() == wanted
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 0
    await harness.quiet(decode, spare)


async def test_a_decode_replica_that_dies_fails_its_requests_at_once(harness: E2eHarness) -> None:
    prefill = await harness.add("p0", "prefill")
    decode = await harness.add("d0", "decode")
    prefill.send(harness.submission("r", prompt(6), decode=decode, max_tokens=1000))
    heard = harness.heard.setdefault(("r", 0), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) > 3, "it decodes")
    await decode.core.stop()
    next_one = await harness.run(prefill, harness.submission("s", prompt(7), decode=decode))
    assert next_one.failure is not None
    assert next_one.failure.code == "peer"
    await harness.quiet(prefill)


async def test_replicas_of_different_models_refuse_each_other(harness: E2eHarness, tmp_path: Path) -> None:
    prefill = await harness.add("p0", "prefill")
    write_random_checkpoint(tmp_path / "other", "llama", seed=4)
    other = E2eHarness(tmp_path / "other")
    other.trust = harness.trust
    decode = await other.add("d0", "decode")
    try:
        heard = await harness.run(prefill, harness.submission("r", prompt(8), decode=decode))
        assert heard.failure is not None
        assert heard.failure.code == "peer"
        assert "model_fingerprint" in heard.failure.reason
    finally:
        await other.close()


async def test_a_small_replica_preempts_and_still_gives_the_same_tokens(harness: E2eHarness) -> None:
    small = await harness.add("d0", "decode", engine={"kv_tokens": 320, "max_batch_tokens": 64})
    prefill = await harness.add("p0", "prefill")
    large = await harness.add("b0", "both", parallel=SINGLE)
    prompts = [prompt(50 + i, 40 + 7 * i) for i in range(5)]
    split = [
        harness.submission(f"s{i}", tokens, decode=small, max_tokens=60, **SAMPLING)
        for i, tokens in enumerate(prompts)
    ]
    await asyncio.gather(*(harness.run(prefill, item) for item in split))
    for i, tokens in enumerate(prompts):
        alone = await harness.run(large, harness.submission(f"a{i}", tokens, max_tokens=60, **SAMPLING))
        assert harness.heard[f"s{i}", 0].sequence() == alone.sequence()
    assert small.core.scheduler.life.num_preemptions > 0, "the test must preempt to mean anything"
    assert BLOCK_TOKENS == 16
    await harness.quiet()
