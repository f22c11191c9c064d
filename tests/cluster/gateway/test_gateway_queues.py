"""What waits in a gateway counts in bytes wherever it waits, and an early refusal costs next to nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, expected, until

from cluster.admission.config import AdmissionConfig
from cluster.admission.ladder import Rung
from cluster.api.generate_options import GenerateOptions, generate_request
from cluster.errors import CallError, OverloadedError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1.inference_pb2_grpc import InferenceStub
from cluster.serve.gateway_server import Gateway

SEED = 11
SCHEMA = json.dumps({"type": "string", "description": "x" * 250_000})


async def opened(
    harness: GatewayHarness,
    max_queue_mb: float = 256.0,
    auth: dict[str, Any] | None = None,
    **classes: dict[str, Any],
) -> tuple[Gateway, str]:
    config = harness.config(auth=auth)
    admission = AdmissionConfig.model_validate({"max_queue_mb": max_queue_mb, **classes})
    return await harness.add_gateway(config.model_copy(update={"admission": admission}))


async def generate(harness: GatewayHarness, address: str, **options: Any) -> None:
    await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=3, **options), resume=False)


async def test_on_a_rung_that_sheds_a_request_it_is_not_even_tokenized(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.add_replica("d0", "decode")
    gateway, address = await opened(harness)
    gateway.requests.admission.degradation.ladder.rung = Rung.LOW_WEIGHT_SHED
    num_read = 0

    async def read(*_: Any) -> None:
        nonlocal num_read
        num_read += 1
        raise AssertionError

    monkeypatch.setattr(gateway.requests.acceptance._preprocessor, "prompt_tokens", read)
    with pytest.raises(CallError) as caught:
        await generate(harness, address, service_class="batch")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "of the class batch" in caught.value.message
    assert num_read == 0
    assert gateway.requests.admission.bytes.num_bytes == 0


async def test_all_of_a_request_counts_in_bytes_until_it_is_submitted(harness: GatewayHarness) -> None:
    """Its schema too, of which 256 KB are the most."""
    replica = await harness.add_replica("d0", "decode")
    replica.script.num_backlog_tokens = 5000
    gateway, address = await opened(harness)
    admission = gateway.requests.admission
    work = asyncio.create_task(generate(harness, address, constraint=pb.Constraint(json_schema=SCHEMA)))
    await until(lambda: len(admission.waiting) == 1, "it waits")
    assert admission.bytes.num_bytes > 250_000
    replica.script.num_backlog_tokens = 0
    await until(lambda: bool(replica.submissions), "it is submitted")
    assert admission.bytes.num_bytes == 0
    await work
    assert admission.bytes.num_bytes == 0


async def test_a_request_that_waits_does_not_pass_the_others_by_being_resumed(
    harness: GatewayHarness,
) -> None:
    """Whatever output it claims; it waits at another gateway, too, which does not know the first one. None is
    judged."""
    replica = await harness.add_replica("d0", "decode")
    replica.script.num_backlog_tokens = 5000
    gateway, address = await opened(harness)
    other, other_address = await opened(harness)
    options = GenerateOptions(max_tokens=3, seed=SEED, request_id="mine")
    first = harness.client(address).generate(PROMPT, options, resume=False).events()
    accepted = await anext(first)
    assert isinstance(accepted, pb.Accepted)
    await until(lambda: len(gateway.requests.admission.waiting) == 1, "it waits")
    (queued,) = gateway.requests.admission.waiting
    for each in (gateway, other):
        each.requests.admission.degradation.ladder.rung = Rung.REFUSING
    calls = []
    for at, claimed in ((address, [1, 2]), (address, [1, 2]), (address, []), (other_address, [])):
        request = generate_request(PROMPT, options)
        request.resume_token = accepted.resume_token
        request.resume.add(sample=0, token_ids=claimed)
        channel = grpc.aio.insecure_channel(at)
        call = InferenceStub(channel).Generate(request)
        calls.append((channel, call, aiter(call)))
        assert (await anext(calls[-1][2])).WhichOneof("event") == "accepted"
    assert (len(gateway.requests.admission.waiting), len(other.requests.admission.waiting)) == (1, 1)
    (last,) = gateway.requests.admission.waiting
    assert last is not queued
    assert last.arrived_at == queued.arrived_at
    assert not replica.submissions
    replica.script.num_backlog_tokens = 0
    for _, _, responses in calls[2:]:
        tokens = [token async for response in responses for token in response.delta.token_ids]
        assert tokens == expected(SEED, 3)
    assert [await call.code() for _, call, _ in calls[:2]] == [grpc.StatusCode.CANCELLED] * 2
    with pytest.raises(CallError):
        await anext(first)
    for channel, _, _ in calls:
        await channel.close()


async def test_a_request_counts_while_its_prompt_is_read(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.add_replica("d0", "decode")
    gateway, address = await opened(harness, max_queue_mb=0.7)
    admission, preprocessor = gateway.requests.admission, gateway.requests.acceptance._preprocessor
    read, goes_on = preprocessor.prompt_tokens, asyncio.Event()

    async def slowly(*arguments: Any) -> Any:
        await goes_on.wait()
        return await read(*arguments)

    monkeypatch.setattr(preprocessor, "prompt_tokens", slowly)
    constraint = pb.Constraint(json_schema=SCHEMA)
    first = asyncio.create_task(generate(harness, address, constraint=constraint))
    await until(lambda: admission.bytes.num_bytes > 250_000, "it has arrived")
    gone = asyncio.create_task(generate(harness, address, constraint=constraint))
    await until(lambda: admission.bytes.num_bytes > 500_000, "another one has arrived")
    with pytest.raises(CallError, match="max_queue_mb"):
        await generate(harness, address, constraint=constraint)
    gone.cancel()
    await until(lambda: admission.bytes.num_bytes < 500_000, "it has left")
    goes_on.set()
    await first
    assert admission.bytes.num_bytes == 0
    await asyncio.gather(gone, return_exceptions=True)


async def test_a_request_counts_again_while_it_waits_after_a_refusal(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.num_refusals = 1000
    gateway, address = await opened(harness)
    admission = gateway.requests.admission
    work = asyncio.create_task(generate(harness, address))
    await until(lambda: len(admission.retries.queue) == 1, "it was refused, and waits")
    assert admission.bytes.num_bytes > 0
    await gateway.requests.close()
    await asyncio.gather(work, return_exceptions=True)
    assert admission.bytes.num_bytes == 0


async def test_a_request_counts_while_there_is_no_replica(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    gateway, address = await opened(harness)
    await replica.die()
    await until(lambda: not gateway.connections.is_connected(), "it is gone")
    work = asyncio.create_task(generate(harness, address))
    await until(lambda: gateway.requests.num_running == 1, "it asks again and again")
    assert gateway.requests.admission.bytes.num_bytes > 0
    with pytest.raises(CallError):
        await work
    assert gateway.requests.admission.bytes.num_bytes == 0


async def test_a_request_that_is_refused_for_the_load_is_not_counted_by_its_quota(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused after its prompt was read, so after it was taken from the quota."""
    replica = await harness.add_replica("d0", "decode")
    tenants = {"*": {"requests_per_s": 0.001, "burst_s": 1000.0}}
    gateway, address = await opened(harness, auth={"tenants": tenants})
    requests = gateway.requests

    def refuse(*_: Any) -> None:
        raise OverloadedError("too late", 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(requests.admission, "place", refuse)
        for _ in range(3):
            with pytest.raises(CallError, match="too late"):
                await generate(harness, address)
    assert requests.admission.bytes.num_bytes == 0
    assert not replica.submissions
    await generate(harness, address)
    with pytest.raises(CallError, match="requests_per_s"):
        await generate(harness, address)


async def test_one_that_waits_in_vain_is_not_counted_by_its_quota(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.num_backlog_tokens = 5000
    tenants = {"*": {"requests_per_s": 0.001, "prompt_tokens_per_s": 0.01, "burst_s": 1000.0}}
    standard = {"ttft_s": 60.0, "aging_s": 0.1, "max_wait_s": 0.3}
    gateway, address = await opened(harness, auth={"tenants": tenants}, standard=standard)
    with pytest.raises(CallError, match="the most for the class"):
        await generate(harness, address)
    states = gateway.requests.charges.quotas.rates("default", gateway.requests._clock.now())
    assert {name: state.level for name, state in states.items()} == {
        "requests_per_s": pytest.approx(1.0),
        "prompt_tokens_per_s": pytest.approx(10.0),
    }
    assert not replica.submissions


async def test_what_is_refused_after_all_was_not_capped(harness: GatewayHarness) -> None:
    await harness.add_replica("d0", "decode")
    standard = {"capped_tokens": 2, "ttft_s": 0.0001, "aging_s": 0.1, "max_wait_s": 0.3}
    gateway, address = await opened(harness, standard=standard, interactive={"capped_tokens": 2})
    admission = gateway.requests.admission
    admission.degradation.ladder.rung = Rung.TOKENS_CAPPED
    with pytest.raises(CallError, match="objective"):
        await generate(harness, address)
    assert admission.degradation.num_capped == 0
    await generate(harness, address, service_class="interactive")
    assert admission.degradation.num_capped == 1


async def test_bytes_are_released_whatever_ends_the_acceptance(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.add_replica("d0", "decode")
    gateway, address = await opened(harness)
    requests = gateway.requests

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    for owner, name in (
        (requests.acceptance._preprocessor, "prompt_tokens"),
        (requests.admission, "place"),
        (requests.charges.quotas, "take_prompt"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, break_down)
            with pytest.raises(CallError):
                await generate(harness, address)
        assert requests.admission.bytes.num_bytes == 0, name
        assert len(requests.admission.waiting) == 0, name
