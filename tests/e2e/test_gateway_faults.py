"""Breaking replicas under streams of the real gateway: the same tokens all the same, or an honest status."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from e2e_front import SAMPLINGS, Call, Front, Stage, decoding, prompt, tokens_alone
from e2e_harness import SHAPES, Replica, until
from tokenizers import Tokenizer

from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.faults import FaultRule

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE: dict[str, Any] = {"kv_tokens": 4096, "chunk_tokens": 32, "stall_s": 20.0}
NUM_TOKENS = 48


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with Stage.opened(tmp_path_factory.mktemp("faults"), ENGINE, request.param) as stage:
        yield stage


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


def fired(fault: FaultRule) -> bool:
    """The fault has struck, and the process id is in its marker."""
    return Path(fault.marker).exists() and Path(fault.marker).read_text() != ""


def both_streams(front: Front, seed: int, num_tokens: int = NUM_TOKENS) -> list[Call]:
    """A greedy stream and a seeded one."""
    return [
        front.call(prompt(seed + i), seed=seed + i, max_tokens=num_tokens, **sampling)
        for i, sampling in enumerate(SAMPLINGS)
    ]


async def all_right(
    stage: Stage, calls: list[Call], seed: int, num_tokens: int = NUM_TOKENS, *, attempts: int | None = None
) -> None:
    """Every stream ends well, with the tokens that one engine gives and the text of these."""
    tokenizer = Tokenizer.from_file(str(stage.model_dir / "tokenizer.json"))
    wanted = await asyncio.gather(
        *(
            stage.wanted(prompt(seed + i), seed + i, num_tokens, **sampling)
            for i, sampling in enumerate(SAMPLINGS)
        )
    )
    for i, call in enumerate(calls):
        await call.done()
        assert call.sequence == wanted[i], f"stream {i}"
        assert call.texts[0] == tokenizer.decode(wanted[i])
        assert call.finished is not None
        if attempts is not None:
            assert call.finished.timing.attempts == attempts


# ----------------------------------------------------------------------------------- rank processes


@pytest.mark.parametrize(("point", "after"), [("rank.step.prefill", 3), ("push.half", 5)])
async def test_a_prefill_rank_is_killed(stage: Stage, tmp_path: Path, point: str, after: int) -> None:
    fault = rule(point, "kill", tmp_path, after)
    victim = await stage.guest("prefill", fault)
    async with stage.front(victim, stage.d0) as front:
        calls = both_streams(front, 100 + after)
        await until(lambda: fired(fault), "the rank is killed")
        await front.register(stage.p0)
        await all_right(stage, calls, 100 + after)
        assert all(call.finished is not None and call.finished.timing.attempts > 1 for call in calls)
        await stage.harness.quiet(stage.p0, stage.d0)
        status = await front.admin.status()
        assert {it.replica_id for it in status.replicas if it.state == admin_pb.REPLICA_STATE_READY} == {
            "p0",
            "d0",
        }


async def test_a_decode_rank_is_killed_mid_stream(stage: Stage, tmp_path: Path) -> None:
    fault = rule("rank.step.decode", "kill", tmp_path, 12)
    victim = await stage.guest("decode", fault)
    async with stage.front(stage.p0, victim) as front:
        calls = both_streams(front, 200)
        await until(lambda: fired(fault), "the rank is killed")
        await front.register(stage.d0)
        await all_right(stage, calls, 200)
        await stage.harness.quiet(stage.p0, stage.d0)
        assert calls[0].accepted is not None
        told = await front.client.explain(calls[0].accepted.request_id)
        first, *_, last = told.decisions
        assert (first.decode, last.decode) == (victim.core.identity.replica_id, "d0")


async def test_nothing_left_to_decode_is_unavailable(stage: Stage, tmp_path: Path) -> None:
    """A client that gives up waiting gets its deadline; one that starts now is told to try again later."""
    fault = rule("rank.step.decode", "kill", tmp_path, 12)
    victim = await stage.guest("decode", fault)
    async with stage.front(stage.p0, victim) as front:
        call = await front.call(prompt(300), max_tokens=NUM_TOKENS, timeout_s=1.5).ended()
        assert fired(fault)
        assert call.error is not None
        assert call.error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < len(call.sequence) < NUM_TOKENS
        assert call.sequence == (await stage.wanted(prompt(300), 300, NUM_TOKENS))[: len(call.sequence)]
        late = front.connect(front.address).generate(prompt(301), resume=False)
        with pytest.raises(Exception, match="UNAVAILABLE") as caught:
            async for _ in late:
                pass
        assert getattr(caught.value, "retry_after_s", None) is not None
        await stage.harness.quiet(stage.p0)


# ------------------------------------------------------------------------------------------- engine cores


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_core_ends_mid_stream(stage: Stage, role: str) -> None:
    victim = await stage.guest(role)
    pair = (victim, stage.d0) if role == "prefill" else (stage.p0, victim)
    async with stage.front(*pair) as front:
        calls = both_streams(front, 400)
        # The prefill side is still computing prompts when it ends, the decode side is streaming.
        await until(
            (lambda: len(victim.core.table) == 2) if role == "prefill" else decoding(calls),
            "both requests are there",
        )
        await front.forget(victim)
        await victim.core.stop()
        await front.register(stage.p0 if role == "prefill" else stage.d0)
        await all_right(stage, calls, 400, attempts=2)
        await stage.harness.quiet(stage.p0, stage.d0)


async def test_a_replica_leaves_mid_stream(stage: Stage) -> None:
    """What has neither finished nor moved within the drain is resumed; the client notices nothing."""
    victim = await stage.guest("decode")
    async with stage.front(stage.p0, victim) as front:
        calls = both_streams(front, 500, 120)
        await until(decoding(calls), "both streams run")
        await front.register(stage.d0)
        await victim.core.drain(0.0)
        await until(lambda: len(victim.core.table) == 0, "nothing is left at the leaving replica")
        await all_right(stage, calls, 500, 120, attempts=2)
        after = await front.complete(prompt(502), max_tokens=4)
        assert after.finished is not None
        assert after.finished.decode_replica == "d0"
        await stage.harness.quiet()


async def test_a_gateway_ends_mid_stream_and_the_client_goes_on_at_another(stage: Stage) -> None:
    async with stage.front(stage.p0, stage.d0) as second, stage.front(stage.p0, stage.d0) as first:
        client = first.connect(first.address, second.address)
        calls = [
            first.call(prompt(600 + i), client=client, seed=600 + i, max_tokens=1000, **sampling)
            for i, sampling in enumerate(SAMPLINGS)
        ]
        await until(decoding(calls), "both streams run")
        await first.gateway.stop()
        await all_right(stage, calls, 600, 1000)
        assert [call.stream.num_resumes for call in calls] == [1, 1]
        await stage.harness.quiet()


# ------------------------------------------------------------------------------------- bytes on the way


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_a_flipped_bit_reaches_no_client(stage: Stage, tmp_path: Path, transport: str) -> None:
    seed = {"shm": 700, "tcp": 750}[transport]  # prompts of its own: what d0 holds is not pushed again
    fault = rule("push.corrupt", "corrupt", tmp_path, 4)
    victim = await stage.guest("prefill", fault, transfer={"transports": (transport,)})
    before = stage.d0.core.kv_receiver.num_checksum_failures
    async with stage.front(victim, stage.d0) as front:
        calls = both_streams(front, seed)
        await all_right(stage, calls, seed, attempts=1)
        assert fired(fault)
        assert stage.d0.core.kv_receiver.num_checksum_failures == before + 1
        await stage.harness.quiet()


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_a_stopped_writer_is_killed_and_its_streams_move(
    stage: Stage, tmp_path: Path, transport: str
) -> None:
    """SIGSTOP inside the copy loop: its step never ends, the engine core notices, the blocks return."""
    seed = {"shm": 800, "tcp": 850}[transport]
    fault = rule("push.half", "stop", tmp_path, 3)
    victim = await stage.guest("prefill", fault, transfer={"transports": (transport,)}, stall_s=2.0)
    async with stage.front(victim, stage.d0) as front:
        calls = both_streams(front, seed)
        await until(lambda: fired(fault), "the writer stops")
        assert stage.d0.core.pool.num_referenced > 0
        await front.register(stage.p0)
        await all_right(stage, calls, seed, attempts=2)
        await stage.harness.quiet(stage.p0, stage.d0)


@pytest.mark.parametrize("wakes", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_blocks_under_a_stopped_writer_are_not_reused_before_it_is_gone(
    stage: Stage, tmp_path: Path, wakes: bool
) -> None:
    """The client cancels while the writer is stopped. Its blocks wait in quarantine until the writer was
    killed for its silence, or woke and acknowledged; other streams through the same replica are right."""
    fault = rule("push.half", "stop", tmp_path, 3)
    transfer = {"transports": ("shm",), "writer_ack_s": 20.0 if wakes else 1.0}
    victim = await stage.guest("prefill", fault, transfer=transfer)
    pool = stage.d0.core.pool
    async with stage.front(victim, stage.d0) as front:
        stuck = front.call(prompt(950 if wakes else 900), max_tokens=NUM_TOKENS)
        await until(lambda: fired(fault), "the writer stops")
        await front.register(stage.p0)
        stuck.stream.cancel()
        await stuck.ended()
        await until(lambda: pool.num_quarantined == 13, "the landing's blocks are in quarantine")
        if wakes:
            os.kill(int(Path(fault.marker).read_text()), signal.SIGCONT)
        else:
            await front.forget(victim)  # as a second gateway would see it: new work goes to p0
        calls = both_streams(front, 910)
        await all_right(stage, calls, 910)
        await stage.harness.quiet(stage.p0, stage.d0)


# ---------------------------------------------------------------------------------------------- soak


@dataclass(frozen=True)
class RandomCall:
    """One request of the soak, and what its client does."""

    number: int
    tokens: tuple[int, ...]
    options: dict[str, Any]
    cancel_at: int | None
    timeout_s: float | None
    delay_s: float


def draw_requests(num_requests: int) -> list[RandomCall]:
    draw = random.Random(2024)
    tenants = ("", "a", "b")
    prefixes = {tenant: prompt(2000 + i, 96) for i, tenant in enumerate(tenants)}
    requests = []
    for number in range(num_requests):
        tenant = draw.choice(tenants)
        shared = prefixes[tenant][: draw.choice((0, 0, 32, 96))]
        tokens = (*shared, *prompt(3000 + number, draw.randrange(1, 180)))
        options: dict[str, Any] = {
            "n": draw.choice((1, 1, 1, 2, 4)),
            "max_tokens": draw.choice((1, 2, 8, 24, 60)),
            "priority": draw.choice((0, 0, 3)),
            "tenant": tenant,
            "seed": draw.getrandbits(40),
        }
        if draw.random() < 0.6:
            options |= {"temperature": draw.choice((0.5, 1.0)), "top_k": draw.choice((0, 20))}
        if draw.random() < 0.3:
            options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4}
        cancel_at = draw.choice((0, 1, 5)) if draw.random() < 0.15 else None
        timeout_s = draw.uniform(0.05, 1.5) if draw.random() < 0.1 else None
        requests.append(RandomCall(number, tokens, options, cancel_at, timeout_s, draw.expovariate(8.0)))
    return requests


async def run_request(front: Front, random_call: RandomCall) -> Call:
    call = front.call(list(random_call.tokens), timeout_s=random_call.timeout_s, **random_call.options)
    if random_call.cancel_at is not None:
        wanted = random_call.cancel_at
        await until(lambda: call.num_tokens >= wanted or call.task.done(), "the moment to cancel", 90.0)
        call.stream.cancel()
    return await call.ended(90.0)


@asynccontextmanager
async def soak_front(stage: Stage, fault: FaultRule) -> AsyncIterator[tuple[Front, list[Replica]]]:
    """Two prefill and two decode replicas under the cost policy; the rank of one decode replica will die."""
    d1 = await stage.guest("decode", fault)
    p1 = await stage.guest("prefill")
    replicas = [stage.p0, p1, stage.d0, d1]
    async with stage.front() as front:
        await front.register(*replicas)
        yield front, [stage.p0, p1, stage.d0]


@pytest.mark.slow
async def test_soak(stage: Stage, tmp_path: Path) -> None:
    """200 requests at random, a rank killed in the middle: each stream has one end, and what finished is
    what one engine gives alone."""
    fault = rule("rank.step.decode", "kill", tmp_path, 150)
    async with soak_front(stage, fault) as (front, survivors):
        running = []
        requests = draw_requests(200)
        for random_call in requests:
            await front.clock.sleep(random_call.delay_s)
            running.append(asyncio.create_task(run_request(front, random_call)))
        calls = await asyncio.gather(*running)
        assert fired(fault), "the rank must die for the test to mean anything"
        await stage.harness.quiet(*survivors)
        num_finished = 0
        for random_call, call in zip(requests, calls, strict=True):
            num_finished += call.finished is not None
            await check_request(stage, random_call, call)
        assert num_finished >= 150
        assert front.gateway.requests.num_running == 0


async def check_request(stage: Stage, random_call: RandomCall, call: Call) -> None:
    """The tokens, all of a finished stream and the first of any other, are those of one engine."""
    if call.error is not None:
        allowed = {grpc.StatusCode.CANCELLED} if random_call.cancel_at is not None else set()
        if random_call.timeout_s is not None:  # it passed, or is predicted to
            allowed |= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert call.error.code in allowed, f"request {random_call.number}: {call.error}"
    elif call.finished is not None:
        num_tokens = [end.num_tokens for end in call.finished.samples]
        assert num_tokens == [random_call.options["max_tokens"]] * random_call.options["n"]
    alone, sampling = stage.harness.replicas["b0"], dict(random_call.options)
    max_tokens, seed = sampling.pop("max_tokens"), sampling.pop("seed")
    for name in ("n", "priority", "tenant"):
        del sampling[name]
    for sample, tokens in call.tokens.items():
        wanted = await tokens_alone(
            alone, stage.harness, list(random_call.tokens), seed, max_tokens, sample=sample, **sampling
        )
        assert tokens == wanted[: len(tokens)], f"request {random_call.number}, sample {sample}"
