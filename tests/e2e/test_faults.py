"""Breaking things at named points: the tokens stay right or the failure is honest; nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import BLOCK_TOKENS, SHAPES, SINGLE, Heard, House, Replica, until

from kvtransfer.common.faults import FaultRule
from workers.errors import RankDiedError
from workers.messages import Cancel
from workers.model.random_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.parametrize("shape", SHAPES, indirect=True)

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77}


def prompt(seed: int, num_tokens: int = 200) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


async def tokens_alone(house: House, tokens: list[int], max_tokens: int) -> list[int]:
    alone = await house.add("alone", "both", parallel=SINGLE)
    return (
        await house.run(alone, house.submission("alone", tokens, max_tokens=max_tokens, **SAMPLING))
    ).sequence()


async def unhealthy(replica: Replica) -> None:
    def died() -> bool:
        try:
            replica.brain.check_health()
        except RankDiedError:
            return True
        return False

    await until(died, f"{replica.brain.identity.replica_id} notices that its rank died")


async def test_a_flipped_bit_is_recomputed_not_used(house: House, tmp_path: Path) -> None:
    prefill = await house.add("p0", "prefill", faults=[rule("push.corrupt", "corrupt", tmp_path, after=4)])
    decode = await house.add("d0", "decode")
    wanted = await tokens_alone(house, prompt(1), 16)
    heard = await house.run(
        prefill, house.submission("r", prompt(1), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert (tmp_path / "push.corrupt.corrupt").exists()
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 1
    assert heard.sequence() == wanted
    await until(lambda: decode.load is not None and decode.load.num_checksum_failures == 1, "it is counted")
    await house.quiet()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_rank_killed_while_it_writes_leaves_no_block_behind(
    house: House, tmp_path: Path, transport: str
) -> None:
    transfer = {"transports": (transport,)}
    rules = [rule("push.half", "kill", tmp_path, after=3)]
    prefill = await house.add("p0", "prefill", transfer=transfer, faults=rules)
    decode = await house.add("d0", "decode", transfer=transfer)
    spare = await house.add("p1", "prefill", transfer=transfer)
    wanted = await tokens_alone(house, prompt(2), 16)
    first = await house.run(
        prefill, house.submission("r", prompt(2), decode=decode, max_tokens=16, **SAMPLING)
    )
    assert first.failure is not None
    assert first.failure.code == "internal"
    again = house.submission(
        "r", prompt(2), decode=decode, attempt=1, output=first.sequence(), max_tokens=16, **SAMPLING
    )
    second = await house.run(spare, again)
    tokens = first.sequence() + [second.tokens[0][i] for i in sorted(second.tokens[0])]
    assert tokens == wanted
    await unhealthy(prefill)
    await house.quiet(decode, spare)


async def test_a_decode_rank_killed_mid_stream_is_resumed_elsewhere(house: House, tmp_path: Path) -> None:
    prefill = await house.add("p0", "prefill")
    decode = await house.add("d0", "decode", faults=[rule("rank.step.decode", "kill", tmp_path, after=10)])
    spare = await house.add("d1", "decode")
    wanted = await tokens_alone(house, prompt(3), 40)
    first = await house.run(
        prefill, house.submission("r", prompt(3), decode=decode, max_tokens=40, **SAMPLING)
    )
    assert first.failure is not None
    heard = first.sequence()
    assert 5 < len(heard) < 40
    again = house.submission("r", prompt(3), decode=spare, attempt=1, output=heard, max_tokens=40, **SAMPLING)
    second = await house.run(prefill, again)
    assert heard + [second.tokens[0][i] for i in sorted(second.tokens[0])] == wanted
    assert second.prefill is not None
    assert second.prefill.num_cached_tokens >= 192, "the prefill side still holds the prompt"
    await unhealthy(decode)
    await house.quiet(prefill, spare)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_stopped_writer_cannot_spoil_a_reused_block(
    house: House, tmp_path: Path, transport: str
) -> None:
    """SIGSTOP inside the copy loop, abort, reuse of the memory, then SIGCONT or the kill that follows."""
    transfer = {"transports": (transport,), "writer_ack_s": 2.0}
    engine = {"kv_tokens": 256, "stall_s": 60.0}
    stop = rule("push.half", "stop", tmp_path, after=2)
    prefill = await house.add("p0", "prefill", transfer=transfer, faults=[stop])
    decode = await house.add("d0", "decode", transfer=transfer, engine=engine)
    spare = await house.add("p1", "prefill", transfer=transfer)
    wanted = await tokens_alone(house, prompt(5, 190), 20)
    prefill.send(house.submission("stuck", prompt(4, 190), decode=decode, **SAMPLING))
    await until(
        lambda: Path(stop.marker).exists() and Path(stop.marker).read_text() != "", "the writer stops"
    )
    writer = int(Path(stop.marker).read_text())
    decode.send(Cancel("stuck", 0))
    pool = decode.brain.pool
    if transport == "shm":
        await until(lambda: pool.num_quarantined == 12, "a one-sided writer's blocks are in quarantine")
        again = asyncio.ensure_future(
            house.run(spare, house.submission("r", prompt(5, 190), decode=decode, max_tokens=20, **SAMPLING))
        )
        await until(lambda: decode.brain.inbound.book.num_waiting == 1, "the next landing waits")
        await unhealthy(prefill)  # it did not acknowledge in time: its own brain killed it
        heard = await again
    else:
        await until(
            lambda: pool.num_referenced == pool.num_quarantined == 0, "the receiver drops late frames"
        )
        heard = await house.run(
            spare, house.submission("r", prompt(5, 190), decode=decode, max_tokens=20, **SAMPLING)
        )
        try:
            os.kill(writer, signal.SIGCONT)
        except ProcessLookupError:
            await unhealthy(prefill)
    assert heard.sequence() == wanted
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 0
    await house.quiet(decode, spare)


async def test_a_decode_replica_that_dies_fails_its_requests_at_once(house: House) -> None:
    prefill = await house.add("p0", "prefill")
    decode = await house.add("d0", "decode")
    prefill.send(house.submission("r", prompt(6), decode=decode, max_tokens=1000))
    heard = house.heard.setdefault(("r", 0), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) > 3, "it decodes")
    await decode.brain.stop()
    next_one = await house.run(prefill, house.submission("s", prompt(7), decode=decode))
    assert next_one.failure is not None
    assert next_one.failure.code == "peer"
    await house.quiet(prefill)


async def test_replicas_of_different_models_refuse_each_other(house: House, tmp_path: Path) -> None:
    prefill = await house.add("p0", "prefill")
    write_random_checkpoint(tmp_path / "other", "llama", seed=4)
    other = House(tmp_path / "other")
    other.secret = house.secret
    decode = await other.add("d0", "decode")
    try:
        heard = await house.run(prefill, house.submission("r", prompt(8), decode=decode))
        assert heard.failure is not None
        assert heard.failure.code == "peer"
        assert "model_fingerprint" in heard.failure.reason
    finally:
        await other.close()


async def test_a_small_replica_preempts_and_still_gives_the_same_tokens(house: House) -> None:
    small = await house.add("d0", "decode", engine={"kv_tokens": 320, "max_batch_tokens": 64})
    prefill = await house.add("p0", "prefill")
    large = await house.add("b0", "both", parallel=SINGLE)
    prompts = [prompt(50 + i, 40 + 7 * i) for i in range(5)]
    split = [
        house.submission(f"s{i}", tokens, decode=small, max_tokens=60, **SAMPLING)
        for i, tokens in enumerate(prompts)
    ]
    await asyncio.gather(*(house.run(prefill, item) for item in split))
    for i, tokens in enumerate(prompts):
        alone = await house.run(large, house.submission(f"a{i}", tokens, max_tokens=60, **SAMPLING))
        assert house.heard[f"s{i}", 0].sequence() == alone.sequence()
    assert small.brain.scheduler.num_preemptions > 0, "the test must preempt to mean anything"
    assert BLOCK_TOKENS == 16
    await house.quiet()
