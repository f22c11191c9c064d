"""SIGSTOP of one of four replicas in the running service, under load: the engine core in one run, its rank in
another. No request fails, and the times to the first token are as before within 3 s."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from serving import TINY, RunningCluster, free_port

from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import SystemClock

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NUM_REPLICAS = 4
RATE = 8.0
BEFORE_S, STOPPED_S, AFTER_S = 6.0, 9.0, 3.0
RECOVERY_S = 3.0
NUM_TOKENS = 32


@dataclass
class Timed:
    """A request that ended well; times are those of the clock."""

    number: int
    sent_at: float
    ttft_s: float
    tokens: list[int]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    file = tmp_path_factory.mktemp("stopped") / "cluster.yaml"
    file.write_text(
        f"model: {TINY}\n"
        "pools:\n"
        f"  - name: all\n    role: decode\n    replicas: {NUM_REPLICAS}\n    dtype: fp32\n"
        "    cpus_per_rank: 0.25\n    health_check_timeout_s: 60\n"
        "    engine: {block_tokens: 16, kv_tokens: 16384, stall_s: 60}\n"
    )
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    yield running
    assert running.stop() == 0


def prompt(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(4, 4000) for _ in range(100)]


async def timed(client: Client, number: int) -> Timed:
    """A whole request; raises where it fails."""
    clock = SystemClock()
    sent_at, first_at = clock.now(), 0.0
    tokens: list[int] = []
    options = GenerateOptions(max_tokens=NUM_TOKENS, seed=number, temperature=1.0, ignore_eos=True)
    async for event in client.generate(prompt(number), options, timeout_s=60.0, resume=False):
        if isinstance(event, pb.Delta):
            first_at = first_at or clock.now()
            tokens.extend(event.token_ids)
    return Timed(number, sent_at, first_at - sent_at, tokens)


async def load(client: Client, process_id: int) -> tuple[list[Timed], float]:
    """Requests at a fixed rate, whatever becomes of them, while the process is stopped for a time; returns
    them, and when it was stopped."""
    clock = SystemClock()
    began_at = clock.now()
    calls: list[asyncio.Task[Timed]] = []

    async def stop_for_a_time() -> float:
        await clock.sleep(BEFORE_S)
        os.kill(process_id, signal.SIGSTOP)
        stopped_at = clock.now()
        await clock.sleep(STOPPED_S)
        os.kill(process_id, signal.SIGCONT)
        return stopped_at

    stopping = asyncio.create_task(stop_for_a_time())
    while (due_at := began_at + len(calls) / RATE) < began_at + BEFORE_S + STOPPED_S + AFTER_S:
        await clock.sleep(max(0.0, due_at - clock.now()))
        calls.append(asyncio.create_task(timed(client, len(calls))))
    return await asyncio.gather(*calls), await stopping


def all_used(status: admin_pb.StatusResponse) -> bool:
    """Whether every replica is ready, and none is avoided."""
    return [(it.state, it.note) for it in status.replicas] == [
        (admin_pb.REPLICA_STATE_READY, "")
    ] * NUM_REPLICAS


def p99_s(requests: Sequence[Timed]) -> float:
    ordered = sorted(request.ttft_s for request in requests)
    return ordered[int(0.99 * (len(ordered) - 1) + 0.5)]


@pytest.mark.parametrize("what", ["engine core", "rank"])
def test_no_request_fails_and_first_tokens_come_as_before_within_3_s(
    cluster: RunningCluster, what: str
) -> None:
    status = cluster.wait_for(all_used, 60)
    victim = status.replicas[1]
    process_id = victim.process_id if what == "engine core" else victim.rank_process_ids[0]

    async def run() -> tuple[list[Timed], float, list[Timed]]:
        async with contextlib.AsyncExitStack() as ends:
            client = Client([cluster.address])
            ends.push_async_callback(client.close)
            await asyncio.gather(*(timed(client, 10_000 + number) for number in range(8)))
            requests, stopped_at = await load(client, process_id)
            again = [await timed(client, request.number) for request in requests]
            return requests, stopped_at, again

    try:
        requests, stopped_at, again = asyncio.run(run())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGCONT)
    assert [it.tokens for it in requests] == [it.tokens for it in again], "the same tokens as undisturbed"
    assert {len(it.tokens) for it in requests} == {NUM_TOKENS}
    before = [it for it in requests if it.sent_at < stopped_at - 1.0]
    during = [it for it in requests if stopped_at - 1.0 <= it.sent_at < stopped_at + RECOVERY_S]
    later = [it for it in requests if stopped_at + RECOVERY_S <= it.sent_at < stopped_at + STOPPED_S]
    print(
        f"\nSIGSTOP of the {what}: p99 TTFT {p99_s(before):.3f} s before, {p99_s(during):.3f} s around it, "
        f"{p99_s(later):.3f} s from {RECOVERY_S:g} s on; {len(requests)} requests"
    )
    assert p99_s(during) < 1.0 + RECOVERY_S
    assert p99_s(later) < 2 * p99_s(before) + 0.3
    log = cluster.log()
    assert f"circuit breaker of {victim.replica_id}: open" in log
    cluster.wait_for(all_used, 30)
