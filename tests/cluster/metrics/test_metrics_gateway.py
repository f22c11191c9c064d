"""What a gateway's counters say after real calls over real Links to scripted replicas."""

from __future__ import annotations

import grpc
import pytest
from gateway_harness import PROMPT, GatewayHarness, Pair, encode, until

from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.metrics.exporters import GatewayMetrics
from cluster.metrics.scraped_registry import ScrapedRegistry

NUM_PROMPT = len(encode(PROMPT))
# Of a token of the scripted replicas: K and V, 2 layers, 2 heads of 8, 4 bytes.
KV_BYTES = 2 * 2 * 2 * 8 * 4


async def test_a_call_is_measured_and_told_to_the_scaler(pair: Pair) -> None:
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=7, n=2, max_tokens=12, tenant="a"))
    counters = pair.gateway.requests.counters
    assert counters.num_requests == {("finished", "ok"): 1}
    assert set(counters.replicas) == {"p0", "d0"}
    prefill, decode = counters.replicas["p0"], counters.replicas["d0"]
    assert (prefill.pool, decode.pool) == ("prefill", "decode")
    counts = {name: prefill.histograms[name].num_values for name in ("ttft_seconds", "queue_seconds")}
    assert counts == {"ttft_seconds": 1, "queue_seconds": 1}
    assert prefill.histograms["queue_seconds"].total == pytest.approx(0.25)
    ended = decode.histograms["e2e_seconds"]
    assert ended.num_values == 1
    assert ended.total >= done.finished.timing.e2e_ms / 1e3
    gaps = sum(replica.histograms["itl_seconds"].num_values for replica in (prefill, decode))
    assert gaps == 2 * 11
    use = counters.tenants.use("a")
    assert (use.num_cached_tokens, use.num_computed_tokens) == (NUM_PROMPT - 1, 1)
    assert (use.num_output_tokens, use.num_requests) == (24, 1)
    held_s = ended.total + done.finished.timing.prefill_ms / 1e3
    bound = held_s * (NUM_PROMPT + 24) * KV_BYTES
    assert 0 < use.kv_byte_s <= bound
    demand = (await pair.admin.status()).demand
    assert (demand.num_arrived, demand.num_sequences, demand.num_ended) == (1, 2, 2)
    assert (demand.num_output_tokens, demand.output_tokens_squared) == (24, 2 * 12**2)
    assert (demand.num_prompts, demand.num_computed_tokens) == (1, 1)
    assert (demand.num_first_tokens, demand.num_gaps) == (1, gaps)


async def test_refusals_failures_and_attempts_have_their_codes(pair: Pair) -> None:
    pair.prefill.script.num_refusals = 1
    await pair.client.complete(PROMPT, GenerateOptions(seed=6, max_tokens=3))
    with pytest.raises(CallError) as caught:
        await pair.client.complete(PROMPT, GenerateOptions(temperature=-1.0))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    pair.decode.script.stop_after = 3
    events = pair.client.generate(PROMPT, GenerateOptions(seed=1, max_tokens=100)).events()
    await anext(events)
    await anext(events)
    await events.aclose()
    counters = pair.gateway.requests.counters
    await until(lambda: counters.num_running == 0, "the cancelled one has ended")
    assert counters.num_requests == {
        ("finished", "ok"): 1,
        ("refused", "invalid_argument"): 1,
        ("cancelled", "cancelled"): 1,
    }
    assert counters.num_retried == 1
    assert counters.replicas["p0"].num_attempt_failures == {"refused": 1}
    window = counters.window(pair.gateway.requests.counters.replicas["p0"].used_at)
    assert (window.num_arrived, window.num_finished, window.num_failed) == (2, 1, 1)


async def test_a_replica_that_dies_is_lost_and_one_that_leaves_is_not(harness: GatewayHarness) -> None:
    dying = await harness.add_replica("d0", "decode")
    leaving = await harness.add_replica("d1", "decode")
    gateway, _ = await harness.add_gateway()
    counters = gateway.requests.counters
    record = leaving.record()
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    await harness.roster.register(type(record)(**fields | {"leaving": True}))
    await until(lambda: any(it.record.leaving for it in gateway.connections.views()), "the roster says so")
    for replica in (dying, leaving):
        await replica.die()
    gone = lambda: all(it.stream is None for it in gateway.connections.views())  # noqa: E731
    await until(gone, "both Links ended")
    assert counters.num_losses == {"decode": 1}


async def test_a_gateway_without_a_console_exports_all_that_one_with_it_shows(pair: Pair) -> None:
    assert pair.gateway.console_port == 0
    await pair.client.complete(PROMPT, GenerateOptions(seed=7, max_tokens=3))
    registry = ScrapedRegistry(gateway="g0", model="m", app="tandem")
    await pair.gateway.export(GatewayMetrics(registry, 0.0))
    text = registry.text().decode()
    assert "tandem_requests_total{" in text
    assert 'state="finished"' in text
