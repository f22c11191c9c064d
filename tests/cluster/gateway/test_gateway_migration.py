"""Through a real gateway: streams leave a replica that leaves or plays another role, and go on elsewhere."""

from __future__ import annotations

import asyncio

from gateway_harness import PROMPT, GatewayHarness, ScriptedReplica, expected, until

from cluster.api.client import Completion
from cluster.api.generate_options import GenerateOptions
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.serve.gateway_server import Gateway
from workers.messages.link import RequestFailed, RoleChanged

NUM_TOKENS = 40


async def decoding(
    harness: GatewayHarness, address: str, at: ScriptedReplica, seed: int = 5
) -> asyncio.Task[Completion]:
    """A stream that has some tokens and stays at `at` until `resume` is set."""
    at.script.stop_after = 4
    call = harness.client(address).complete(PROMPT, GenerateOptions(seed=seed, max_tokens=NUM_TOKENS))
    task = asyncio.create_task(call)
    await until(lambda: any(5 in it.values() for _, it in at.decoding.values()), "it decodes")
    return task


async def pair(harness: GatewayHarness) -> tuple[Gateway, str, ScriptedReplica]:
    await harness.add_replica("p0", "prefill")
    first = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    return gateway, address, first


async def test_a_stream_moves_from_a_replica_that_leaves(harness: GatewayHarness) -> None:
    _, address, first = await pair(harness)
    stream = await decoding(harness, address, first)
    await harness.add_replica("d1", "decode")
    first.leave()
    done = await stream
    assert list(done.token_ids[0]) == expected(5, NUM_TOKENS)
    assert (done.finished.timing.attempts, done.finished.decode_replica) == (1, "d1")
    assert done.finished.timing.transfer_bytes == 4096
    told = await harness.client(address).explain(done.request_id)
    names = [event.name for event in told.timeline]
    assert names.index("moving") < names.index("moved") < names.index("finished")
    assert first.cancels == []
    again = await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=3))
    assert again.finished.decode_replica == "d1"


async def test_it_waits_for_a_place_to_move_to(harness: GatewayHarness) -> None:
    gateway, address, first = await pair(harness)
    stream = await decoding(harness, address, first)
    first.leave()
    await until(lambda: str(gateway.connections.views()[0].state) == "leaving", "it is known")
    assert first.moves == []
    await harness.add_replica("d1", "decode")
    done = await stream
    assert list(done.token_ids[0]) == expected(5, NUM_TOKENS)
    assert (done.finished.timing.attempts, done.finished.decode_replica) == (1, "d1")


async def test_a_move_that_fails_is_tried_again_on_another_replica(harness: GatewayHarness) -> None:
    _, address, first = await pair(harness)
    stream = await decoding(harness, address, first)
    for name in ("d1", "d2"):
        await harness.add_replica(name, "decode")
    await until(lambda: harness.is_connected(harness.gateways[0]), "all are connected")
    first.script.moves_fail = "no free blocks"
    first.leave()
    await until(lambda: len(first.moves) == 1, "it is asked to move")
    first.script.moves_fail = ""
    done = await stream
    tried, taken = (order.target.identity.replica_id for order in first.moves)
    assert tried != taken
    assert list(done.token_ids[0]) == expected(5, NUM_TOKENS)
    assert (done.finished.timing.attempts, done.finished.decode_replica) == (1, taken)


async def test_a_replica_that_becomes_a_prefill_replica_loses_its_streams_and_gets_prompts(
    harness: GatewayHarness,
) -> None:
    gateway, address, first = await pair(harness)
    stream = await decoding(harness, address, first)
    await harness.add_replica("d1", "decode")
    await until(lambda: harness.is_connected(gateway), "d1 is connected")
    first.broadcast(RoleChanged("prefill", 3))
    done = await stream
    assert (done.finished.timing.attempts, done.finished.decode_replica) == (1, "d1")
    first.broadcast(RoleChanged("decode", 2))  # late: older than the change before
    client = harness.client(address)
    told = [await client.complete(PROMPT, GenerateOptions(seed=i, max_tokens=3)) for i in range(6)]
    assert {it.finished.decode_replica for it in told} == {"d1"}
    assert {
        replica.replica_id: name_of(admin_pb.ReplicaRole, replica.role)
        for replica in (await harness.admin().status()).replicas
    } == {
        "p0": "prefill",
        "d0": "prefill",
        "d1": "decode",
    }
    first.script.stop_after = None
    harness.replicas["d1"].broadcast(RoleChanged("prefill", 1))
    await until(lambda: not gateway.connections.has_route(), "nobody decodes")
    first.broadcast(RoleChanged("decode", 4))
    done = await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    assert done.finished.decode_replica == "d0"


async def test_what_is_handed_back_is_done_on_another_replica_at_once(harness: GatewayHarness) -> None:
    _, address, _ = await pair(harness)
    await harness.add_replica("p1", "prefill")
    await until(lambda: harness.is_connected(harness.gateways[0]), "p1 is connected")
    for name in ("p0", "p1"):
        harness.replicas[name].script.failure = RequestFailed("", 0, "leaving", "it leaves")
    done = await harness.client(address).complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    assert list(done.token_ids[0]) == expected(1, 3)
    assert done.finished.timing.attempts == 3
