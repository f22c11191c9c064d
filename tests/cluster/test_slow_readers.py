"""Clients that do not read, over real gRPC: what waits for all of them is bounded, and the others are served;
and replicas that do not read what waits on their Links."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from gateway_harness import PROMPT, GatewayHarness, expected, until

from cluster.admission.config import AdmissionConfig
from cluster.api.client import GenerateOptions, GenerateStream
from cluster.errors import CallError
from cluster.gateway import replica_connections
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.rpc.stream import FrameStream
from workers.messages.link import Announce

# Much less than the four streams send; gRPC may let a client have some of it that is not read.
MAX_MB = 0.1


async def begun(stream: GenerateStream) -> GenerateStream:
    """The stream, of which no more is read than that it was accepted."""
    assert isinstance(await anext(stream.events()), pb.Accepted)
    return stream


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
            async for _ in stream.events():
                pass
        except CallError as error:
            codes.append(error.code)
    assert codes
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    await until(lambda: unread.num_bytes == 0, "nothing waits any more")
    await until(replica.is_idle, "what nobody reads is not computed")


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
