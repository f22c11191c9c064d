"""The gateway's Links: connect, refuse, lose, find again; what the router learns on the way."""

from __future__ import annotations

import pytest
from gateway_harness import PROMPT, GatewayHarness, Pair, expected, until

from cluster.api.generate_options import GenerateOptions
from cluster.gateway import replica_connections
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.serve.gateway_server import Gateway
from kvtransfer.kv_events import BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity
from kvtransfer.rpc.trust import Trust
from workers.messages.link import LinkUp, LoadReport, RoleChanged, StepFrame


def states(gateway: Gateway) -> list[str]:
    return [str(view.state) for view in gateway.connections.views()]


async def test_a_snapshot_is_asked_for_on_connect_and_after_a_gap(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    await harness.add_gateway()
    await until(lambda: replica.snapshot_requests == ["connect"], "a snapshot is asked for")
    stored = (BlocksStored(b"", (b"k" * 16,)),)
    replica.broadcast(KvEvents(replica.identity, 1, stored, ()))
    replica.broadcast(KvEvents(replica.identity, 3, stored, ()))
    replica.broadcast(KvEvents(replica.identity, 4, stored, ()))
    await until(lambda: len(replica.snapshot_requests) > 1, "the gap is seen")
    assert replica.snapshot_requests == ["connect", "gap"]


async def test_a_replica_of_another_model_is_refused_and_the_others_serve(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    other = CompatibilityRecord(1, b"another model...", "float32", "float32", 16, 2, 2, 8)
    monkeypatch.setattr(type(harness.replicas["d0"]), "compatibility", lambda self: other)
    await harness.add_replica("d1", "decode")
    await until(lambda: states(gateway) == ["ready", "refused"], "the stranger is refused")
    status = await harness.admin().status()
    assert "model_fingerprint" in status.replicas[1].note
    for _ in range(3):
        done = await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=2))
        assert done.finished.decode_replica == "d0"


async def test_another_block_size_is_refused(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, _ = await harness.add_gateway()
    monkeypatch.setattr("gateway_harness.BLOCK_TOKENS", 64)
    await harness.add_replica("d0", "decode")
    await until(lambda: states(gateway) == ["refused"], "it is refused")
    assert gateway.connections.views()[0].note == "block_tokens 64, configured 16"


async def test_a_replica_that_does_not_know_the_secret_is_not_used(harness: GatewayHarness) -> None:
    gateway, _ = await harness.add_gateway()
    harness.trust = Trust.draw()
    await harness.add_replica("d0", "decode")
    await until(lambda: any("secret" in view.note for view in gateway.connections.views()), "the proof fails")
    assert states(gateway) == ["connecting"]
    assert not gateway.connections.has_route()


async def test_a_restarted_replica_is_used_again(harness: GatewayHarness) -> None:
    first = await harness.add_replica("d0", "decode", epoch=1)
    gateway, address = await harness.add_gateway()
    await first.die()
    await until(lambda: states(gateway) == ["connecting"], "the loss is seen")
    await harness.add_replica("d0", "decode", epoch=2)
    await until(lambda: states(gateway) == ["ready"], "the new life is found")
    done = await harness.client(address).complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    assert list(done.token_ids[0]) == expected(1, 3)


async def test_a_hung_earlier_life_is_left_when_the_roster_names_a_later_one(harness: GatewayHarness) -> None:
    old = await harness.add_replica("d0", "decode", epoch=1)
    gateway, address = await harness.add_gateway()
    new = await harness.add_replica("d0", "decode", epoch=2)
    await until(lambda: gateway.connections.views()[0].epoch == 2, "the new life is linked")
    await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=2))
    assert not old.submissions
    assert new.submissions
    await old.die()


async def test_a_replica_that_left_the_roster_serves_on_until_its_link_ends(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    await harness.roster.remove("d0", 1)
    done = await harness.client(address).complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    assert list(done.token_ids[0]) == expected(1, 3)
    await replica.die()
    await until(lambda: gateway.connections.views() == [], "it is forgotten")
    assert not gateway.connections._tasks


async def test_a_replica_is_told_to_stop_what_nobody_wants(harness: GatewayHarness) -> None:
    """Tokens of a request that this gateway does not know (any more) are answered by a cancel, once."""
    replica = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    await harness.client(address).complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    await harness.client(address).complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    (first, _) = replica.submissions
    for _ in range(3):
        replica._run(first, replica._prefill(first, "g0"))
    await until(lambda: bool(replica.cancels), "a cancel arrives")
    await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=3))
    assert [(it.request_id, it.attempt) for it in replica.cancels] == [(first.request_id, 1)]
    assert gateway.requests.num_running == 0


async def test_a_replica_that_falls_silent_is_left_and_found_again(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped: its connection stays open, but nothing comes."""
    monkeypatch.setattr(replica_connections, "SILENCE_S", 0.5)
    silent = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    silent.script.stop_after = 2
    stream = harness.client(address).generate(PROMPT, GenerateOptions(seed=3, max_tokens=8)).events()
    while not isinstance(first := await anext(stream), pb.Delta):
        pass
    silent.script.is_stopped = True
    other = await harness.add_replica("d1", "decode")
    rest = [token async for event in stream if isinstance(event, pb.Delta) for token in event.token_ids]
    assert [*first.token_ids, *rest] == expected(3, 8)
    assert other.submissions
    note = "nothing was heard for 0.5 s"
    await until(lambda: any(view.note == note for view in gateway.connections.views()), "the reason is told")
    silent.script.is_stopped = False
    await until(lambda: len(silent.snapshot_requests) > 1, "it is connected again")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (RoleChanged("nothing", 1), "role 'nothing' is not one of prefill, decode, both"),
        (StepFrame(load=LoadReport(identity=ReplicaIdentity("p0", 1), sequence=9)), "a StepFrame of 'p0'"),
        (KvSnapshot(ReplicaIdentity("d0", 2), 1, ()), "a KvSnapshot of 'd0'"),
    ],
)
async def test_a_replica_that_is_wrong_about_itself_loses_its_link_and_may_come_back(
    pair: Pair, message: LinkUp, reason: str
) -> None:
    """An error of another kind would end the task that connects, until the roster changes."""
    view = pair.gateway.connections.find("d0")
    assert view is not None
    stream = view.stream
    pair.decode.broadcast(message)
    await until(lambda: reason in view.note, "the link has ended for that reason")
    await until(lambda: view.takes_requests, "the replica is connected again")
    assert view.stream is not stream
    assert (await pair.client.complete(PROMPT, GenerateOptions(max_tokens=2))).finish_reasons == ("length",)
