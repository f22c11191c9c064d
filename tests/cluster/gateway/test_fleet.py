"""Gateways that ask each other: what any of them says of all, and what it says when one is away, hangs, lies
or floods it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from gateway_harness import PROMPT, GatewayHarness, until
from inner_tls import TLS_FILES
from patience import WAIT_S

from cluster.api.client import Client, Collector
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError, StartError
from cluster.gateway.fleet import fleet, peer_queries
from cluster.gateway.fleet.messages import (
    ANSWER_CODEC,
    FLEET_PROTOCOL,
    MAX_ANSWER_BYTES,
    MAX_QUERY_BYTES,
    QUERY_CODEC,
    ExplainAnswer,
    ExplainQuery,
    FleetHello,
    FleetRefusal,
    ListAnswer,
    ListQuery,
    Noted,
    StatsAnswer,
    StatsQuery,
)
from cluster.identity.ended_sessions import EndedSession
from cluster.roster.messages import GatewayRecord
from cluster.serve.gateway_server import Gateway
from kvtransfer.codec import LENGTH
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import PeerGoneError, ProofError
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import FrameStream, frame_stream, open_tcp
from kvtransfer.rpc.trust import Trust


class Pair:
    """Two gateways that know each other, over p0 (prefill) and d0 (decode), and a client of each."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.gateways: list[Gateway] = []
        self.clients: list[Client] = []

    async def start(self) -> None:
        await self.harness.add_replica("p0", "prefill")
        await self.harness.add_replica("d0", "decode")
        for _ in range(2):
            gateway, address = await self.harness.add_known_gateway(self.harness.config(console_port=0))
            self.gateways.append(gateway)
            self.clients.append(self.harness.client(address))

    async def complete(self, number: int, name: str = "", tenant: str = "") -> str:
        """A request at this gateway; returns its id."""
        options = GenerateOptions(max_tokens=3, request_id=name, tenant=tenant)
        return (await self.clients[number].complete(PROMPT, options)).request_id

    async def explained_at(self, number: int, request_id: str, tenant: str | None = None) -> str:
        """The gateway that had the request, as this one says."""
        admin = self.harness.admin(self.gateways[number])
        return (await admin.explain(request_id, tenant)).gateway_id


@pytest.fixture
async def pair(harness: GatewayHarness) -> Pair:
    built = Pair(harness)
    await built.start()
    return built


async def code_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(CallError) as failed:
        await call
    return failed.value.code, failed.value.message


# ------------------------------------------------------------------------------------ what all know together


async def test_any_gateway_explains_the_requests_of_all(pair: Pair) -> None:
    drawn = await pair.complete(0)
    chosen = await pair.complete(1, "chosen")
    assert drawn.startswith("g0-")
    for number in (0, 1):
        assert await pair.explained_at(number, drawn) == "g0"
        assert await pair.explained_at(number, chosen) == "g1"
    own, asked = [await pair.harness.admin(it).explain(drawn) for it in pair.gateways]
    assert [event.name for event in asked.timeline] == [event.name for event in own.timeline]
    assert asked.timeline[-1].at_ms == pytest.approx(own.timeline[-1].at_ms, abs=1.0)
    assert asked.decisions == own.decisions


async def test_gateways_with_certificates_ask_each_other(harness: GatewayHarness) -> None:
    harness.trust = Trust.read(TLS_FILES)
    built = Pair(harness)
    await built.start()
    drawn = await built.complete(0)
    assert await built.explained_at(1, drawn) == "g0"
    given = await built.gateways[1].fleet.latest(10, None)
    assert given.missing == {}


async def test_a_request_of_another_tenant_is_none(pair: Pair) -> None:
    await pair.complete(0, "same", "ours")
    await pair.complete(1, "same", "theirs")
    assert await pair.explained_at(0, "same", "ours") == "g0"
    assert await pair.explained_at(0, "same", "theirs") == "g1"
    assert await pair.explained_at(0, "same") == "g1"  # the latest of any tenant
    admin = pair.harness.admin(pair.gateways[0])
    assert (await code_of(admin.explain("same", "nobody")))[0] is grpc.StatusCode.NOT_FOUND
    given = await pair.gateways[0].fleet.latest(10, "theirs")
    assert [(gateway_id, it.request_id) for gateway_id, it in given.requests] == [("g1", "same")]


async def test_the_latest_call_of_a_request_that_was_resumed_at_another_gateway_is_explained(
    pair: Pair,
) -> None:
    """Its id names the gateway where it began, and failed."""
    script = pair.harness.replicas["d0"].script
    script.stop_after = 4
    client = pair.harness.client(*(each.address for each in pair.clients))
    stream = client.generate(PROMPT, GenerateOptions(max_tokens=9))
    collector = Collector()
    events = aiter(stream)
    while collector.num_tokens < 5:
        collector.add(await anext(events))
    assert await pair.explained_at(1, stream.request_id) == "g0"
    script.stop_after = None
    await pair.gateways[0].requests.close()
    async for event in events:
        collector.add(event)
    assert (stream.num_resumes, collector.num_tokens) == (1, 9)
    for number in (0, 1):
        assert await pair.explained_at(number, stream.request_id) == "g1"


async def test_the_requests_of_all_are_listed_by_arrival(pair: Pair) -> None:
    names = [await pair.complete(number % 2, f"r{number}") for number in range(5)]
    for gateway in pair.gateways:
        reply = await pair.harness.admin(gateway).requests()
        assert [it.request_id for it in reply.requests] == names[::-1]
        assert [it.gateway_id for it in reply.requests] == ["g0", "g1", "g0", "g1", "g0"]
        assert all(0 < it.ttft_ms <= it.e2e_ms <= 1e3 * it.age_s for it in reply.requests)
        assert not reply.missing
        two = await pair.harness.admin(gateway).requests(2)
        assert [it.request_id for it in two.requests] == ["r4", "r3"]


async def test_totals_are_of_each_gateway_and_curves_of_all(pair: Pair) -> None:
    for number in (0, 1, 1):
        await pair.complete(number)
    for gateway in pair.gateways:
        status = await pair.harness.admin(gateway).status()
        assert {it.gateway_id: (it.num_finished_requests, it.note) for it in status.gateways} == {
            "g0": (1, ""),
            "g1": (2, ""),
        }
    stats = [await gateway.fleet.stats() for gateway in pair.gateways]
    assert [it.minute.num_finished for it in stats] == [3, 3]
    assert stats[0].minute.ttft_p90_s == pytest.approx(stats[1].minute.ttft_p90_s)
    await pair.complete(0)
    again = await pair.gateways[1].fleet.stats()  # g0 sends what is new, and g1 has kept the rest
    assert again.minute.num_finished == 4


async def test_the_port_may_be_fixed_and_a_taken_one_is_named(harness: GatewayHarness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = harness.gateway("g0", harness.config(fleet_port=port))
        with pytest.raises(StartError, match=r"gateway\.fleet_port: .*127\.0\.0\.1"):
            await gateway.start()
        await gateway.stop()
    gateway, _ = await harness.add_gateway(harness.config(fleet_port=port))
    assert gateway.fleet_port == port


# ------------------------------------------------------------------------------- a gateway that is no help


class Liar:
    """A gateway `g9` of the roster that does what a test wants with each query; it knows the secret."""

    def __init__(self, harness: GatewayHarness, answer: Callable[[FrameStream], Awaitable[None]]) -> None:
        self._harness = harness
        self._answer = answer
        self._tasks = SupervisedTasks()
        self._listener: ProvenListener | None = None

    async def start(self) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        trust, clock = self._harness.trust, SystemClock()
        self._listener = ProvenListener(sock, trust, self._serve, self._tasks.spawn, clock, "liar")
        record = GatewayRecord("g9", 1, "127.0.0.1:1", 1, fleet=address)
        await self._harness.roster.register(record)
        await until(
            lambda: all(record in it.connections.gateways for it in self._harness.gateways), "g9 is known"
        )

    async def stop(self) -> None:
        assert self._listener is not None
        self._listener.close()
        await self._tasks.close()

    async def _serve(self, sock: socket.socket, name: str) -> None:
        stream = await frame_stream(sock, name, has_heartbeat=True)
        try:
            hello = QUERY_CODEC.decode(await stream.next_frame())
            assert hello == FleetHello(FLEET_PROTOCOL, "g9")
            while await stream.receive() is not None:
                await self._answer(stream)
        finally:
            stream.abort()


async def says_nothing(stream: FrameStream) -> None:
    await asyncio.Event().wait()


async def hangs_up(stream: FrameStream) -> None:
    raise PeerGoneError("no more")


async def says_garbage(stream: FrameStream) -> None:
    stream.send(b"\xc1 this is no frame")


async def says_something_else(stream: FrameStream) -> None:
    stream.send(ANSWER_CODEC.encode(ListAnswer(0.0, ())))


async def refuses(stream: FrameStream) -> None:
    stream.send(ANSWER_CODEC.encode(FleetRefusal("I do not care")))


async def floods(stream: FrameStream) -> None:
    stream.send(bytes(MAX_ANSWER_BYTES + 1))


@contextlib.asynccontextmanager
async def lying(
    harness: GatewayHarness, answer: Callable[[FrameStream], Awaitable[None]]
) -> AsyncIterator[Liar]:
    liar = Liar(harness, answer)
    await liar.start()
    yield liar
    await liar.stop()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (says_nothing, "did not answer within 1 s"),
        (hangs_up, "could not be asked: connection closed"),
        (says_garbage, "could not be asked: frame refused"),
        (says_something_else, "answered something else"),
        (refuses, "refused to answer: I do not care"),
        (floods, "could not be asked: "),
    ],
)
async def test_a_gateway_that_does_not_answer_is_named_and_the_rest_is_shown(
    pair: Pair,
    answer: Callable[[FrameStream], Awaitable[None]],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Those that answer do so in the end, on the busiest machine.
    monkeypatch.setattr(peer_queries, "ANSWER_S", 1.0 if answer is says_nothing else WAIT_S)
    done = await pair.complete(1, "chosen")
    async with lying(pair.harness, answer):
        admin = pair.harness.admin(pair.gateways[0])
        stats = await pair.gateways[0].fleet.stats()
        assert (list(stats.totals), list(stats.missing)) == (["g0", "g1"], ["g9"])
        assert named in stats.missing["g9"]
        status = await admin.status()
        assert named in next(it.note for it in status.gateways if it.gateway_id == "g9")
        if answer is not says_something_else:
            reply = await admin.requests()
            assert ([it.request_id for it in reply.requests], list(reply.missing)) == ([done], ["g9"])
        assert (await admin.explain("chosen")).gateway_id == "g1"
        code, message = await code_of(admin.explain("nobody"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert f"g9 {named}" in message
    assert not pair.gateways[0].requests.num_running


async def test_a_gateway_that_did_not_answer_is_left_alone_for_a_while(pair: Pair) -> None:
    num_queries = 0

    async def count(stream: FrameStream) -> None:
        nonlocal num_queries
        num_queries += 1
        await refuses(stream)

    async with lying(pair.harness, count):
        for _ in range(3):
            stats = await pair.gateways[0].fleet.stats()
            assert "I do not care" in stats.missing["g9"]
        assert num_queries == 1
        assert (await code_of(pair.harness.admin(pair.gateways[0]).explain("nobody")))[0] is (
            grpc.StatusCode.NOT_FOUND
        )
        assert num_queries == 2  # where a request went is asked of all


async def test_a_gateway_that_has_gone_is_not_asked(pair: Pair) -> None:
    drawn = await pair.complete(1)
    await pair.gateways[1].stop()
    stats = await pair.gateways[0].fleet.stats()
    assert "could not be asked" in stats.missing["g1"]
    await pair.harness.roster.remove("g1", 1)
    await until(lambda: len(pair.gateways[0].connections.gateways) == 1, "g1 has left the roster")
    stats = await pair.gateways[0].fleet.stats()
    assert (list(stats.totals), stats.missing) == (["g0"], {})
    code, message = await code_of(pair.harness.admin(pair.gateways[0]).explain(drawn))
    assert (code, "g1" in message.replace(drawn, "")) == (grpc.StatusCode.NOT_FOUND, False)


async def test_a_gateway_that_was_not_reached_is_told_again_that_a_session_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_REPEAT_S", 0.02)
    monkeypatch.setattr(peer_queries, "_FIRST_PAUSE_S", 0.01)
    num_queries = 0
    told = asyncio.Event()

    async def wake_up(stream: FrameStream) -> None:
        nonlocal num_queries
        num_queries += 1
        if num_queries < 3:
            await refuses(stream)
        else:
            stream.send(ANSWER_CODEC.encode(Noted(0.0)))
            told.set()

    ended = EndedSession(b"session", time.time() + 1000.0, "key", time.time())
    # One that registers only after the session has ended hears of it as well.
    assert await pair.gateways[0].fleet.end_session(ended) == {}
    async with lying(pair.harness, wake_up):
        await pair.gateways[0].fleet.end_session(ended)
        await asyncio.wait_for(told.wait(), 10.0)
        assert num_queries == 3


async def test_an_abandoned_query_does_not_answer_the_next(pair: Pair) -> None:
    """Who no longer waits leaves an answer on its way: the stream ends with it."""
    request_id = await pair.complete(1, "chosen")
    own = pair.gateways[0].fleet
    await own.stats()
    asking = asyncio.create_task(own.explain(request_id, None))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await own.stats()).missing == {}
    assert (await own.explain(request_id, None)).gateway_id == "g1"


# ---------------------------------------------------------------------------------- who asks a gateway


async def answers_of(stream: FrameStream, *frames: bytes) -> list[object]:
    """What comes until the stream ends."""
    for frame in frames:
        stream.send(frame)
    answers: list[object] = []
    while (answer := await stream.receive()) is not None:
        answers.append(ANSWER_CODEC.decode(answer))
    return answers


async def test_strangers_learn_nothing(pair: Pair) -> None:
    address = f"127.0.0.1:{pair.gateways[0].fleet_port}"
    with pytest.raises(ProofError):
        await open_tcp(address, Trust.draw(), "stranger")
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.gateways[0].fleet_port)
    writer.write(LENGTH.pack(1 << 30))
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    "frames",
    [
        (QUERY_CODEC.encode(StatsQuery(0)),),
        (b"\xc1",),
        (bytes(MAX_QUERY_BYTES + 1),),
    ],
)
async def test_what_is_no_hello_ends_the_connection(pair: Pair, frames: tuple[bytes, ...]) -> None:
    stream = await open_tcp(f"127.0.0.1:{pair.gateways[0].fleet_port}", pair.harness.trust, "other")
    assert await answers_of(stream, *frames) == []


@pytest.mark.parametrize("hello", [FleetHello(FLEET_PROTOCOL, "g1"), FleetHello(FLEET_PROTOCOL + 1, "g0")])
async def test_a_hello_for_somebody_else_is_refused_by_name(pair: Pair, hello: FleetHello) -> None:
    stream = await open_tcp(f"127.0.0.1:{pair.gateways[0].fleet_port}", pair.harness.trust, "other")
    (refusal,) = await answers_of(stream, QUERY_CODEC.encode(hello), QUERY_CODEC.encode(StatsQuery(0)))
    assert isinstance(refusal, FleetRefusal)
    assert "g0" in refusal.reason


async def test_queries_are_limited_whatever_they_ask(pair: Pair) -> None:
    await pair.complete(0)
    stream = await open_tcp(f"127.0.0.1:{pair.gateways[0].fleet_port}", pair.harness.trust, "g1")
    stream.send(QUERY_CODEC.encode(FleetHello(FLEET_PROTOCOL, "g0")))
    kinds = []
    for query in (
        ListQuery(1 << 60, None),
        ListQuery(-5, ""),
        ExplainQuery("x" * 3000, None),
        StatsQuery(-9),
    ):
        stream.send(QUERY_CODEC.encode(query))
        kinds.append(type(ANSWER_CODEC.decode(await stream.next_frame())))
    assert kinds == [ListAnswer, ListAnswer, ExplainAnswer, StatsAnswer]
    assert await answers_of(stream, QUERY_CODEC.encode(FleetHello(FLEET_PROTOCOL, "g0"))) == []
