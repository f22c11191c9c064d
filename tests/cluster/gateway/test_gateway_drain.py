"""A gateway that leaves: streams finish within its drain, new requests are refused, the rest is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from gateway_harness import PROMPT, GatewayHarness, expected, until

from cluster.api.client import Collector, Event
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.serve.gateway_server import Gateway

OPTIONS = GenerateOptions(max_tokens=8, seed=1)


class Leaving:
    """A gateway with a stream that waits for its replica; calls are as of a client that does not resume."""

    def __init__(self, harness: GatewayHarness, gateway: Gateway, address: str) -> None:
        self.gateway = gateway
        self.replica = harness.replicas["d0"]
        self.client = harness.client(address)
        self.stream = self.client.generate(PROMPT, OPTIONS, resume=False).events()
        self.collected = Collector()

    async def begin(self) -> None:
        self.replica.script.stop_after = 3
        while self.collected.num_tokens < 3:
            self.collected.add(await anext(self.stream))

    async def rest(self) -> None:
        async for event in self.stream:
            self.collected.add(event)

    def another(self) -> AsyncIterator[Event]:
        return aiter(self.client.generate(PROMPT, OPTIONS, resume=False))


async def open_gateway(harness: GatewayHarness, drain_s: float) -> Leaving:
    await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway(harness.config(drain_s=drain_s))
    harness.gateways.remove(gateway)  # the test stops it
    leaving = Leaving(harness, gateway, address)
    await leaving.begin()
    return leaving


async def test_what_runs_finishes_and_what_is_new_goes_to_other_gateways(harness: GatewayHarness) -> None:
    leaving = await open_gateway(harness, drain_s=60.0)
    stopping = asyncio.create_task(leaving.gateway.stop())
    with pytest.raises(CallError, match="this gateway is stopping") as refused:
        await anext(leaving.another())
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert refused.value.retry_after_s == 0.0
    assert not stopping.done()
    leaving.replica.script.resume.set()
    await leaving.rest()
    assert list(leaving.collected.completion().token_ids[0]) == expected(1, 8)
    await stopping


async def test_what_does_not_finish_in_time_is_ended_so_that_it_can_be_resumed(
    harness: GatewayHarness,
) -> None:
    leaving = await open_gateway(harness, drain_s=0.1)
    await leaving.gateway.stop()
    with pytest.raises(CallError) as ended:
        await leaving.rest()
    assert ended.value.code is grpc.StatusCode.UNAVAILABLE
    assert "this gateway is stopping" in ended.value.message
    await until(lambda: bool(leaving.replica.cancels), "the replica is told to stop")
