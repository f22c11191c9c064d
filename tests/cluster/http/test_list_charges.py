"""Calls with several prompts, and calls that only tokenize: what they take from the quota of their tenant;
and how often callers are refused that have used it up."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import grpc
import pytest
from gateway_harness import GatewayHarness, until
from http_harness import CHAT, HttpFrontHarness

from cluster.admission.refusal_pace import BURST, MAX_DELAY_S, PERIOD_S, RefusalPace
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1.inference_pb2_grpc import InferenceStub
from cluster.text.text_threads import NUM_THREADS, TextThreads

# Ten requests, and no more.
TEN: dict[str, Any] = {"requests_per_s": 1e-6, "burst_s": 1e7}


def front_of(harness: GatewayHarness, **limits: Any) -> HttpFrontHarness:
    return HttpFrontHarness(harness, harness.config(auth={"tenants": {"*": limits}}))


def num_left(front: HttpFrontHarness) -> int:
    requests = front.gateway.requests
    return round(requests.charges.quotas.rates("", requests._clock.now())["requests_per_s"].level)


def num_accepted(front: HttpFrontHarness) -> int:
    return len(front.gateway.requests.latest(1000, None))


async def test_a_list_takes_a_request_for_each_prompt_or_none(
    harness: GatewayHarness,
) -> None:
    async with front_of(harness, **TEN) as front:
        for path, field, count, left in (
            ("/v1/completions", "prompt", 6, 4),
            ("/v1/embeddings", "input", 3, 1),
            ("/v1/completions", "prompt", 1, 0),
        ):
            body = {field: ["a"] * count} | ({"max_tokens": 1} if field == "prompt" else {})
            reply = await front.post(path, body)
            assert (reply.status, num_left(front)) == (200, left), path
        assert num_accepted(front) == 10
    async with front_of(harness, **TEN) as front:
        assert (await front.post("/v1/completions", {"prompt": ["a"] * 7, "max_tokens": 1})).status == 200
        for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
            reply = await front.post(path, {field: ["a"] * 4})
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert "4 requests at once: tenant '' may use" in reply.error["message"]
            assert int(reply.headers["Retry-After"]) > 0
            assert num_left(front) == 3
        assert num_accepted(front) == 7


async def test_inputs_of_grpc_calls_are_taken_together_too(harness: GatewayHarness) -> None:
    async with front_of(harness, **TEN) as front:
        address = f"127.0.0.1:{front.gateway._ports.clients.number}"  # type: ignore[union-attr]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = InferenceStub(channel)
            inputs = [pb.EmbedInput(text="a")] * 8
            await stub.Embed(pb.EmbedRequest(inputs=inputs))
            assert num_left(front) == 2
            for call in (
                stub.Embed(pb.EmbedRequest(inputs=inputs[:3])),
                stub.Score(pb.ScoreRequest(text="a", continuations=inputs[:3])),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="3 requests at once"):
                    await call
        assert (num_left(front), num_accepted(front)) == (2, 8)


async def test_a_longer_list_than_the_bucket_is_taken_when_it_is_full(harness: GatewayHarness) -> None:
    async with front_of(harness, **TEN) as front:
        body = {"prompt": ["a"] * 12, "max_tokens": 1}
        assert (await front.post("/v1/completions", body)).status == 200
        assert num_left(front) == -2
        assert (await front.post("/v1/completions", body)).status == 429


async def test_calls_that_tokenize_take_a_request(harness: GatewayHarness) -> None:
    calls: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "the fox"},
        "/detokenize": {"tokens": [5, 6]},
        "/v1/messages/count_tokens": {"model": "m", "messages": CHAT["messages"]},
    }
    async with front_of(harness, **TEN) as front:
        for number, (path, body) in enumerate(calls.items(), 1):
            assert (await front.post(path, body)).status == 200
            assert num_left(front) == 10 - number, path
        await front.gateway.requests.charges.charge("", 7)
        for path, body in calls.items():
            assert (await front.post(path, body)).status == 429
    assert not front.gateway.requests.num_running


# ---------------------------------------------------------------------------------- turns in threads


async def test_a_party_uses_one_thread_whatever_it_has_waiting() -> None:
    threads, goes_on, begun = TextThreads("test"), threading.Event(), []

    def work(name: str) -> str:
        begun.append(name)
        if name.startswith("a"):
            assert goes_on.wait(20.0)
        return name

    held = [asyncio.create_task(threads.run("a", partial(work, f"a{number}"))) for number in range(20)]
    await until(lambda: begun == ["a0"], "one runs")
    for name in ("b", "c", "b"):
        assert await threads.run(name, partial(work, name)) == name
    assert begun == ["a0", "b", "c", "b"]
    goes_on.set()
    assert await asyncio.gather(*held) == [f"a{number}" for number in range(20)]
    threads.close()


async def test_whoever_leaves_keeps_its_turn_until_its_thread_is_free() -> None:
    threads, goes_on, begun = TextThreads("test"), threading.Event(), []

    def work() -> None:
        begun.append(1)
        assert goes_on.wait(20.0)

    first = asyncio.create_task(threads.run("a", work))
    await until(lambda: len(begun) == 1, "it runs")
    for _ in range(2):
        first.cancel()
        await asyncio.sleep(0)
    others = [asyncio.create_task(threads.run("a", work)) for _ in range(NUM_THREADS)]
    others[0].cancel()
    await asyncio.wait(others[:1])
    assert (len(begun), first.done()) == (1, False)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await others[1]
    assert len(begun) == 2
    threads.close()


async def test_what_fails_in_a_thread_fails_its_caller_alone() -> None:
    threads = TextThreads("test")
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    assert await threads.run("a", lambda: 1) == 1
    threads.close()


# ---------------------------------------------------------------------------------------- refusals


def test_refusals_of_a_tenant_come_evenly_after_the_first_ones() -> None:
    pace = RefusalPace()
    assert [pace.delay_s("a", 5.0) for _ in range(BURST)] == [0.0] * BURST
    later = [pace.delay_s("a", 5.0) for _ in range(3)]
    assert later == pytest.approx([0.0, PERIOD_S, 2 * PERIOD_S])
    assert pace.delay_s("b", 5.0) == 0.0
    for _ in range(200):
        assert 0 < pace.delay_s("a", 5.0) <= MAX_DELAY_S
    assert pace.delay_s("a", 5.0 + MAX_DELAY_S) == 0.0
    assert [pace.delay_s("a", 100.0) for _ in range(BURST)] == [0.0] * BURST


async def test_a_gateway_is_not_kept_busy_by_calls_that_it_refuses(harness: GatewayHarness) -> None:
    async with front_of(harness, **TEN) as front:
        await front.gateway.requests.charges.charge("", 10)
        clock = front.gateway.requests._clock
        began_at = clock.now()
        replies = [await front.post("/v1/completions", {"prompt": ["a"] * 4}) for _ in range(BURST + 4)]
        assert {reply.status for reply in replies} == {429}
        assert clock.now() - began_at >= 2 * PERIOD_S
