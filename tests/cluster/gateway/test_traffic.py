"""Requests split between two applications: two gateways over real gRPC, each in front of its own replicas."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, encode, until
from serving import tandem

from cluster.admission.quotas import Quotas
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.cli.terminal import traffic_line
from cluster.cli.traffic import parse_weights
from cluster.errors import CallError
from cluster.gateway.traffic_splitter import RELAYED_KEY, application_of
from cluster.identity.config import AuthConfig
from cluster.metrics.logs import ACCESS_LOGGER
from cluster.proto import APPLICATION_KEY
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from cluster.roster.messages import GatewayRecord, SetTraffic
from cluster.roster.state import LocalRoster, RosterClient
from cluster.serve.gateway_server import ControlPlane, Gateway

OWN, OTHER = "tandem", "tandem-v2"
IDS = [f"request-{number}" for number in range(2000)]


class TwoApps:
    """`tandem`, whose gateway clients call, and `tandem-v2`; the replicas of each give tokens of its own."""

    def __init__(self, front: GatewayHarness, behind: GatewayHarness) -> None:
        self.front, self.behind = front, behind
        self.address = ""
        self.behind_address = ""

    async def start(self) -> None:
        for harness, name, token in ((self.front, "d0", 65), (self.behind, "e0", 66)):
            replica = await harness.add_replica(name, "decode")
            replica.script.tokens = [token] * 400
        self.address = await self.add_gateway(self.front, OWN)
        self.behind_address = await self.add_gateway(self.behind, OTHER)

    async def add_gateway(self, harness: GatewayHarness, app: str) -> str:
        name = f"{app}-g{len(harness.gateways)}"
        gateway = Gateway(
            gateway_id=name,
            epoch=1,
            config=harness.config().model_copy(update={"app": app}),
            control=ControlPlane(harness.roster, open_roster=self.roster),
            trust=harness.trust,
            clock=harness.clock,
        )
        harness.gateways.append(gateway)
        address = f"127.0.0.1:{await gateway.start()}"
        await harness.roster.register(GatewayRecord(name, 1, address, 1))
        await until(lambda: harness.is_connected(gateway), "its replicas are connected")
        return address

    def roster(self, app: str) -> RosterClient:
        return {OWN: self.front, OTHER: self.behind}[app].roster

    async def split(self, **shares: float) -> None:
        named = {name.replace("_", "-"): share for name, share in shares.items()}
        await self.front.roster.change(SetTraffic(named))
        links = self.front.gateways[0].connections
        await until(lambda: links.roster_view.traffic == named, "the gateway knows")

    async def letters(self, client: Client, ids: list[str], count: int = 2) -> str:
        """Of which application each answer is: A or B."""
        found = ""
        for request_id in ids:
            options = GenerateOptions(request_id=request_id, max_tokens=count)
            done = await client.complete(PROMPT, options)
            assert list(done.token_ids[0]) == [done.token_ids[0][0]] * count
            found += chr(done.token_ids[0][0])
        return found


@pytest.fixture
async def apps(gateway_model: Path) -> AsyncIterator[TwoApps]:
    both = TwoApps(GatewayHarness(gateway_model), GatewayHarness(gateway_model))
    await both.start()
    yield both
    await both.front.close()
    await both.behind.close()


def expected(shares: dict[str, float], ids: list[str]) -> str:
    return "".join("B" if application_of(shares, OWN, "", it) == OTHER else "A" for it in ids)


def test_shares_are_kept_and_a_change_moves_no_more_than_it_must() -> None:
    before = {it: application_of({OWN: 0.9, OTHER: 0.1}, OWN, "t", it) for it in IDS}
    after = {it: application_of({OWN: 0.7, OTHER: 0.3}, OWN, "t", it) for it in IDS}
    assert Counter(before.values())[OTHER] == pytest.approx(200, abs=60)
    assert Counter(after.values())[OTHER] == pytest.approx(600, abs=90)
    assert all(after[it] == OTHER for it in IDS if before[it] == OTHER)
    other_tenant = [application_of({OWN: 0.5, OTHER: 0.5}, OWN, "u", it) for it in IDS]
    assert other_tenant != [application_of({OWN: 0.5, OTHER: 0.5}, OWN, "t", it) for it in IDS]


def test_all_or_nothing_are_exact() -> None:
    assert {application_of({OWN: 1.0, OTHER: 0.0}, OWN, "", it) for it in IDS} == {OWN}
    assert {application_of({OWN: 0.0, OTHER: 1.0}, OWN, "", it) for it in IDS} == {OTHER}
    assert {application_of({}, OWN, "", it) for it in IDS} == {OWN}
    thirds = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    assert {application_of(thirds, OWN, "", it) for it in IDS} == {"a", "b", "c"}


def test_weights_are_read_from_the_command_line() -> None:
    assert parse_weights(["tandem=90", "tandem-v2=10"]) == {OWN: 90.0, OTHER: 10.0}
    assert parse_weights([]) == {}
    for wrong in (["tandem"], ["tandem=-1"], ["=1"], ["a=1", "a=2"], ["a=inf"], ["a=nan"]):
        with pytest.raises(ValueError, match="weight"):
            parse_weights(wrong)
    assert traffic_line({OTHER: 0.1, OWN: 0.9}) == "tandem 90 %, tandem-v2 10 %"


async def test_each_request_is_answered_by_the_application_that_its_id_falls_to(apps: TwoApps) -> None:
    client = apps.front.client(apps.address)
    ids = IDS[:24]
    assert await apps.letters(client, ids) == "A" * 24
    await apps.split(tandem=0.5, tandem_v2=0.5)
    answered = await apps.letters(client, ids)
    assert answered == expected({OWN: 0.5, OTHER: 0.5}, ids)
    assert set(answered) == {"A", "B"}
    assert await apps.letters(client, ids) == answered, "the same again"
    await apps.split(tandem=1.0, tandem_v2=0.0)
    assert await apps.letters(client, ids) == "A" * 24
    assert (await apps.front.admin().status()).traffic == {OWN: 1.0, OTHER: 0.0}


@pytest.mark.slow
async def test_an_operator_splits_the_requests_by_the_command_line(apps: TwoApps) -> None:
    gateway = apps.front.gateways[0]

    async def traffic(*arguments: str) -> Any:
        where = ("--admin-address", f"127.0.0.1:{gateway.admin_port}")
        return await asyncio.to_thread(tandem, "traffic", *arguments, *where)

    assert (await traffic()).stdout == "requests to tandem: tandem 100 %\n"
    done = await traffic("tandem=30", "tandem-v2=10")
    assert done.stdout == "requests to tandem: tandem 75 %, tandem-v2 25 %\n", done.stderr
    await until(lambda: gateway.connections.roster_view.traffic == {OWN: 0.75, OTHER: 0.25}, "it holds")
    shown = await traffic("tandem=1", "--json")
    assert json.loads(shown.stdout) == {"app": OWN, "traffic": {OWN: 1.0, OTHER: 0.0}}, shown.stderr
    for weights, problem in (("tandem=0", "a weight above 0"), ("tandem=x", "APPLICATION=WEIGHT")):
        refused = await traffic(weights)
        assert refused.returncode
        assert problem in " ".join(refused.stderr.split())
    assert "tandem 100 %, tandem-v2 0 %" in (await traffic()).stdout


async def test_a_request_without_an_id_gets_one_and_can_be_explained(apps: TwoApps) -> None:
    await apps.split(tandem=0.0, tandem_v2=1.0)
    client = apps.front.client(apps.address)
    done = await client.complete(PROMPT, GenerateOptions(max_tokens=3, model="m"))
    assert chr(done.token_ids[0][0]) == "B"
    explained = await client.explain(done.request_id)
    assert explained.state == pb.REQUEST_STATE_FINISHED
    assert explained.decisions[0].decode == "e0"
    with pytest.raises(CallError, match="NOT_FOUND"):
        await client.explain("unheard-of")


async def test_errors_pass_through_with_their_details(apps: TwoApps) -> None:
    await apps.split(tandem=0.0, tandem_v2=1.0)
    client = apps.front.client(apps.address)
    with pytest.raises(CallError) as refused:
        await client.complete(PROMPT, GenerateOptions(temperature=-1.0))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [field for field, _ in refused.value.fields] == ["temperature"]
    with pytest.raises(CallError) as unknown:
        await client.complete(PROMPT, GenerateOptions(model="other"))
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_request_over_http_is_charged_where_it_is_answered(apps: TwoApps) -> None:
    """Its body is charged here when it begins, and given back."""
    await apps.split(tandem=0.0, tandem_v2=1.0)
    gateways = [apps.front.gateways[0], apps.behind.gateways[0]]
    limits = AuthConfig.model_validate({"tenants": {"*": {"requests_per_s": 1e-6, "burst_s": 1e7}}})
    for gateway in gateways:
        gateway.requests.charges.quotas = Quotas(limits)
    url = f"http://127.0.0.1:{gateways[0].http_port}/v1/completions"
    left = 10
    async with aiohttp.ClientSession() as session:
        for prompt, fields, status in (("a", {}, 200), (["a"] * 3, {}, 200), ("a", {"temperature": -1}, 400)):
            body = {"model": "m", "prompt": prompt, "max_tokens": 1, **fields}
            async with session.post(url, json=body) as reply:
                assert reply.status == status, await reply.text()
            left -= 0 if status == 400 else len(prompt)
            now = apps.front.clock.now()
            rates = [gateway.requests.charges.quotas.rates("", now)["requests_per_s"] for gateway in gateways]
            assert [round(rate.level) for rate in rates] == [10, left]


async def test_deadline_and_cancellation_reach_the_other_application(apps: TwoApps) -> None:
    await apps.split(tandem=0.0, tandem_v2=1.0)
    client = apps.front.client(apps.address)
    replica = apps.behind.replicas["e0"]
    replica.script.stop_after = 2
    with pytest.raises(CallError) as late:
        await client.complete(PROMPT, GenerateOptions(max_tokens=50), timeout_s=0.3)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: len(replica.cancels) == 1, "the replica is told to stop")
    events = client.generate(PROMPT, GenerateOptions(max_tokens=50)).events()
    for _ in range(2):  # `accepted`, and a delta of one token or of all that the replica gives
        await anext(events)
    await events.aclose()
    await until(lambda: len(replica.cancels) == 2, "the replica is told to stop, again")


async def test_what_a_gateway_passed_on_is_not_passed_on_again(apps: TwoApps) -> None:
    """Both send everything to each other."""
    await apps.split(tandem=0.0, tandem_v2=1.0)
    await apps.behind.roster.change(SetTraffic({OWN: 1.0}))
    links = apps.behind.gateways[0].connections
    await until(lambda: bool(links.roster_view.traffic), "the other gateway knows")
    assert await apps.letters(apps.front.client(apps.address), ["x"]) == "B"
    assert await apps.letters(apps.behind.client(apps.behind_address), ["x"]) == "A"


async def test_the_trace_context_goes_with_the_request(
    apps: TwoApps, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    await apps.split(tandem=0.0, tandem_v2=1.0)
    seen: list[Any] = []
    manager = apps.behind.gateways[0].requests
    manager._observers = (*manager._observers, seen.append)
    async with grpc.aio.insecure_channel(apps.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=encode(PROMPT)), max_tokens=2, request_id="r")
        call = stub.Generate(request, metadata=(("traceparent", "00-1-2-01"),))
        async for _ in call:
            pass
        assert dict(await call.initial_metadata())[APPLICATION_KEY] == OTHER
    assert seen[0].caller.traceparent == "00-1-2-01"
    lines = [record.getMessage() for record in caplog.records if record.name == ACCESS_LOGGER]
    assert any(line.startswith("r relayed to tandem-v2 OK") for line in lines)
    assert any(line.startswith("r finished OK") for line in lines)


async def test_a_new_request_is_answered_here_when_the_other_application_is_away(apps: TwoApps) -> None:
    await apps.split(tandem=0.0, tandem_v2=1.0)
    client = apps.front.client(apps.address)
    await apps.behind.gateways.pop().stop()
    assert await apps.letters(client, IDS[:3]) == "AAA"
    await apps.behind.roster.remove("tandem-v2-g0", 1)
    assert await apps.letters(client, IDS[:3]) == "AAA"


async def test_another_gateway_is_asked_when_one_is_gone(apps: TwoApps) -> None:
    await apps.split(tandem=0.0, tandem_v2=1.0)
    await apps.add_gateway(apps.behind, OTHER)
    await apps.behind.gateways.pop(0).stop()
    assert await apps.letters(apps.front.client(apps.address), IDS[:6]) == "BBBBBB"


async def test_a_stream_goes_on_where_it_began_when_its_gateway_goes_and_the_shares_have_changed(
    apps: TwoApps,
) -> None:
    """The front gateway that relays is stopped; by then all new requests stay at the front application."""
    await apps.split(tandem=0.0, tandem_v2=1.0)
    second = await apps.add_gateway(apps.front, OWN)
    client = apps.front.client(apps.address, second)
    replica = apps.behind.replicas["e0"]
    replica.script.stop_after = 3
    stream = client.generate(PROMPT, GenerateOptions(max_tokens=8))
    events = stream.events()
    tokens: list[int] = []
    while len(tokens) < 3:
        event = await anext(events)
        tokens += list(event.token_ids) if isinstance(event, pb.Delta) else []
    await apps.front.roster.change(SetTraffic({OWN: 1.0, OTHER: 0.0}))
    links = apps.front.gateways[1].connections
    await until(lambda: links.roster_view.traffic.get(OWN) == 1.0, "the second gateway knows")
    replica.script.stop_after = None
    await apps.front.gateways.pop(0).stop()
    async for event in events:
        tokens += list(event.token_ids) if isinstance(event, pb.Delta) else []
    assert stream.num_resumes == 1
    assert tokens == [66] * 8


async def test_a_resumed_stream_waits_for_the_application_that_it_began_at(apps: TwoApps) -> None:
    await apps.split(tandem=1.0, tandem_v2=0.0)
    await apps.behind.gateways.pop().stop()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=encode(PROMPT)), max_tokens=5, seed=1)
    request.resume.add(sample=0, token_ids=[66, 66])
    apps.front.allow_resume(request)
    async with grpc.aio.insecure_channel(apps.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await anext(aiter(stub.Generate(request, metadata=((APPLICATION_KEY, OTHER),))))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (failed.value.details() or "").startswith("application tandem-v2, where the request began: ")


async def test_an_unknown_application_in_the_metadata_is_of_no_use(apps: TwoApps) -> None:
    await apps.split(tandem=1.0, tandem_v2=0.0)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=encode(PROMPT)), max_tokens=3, seed=1)
    request.resume.add(sample=0)
    apps.front.allow_resume(request)
    async with grpc.aio.insecure_channel(apps.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for metadata in (((APPLICATION_KEY, "elsewhere"),), ((RELAYED_KEY, "elsewhere"),)):
            events = [event async for event in stub.Generate(request, metadata=metadata)]
            assert events[-1].finished.decode_replica == "d0"


async def test_nobody_waits_twice_for_a_roster_that_does_not_answer(
    apps: TwoApps, caplog: pytest.LogCaptureFixture
) -> None:
    """Each that waits says so at the end."""

    class Silent(LocalRoster):
        num_asked = 0

        async def view(self, after_version: int, timeout_s: float) -> Any:
            self.num_asked += 1
            await asyncio.Event().wait()

    silent = Silent(apps.front.clock)
    apps.behind.roster = silent
    await apps.split(tandem=0.0, tandem_v2=1.0)
    client = apps.front.client(apps.address)
    assert await apps.letters(client, IDS[:1]) == "A"
    assert await apps.letters(client, IDS[1:4]) == "AAA"
    assert silent.num_asked == 1
    told = [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()]
    assert told == ["the roster of application tandem-v2 does not answer"]
