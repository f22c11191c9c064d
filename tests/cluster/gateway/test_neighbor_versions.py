"""Gateways and replicas that hear a neighbor of another version, as they do while a cluster is rolled."""

from __future__ import annotations

import asyncio
import json
from typing import get_args

import msgspec
import pytest
from gateway_harness import PROMPT, GatewayHarness, until
from neighbor_version import Version, speak
from pydantic import ValidationError
from wire_image import recorded_images

from cluster.api.generate_options import GenerateOptions
from cluster.config import parse_config
from cluster.gateway.fleet.messages import (
    ANSWER_CODEC,
    FLEET_PROTOCOL,
    QUERY_CODEC,
    FleetHello,
    FleetRefusal,
    StatsAnswer,
    StatsQuery,
)
from cluster.stored_config import read_stored_config
from kvtransfer.rpc.stream import open_tcp

NUM_REQUESTS = 40
OPTIONS = GenerateOptions(max_tokens=5, seed=3)


@pytest.mark.parametrize("version", get_args(Version))
async def test_no_request_fails_beside_a_neighbor_of_another_version(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch, version: Version
) -> None:
    """All that two gateways and three replicas send is what the other version would send: requests are handed
    over, placements are heard, and each gateway knows what the other did."""
    speak(version, monkeypatch, recorded_images()[-1])
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        await harness.add_replica(name, role)
    gateways = [await harness.add_known_gateway(harness.config(console_port=0)) for _ in range(2)]
    clients = [harness.client(address) for _, address in gateways]
    calls = (clients[number % 2].complete(PROMPT, OPTIONS) for number in range(NUM_REQUESTS))
    answers = await asyncio.gather(*calls)
    assert [it.token_ids for it in answers] == [answers[0].token_ids] * NUM_REQUESTS
    assert {it.finished.timing.attempts for it in answers} == {1}
    await until(lambda: not any(gateway.exchange.missing() for gateway, _ in gateways), "all are heard")
    for gateway, _ in gateways:
        status = await harness.admin(gateway).status()
        assert [it.note for it in status.gateways] == ["", ""]
        assert [it.num_finished_requests for it in status.gateways] == [NUM_REQUESTS // 2] * 2


async def test_a_query_of_a_newer_gateway_is_refused_and_the_next_one_is_answered(
    harness: GatewayHarness,
) -> None:
    gateway, _ = await harness.add_known_gateway()
    stream = await open_tcp(f"127.0.0.1:{gateway.fleet_port}", harness.trust, "g9")
    stream.send(QUERY_CODEC.encode(FleetHello(FLEET_PROTOCOL, "g0")))
    stream.send(msgspec.msgpack.encode(["HistoryQuery", 1]))
    refused = ANSWER_CODEC.decode(await stream.next_frame())
    assert isinstance(refused, FleetRefusal)
    assert "HistoryQuery" in refused.reason
    stream.send(QUERY_CODEC.encode(StatsQuery(0)))
    assert isinstance(ANSWER_CODEC.decode(await stream.next_frame()), StatsAnswer)
    stream.abort()


# ------------------------------------------------------------------------------- stored configurations


def stored() -> dict[str, object]:
    pools = [{"name": "a", "role": "both"}, {"name": "b", "role": "both", "replicas": 2}]
    config = parse_config({"model": "m", "pools": pools}, "test")
    made: dict[str, object] = json.loads(config.model_dump_json())
    return made


def test_settings_of_a_newer_version_are_left_out() -> None:
    settings = stored()
    wanted = read_stored_config(json.dumps(settings))
    changed = json.loads(json.dumps(settings))
    changed["added"] = {"deep": [1]}
    changed["gateway"]["added_s"] = 1.5
    changed["pools"][1]["engine"]["added"] = None
    assert read_stored_config(json.dumps(changed)) == wanted


def test_settings_that_an_older_version_lacked_have_their_defaults() -> None:
    settings = stored()
    wanted = read_stored_config(json.dumps(settings))
    changed = json.loads(json.dumps(settings))
    del changed["gateway"]["drain_s"], changed["pools"][0]["engine"]
    assert read_stored_config(json.dumps(changed)) == wanted


def test_what_is_wrong_in_a_stored_configuration_is_still_an_error() -> None:
    settings = json.loads(json.dumps(stored()))
    settings["gateway"]["drain_s"] = "soon"
    settings["added"] = 1
    with pytest.raises(ValidationError, match="drain_s"):
        read_stored_config(json.dumps(settings))
