"""What a gateway keeps of requests that are over: nothing, beside memories that are full."""

from __future__ import annotations

import asyncio
import gc
import random
from asyncio import base_events
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from gateway_harness import PROMPT, GatewayHarness, ScriptedReplica, until
from http_harness import HttpFrontHarness
from kept_objects import KeptObjects, without_collector
from slow_cases import slow_but

from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.gateway import history, prefix_reuse, prompt_relatives, request_manager, request_records
from cluster.metrics import curves, recent_outcomes
from cluster.serve.gateway_server import Gateway
from router import service

NUM_SESSIONS, NUM_TURNS = 15, 4


async def serve(client: Client, replicas: list[ScriptedReplica], draw: random.Random) -> None:
    """Sessions one after the other, each of some turns: a turn's prompt has all turns before it."""
    options = GenerateOptions(max_tokens=3, ignore_eos=True, seed=0)
    for _ in range(NUM_SESSIONS):
        prompt: list[int] = []
        for _ in range(NUM_TURNS):
            prompt += [draw.randrange(3, 190) for _ in range(20)]
            completion = await client.complete(prompt, options)
            prompt += completion.token_ids[0]
    for replica in replicas:
        for kept in (replica.submissions, replica.announces, replica.cancels, replica.moves):
            kept.clear()
        replica._running.clear()
        replica.decoding.clear()
    gc.collect()  # closes what is left of the client's streams, in tasks of the loop
    num_tasks = 0
    while len(asyncio.all_tasks()) != num_tasks:
        num_tasks = len(asyncio.all_tasks())
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_requests_that_are_over_leave_nothing_behind(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, names in (
        (request_manager, ("_NUM_STALE",)),
        (request_records, ("NUM_RECORDS",)),
        (service, ("NUM_DECISIONS_KEPT",)),
        (history, ("MAX_REQUESTS",)),
        (prefix_reuse, ("MAX_PROMPTS", "MAX_KEYS", "MAX_ANCHORS")),
        (prompt_relatives, ("MAX_BLOCKS",)),
        (recent_outcomes, ("MAX_REQUESTS",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 16)
    monkeypatch.setattr(curves, "RING_S", 0)
    # The event loop keeps cancelled timers until there are more than this: not as many after every round.
    monkeypatch.setattr(base_events, "_MIN_SCHEDULED_TIMER_HANDLES", 0)
    monkeypatch.setattr(base_events, "_MIN_CANCELLED_TIMER_HANDLES_FRACTION", 0.0)
    config = harness.config()
    router = config.router.model_copy(update={"prediction_ttl_s": 0.001})
    replicas = [await harness.add_replica("p0", "prefill"), await harness.add_replica("d0", "decode")]
    recording = config.recording.model_copy(update={"max_mb": 0.001})
    config = config.model_copy(update={"router": router, "recording": recording})
    _, address = await harness.add_gateway(config)
    client, draw = harness.client(address), random.Random(3)
    await serve(client, replicas, draw)
    kept = KeptObjects(NUM_SESSIONS * NUM_TURNS)
    for _ in range(5):
        await serve(client, replicas, draw)
        kept.count()
    kept.check()


async def cancel_at_once(client: Client, number: int) -> None:
    stream = client.generate(PROMPT, GenerateOptions(seed=number, max_tokens=100))

    async def read() -> None:
        async for _ in stream:
            stream.cancel()

    with pytest.raises(CallError):
        await read()


async def finish(client: Client, number: int) -> None:
    await client.complete(PROMPT, GenerateOptions(seed=number, max_tokens=4))


async def be_refused(client: Client, number: int) -> None:
    with pytest.raises(CallError):
        await client.complete(PROMPT, GenerateOptions(seed=number, max_tokens=-1))


HTTP_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}),
    "stream": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True}),
    "list": ("/v1/completions", {"prompt": [PROMPT, PROMPT], "max_tokens": 4}),
    "refused": ("/v1/completions", {"prompt": PROMPT, "max_tokens": -1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}),
}
NUM_CALLS = 20
OURS = ("cluster", "kvtransfer", "router", "workers", "aiohttp.web")


async def kept_by_cycles(gateway: Gateway, call: Callable[[int], Awaitable[object]]) -> dict[str, int]:
    """Count by type what calls leave to the garbage collector."""
    for number in range(NUM_CALLS):
        await call(number)
    with without_collector():
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(NUM_CALLS):
                await call(number)
            await until(lambda: gateway.requests.num_running == 0, "all requests are over")
            await asyncio.sleep(0)
            gc.collect()
            left = Counter(f"{type(it).__module__}.{type(it).__qualname__}" for it in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    return {name: num for name, num in left.items() if num >= NUM_CALLS / 2 and name.startswith(OURS)}


@pytest.mark.parametrize("call", [finish, cancel_at_once, be_refused])
async def test_requests_that_are_over_are_in_no_cycle(
    harness: GatewayHarness, call: Callable[[Client, int], Awaitable[None]]
) -> None:
    """In a process with so many objects as a gateway has, the garbage collector looks for old ones once in
    hours: a gateway grew by half a megabyte a minute."""
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    client = harness.client(address)
    assert await kept_by_cycles(gateway, lambda number: call(client, number)) == {}


@pytest.mark.parametrize("kind", slow_but(HTTP_CALLS, "stream", "chat", "refused"))
async def test_requests_over_http_are_in_no_cycle_either(harness: GatewayHarness, kind: str) -> None:
    path, body = HTTP_CALLS[kind]
    async with HttpFrontHarness(harness) as front:
        assert await kept_by_cycles(front.gateway, lambda _: front.post(path, {"model": "m", **body})) == {}
