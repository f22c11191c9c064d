"""Gateways that share quotas through a real Redis: it dies, stands still, comes back, and holds garbage."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from child_processes import killed_on_error
from gateway_harness import PROMPT, GatewayHarness, encode, until
from index_harness import RawRedis
from optional_programs import uses_redis_or_valkey

from cluster.admission.quotas import GRACE_S, MAX_TENANTS, QuotaRecord, Quotas, TenantRecord
from cluster.admission.shared_quotas import (
    EXPIRY_S,
    MAX_RECORD_BYTES,
    RECORD_CODEC,
    SharedQuotas,
    quota_key,
)
from cluster.api.client import GenerateStream
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError, QuotaError
from cluster.identity.config import AuthConfig
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.serve.gateway_server import Gateway
from kvtransfer.common.clock import SystemClock

CLOCK = SystemClock()
NUM_PROMPT_TOKENS = len(encode(PROMPT))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RawRedis]:
    with RawRedis(tmp_path) as server:
        server.client().ping()
        yield server


class Member:
    """One gateway's quotas, and their exchange."""

    def __init__(self, name: str, names: list[str], url: str, **limits: Any) -> None:
        self.quotas = Quotas(AuthConfig.model_validate({"tenants": {"a": limits}}))
        self.counters = GatewayCounters(lambda replica_id: "", lambda: 0)
        self.shared = SharedQuotas(self.quotas, name, lambda: names, self.counters, CLOCK, url=url)

    def take_all(self) -> int:
        """Take requests until one is refused."""
        for num_taken in range(1000):
            try:
                self.quotas.admit("a", CLOCK.now())
            except QuotaError:
                return num_taken
        raise AssertionError("nothing is refused")


@asynccontextmanager
async def members(num: int, url: str, **limits: Any) -> AsyncIterator[list[Member]]:
    """Gateways `g0`, `g1`, ... that exchange their records."""
    names = [f"g{number}" for number in range(num)]
    built = [Member(name, names, url, **limits) for name in names]
    for member in built:
        member.shared.start()
    try:
        yield built
    finally:
        for member in built:
            await member.shared.stop()


def shares(built: list[Member]) -> list[float]:
    return [member.counters.quota_share for member in built]


async def until_all_read(built: list[Member], server: RawRedis) -> None:
    """Wait until each has written its record, and read those of the others."""
    await until(lambda: server.client().dbsize() == len(built), "all records")
    await until(lambda: is_shared(built), "limits are shared")


def is_shared(built: list[Member]) -> bool:
    """Whether each has read the records of the others since it last had its own part."""
    return all(member.quotas.share == 1 and not member.quotas._is_divided for member in built)


@uses_redis_or_valkey
async def test_what_one_gateway_takes_is_missing_at_the_others(server: RawRedis) -> None:
    async with members(3, server.url, requests_per_s=0.01, burst_s=1000.0) as built:
        await until_all_read(built, server)
        for _ in range(7):
            built[0].quotas.admit("a", CLOCK.now())
        client = server.client()

        def written() -> int:
            value = client.get(quota_key("tandem", "g0"))
            assert isinstance(value, bytes)
            return sum(it.num_requests for it in RECORD_CODEC.decode(value).tenants)

        await until(lambda: written() == 7, "the record of g0")
        seen = built[1].quotas
        await until(lambda: bool(seen.record(CLOCK.now()).tenants) or seen_by(built[1]) == 7, "g1 reads it")
        assert built[1].take_all() == 3
        await until(lambda: seen_by(built[2]) == 7, "g2 reads it")
        for key in list(client.keys()):
            assert 0 < client.pttl(key) <= EXPIRY_S * 1e3
        assert sorted(client.keys()) == [quota_key("tandem", f"g{number}") for number in range(3)]


def is_seen(member: Member, num_requests: int) -> bool:
    return seen_by(member) == num_requests


def seen_by(member: Member) -> int:
    """Return what the member knows that the first gateway has used."""
    peer = member.quotas._peers.get("g0")
    return sum(it.num_requests for it in peer.records.values()) if peer else 0


@uses_redis_or_valkey
async def test_redis_dies_and_comes_back(server: RawRedis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.admission.shared_quotas")
    async with members(2, server.url, requests_per_s=0.01, burst_s=1000.0) as built:
        await until_all_read(built, server)
        built[0].quotas.admit("a", CLOCK.now())
        caplog.clear()
        server.kill()
        await until(lambda: shares(built) == [0.5, 0.5], "each has its part")
        assert [built[0].take_all(), built[1].take_all()] == [4, 5]
        assert (
            "tenants' limits are divided among the gateways, 50% of each applies here" in built[0].shared.note
        )
        assert "start it, or correct store.redis_url" in built[0].shared.note
        server.start()
        await until(lambda: shares(built) == [1.0, 1.0], "shared again")
        assert [member.shared.note for member in built] == ["", ""]
    texts = [record.getMessage() for record in caplog.records]
    assert sum("are divided" in text for text in texts) == 2
    assert sum("share the tenants' limits again" in text for text in texts) == 2
    assert len(texts) == 4


@uses_redis_or_valkey
async def test_nobody_waits_for_a_redis_that_stands_still(server: RawRedis) -> None:
    async with members(2, server.url, requests_per_s=0.01, burst_s=1000.0) as built:
        await until_all_read(built, server)
        server.signal(signal.SIGSTOP)
        began_at = CLOCK.now()
        built[0].quotas.admit("a", CLOCK.now())
        assert CLOCK.now() - began_at < 0.1
        await until(lambda: shares(built) == [0.5, 0.5], "each has its part")
        server.signal(signal.SIGCONT)
        await until(lambda: shares(built) == [1.0, 1.0], "shared again")


@uses_redis_or_valkey
async def test_connections_that_are_cut_again_and_again_cost_no_more_than_a_reconnection(
    server: RawRedis,
) -> None:
    async with members(2, server.url, requests_per_s=0.01, burst_s=1000.0) as built:
        await until_all_read(built, server)
        for number in range(1, 6):
            await until(lambda: is_shared(built), "shared")
            built[0].quotas.admit("a", CLOCK.now())
            server.client().client_kill_filter(_type="normal", skipme=True)
            await until(partial(is_seen, built[1], number), "g1 reads it")
        await until(lambda: shares(built) == [1.0, 1.0], "shared again")
        assert 3 <= built[1].take_all() <= 5


@uses_redis_or_valkey
async def test_a_redis_without_memory_counts_as_away(tmp_path: Path) -> None:
    with RawRedis(tmp_path, maxmemory=1, maxmemory_policy="noeviction") as full:
        full.client().ping()
        async with members(2, full.url, requests_per_s=0.01, burst_s=1000.0) as built:
            await until(lambda: shares(built) == [0.5, 0.5], "each has its part")
            await until(lambda: "maxmemory" in built[0].shared.note, "the reason is named")
            full.client().config_set("maxmemory", 0)
            await until(lambda: shares(built) == [1.0, 1.0], "shared again")


@uses_redis_or_valkey
@pytest.mark.slow
async def test_the_tokens_of_a_killed_gateway_come_back_when_its_record_expires(server: RawRedis) -> None:
    """SIGKILL: nothing is given back, and nobody removes the gateway from the roster."""
    code = (
        "import asyncio, test_shared_quotas as tests\n"
        "async def run():\n"
        f"    member = tests.Member('g0', ['g0', 'g1'], {server.url!r}, concurrent_tokens=100)\n"
        "    member.quotas.take_prompt('a', 50, 40, tests.CLOCK.now())\n"
        "    member.shared.start()\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(run())\n"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1] / "support"), *sys.path])
    other = Member("g1", ["g0", "g1"], server.url, concurrent_tokens=100)
    other.shared.start()
    killed = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    with killed_on_error(killed):

        def can_begin() -> bool:
            try:
                other.quotas.end("a", other.quotas.take_prompt("a", 20, 20, CLOCK.now()))
            except QuotaError:
                return False
            return True

        await until(lambda: not can_begin(), "g1 knows what g0 holds")
        assert other.counters.quota_share == 1.0
        killed.kill()
        killed.wait()
    killed_at = CLOCK.now()
    await until(can_begin, "the tokens are back")
    assert CLOCK.now() - killed_at < EXPIRY_S + GRACE_S + 3
    assert "g0 (no record)" in other.shared.note
    await other.shared.stop()


def many_tenants() -> bytes:
    """Return a record of more tenants than a gateway has."""
    one = TenantRecord("a", 1, 2, 3, 4, 5)
    return RECORD_CODEC.encode(QuotaRecord((one,) * (MAX_TENANTS + 1)))


@uses_redis_or_valkey
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        RECORD_CODEC.encode(QuotaRecord((TenantRecord("a", 1, -5, 0, 0, 0),))),
        RECORD_CODEC.encode(QuotaRecord((TenantRecord("a", 1, 1 << 60, 0, 0, 0),))),
        RECORD_CODEC.encode(QuotaRecord((TenantRecord("a" * 1000, 1, 0, 0, 0, 0),))),
        many_tenants(),
        bytes(MAX_RECORD_BYTES + 1),
    ],
    ids=["empty", "garbage", "negative", "huge", "long name", "many tenants", "long"],
)
async def test_a_record_that_no_gateway_writes_counts_as_none(server: RawRedis, value: bytes) -> None:
    server.client().set(quota_key("tandem", "g1"), value)
    names = ["g0", "g1"]
    member = Member("g0", names, server.url, requests_per_s=0.01, burst_s=1000.0)
    member.shared.start()
    await until(lambda: "what these gateways use is not known: g1 (" in member.shared.note, "its name")
    assert member.counters.quota_share == 0.5
    assert member.take_all() == 5
    await member.shared.stop()


async def test_without_redis_each_gateway_has_its_part() -> None:
    async with members(2, "", requests_per_s=0.01, burst_s=1000.0) as built:
        await until(lambda: shares(built) == [0.5, 0.5], "each has its part")
        assert built[0].shared.note.endswith("no store.redis_url is set")
        assert [member.take_all() for member in built] == [5, 5]


async def test_one_gateway_has_all_of_it() -> None:
    async with members(1, "", requests_per_s=0.01, burst_s=1000.0) as (only,):
        assert only.shared.note == ""
        assert only.take_all() == 10


# ------------------------------------------------------------------------------- at real gateways


async def started(harness: GatewayHarness, url: str = "", **limits: Any) -> tuple[Gateway, str]:
    """Return a gateway before p0 and d0 that limits tenant `a`."""
    if not harness.replicas:
        await harness.add_replica("p0", "prefill")
        await harness.add_replica("d0", "decode")
    config = harness.config(auth={"tenants": {"a": limits}})
    return await harness.add_known_gateway(config.with_redis_url(url) if url else config)


def options(max_tokens: int = 4, tenant: str = "a") -> GenerateOptions:
    return GenerateOptions(tenant=tenant, max_tokens=max_tokens, seed=1)


async def refused(stream: GenerateStream) -> CallError:
    with pytest.raises(CallError) as caught:
        async for _ in stream:
            pass
    return caught.value


async def test_a_tenant_beyond_its_requests_is_told_when_to_come_back(harness: GatewayHarness) -> None:
    gateway, address = await started(harness, requests_per_s=0.1, burst_s=20.0)
    client = harness.client(address)
    for _ in range(2):
        await client.complete(PROMPT, options())
    error = await refused(client.generate(PROMPT, options(), resume=False))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "auth.tenants.a.requests_per_s" in error.message
    assert error.retry_after_s is not None
    assert 5 < error.retry_after_s <= 12.5
    await client.complete(PROMPT, options(tenant="b"))
    use = gateway.requests.counters.tenants.series()
    assert (use["a"].num_requests, use["a"].num_over_quota) == (2, {"requests_per_s": 1})
    assert (use["b"].num_requests, use["b"].num_over_quota) == (1, {})


async def test_output_that_was_streamed_counts(harness: GatewayHarness) -> None:
    _, address = await started(harness, output_tokens_per_s=1.0, burst_s=10.0)
    client = harness.client(address)
    done = await client.complete(PROMPT, options(40))
    assert len(done.token_ids[0]) == 40  # a running stream is never stopped
    error = await refused(client.generate(PROMPT, options(), resume=False))
    assert "output_tokens_per_s" in error.message
    assert error.retry_after_s is not None
    assert 20 < error.retry_after_s <= 37.5


async def test_cancelled_failed_and_finished_requests_give_their_tokens_back(harness: GatewayHarness) -> None:
    gateway, address = await started(harness, concurrent_tokens=2 * (NUM_PROMPT_TOKENS + 20))
    client, decode = harness.client(address), harness.replicas["d0"]
    await client.complete(PROMPT, options(20))
    decode.script.stop_after = 3
    streams = [client.generate(PROMPT, options(20)) for _ in range(2)]
    read = [stream.events() for stream in streams]  # who drops them cancels
    for events in read:
        while not isinstance(await anext(events), pb.Delta):
            pass
    error = await refused(client.generate(PROMPT, options(20), resume=False))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "auth.tenants.a.concurrent_tokens" in error.message
    too_long = await refused(client.generate(PROMPT, options(200), resume=False))
    assert too_long.code is grpc.StatusCode.INVALID_ARGUMENT
    streams[0].cancel()
    await until(lambda: gateway.requests.num_running == 1, "the cancelled one has ended")
    other = client.generate(PROMPT, options(20))
    read.append(other.events())
    while not isinstance(await anext(read[-1]), pb.Delta):
        pass
    for stream in (streams[1], other):
        stream.cancel()
    await until(lambda: gateway.requests.num_running == 0, "all have ended")
    decode.script.stop_after = None
    with pytest.raises(CallError):  # it fails after it was accepted
        await harness.client(address).complete(PROMPT, options(20), timeout_s=0.0)
    await client.complete(PROMPT, options(2 * 20 + NUM_PROMPT_TOKENS))
    use = gateway.requests.counters.tenants.series()["a"]
    assert use.num_prompt_tokens == 5 * NUM_PROMPT_TOKENS
    assert use.num_requests == 5
    assert use.num_output_tokens >= 20 + 3 * 3 + 2 * 20 + NUM_PROMPT_TOKENS


async def test_a_resumed_request_is_not_charged_again(harness: GatewayHarness) -> None:
    gateway, address = await started(harness, requests_per_s=0.001, burst_s=1000.0)
    client = harness.client(address)
    done = await client.complete(PROMPT, options())
    assert "requests_per_s" in (await refused(client.generate(PROMPT, options(), resume=False))).message
    request = pb.GenerateRequest(text=PROMPT, max_tokens=4, tenant="a", seed=1)
    request.resume.add(sample=0, token_ids=done.token_ids[0][:2])
    harness.allow_resume(request)
    resumed = [response async for response in client.stub().Generate(request)]
    assert resumed
    assert gateway.requests.counters.tenants.series()["a"].num_requests == 2


@uses_redis_or_valkey
async def test_two_gateways_give_one_tenant_one_limit_and_status_says_when_they_cannot(
    harness: GatewayHarness, server: RawRedis
) -> None:
    limits = {"requests_per_s": 0.01, "burst_s": 400.0}
    known = [await started(harness, server.url, **limits) for _ in range(2)]
    await until(lambda: server.client().dbsize() == 2, "both records")
    clients = [harness.client(address) for _, address in known]
    for _ in range(3):
        await clients[0].complete(PROMPT, options())

    def written() -> int:
        value = server.client().get(quota_key("tandem", "g0"))
        assert isinstance(value, bytes)
        return sum(it.num_requests for it in RECORD_CODEC.decode(value).tenants)

    await until(lambda: written() == 3, "the record of g0")
    second = known[1][0].requests
    await until(lambda: read_by(second, "g0") == 3, "g1 reads it")
    await clients[1].complete(PROMPT, options())
    error = await refused(clients[1].generate(PROMPT, options(), resume=False))
    assert "requests_per_s" in error.message
    status = await known[0][0].status()
    assert [it.quota_note for it in status.gateways] == ["", ""]
    (quota,) = status.quotas
    assert (quota.tenant, dict(quota.num_refused)) == ("a", {"requests_per_s": 1})
    assert quota.used["requests_per_s"] == pytest.approx(1.0, abs=0.01)
    server.kill()
    await until(lambda: all(it.requests.counters.quota_share == 0.5 for it, _ in known), "their parts")
    await until_noted(known[0][0])


def read_by(requests: Any, name: str) -> int:
    """Return how many requests of another gateway this one knows of."""
    peer = requests.charges.quotas._peers.get(name)
    return sum(it.num_requests for it in peer.records.values()) if peer else 0


async def until_noted(gateway: Gateway) -> None:
    """Wait until the status, which is a second old at most, names both gateways' limits as divided."""
    end = CLOCK.now() + 30
    while True:
        status = await gateway.status()
        if all("50% of each applies here" in it.quota_note for it in status.gateways):
            return
        assert CLOCK.now() < end
        await CLOCK.sleep(0.05)


@uses_redis_or_valkey
async def test_a_list_at_one_gateway_is_missing_at_the_others_and_none_is_begun_in_part(
    harness: GatewayHarness, server: RawRedis
) -> None:
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        await harness.add_replica(name, role)
    limits = {"requests_per_s": 0.01, "burst_s": 1000.0}
    config = harness.config(auth={"tenants": {"*": limits}}).with_redis_url(server.url)
    first, second = [(await harness.add_known_gateway(config))[0] for _ in range(2)]
    await until(lambda: server.client().dbsize() == 2, "both records")
    async with aiohttp.ClientSession() as session:

        async def status_of(gateway: Gateway, count: int) -> int:
            url = f"http://127.0.0.1:{gateway.http_port}/v1/completions"
            body = {"prompt": [PROMPT] * count, "max_tokens": 1}
            async with session.post(url, json=body) as reply:
                await reply.read()
                return int(reply.status)

        assert await status_of(first, 6) == 200
        await until(lambda: read_by(second.requests, "g0") == 6, "g1 reads it")
        assert [await status_of(second, count) for count in (5, 4, 1)] == [429, 200, 429]
        await until(lambda: read_by(first.requests, "g1") >= 4, "g0 reads it")
        assert await status_of(first, 1) == 429
    assert sum(num_counted(it) for it in (first, second)) == 10


def num_counted(gateway: Gateway) -> int:
    """Return how many requests a gateway has counted for the others, without those that it gave back."""
    return sum(it.used[0] - it.withdrawn[0] for it in gateway.requests.charges.quotas._tenants.values())
