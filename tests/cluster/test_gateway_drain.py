"""A gateway that leaves: streams finish within its drain, new requests are refused, the rest is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from gateway_harness import GatewayHouse, until
from gateway_model import PROMPT, expected

from cluster.api.client import Collector, Event, GenerateOptions
from cluster.errors import CallError
from cluster.serve.gateway_server import Gateway

OPTIONS = GenerateOptions(max_tokens=8, seed=1)


class Leaving:
    """A gateway with a stream that waits for its replica; calls are as of a client that does not resume."""

    def __init__(self, house: GatewayHouse, gateway: Gateway, address: str) -> None:
        self.gateway = gateway
        self.replica = house.replicas["d0"]
        self.client = house.client(address)
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


async def open_gateway(house: GatewayHouse, drain_s: float) -> Leaving:
    await house.add_replica("d0", "decode")
    gateway, address = await house.add_gateway(house.config(drain_s=drain_s))
    house.gateways.remove(gateway)  # the test stops it
    leaving = Leaving(house, gateway, address)
    await leaving.begin()
    return leaving


async def test_what_runs_finishes_and_what_is_new_goes_elsewhere(house: GatewayHouse) -> None:
    leaving = await open_gateway(house, drain_s=60.0)
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


async def test_what_does_not_finish_in_time_is_ended_so_that_it_can_be_resumed(house: GatewayHouse) -> None:
    leaving = await open_gateway(house, drain_s=0.1)
    await leaving.gateway.stop()
    with pytest.raises(CallError) as ended:
        await leaving.rest()
    assert ended.value.code is grpc.StatusCode.UNAVAILABLE
    assert "this gateway is stopping" in ended.value.message
    await until(lambda: bool(leaving.replica.cancels), "the replica is told to stop")
