"""Limits of a tenant at a real gateway in front of real engine cores: what is refused, what never is, and
what requests that do not finish have used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from e2e_front import Front, Stage, decoding, prompt
from e2e_harness import until

from cluster.api.channel import call_error
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE: dict[str, Any] = {"kv_tokens": 8192, "chunk_tokens": 64, "max_sequences": 16}
NUM_PROMPT = 100


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with Stage.opened(tmp_path_factory.mktemp("quotas"), ENGINE) as stage:
        yield stage


@asynccontextmanager
async def limited(stage: Stage, **limits: Any) -> AsyncIterator[Front]:
    """A gateway over p0 and d0 that limits tenant a."""
    front = Front(stage.harness, stage.model_dir, {"a": limits})
    await front.open()
    try:
        await front.register(stage.p0, stage.d0)
        yield front
    finally:
        await front.close()


async def refused(front: Front, seed: int, max_tokens: int = 4) -> CallError:
    options = GenerateOptions(tenant="a", max_tokens=max_tokens, ignore_eos=True)
    with pytest.raises(CallError) as caught:
        async for _ in front.client.generate(prompt(seed, NUM_PROMPT), options, resume=False):
            pass
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s is not None
    assert caught.value.usage is None
    return caught.value


async def test_a_stream_that_was_paid_for_moves_on_while_new_requests_are_refused(stage: Stage) -> None:
    """Hand-over and migration take nothing: the bucket would not have it."""
    guest = await stage.guest("decode")
    front = Front(stage.harness, stage.model_dir, {"a": {"requests_per_s": 0.001, "burst_s": 1000.0}})
    await front.open()
    try:
        await front.register(stage.p0, guest)
        call = front.call(prompt(1, NUM_PROMPT), tenant="a", max_tokens=300)
        await until(decoding([call]), "it runs")
        error = await refused(front, 2)
        assert "auth.tenants.a.requests_per_s" in error.message
        assert (error.retry_after_s or 0) > 900
        await front.register(stage.d0)
        await guest.core.drain(60.0)
        await call.done()
        assert call.finished is not None
        assert (call.finished.decode_replica, call.finished.timing.attempts) == ("d0", 1)
        await front.complete(prompt(3, NUM_PROMPT), tenant="b")
        use = front.gateway.requests.counters.tenants.series()["a"]
        assert (use.num_requests, use.num_over_quota) == (1, {"requests_per_s": 1})
    finally:
        await front.close()
        await guest.core.stop()
    await stage.harness.quiet()


async def test_output_beyond_the_limit_refuses_the_next_request_until_it_is_made_up_for(stage: Stage) -> None:
    async with limited(stage, output_tokens_per_s=8.0, burst_s=2.5) as front:
        call = await front.complete(prompt(4, NUM_PROMPT), tenant="a", max_tokens=40)
        assert len(call.sequence) == 40
        error = await refused(front, 5)
        assert "auth.tenants.a.output_tokens_per_s" in error.message
        await front.clock.sleep(error.retry_after_s or 0)
        await front.complete(prompt(6, NUM_PROMPT), tenant="a", max_tokens=1)
    await stage.harness.quiet()


async def test_what_cancelled_and_failed_requests_have_used_is_counted_and_given_back(stage: Stage) -> None:
    limit = 2 * (NUM_PROMPT + 400)
    async with limited(stage, concurrent_tokens=limit) as front:
        cancelled = front.call(prompt(7, NUM_PROMPT), tenant="a", max_tokens=400)
        failed = front.call(prompt(8, NUM_PROMPT), tenant="a", max_tokens=400)
        await until(decoding([cancelled, failed]), "both run")
        error = await refused(front, 9)
        assert "auth.tenants.a.concurrent_tokens" in error.message
        status = await front.admin.status()
        (quota,) = status.quotas
        assert (quota.tenant, quota.used["concurrent_tokens"]) == ("a", 1.0)
        assert dict(quota.num_refused) == {"concurrent_tokens": 1}
        cancelled.stream.cancel()
        await cancelled.ended()
        await until(lambda: front.gateway.requests.num_running == 1, "the gateway has noticed")
        # Every request of this gateway fails, and none can be resumed here.
        await front.gateway.requests.close()
        failed.stream._may_resume = False
        await failed.ended()
        assert failed.error is not None
        usage = failed.error.usage
        assert usage is not None
        assert usage.prompt_tokens == NUM_PROMPT
        assert len(failed.sequence) <= usage.completion_tokens < 400
        use = front.gateway.requests.counters.tenants.series()["a"]
        assert (use.num_requests, use.num_prompt_tokens) == (2, 2 * NUM_PROMPT)
        assert use.num_output_tokens >= cancelled.num_tokens + failed.num_tokens
        states = {name_of(pb.RequestState, it.state): it for it in await front.client.requests()}
        assert set(states) == {"cancelled", "failed"}
        assert states["cancelled"].num_output_tokens >= cancelled.num_tokens > 0
        now = front.clock.now()
        assert [it.used["concurrent_tokens"] for it in front.gateway._quotas.uses(now)] == [0.0]
    await stage.harness.quiet()


def inputs(*seeds: int, num_tokens: int = NUM_PROMPT) -> list[pb.EmbedInput]:
    return [pb.EmbedInput(token_ids=pb.TokenIds(ids=prompt(seed, num_tokens))) for seed in seeds]


async def test_inputs_of_embed_and_score_are_charged_each(stage: Stage) -> None:
    async with limited(stage, prompt_tokens_per_s=1.0, burst_s=450.0) as front:
        stub = front.client.stub()
        embedded = await stub.Embed(pb.EmbedRequest(tenant="a", inputs=inputs(20, 21)))
        assert len(embedded.embeddings) == 2
        assert (embedded.usage.prompt_tokens, embedded.usage.completion_tokens) == (2 * NUM_PROMPT, 0)
        continued = pb.ScoreRequest(
            tenant="a",
            token_ids=pb.TokenIds(ids=prompt(22, NUM_PROMPT)),
            continuations=inputs(23, num_tokens=20),
        )
        scored = await stub.Score(continued)
        assert scored.usage.prompt_tokens == NUM_PROMPT + 20
        use = front.gateway.requests.counters.tenants.series()["a"]
        assert (use.num_requests, use.num_prompt_tokens) == (3, 3 * NUM_PROMPT + 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(pb.EmbedRequest(tenant="a", inputs=inputs(24, 25, 26)))
        error = call_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA")
        assert "auth.tenants.a.prompt_tokens_per_s" in error.message
        assert error.retry_after_s is not None
        assert error.usage is not None
        assert error.usage.prompt_tokens == NUM_PROMPT, "the first one had been accepted"
        await until(lambda: not front.gateway.requests.num_running, "the call has ended its requests")
    await stage.harness.quiet()


async def test_a_call_that_is_left_or_too_late_ends_its_requests(stage: Stage) -> None:
    async with limited(stage, requests_per_s=1000.0) as front:
        many = pb.EmbedRequest(tenant="a", inputs=inputs(*range(30, 60), num_tokens=900))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await front.client.stub().Embed(many, timeout=0.1)
        # At once where that is foreseen, else when the time has passed.
        too_late = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.code() in too_late
        await until(lambda: not front.gateway.requests.num_running, "nothing of it runs on")
        call = front.client.stub().Embed(many)
        await until(lambda: front.gateway.requests.num_running > 20, "they run")
        call.cancel()
        await until(lambda: not front.gateway.requests.num_running, "they are ended")
        await stage.harness.quiet()
        (listed, *_) = await front.client.requests()
        assert listed.request_id.partition(":")[2], "each is named by its number in the call"
