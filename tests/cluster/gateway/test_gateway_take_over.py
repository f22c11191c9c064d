"""A gateway is replaced at its port: clients that know nothing but gRPC notice nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, expected, until
from serving import free_port

from cluster.api.generate_options import GenerateOptions, generate_request
from cluster.config import ClusterConfig
from cluster.errors import StartError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from cluster.roster.messages import GatewayRecord
from cluster.serve.gateway_server import Gateway

NUM_TOKENS = 8
NUM_CLIENTS = 8
NUM_ROLLS = 3


class PlainClient:
    """One gRPC channel, one request after the other; no retry, no resume, as generated code does it."""

    def __init__(self, address: str) -> None:
        self.num_done = 0
        self._is_ending = False
        self._channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Raises what a call has met."""
        self._is_ending = True
        await self.task
        await self._channel.close()

    async def _run(self) -> None:
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        while not self._is_ending:
            request = generate_request(PROMPT, GenerateOptions(max_tokens=NUM_TOKENS, seed=self.num_done))
            token_ids: list[int] = []
            async for response in stub.Generate(request, timeout=60):
                token_ids += response.delta.token_ids
            assert token_ids == expected(self.num_done, NUM_TOKENS)
            self.num_done += 1


class Rolling:
    """Gateways of one application that follow each other at one port."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.port = free_port()
        self.config: ClusterConfig = harness.config(port=self.port, drain_s=60, max_connection_age_s=0.2)
        self.num_gateways = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> Gateway:
        self.num_gateways += 1
        name = f"rolled-{self.num_gateways}"
        gateway = self.harness.gateway(name, self.config)
        await gateway.start()
        await self.harness.roster.register(GatewayRecord(name, 1, self.address, process_id=1))
        if self.num_gateways == 1:  # those that follow wait by themselves
            await until(gateway.connections.has_route, "the replica is connected")
        await until(lambda: any(it.gateway_id == name for it in gateway.connections.gateways), "it is listed")
        return gateway

    async def stop(self, gateway: Gateway, number: int) -> None:
        """As its actor does."""
        await self.harness.roster.remove(f"rolled-{number}", 1)
        await gateway.stop()


@pytest.fixture
async def rolling(harness: GatewayHarness) -> Rolling:
    replica = await harness.add_replica("d0", "decode")
    replica.script.token_s = 0.002
    return Rolling(harness)


async def test_no_call_fails_while_gateways_are_replaced(rolling: Rolling) -> None:
    running = await rolling.start()
    clients = [PlainClient(rolling.address) for _ in range(NUM_CLIENTS)]
    for number in range(1, NUM_ROLLS + 1):
        before = [client.num_done for client in clients]
        following = await rolling.start()
        await rolling.stop(running, number)
        assert not running.requests.num_running
        assert following.requests.counters.num_ended("finished"), "calls go to the one that follows"
        assert (
            running.requests.counters.num_ended("failed")
            == running.requests.counters.num_ended("cancelled")
            == 0
        )
        await until(
            lambda: all(client.num_done > done for client, done in zip(clients, before, strict=True)),  # noqa: B023
            "every client goes on",
        )
        running = following
    for client in clients:
        await client.end()
    await rolling.stop(running, rolling.num_gateways)


async def test_a_stream_ends_where_it_began(rolling: Rolling) -> None:
    running = await rolling.start()
    script = rolling.harness.replicas["d0"].script
    script.stop_after = 3
    async with grpc.aio.insecure_channel(rolling.address) as channel:
        request = generate_request(PROMPT, GenerateOptions(max_tokens=NUM_TOKENS, seed=5))
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        token_ids: list[int] = []
        responses: AsyncIterator[pb.GenerateResponse] = aiter(call)
        while len(token_ids) < 3:
            token_ids += (await anext(responses)).delta.token_ids
        following = await rolling.start()
        leaving = asyncio.create_task(rolling.stop(running, 1))
        fresh = PlainClient(rolling.address)
        script.resume.set()
        async for response in responses:
            token_ids += response.delta.token_ids
        assert token_ids == expected(5, NUM_TOKENS)
        await until(lambda: fresh.num_done > 0, "new calls are answered meanwhile")
        await fresh.end()
        await leaving
    assert running.requests.counters.num_ended("finished") == 1
    assert following.requests.counters.num_ended("finished") >= 1
    await rolling.stop(following, 2)


async def test_a_port_is_shared_with_nobody_else(rolling: Rolling, harness: GatewayHarness) -> None:
    """Neither with another application's gateway, which would share it, nor with any other program."""
    running = await rolling.start()
    await rolling.harness.roster.remove("rolled-1", 1)  # as if it were another application's
    with pytest.raises(StartError, match=f"cannot listen on {rolling.address}: the port is taken"):
        await rolling.start()
    await running.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", rolling.port))
        other.listen()
        with pytest.raises(StartError, match="the port is taken"):
            await rolling.start()
