"""Prompts that take longer to compute than the objective of their class, on a cluster that does nothing
else."""

from __future__ import annotations

import grpc
import pytest
from gateway_harness import GatewayHarness

from cluster.admission.config import AdmissionConfig
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError

# 400 tokens at 5 tokens a second, by its own measure: 80 s.
PROMPT = [5] * 400
TOK_S = 5.0


async def call(harness: GatewayHarness, admission: AdmissionConfig, timeout_s: float | None = None) -> int:
    """Send the prompt through a gateway with this admission; returns the number of tokens that came."""
    config = harness.config().model_copy(update={"admission": admission})
    _, address = await harness.add_gateway(config)
    options = GenerateOptions(max_tokens=3)
    done = await harness.client(address).complete(PROMPT, options, timeout_s=timeout_s)
    return len(done.token_ids[0])


@pytest.fixture
async def slow(harness: GatewayHarness) -> GatewayHarness:
    replica = await harness.add_replica("d0", "decode")
    await replica.die()
    replica.prefill_tok_s = TOK_S
    await replica.start()
    return harness


async def test_an_idle_cluster_answers_a_long_prompt_without_any_setting(slow: GatewayHarness) -> None:
    assert await call(slow, AdmissionConfig()) == 3


async def test_an_objective_that_is_set_refuses_it(slow: GatewayHarness) -> None:
    admission = AdmissionConfig.model_validate({"standard": {"ttft_s": 30.0}})
    with pytest.raises(CallError, match=r"the prompt alone takes 80\.0 s to compute") as refused:
        await call(slow, admission)
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_deadline_of_a_client_refuses_it(slow: GatewayHarness) -> None:
    problem = r"takes 80.0 s to compute, and \d+.\d s are left of the deadline"
    with pytest.raises(CallError, match=problem) as late:
        await call(slow, AdmissionConfig(), timeout_s=60.0)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
