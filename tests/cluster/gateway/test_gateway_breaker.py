"""Circuit breakers in a gateway, over real Links to scripted replicas: failures, probes, silence, stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from gateway_harness import PROMPT, GatewayHarness, ScriptedReplica, expected, until

from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.gateway import circuit_breaker
from cluster.gateway.circuit_breaker import NUM_FAILURES, BreakerState
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.serve.gateway_server import Gateway
from workers.messages.link import RequestFailed

OPEN = BreakerState.OPEN


def state(gateway: Gateway, replica: ScriptedReplica) -> BreakerState:
    breaker = gateway.connections.breakers.of(replica.identity)
    assert breaker is not None
    return breaker.state


def is_in(gateway: Gateway, replica: ScriptedReplica, wanted: BreakerState) -> Callable[[], bool]:
    return lambda: state(gateway, replica) is wanted


async def load(gateway: Gateway, replica: ScriptedReplica, num_tokens: int) -> None:
    """Return when the replica has reported that so much waits there."""
    replica.script.num_backlog_tokens = num_tokens

    def is_known() -> bool:
        view = gateway.connections.find(replica.identity.replica_id)
        return view is not None and view.load is not None and view.load.num_backlog_tokens == num_tokens

    await until(is_known, "its report has come")


async def generate(client: Client, seed: int, num_tokens: int = 3) -> list[int]:
    done = await client.complete(PROMPT, GenerateOptions(seed=seed, max_tokens=num_tokens))
    return list(done.token_ids[0])


async def test_a_replica_that_breaks_its_requests_is_avoided_until_a_probe_succeeds(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.3)
    bad = await harness.add_replica("d0", "decode")
    good = await harness.add_replica("d1", "decode")
    gateway, address = await harness.add_gateway()
    client = harness.client(address)
    num_failed = 0
    while state(gateway, bad) is BreakerState.CLOSED:
        bad.script.failure = RequestFailed("", 0, "internal", "a bug")
        num_failed = len(bad.submissions)
        assert await generate(client, 1) == expected(1, 3), "the client notices nothing"
        assert len(bad.submissions) <= NUM_FAILURES
    assert num_failed == NUM_FAILURES - 1
    status = await gateway.status()
    assert status.replicas[0].note.startswith("circuit breaker open: 3 failures in a row")
    bad.script.failure = None
    before = len(bad.submissions)
    await generate(client, 2)
    assert len(bad.submissions) == before
    await until(is_in(gateway, bad, BreakerState.HALF_OPEN), "its pause ends")
    for seed in range(40):
        assert await generate(client, seed) == expected(seed, 3)
        if state(gateway, bad) is BreakerState.CLOSED:
            break
    assert state(gateway, bad) is BreakerState.CLOSED, "a request was its probe"
    assert len(bad.submissions) > before
    assert good.submissions
    changes = gateway.requests.counters.num_breaker_changes
    assert changes == {("decode", "open"): 1, ("decode", "half-open"): 1, ("decode", "closed"): 1}


async def test_requests_that_break_by_themselves_open_nothing(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    for code in ("refused", "peer", "leaving"):
        for _ in range(NUM_FAILURES + 1):
            replica.script.failure = RequestFailed("", 0, code, "no", 0.01)
            await generate(harness.client(address), 1)
    assert state(gateway, replica) is BreakerState.CLOSED


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_has_no_token_leaves_a_silent_replica_at_once(harness: GatewayHarness, role: str) -> None:
    other = await harness.add_replica(
        "p0" if role == "decode" else "d0", "prefill" if role == "decode" else "decode"
    )
    silent = await harness.add_replica("x0", role)
    gateway, address = await harness.add_gateway()
    silent.script.is_stopped = True
    before = time.monotonic()
    calls = [asyncio.create_task(generate(harness.client(address), seed)) for seed in range(4)]
    await until(lambda: bool(other.submissions) or gateway.requests.num_running == 4, "all are placed")
    spare = await harness.add_replica("d9", "decode")
    assert await asyncio.gather(*calls) == [expected(seed, 3) for seed in range(4)]
    assert time.monotonic() - before < 4.0, "long before the Link is given up"
    assert role == "prefill" or len(spare.decoding) == 4
    assert is_in(gateway, silent, OPEN)()
    await generate(harness.client(address), 9)
    note = {it.replica_id: it.note for it in (await gateway.status()).replicas}["x0"]
    assert note.startswith("circuit breaker open: nothing was heard for 1.")
    num_before = len(silent.submissions)
    silent.script.is_stopped = False
    await until(is_in(gateway, silent, BreakerState.CLOSED), "it is used again")
    await until(silent.is_idle, "what was left there is cancelled")
    assert len(silent.submissions) >= num_before


async def test_streams_leave_a_stopped_process_soon_and_continue_with_the_same_tokens(
    harness: GatewayHarness,
) -> None:
    silent = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    silent.script.stop_after = 3
    stream = harness.client(address).generate(PROMPT, GenerateOptions(seed=3, max_tokens=9)).events()
    while not isinstance(first := await anext(stream), pb.Delta):
        pass
    silent.script.is_stopped = True
    began_at = time.monotonic()
    await harness.add_replica("d1", "decode")
    rest = [token async for event in stream if isinstance(event, pb.Delta) for token in event.token_ids]
    assert [*first.token_ids, *rest] == expected(3, 9)
    assert 1.5 < time.monotonic() - began_at < 5.0
    assert is_in(gateway, silent, OPEN)()


async def test_streams_wait_where_the_network_may_be_the_cause(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.rpc.stream.FrameStream.is_acknowledged", False)
    silent = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    silent.script.stop_after = 3
    stream = harness.client(address).generate(PROMPT, GenerateOptions(seed=3, max_tokens=9)).events()
    while not isinstance(first := await anext(stream), pb.Delta):
        pass
    silent.script.is_stopped = True
    other = await harness.add_replica("d1", "decode")
    await until(lambda: gateway.connections.breakers.silent_s(silent.identity) > 3.0, "3 s of silence")
    silent.script.is_stopped = False
    silent.script.resume.set()
    rest = [token async for event in stream if isinstance(event, pb.Delta) for token in event.token_ids]
    assert [*first.token_ids, *rest] == expected(3, 9)
    assert not other.submissions


async def test_ranks_that_stand_still_are_left_while_their_engine_core_reports(
    harness: GatewayHarness,
) -> None:
    stalled = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    client = harness.client(address)
    stalled.script.stalled_s = 0.5
    waiting = asyncio.create_task(generate(client, 1))
    await until(lambda: bool(stalled.submissions), "it is there")
    other = await harness.add_replica("d1", "decode")
    await harness.clock.sleep(1.5)
    assert not other.submissions, "slow, and not stopped"
    stalled.script.stalled_s = 1.2
    assert await waiting == expected(1, 3)
    assert other.submissions
    stalled.script.stalled_s = 0.0
    await until(is_in(gateway, stalled, BreakerState.CLOSED), "it is used again")


async def test_what_waits_in_the_gateway_for_a_stopped_replica_waits_for_others(
    harness: GatewayHarness,
) -> None:
    """Both are full, so that nothing was sent to the one that stands still."""
    replicas = {name: await harness.add_replica(name, "decode") for name in ("d0", "d1")}
    for replica in replicas.values():
        replica.script.num_backlog_tokens = 5000
    gateway, address = await harness.add_gateway()
    calls = [asyncio.create_task(generate(harness.client(address), seed)) for seed in range(8)]
    await until(lambda: len(gateway.requests.admission.waiting) == 8, "they wait in the gateway")

    def waits_at() -> set[str]:
        return {it.compute_id for it in gateway.exchange._router.own_placements()}

    assert waits_at() == {"d0", "d1"}
    status = await harness.admin(gateway).status()
    assert sum(replica.held.num_prompts for replica in status.replicas) == 8
    replicas["d0"].script.is_stopped = True
    await until(is_in(gateway, replicas["d0"], OPEN), "it is found silent")
    assert waits_at() == {"d1"}
    replicas["d1"].script.num_backlog_tokens = 0
    assert await asyncio.gather(*calls) == [expected(seed, 3) for seed in range(8)]
    assert not replicas["d0"].submissions
    gateway.requests.admission.check()


async def test_alone_it_keeps_its_requests(harness: GatewayHarness) -> None:
    only = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    only.script.is_stopped = True
    waiting = asyncio.create_task(generate(harness.client(address), 1))
    await until(is_in(gateway, only, OPEN), "it is found silent")
    only.script.is_stopped = False
    assert await waiting == expected(1, 3)
    assert len(only.submissions) == 1


async def test_a_gateway_that_stood_still_itself_blames_nobody(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    await generate(harness.client(address), 1)
    time.sleep(1.5 * circuit_breaker.SILENT_S)  # blocks on purpose: the loop of gateway and replica
    await harness.clock.sleep(0.5)
    assert not gateway.requests.counters.num_breaker_changes
    assert state(gateway, replica) is BreakerState.CLOSED


@pytest.mark.parametrize("way", ["lost", "stopped"])
async def test_a_probe_whose_attempt_moves_on_frees_its_place(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The replica that computes a probe's prompt is lost, or stands still, before the half-open one has
    anything of it."""
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.3)
    prefill = await harness.add_replica("p0", "prefill")
    bad = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    client, breaker = harness.client(address), gateway.connections.breakers.of(bad.identity)
    assert breaker is not None
    for _ in range(NUM_FAILURES):
        gateway.connections.breakers.failed(bad.identity, "", "broke", harness.clock.now())
    await until(is_in(gateway, bad, BreakerState.HALF_OPEN), "its pause ends")
    prefill.script.stalled_s = 0.5  # slow, and not stopped
    stream = asyncio.create_task(generate(client, 3, 9))
    await until(lambda: bool(prefill.submissions), "the prompt waits there")
    assert breaker.probe == prefill.submissions[0].request_id
    other = await harness.add_replica("d1", "decode")
    other.script.stop_after = 3
    await load(gateway, other, 0)
    await load(gateway, bad, 5000)
    if way == "lost":
        await prefill.die()
    else:
        prefill.script.stalled_s = 1.2
    await until(lambda: bool(other.decoding), "it streams from there")
    assert not bad.submissions
    assert not breaker.probe
    await load(gateway, bad, 0)
    await load(gateway, other, 5000)
    assert await generate(client, 4) == expected(4, 3)
    assert bad.submissions, "another request is its probe"
    assert state(gateway, bad) is BreakerState.CLOSED
    assert not stream.done()
    other.script.resume.set()
    assert await stream == expected(3, 9)
