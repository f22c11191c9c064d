"""Gateways of one process that exchange their placements over their real ports."""

from __future__ import annotations

import asyncio
import socket

import pytest
from gateway_harness import PROMPT, GatewayHarness, until

from cluster.api.client import Collector
from cluster.api.generate_options import GenerateOptions
from cluster.gateway.fleet.messages import (
    PLACEMENT_CODEC,
    PLACEMENT_PROTOCOL,
    QUERY_CODEC,
    Finished,
    FollowPlacements,
    PlacementDelta,
    PlacementsRefused,
)
from cluster.roster.messages import GatewayRecord
from cluster.serve import gateway_server
from cluster.serve.gateway_server import Gateway
from kvtransfer.rpc.stream import FrameStream, open_tcp


async def three_gateways(harness: GatewayHarness) -> list[tuple[Gateway, str]]:
    """Gateways over p0 (prefill) and d0 (decode) that hear each other; d0 stops after four tokens."""
    await harness.add_replica("p0", "prefill")
    (await harness.add_replica("d0", "decode")).script.stop_after = 4
    known = [await harness.add_known_gateway() for _ in range(3)]
    for gateway, _ in known:
        await until(lambda it=gateway: len(it.exchange.heard) == 2, "gateways that hear each other")  # type: ignore[misc]
    return known


def counts(known: list[tuple[Gateway, str]]) -> list[int]:
    return [gateway.exchange.num_placements for gateway, _ in known]


async def run_some(harness: GatewayHarness, address: str, num_requests: int) -> list[asyncio.Task[None]]:
    """Start requests at this gateway that have a token and do not end."""
    collectors = [Collector() for _ in range(num_requests)]

    async def follow(collector: Collector) -> None:
        async for event in harness.client(address).generate(PROMPT, GenerateOptions(max_tokens=9)):
            collector.add(event)

    tasks = [asyncio.create_task(follow(collector)) for collector in collectors]
    await until(lambda: all(collector.num_tokens > 1 for collector in collectors), "tokens")
    return tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_placements_and_their_ends_reach_all_others(harness: GatewayHarness) -> None:
    known = await three_gateways(harness)
    first, second = await run_some(harness, known[0][1], 2), await run_some(harness, known[1][1], 1)
    await until(lambda: counts(known) == [1, 2, 3], "placements of the others")
    await end([*first, *second])
    await until(lambda: counts(known) == [0, 0, 0], "ends of all")


async def test_a_gateway_that_is_gone_takes_its_placements_along_and_is_named(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    known = await three_gateways(harness)
    tasks = await run_some(harness, known[0][1], 2)
    await until(lambda: counts(known) == [0, 2, 2], "placements of the first")
    await known[0][0].fleet.stop()  # nobody reaches it any more; its requests run on
    await until(lambda: counts(known) == [0, 0, 0], "no placements of the first")
    for gateway, _ in known[1:]:
        assert list(gateway.exchange.missing()) == ["g0"]
    assert "gateway g0: its placements are not heard" in caplog.text
    status = await known[1][0].status()
    assert {it.gateway_id: list(it.unheard) for it in status.gateways} == {
        "g0": [],
        "g1": ["g0"],
        "g2": ["g0"],
    }
    known[1][0].exchange.update([])  # the roster forgets them all
    assert known[1][0].exchange.missing() == {}
    await end(tasks)


async def test_a_cut_exchange_recovers(harness: GatewayHarness) -> None:
    known = await three_gateways(harness)
    tasks = await run_some(harness, known[0][1], 2)
    await until(lambda: counts(known) == [0, 2, 2], "placements of the first")
    wrong = PLACEMENT_CODEC.encode(PlacementDelta((Finished("x" * 1000),)))
    for stream in tuple(known[0][0].exchange.followers):
        stream.send(wrong)
    await until(lambda: counts(known) == [0, 0, 0], "the cut")
    await until(lambda: counts(known) == [0, 2, 2], "placements after the cut")
    assert known[1][0].exchange.missing() == {}
    await end(tasks)
    await until(lambda: counts(known) == [0, 0, 0], "ends of all")


async def test_a_new_gateway_has_the_snapshots_before_it_serves(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_server, "SNAPSHOT_WAIT_S", 30.0)  # a busy machine takes its time
    known = await three_gateways(harness)
    tasks = await run_some(harness, known[0][1], 2)
    gateway = harness.gateway("g3", harness.config())
    await gateway.start()
    now_known = gateway.exchange.missing(), sorted(gateway.exchange.heard), gateway.exchange.num_placements
    await gateway.stop()
    assert now_known == ({}, ["g0", "g1", "g2"], 2)
    await end(tasks)


async def test_a_new_gateway_does_not_wait_for_ever(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_server, "SNAPSHOT_WAIT_S", 0.2)
    await three_gateways(harness)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        await harness.roster.register(
            GatewayRecord(gateway_id="g9", epoch=1, address="", process_id=1, fleet=address)
        )
        gateway = harness.gateway("g3", harness.config())
        await gateway.start()
        missing = gateway.exchange.missing()
        await gateway.stop()
        assert list(missing) == ["g9"]
        assert "serves without the placements of gateway g9" in caplog.text


@pytest.mark.parametrize(
    "follow", [FollowPlacements(PLACEMENT_PROTOCOL, "g7"), FollowPlacements(PLACEMENT_PROTOCOL + 1, "g0")]
)
async def test_who_means_another_gateway_is_refused(
    harness: GatewayHarness, follow: FollowPlacements
) -> None:
    gateway, _ = await harness.add_known_gateway()
    stream = await open_follower(harness, gateway, follow)
    answer = PLACEMENT_CODEC.decode(await stream.next_frame())
    assert isinstance(answer, PlacementsRefused)
    assert "this is gateway g0" in answer.reason
    stream.abort()


async def test_a_follower_that_speaks_is_cut_off(harness: GatewayHarness) -> None:
    gateway, _ = await harness.add_known_gateway()
    stream = await open_follower(harness, gateway, FollowPlacements(PLACEMENT_PROTOCOL, "g0"))
    await stream.next_frame()
    stream.send(b"what?")
    assert await stream.receive() is None


async def open_follower(harness: GatewayHarness, gateway: Gateway, follow: FollowPlacements) -> FrameStream:
    stream = await open_tcp(f"127.0.0.1:{gateway.fleet_port}", harness.trust, "follower", has_heartbeat=True)
    stream.send(QUERY_CODEC.encode(follow))
    return stream
