"""A tenant that sends requests of 15 MB, of which none is served: what the gateway's process takes for it,
and whether a neighbor is served meanwhile. Run with `-s` for the figures."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from flooded_gateway import FloodedGateway, flooded_gateway

pytestmark = pytest.mark.slow

MOST_MB = 128.0
NUM_BODIES, NUM_CALLS, NUM_ROUNDS = 60, 30, 6
# As an operator may set them; by default they follow from the context, and are far less here.
_LARGE = {"max_message_bytes": 16 << 20, "http": {"max_body_bytes": 16 << 20}}


@contextlib.asynccontextmanager
async def peak_growth_mb(gateway: FloodedGateway) -> AsyncIterator[list[float]]:
    """Yield a list whose last item is by how much the process has grown at most."""
    before = gateway.rss_mb()
    found = [0.0]

    async def watch() -> None:
        while True:
            found.append(max(found[-1], gateway.rss_mb() - before))
            await asyncio.sleep(0.01)

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()


@pytest.mark.parametrize("settings", [{}, _LARGE], ids=["default", "16 MiB"])
async def test_unfinished_bodies_take_little(settings: dict[str, object]) -> None:
    with flooded_gateway(**settings) as gateway:
        await gateway.neighbor_ttft_ms()
        quiet_ms = await gateway.neighbor_ttft_ms()
        statuses: list[int] = []

        async def flood() -> None:
            sent = await asyncio.gather(*(gateway.unfinished_body() for _ in range(NUM_BODIES)))
            statuses.extend(status for status, _ in sent)
            for _, writer in sent:
                writer.transport.abort()

        async with peak_growth_mb(gateway) as grown:
            busy_ms = await gateway.neighbor_ttft_ms(flood())
        ratio = busy_ms / quiet_ms
        print(f"\n{NUM_BODIES} bodies: +{grown[-1]:.0f} MB, {Counter(statuses)}, neighbor x{ratio:.2f}")
        assert grown[-1] <= MOST_MB
        assert set(statuses) <= {0, -1, 413, 429}, "0, -1: closed before the client had read the answer"


@pytest.mark.parametrize("settings", [{}, _LARGE], ids=["default", "16 MiB"])
async def test_refused_calls_take_little(settings: dict[str, object]) -> None:
    with flooded_gateway(**settings) as gateway:
        await gateway.neighbor_ttft_ms()
        quiet_ms = await gateway.neighbor_ttft_ms()
        codes: Counter[grpc.StatusCode] = Counter()

        async def flood() -> None:
            codes.update(await asyncio.gather(*(gateway.long_call() for _ in range(NUM_CALLS))))

        async with peak_growth_mb(gateway) as grown:
            for _ in range(NUM_ROUNDS):
                ratio = await gateway.neighbor_ttft_ms(flood()) / quiet_ms
                print(f"\n{NUM_CALLS} calls: +{grown[-1]:.0f} MB, {codes}, neighbor x{ratio:.2f}")
        assert grown[-1] <= MOST_MB
        refused = {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert set(codes) <= (refused | {grpc.StatusCode.INVALID_ARGUMENT} if settings else refused)
