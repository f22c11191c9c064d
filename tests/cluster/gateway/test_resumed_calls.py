"""Which calls that resume a request are free: what a gateway remembers, what the others say, and what a
caller cannot have by claiming that something broke."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from gateway_harness import PROMPT, GatewayHarness, encode, expected, until
from hypothesis import given
from hypothesis import strategies as st
from index_harness import RawRedis
from optional_programs import uses_redis_or_valkey

from cluster.admission.ladder import Rung
from cluster.api.generate_options import GenerateOptions, generate_request
from cluster.errors import AbandonedError, DeadlineError, OverloadedError, RequestError, UnavailableError
from cluster.gateway import resumed_calls
from cluster.gateway.resumed_calls import OtherGateways, ResumeClaim, ResumedCalls
from cluster.identity.resume_tokens import ResumeToken, gateway_tag
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1.inference_pb2_grpc import InferenceStub
from cluster.serve.gateway_server import Gateway
from kvtransfer.common.clock import ManualClock

KEY = "acme", "r"
NUM_PROMPT = len(encode(PROMPT))


class Fleet:
    """Gateways that ask each other; those in `gone` do not answer."""

    def __init__(self, *names: str) -> None:
        self.clock = ManualClock(1000.0)
        self.gone: set[str] = set()
        self.num_asked = 0
        self.calls = {name: ResumedCalls(name, self.clock, self._asked_by(name)) for name in names}

    def _asked_by(self, asker: str) -> Callable[[ResumeClaim], Any]:
        async def ask(claim: ResumeClaim) -> OtherGateways:
            self.num_asked += 1
            names = [name for name in self.calls if name != asker and name not in self.gone]
            said = [self.calls[name].judge(claim) for name in names]
            return OtherGateways(all(said), any(gateway_tag(name) == claim.issuer for name in names))

        return ask

    def token(self, issuer: str, number: int = 0, lifetime_s: int = 600) -> ResumeToken:
        expires_at = int(self.clock.wall()) + lifetime_s
        return ResumeToken(number.to_bytes(16, "big"), gateway_tag(issuer), expires_at, 0)

    async def is_free(self, at: str, token: ResumeToken, num_tokens: int = 0) -> bool:
        return await self.calls[at].claim(KEY, token, num_tokens) is not None


@pytest.mark.parametrize(
    ("error", "is_free"),
    [
        (None, False),
        (AbandonedError("the client cancelled"), False),
        (DeadlineError("the deadline passed"), False),
        (UnavailableError("no replica", 0.0), True),
        (OverloadedError("the replicas refused it", 0.0), True),
    ],
)
async def test_a_call_is_free_once_if_its_gateway_broke_the_one_before(
    error: RequestError | None, is_free: bool
) -> None:
    fleet = Fleet("a", "b")
    fleet.calls["a"].ended(KEY, error, num_before=None, num_tokens=5)
    assert await fleet.is_free("b", fleet.token("a"), 3) == is_free
    for at in ("a", "b"):
        assert not await fleet.is_free(at, fleet.token("a"), 4)


async def test_a_call_that_runs_or_is_not_remembered_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumed_calls, "MAX_BROKEN", 2)
    fleet = Fleet("a", "b")
    assert not await fleet.is_free("a", fleet.token("a"))
    broken = UnavailableError("no replica", 0.0)
    for name in ("r", "s", "t"):
        fleet.calls["a"].ended(("acme", name), broken, num_before=None, num_tokens=5)
    assert not await fleet.is_free("a", fleet.token("a"))
    assert await fleet.calls["a"].claim(("acme", "t"), fleet.token("a", 2), 0) is not None
    assert fleet.num_asked == 0, "a gateway knows its own calls"


async def test_a_caller_needs_more_output_than_before_and_no_more_than_there_was() -> None:
    fleet = Fleet("a")
    broken = UnavailableError("no replica", 0.0)
    for num_before, num_tokens, is_free in ((3, 3, False), (3, 4, True), (3, 9, False), (None, 0, True)):
        fleet.calls["a"].ended(KEY, broken, num_before=num_before, num_tokens=8)
        assert await fleet.is_free("a", fleet.token("a"), num_tokens) == is_free, (num_before, num_tokens)


async def test_a_call_of_a_gateway_that_is_gone_is_free_once_in_the_whole_fleet() -> None:
    fleet = Fleet("a", "b", "c", "d")
    fleet.gone.add("a")
    assert await fleet.is_free("b", fleet.token("a"), 7)
    fleet.gone.add("b")  # what it knew is known to those that it asked
    for at in ("c", "d"):
        assert not await fleet.is_free(at, fleet.token("a"), 8)
    assert await fleet.is_free("c", fleet.token("a", 2), 7), "the token of another call"


async def test_a_grant_that_was_given_back_is_there_again_once() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.calls["a"].ended(KEY, UnavailableError("no replica", 0.0), num_before=None, num_tokens=5)
    for gone in (set[str](), {"a"}):
        fleet.gone = gone
        token = fleet.token("a", len(gone))
        grant = await fleet.calls["b"].claim(KEY, token, 0)
        assert grant is not None
        assert (grant.has_moved, grant.is_issuer_gone) == (True, bool(gone))
        assert grant.is_from("a")
        await fleet.calls["b"].give_back(grant)
        assert await fleet.is_free("c", token)
        assert not await fleet.is_free("b", token)


async def test_what_does_not_fit_into_the_memory_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumed_calls, "MAX_USED", 4)
    fleet = Fleet("b")
    fleet.clock.advance(10.0)
    for number in range(6):
        assert await fleet.is_free("b", fleet.token("a", number, lifetime_s=600 + number))
    for number in range(6):
        assert not await fleet.is_free("b", fleet.token("a", number, lifetime_s=600 + number))
    assert not await fleet.is_free("b", fleet.token("a", 100, lifetime_s=601)), "as old as what was dropped"
    assert await fleet.is_free("b", fleet.token("a", 101, lifetime_s=700))
    other = "other", "r"
    assert await fleet.calls["b"].claim(other, fleet.token("a", 0), 0) is not None, "another tenant's"


async def test_a_tenant_that_was_forgotten_has_used_what_it_may_have_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumed_calls, "MAX_TENANTS", 3)
    fleet = Fleet("b")
    for number in range(5):
        assert await fleet.calls["b"].claim((f"t{number}", "r"), fleet.token("a", lifetime_s=600 + number), 0)
    assert await fleet.calls["b"].claim(("t0", "r"), fleet.token("a"), 0) is None
    assert await fleet.calls["b"].claim(("t0", "r"), fleet.token("a", lifetime_s=700), 0) is not None


@given(
    st.lists(
        st.tuples(st.sampled_from(["claim", "kill", "drop"]), st.integers(0, 3), st.integers(0, 5)),
        max_size=60,
    )
)
def test_no_token_is_free_twice_whatever_is_asked_of_whom(steps: list[tuple[str, int, int]]) -> None:
    """Gateways die one after the other; the last one remains."""

    async def run() -> None:
        names = ["b", "c", "d", "e"]
        fleet = Fleet(*names)
        used: set[int] = set()
        for what, which, number in steps:
            alive = [name for name in names if name not in fleet.gone]
            name = alive[which % len(alive)]
            if what == "kill" and len(alive) > 1:
                fleet.gone.add(name)
            elif what == "claim":
                is_free = await fleet.is_free(name, fleet.token("a", number))
                assert is_free == (number not in used)
                used.add(number)

    asyncio.run(run())


# --------------------------------------------------------------------------------- at a real gateway


@pytest_asyncio.fixture
async def scripted(harness: GatewayHarness) -> GatewayHarness:
    await harness.add_replica("d0", "decode")
    return harness


async def opened(harness: GatewayHarness, **limits: Any) -> tuple[Gateway, str]:
    return await harness.add_known_gateway(harness.config(auth={"tenants": {"a": limits}}))


class Call:
    """One call of `Generate`, and the request with which it is resumed."""

    def __init__(self, address: str, request: pb.GenerateRequest) -> None:
        self.request = pb.GenerateRequest()
        self.request.CopyFrom(request)
        self._channel = grpc.aio.insecure_channel(address)
        self._call = InferenceStub(self._channel).Generate(request)
        self._replies = aiter(self._call)
        self.token_ids: list[int] = []
        self.usage = pb.Usage()

    async def begin(self, num_tokens: int = 0) -> None:
        """Read until so many tokens are there; raise where the call is refused."""
        accepted = (await anext(self._replies)).accepted
        assert accepted.request_id
        self.request.request_id, self.request.seed = accepted.request_id, accepted.seed
        self.request.resume_token = accepted.resume_token
        while len(self.token_ids) < num_tokens:
            await self._take()

    async def _take(self) -> None:
        reply = await anext(self._replies)
        self.token_ids += reply.delta.token_ids
        self.usage = reply.finished.usage

    async def read(self) -> list[int]:
        """Read to the end; return the tokens."""
        async for reply in self._replies:
            self.token_ids += reply.delta.token_ids
            self.usage = reply.finished.usage
        return self.token_ids

    def resumed(self, *token_ids: int) -> pb.GenerateRequest:
        """The request, resumed with this output."""
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        del request.resume[:]
        request.resume.add(sample=0, token_ids=token_ids)
        return request

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def asked(max_tokens: int = 6, **fields: Any) -> pb.GenerateRequest:
    return generate_request(PROMPT, GenerateOptions(max_tokens=max_tokens, tenant="a", seed=3, **fields))


async def begun(address: str, request: pb.GenerateRequest, num_tokens: int = 0) -> Call:
    call = Call(address, request)
    await call.begin(num_tokens)
    return call


async def refusal(address: str, request: pb.GenerateRequest) -> str:
    """Return the details of a call that is refused."""
    call = Call(address, request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.begin()
    await call.close()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(caught.value.details())


class Meter:
    """Counts what a gateway takes from the tenant's requests, from now on: the bucket is not refilled."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before = self._level()

    @classmethod
    async def steady(cls, gateway: Gateway, num_gateways: int) -> Meter:
        """Return one when the gateway has its part of the limit."""
        quotas = gateway.requests.charges.quotas
        await until(lambda: quotas.share == 1 / num_gateways, "its part")
        return cls(gateway)

    @property
    def num_charged(self) -> int:
        return round(self._before - self._level())

    def _level(self) -> float:
        requests = self._gateway.requests
        return requests.charges.quotas.rates("a", requests._clock.now())["requests_per_s"].level


# A hundred requests, and no more. Several gateways divide them.
RARE: dict[str, Any] = {"requests_per_s": 1e-4, "burst_s": 1e6}


@pytest.mark.parametrize("how", ["cancelled", "ended", "running"])
async def test_a_caller_cannot_have_a_served_request_again_by_resuming_it(
    scripted: GatewayHarness, how: str
) -> None:
    """It pays as for a new one: `requests_per_s` lets three pass."""
    gateway, address = await opened(scripted, requests_per_s=1e-6, burst_s=3e6)
    meter = Meter(gateway)
    replica = scripted.replicas["d0"]
    replica.script.stop_after = None if how == "ended" else 3
    call = await begun(address, asked(), 2)
    if how == "ended":
        await call.read()
    elif how == "cancelled":
        await call.close()
        await until(lambda: not gateway.requests.num_running, "it is noticed")
    for num_charged in (2, 3):
        again = await begun(address, call.resumed(*call.token_ids[:2]))
        assert meter.num_charged == num_charged
        replica.script.resume.set()
        assert call.token_ids[:2] + await again.read() == expected(3, 6)
        assert (again.usage.completion_tokens, again.usage.resumed_tokens) == (6, 2)
    said = await refusal(address, call.resumed(*call.token_ids[:2]))
    assert "auth.tenants.a.requests_per_s" in said
    await call.close()


async def test_what_a_replica_broke_is_resumed_free_of_charge_once(scripted: GatewayHarness) -> None:
    gateway, address = await opened(scripted, **RARE)
    meter = Meter(gateway)
    replica = scripted.replicas["d0"]
    replica.script.stop_after = 3
    call = await begun(address, asked(), 3)
    await gateway.requests.close()  # ends what runs, as when nothing can serve it
    gateway.requests.acceptance._is_leaving = False
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    replica.script.resume.set()
    again = await begun(address, call.resumed(*call.token_ids))
    assert meter.num_charged == 1
    assert call.token_ids + await again.read() == expected(3, 6)
    await (await begun(address, call.resumed(*call.token_ids))).read()
    assert meter.num_charged == 2


async def test_output_that_never_was_is_charged_like_a_prompt(scripted: GatewayHarness) -> None:
    """It says to have 200 tokens of a call that brought three."""
    limit = NUM_PROMPT + 100
    gateway, address = await opened(scripted, prompt_tokens_per_s=1e-6, burst_s=1e6 * 2 * limit)
    replica = scripted.replicas["d0"]
    replica.script.stop_after = 3
    call = await begun(address, asked(max_tokens=300), 3)
    await gateway.requests.close()
    gateway.requests.acceptance._is_leaving = False
    said = await refusal(address, call.resumed(*[5] * 280))
    assert "auth.tenants.a.prompt_tokens_per_s" in said
    replica.script.resume.set()
    await (await begun(address, call.resumed(*[5] * 50))).close()
    state = gateway.requests.charges.quotas.rates("a", gateway.requests._clock.now())["prompt_tokens_per_s"]
    assert round(state.level) == 2 * limit - NUM_PROMPT - NUM_PROMPT - 50


async def test_requests_of_a_gateway_that_died_go_on_free_of_charge_once(scripted: GatewayHarness) -> None:
    """None was refused; whoever shows the token again, here or at a third gateway, pays."""
    _, first = await opened(scripted, **RARE)
    second, address = await opened(scripted, **RARE)
    third, other = await opened(scripted, **RARE)
    replica = scripted.replicas["d0"]
    replica.script.stop_after = 3
    calls = [await begun(first, asked(request_id=f"r{number}"), 3) for number in range(3)]
    await scripted.gateways[0].stop()
    await scripted.roster.remove("g0", 1)
    meters = [await Meter.steady(gateway, 2) for gateway in (second, third)]
    for gateway in (second, third):
        gateway.requests.admission.degradation.ladder.rung = Rung.REFUSING  # nor are they judged
    replica.script.resume.set()
    for call in calls:
        again = await begun(address, call.resumed(*call.token_ids))
        assert call.token_ids + await again.read() == expected(3, 6)
    assert [meter.num_charged for meter in meters] == [0, 0]
    for gateway in (second, third):
        gateway.requests.admission.degradation.ladder.rung = Rung.NORMAL
    for at in (address, other):
        await (await begun(at, calls[0].resumed(*expected(3, 6)[:5]))).read()
    assert [meter.num_charged for meter in meters] == [1, 1]


async def test_a_request_that_runs_at_another_gateway_is_charged_here(scripted: GatewayHarness) -> None:
    """And one that was refused here for another reason than its quota may try again."""
    first, address = await opened(scripted, **RARE)
    second, other = await opened(scripted, **RARE, concurrent_tokens=NUM_PROMPT + 6)
    meter = await Meter.steady(second, 2)
    scripted.replicas["d0"].script.stop_after = 3
    running = await begun(address, asked(request_id="runs"), 3)
    broken = await begun(address, asked(request_id="broken"), 3)
    await (await begun(other, running.resumed(*running.token_ids))).close()
    assert meter.num_charged == 1
    await until(lambda: not second.requests.num_running, "it is cancelled")
    holding = await begun(other, asked(request_id="holds"))
    assert meter.num_charged == 2
    await first.requests.close()
    assert "concurrent_tokens" in await refusal(other, broken.resumed(*broken.token_ids))
    await holding.close()
    await until(lambda: not second.requests.num_running, "there is room")
    scripted.replicas["d0"].script.resume.set()
    again = await begun(other, broken.resumed(*broken.token_ids))
    assert broken.token_ids + await again.read() == expected(3, 6)
    assert meter.num_charged == 2


async def test_a_refused_call_has_no_place_while_other_gateways_hear_of_it(
    scripted: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits behind it would wait for their answers."""
    first, address = await opened(scripted, **RARE)
    second, other = await opened(scripted, **RARE, concurrent_tokens=NUM_PROMPT + 6)
    scripted.replicas["d0"].script.stop_after = 3
    broken = await begun(address, asked(request_id="broken"))
    holding = await begun(other, asked(request_id="holds"), 3)
    await first.requests.close()
    admission, resumed = second.requests.admission, second.requests.resumed
    left: list[tuple[int, float]] = []
    ask_others = resumed._ask_others

    async def ask(claim: ResumeClaim) -> OtherGateways:
        if claim.is_returned:
            left.append((len(admission.waiting), admission.bytes.num_bytes))
        return await ask_others(claim)

    monkeypatch.setattr(resumed, "_ask_others", ask)
    assert "concurrent_tokens" in await refusal(other, broken.resumed())
    assert left == [(0, 0)]
    await holding.close()


async def test_concurrent_tokens_are_refused_to_resumed_calls_too(scripted: GatewayHarness) -> None:
    """Twelve are begun and cancelled one after the other, then resumed together."""
    num_tokens = NUM_PROMPT + 60
    gateway, address = await opened(scripted, concurrent_tokens=3 * num_tokens + num_tokens // 2)
    scripted.replicas["d0"].script.stop_after = 3
    calls = []
    for number in range(12):
        calls.append(await begun(address, asked(max_tokens=60, request_id=f"r{number}"), 2))
        await calls[-1].close()
        await until(lambda: not gateway.requests.num_running, "it is cancelled")
    resumed = [Call(address, call.resumed(*call.token_ids[:2])) for call in calls]
    refusals = []
    for call in resumed:
        try:
            await call.begin()
        except grpc.aio.AioRpcError as error:
            refusals.append(str(error.details()))
    assert gateway.requests.num_running == 3
    assert len(refusals) == 9
    assert all("auth.tenants.a.concurrent_tokens" in said for said in refusals)
    for call in resumed:
        await call.close()


async def test_a_failed_attempt_at_a_token_is_counted(scripted: GatewayHarness) -> None:
    gateway, address = await opened(scripted, **RARE)
    meter = Meter(gateway)
    request = asked(request_id="mine")
    request.resume_token = "bm9uZQ=="
    request.resume.add(sample=0)
    call = Call(address, request)
    with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
        await call.begin()
    await call.close()
    assert meter.num_charged == 1


async def test_a_call_that_no_replica_took_is_free_once_more(scripted: GatewayHarness) -> None:
    gateway, address = await scripted.add_known_gateway(
        scripted.config(auth={"tenants": {"a": RARE}}, max_attempts=1)
    )
    meter = Meter(gateway)
    replica = scripted.replicas["d0"]
    replica.script.num_refusals = 1
    call = await begun(address, asked())
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await call.read()
    again = await begun(address, call.resumed())
    await again.read()
    assert meter.num_charged == 1


@uses_redis_or_valkey
async def test_what_one_gateway_broke_is_free_at_another_once_where_they_share_the_limits(
    scripted: GatewayHarness, tmp_path: Path
) -> None:
    """The tenant has three requests; which gateway counted one is seen in its own record."""
    with RawRedis(tmp_path) as server:
        limits = {"requests_per_s": 1e-3, "burst_s": 3e3}
        config = scripted.config(auth={"tenants": {"a": limits}}).with_redis_url(server.url)
        known = [await scripted.add_known_gateway(config) for _ in range(2)]
        (first, address), (second, other_address) = known
        await until(lambda: all(_knows_others(gateway) for gateway, _ in known), "they share the limits")
        replica = scripted.replicas["d0"]
        replica.script.stop_after = 3
        call = await begun(address, asked(), 3)
        await first.requests.close()  # ends what runs, as when nothing can serve it
        first.requests.acceptance._is_leaving = False
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        replica.script.resume.set()
        for num_there in (0, 1):
            again = await begun(other_address, call.resumed(*call.token_ids))
            assert call.token_ids + await again.read() == expected(3, 6)
            assert [_num_counted(gateway) for gateway, _ in known] == [1, num_there]
            await again.close()
        await until(lambda: _left(first) == _left(second) == 1, "each knows what the other took")
        await (await begun(address, asked())).read()
        assert "requests_per_s" in await refusal(address, asked())
        await call.close()


def _knows_others(gateway: Gateway) -> bool:
    quotas = gateway.requests.charges.quotas
    return quotas.share == 1 and not quotas._is_divided and not quotas.missing


def _num_counted(gateway: Gateway) -> int:
    """Return how many requests a gateway has counted for the others, without those that it gave back."""
    return sum(it.used[0] - it.withdrawn[0] for it in gateway.requests.charges.quotas._tenants.values())


def _left(gateway: Gateway) -> int:
    requests = gateway.requests
    return round(requests.charges.quotas.rates("a", requests._clock.now())["requests_per_s"].level)
