"""The gateway's metrics at the console's port: what a scraper reads, and who may scrape."""

from __future__ import annotations

from pathlib import Path

from callers import key_of
from console_harness import ConsoleHarness, Page
from gateway_harness import PROMPT, GatewayHarness
from patience import WAIT_S
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from cluster.api.generate_options import GenerateOptions
from cluster.metrics.definitions import METRICS
from cluster.metrics.registry import PREFIX
from kvtransfer.common.clock import SystemClock


async def scrape(page: Page, **headers: str) -> dict[str, Family]:
    """What Prometheus' own parser finds, by the names of families."""
    async with page.session.get(f"{page.url}/metrics", headers=headers) as reply:
        text = await reply.text()
        assert reply.status == 200, text
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    """Of the one series of this name with these labels among others."""
    (found,) = (
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    )
    return found


async def scrape_until(page: Page, wanted: float, name: str, **labels: str) -> dict[str, Family]:
    """The first scrape in which the series has this value."""
    clock = SystemClock()
    asked_at = clock.now()
    while value(found := await scrape(page), name, **labels) != wanted:
        assert clock.now() < asked_at + WAIT_S, f"{name} is never {wanted}"
        await clock.sleep(0.05)
    return found


async def test_what_a_call_did_is_in_the_next_scrape(front: ConsoleHarness) -> None:
    before = await scrape(front.page)
    assert value(before, "requests_total", state="finished", code="ok") == 0
    client = front.harness.client(front.address)
    done = await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=5, tenant="acme"))
    found = await scrape_until(front.page, 5, "output_tokens_total")
    usage = done.finished.usage
    assert value(found, "requests_total", state="finished", code="ok") == 1
    assert value(found, "prompt_tokens_total") == usage.prompt_tokens
    assert value(found, "tenant_output_tokens_total", tenant="acme") == 5
    assert value(found, "e2e_seconds_count", replica="d0", pool="decode") == 1
    assert value(found, "e2e_seconds_bucket", replica="d0", le="+Inf") == 1
    assert 0 < value(found, "e2e_seconds_sum", replica="d0") < 10
    assert value(found, "pool_replicas", pool="decode", state="ready") == 1


async def test_families_are_those_that_are_declared(front: ConsoleHarness) -> None:
    await front.harness.client(front.address).complete(PROMPT, GenerateOptions(seed=1, max_tokens=5))
    found = await scrape(front.page)
    gateway = {"app": front.config.app, "gateway": front.gateway._gateway_id, "model": "m"}
    for family in found.values():
        name = family.name.removeprefix(PREFIX)
        declared = METRICS.get(name) or METRICS[f"{name}_total"]
        assert (family.type, family.documentation) == (declared.kind, declared.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(declared.labels)
            assert gateway.items() <= sample.labels.items()
    assert {"tandem_ttft_seconds", "tandem_requests", "tandem_running_requests"} <= found.keys()


async def test_a_replica_that_died_is_no_longer_counted(front: ConsoleHarness) -> None:
    await scrape_until(front.page, 1, "pool_replicas", pool="decode", state="ready")
    await front.harness.replicas["d0"].die()
    found = await scrape_until(front.page, 0, "pool_replicas", pool="decode", state="ready")
    assert value(found, "replica_losses_total", pool="decode") == 1


async def test_a_tenant_may_not_scrape_and_a_viewer_may(harness: GatewayHarness, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    front = ConsoleHarness(harness)
    tenant, viewer = key_of(keys, "acme", "user"), key_of(keys, "ops", "viewer")
    await front.start(auth={"mode": "required", "keys_file": str(keys)})
    try:
        for key, status in (("", 401), (tenant, 403), (f"{viewer[:-1]}!", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            refused, fields = await front.page.ask("GET", "/metrics", headers)
            assert refused == status
            assert fields.keys() == {"error"}
        found = await scrape(front.page, Authorization=f"Bearer {viewer}")
        assert value(found, "running_requests") == 0
    finally:
        await front.stop()
