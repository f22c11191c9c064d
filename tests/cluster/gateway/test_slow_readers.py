"""Clients that do not read, over real gRPC: what waits for all of them is bounded, and the others are served;
and replicas that do not read what waits on their Links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, expected, until
from slow_cases import slow_but

from cluster.admission.config import AdmissionConfig
from cluster.api.client import Event, GenerateStream
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError, RequestError
from cluster.gateway import replica_connections
from cluster.gateway.request_task import RequestTask
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from cluster.serve.gateway_server import Gateway
from kvtransfer.rpc.stream import FrameStream
from workers.messages.link import Announce

# Much less than the four streams send; gRPC may let a client have some of it that is not read.
MAX_MB = 0.1


async def begun(stream: GenerateStream) -> AsyncGenerator[Event, None]:
    """The events of a stream, of which no more is read than that it was accepted."""
    events = stream.events()
    assert isinstance(await anext(events), pb.Accepted)
    return events


async def test_what_waits_for_slow_readers_is_bounded_and_the_slowest_is_cut_off(
    harness: GatewayHarness,
) -> None:
    replica = await harness.add_replica("d0", "decode")
    config = harness.config().model_copy(update={"admission": AdmissionConfig(max_unread_mb=MAX_MB)})
    gateway, address = await harness.add_gateway(config)
    unread = gateway.requests.unread
    assert unread.max_bytes == MAX_MB * 1e6
    long = GenerateOptions(seed=1, max_tokens=400, n=4, logprobs=20)
    slow = [await begun(harness.client(address).generate(PROMPT, long, resume=False)) for _ in range(4)]
    done = await harness.client(address).complete(PROMPT, GenerateOptions(seed=2, max_tokens=400))
    assert list(done.token_ids[0]) == expected(2, 400), "who reads is not concerned"
    await until(lambda: gateway.requests.num_running == 0, "the slow ones have ended, or are cut off")
    assert unread.num_bytes <= 2 * unread.max_bytes, "with one message on its way to each"
    codes = []
    for stream in slow:
        try:
            async for _ in stream:
                pass
        except CallError as error:
            codes.append(error.code)
    assert codes
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    await until(lambda: unread.num_bytes == 0, "nothing waits any more")
    await until(replica.is_idle, "what nobody reads is not computed")


def num_ended(gateway: Gateway, *states: str) -> int:
    return sum(record.state in states for record in gateway.requests.latest(1000, None))


# 4096 bytes hold a message or two, 0 none at all.
@pytest.mark.parametrize("window_bytes", slow_but([4096, 0], 4096))
@pytest.mark.slow
async def test_clients_that_never_read_leave_all_that_may_wait_to_those_that_do(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    """They stay connected, too, so that the write that each call waits for does not end."""
    handled: list[RequestTask] = []
    abandon = RequestTask.abandon

    def abandoned(task: RequestTask, error: RequestError | None = None) -> None:
        if error is None:  # the handler ends
            handled.append(task)
        abandon(task, error)

    monkeypatch.setattr(RequestTask, "abandon", abandoned)
    await harness.add_replica("d0", "decode")
    config = harness.config().model_copy(update={"admission": AdmissionConfig(max_unread_mb=0.5)})
    gateway, address = await harness.add_gateway(config)
    unread = gateway.requests.unread
    options = [("grpc.http2.lookahead_bytes", window_bytes), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        asked = pb.GenerateRequest(text=PROMPT, max_tokens=400, logprobs=20)
        hanging = [stub.Generate(asked) for _ in range(60)]
        await until(lambda: num_ended(gateway, "finished", "failed") == 60, "all have ended, or are cut off")
        reading = GenerateOptions(seed=2, max_tokens=50, logprobs=20)
        calls = [harness.client(address).complete(PROMPT, reading, resume=False) for _ in range(6)]
        for done in await asyncio.gather(*calls):
            assert list(done.token_ids[0]) == expected(2, 50)
        await until(lambda: unread.num_bytes < unread.max_bytes / 2, "what nobody reads is dropped", 10.0)
        num_cut = num_ended(gateway, "failed")
        assert num_cut > 50
        await until(lambda: len(handled) >= num_cut + len(calls), "their handlers have ended", 10.0)
        assert not any(call.done() for call in hanging)
        ends = await asyncio.gather(*map(status, hanging))
    assert set(ends) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK}
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in ends
    await until(lambda: unread.num_bytes == 0, "nothing waits any more")


async def status(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """Read the call to its end."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code()


async def test_no_submission_is_added_to_what_a_replica_does_not_read(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    other = await harness.add_replica("d1", "decode")
    await until(lambda: harness.is_connected(gateway), "both are connected")
    stream = gateway.connections.views()[0].stream
    monkeypatch.setattr(
        FrameStream,
        "num_unsent_bytes",
        property(lambda self: replica_connections.MAX_UNSENT_BYTES + 1 if self is stream else 0),
    )
    client = harness.client(address)
    calls = [client.complete(PROMPT, GenerateOptions(seed=seed, max_tokens=3)) for seed in range(8)]
    assert [list(it.token_ids[0]) for it in await asyncio.gather(*calls)] == [
        expected(seed, 3) for seed in range(8)
    ]
    assert len(other.submissions) == 8
    assert behind.submissions == []
    announce = Announce("r", "", 16, (b"key",))
    assert not gateway.connections.send(behind.identity, announce)
    assert gateway.connections.send(other.identity, announce)
    await until(lambda: other.announces == [announce], "it has arrived")
    assert behind.announces == []
