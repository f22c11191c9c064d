"""Prompts that some replicas are too small for: routed around them, or refused when no request could be."""

from __future__ import annotations

import grpc
import pytest
from gateway_harness import GatewayHarness

from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError

SHORT = GenerateOptions(max_tokens=4)


async def test_a_prompt_too_long_for_a_prefill_replica_goes_around_it(harness: GatewayHarness) -> None:
    prefill = await harness.add_replica("p0", "prefill", num_blocks=8)
    decode = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    client = harness.client(address)
    assert (
        (await harness.admin().status()).model.max_context_tokens
        == gateway.connections.max_context_tokens
        == 512
    )
    near = await client.complete([5] * 100, SHORT)
    assert (near.finished.prefill_replica, near.finished.decode_replica) == ("p0", "d0")
    far = await client.complete([6] * 300, SHORT)
    assert (far.finished.prefill_replica, far.finished.decode_replica) == ("d0", "d0")
    assert [len(it.prompt) // 4 for it in prefill.submissions] == [100]
    assert [it.decode for it in decode.submissions] == [None]
    assert far.finished.timing.attempts == 1


async def test_the_context_is_that_of_the_least_replica_that_can_serve_alone(harness: GatewayHarness) -> None:
    await harness.add_replica("p0", "prefill", num_blocks=8)
    await harness.add_replica("d0", "decode")
    await harness.add_replica("d1", "decode", num_blocks=16)
    _, address = await harness.add_gateway()
    client = harness.client(address)
    assert (await harness.admin().status()).model.max_context_tokens == 256
    with pytest.raises(CallError, match="256") as refused:
        await client.complete([5] * 256, SHORT)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in str(refused.value)
    assert len((await client.complete([5] * 250, SHORT)).token_ids[0]) == 4
