"""A running cluster under a real Prometheus: panels show something, metrics are there or say why not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from optional_programs import needs_prometheus
from prometheus import DASHBOARDS, RULES, SERIES, Prometheus, Query, panel_queries, series_names, series_of
from serving import TINY, RunningCluster, free_port

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.metrics.definitions import METRICS
from cluster.metrics.metric import (
    NEEDS_EXPERTS,
    NEEDS_FAULT,
    NEEDS_FULL_STORE,
    NEEDS_OVERLOAD,
    NEEDS_STORED_PROMPT,
    NEEDS_USED_UP_LIMIT,
)
from kvtransfer.common.clock import SystemClock

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_prometheus,
]
# With space for three prompts on a device, so that the store is asked for the others.
FILE = f"""
model: {TINY}
pools:
  - {{name: prefill, role: prefill, engine: {{block_tokens: 16, kv_tokens: 640}}}}
  - {{name: decode, role: decode, engine: {{block_tokens: 16, kv_tokens: 640}}}}
scaling: {{ttft_slo_s: 0.001}}
"""
PROMPT = "".join(
    f"def function_{number}(self, value):\n    return value + {number}\n\n" for number in range(12)
)
# Of all reasons in the catalogue: here are hand-overs, and a store with both tiers.
NOT_IN_THE_DEMO = {
    NEEDS_EXPERTS,
    NEEDS_FAULT,
    NEEDS_STORED_PROMPT,
    NEEDS_FULL_STORE,
    NEEDS_OVERLOAD,
    NEEDS_USED_UP_LIMIT,
}
# A rate needs two scrapes of what Ray hands on every 10 s.
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("metrics")
    file = folder / "cluster.yaml"
    nvme = f"store: {{dram_gb: 0.25, nvme_path: {folder / 'nvme'}, nvme_gb: 1}}\n"
    file.write_text(FILE + nvme)
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def prometheus(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    discovery = Path(cluster.addresses["logs"]).parent / "prom_metrics_service_discovery.json"
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), discovery, RULES)
    yield started
    started.stop()


class Demo(threading.Thread):
    """Clients of two tenants, over and over: known prefixes, new ones, mistakes, and one who leaves."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._ended = threading.Event()
        self.num_rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with BlockingClient(self._address) as client:
                while not self._ended.is_set():
                    self._round(client)
                    self.num_rounds += 1
        except (CallError, AssertionError) as error:
            self.error = error

    def end(self) -> None:
        self._ended.set()
        self.join(60)
        assert not self.is_alive()
        assert self.error is None

    def _round(self, client: BlockingClient) -> None:
        for tenant in ("alpha", "beta"):
            options = GenerateOptions(max_tokens=12, tenant=tenant)
            client.complete(PROMPT, options, timeout_s=60)
            client.complete(f"# {self.num_rounds}\n{PROMPT}", options, timeout_s=60)
        with pytest.raises(CallError):
            client.complete(PROMPT, GenerateOptions(max_tokens=4, temperature=-1.0), timeout_s=60)
        stream = client.generate(PROMPT, GenerateOptions(max_tokens=200), timeout_s=60)
        next(iter(stream))
        stream.close()


def concrete(query: Query) -> str:
    """With the variables as Grafana fills them in."""
    text = query.text.replace("$__rate_interval", "1m")
    for name in ("app", "model", "pool", "replica"):
        text = text.replace(f'"${name}"', '".*"')
    assert "$" not in text, query.where
    return text


def is_excused(name: str) -> bool:
    return SERIES[name].why_empty in NOT_IN_THE_DEMO


def test_every_panel_and_every_metric_has_data(cluster: RunningCluster, prometheus: Prometheus) -> None:
    demo = Demo(cluster.address)
    demo.start()
    queries = [query for path in DASHBOARDS for query in panel_queries(path)]
    names = [f"ray_tandem_{name}" for metric in METRICS.values() for name in series_names(metric)]
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.now() + PATIENCE_S
    empty_panels = [query for query in queries if not any(map(is_excused, series_of(query.text)))]
    empty_metrics = [name for name in names if not is_excused(name)]
    while (empty_panels or empty_metrics) and clock.now() < deadline and demo.error is None:
        pause.wait(5.0)
        empty_panels = [query for query in empty_panels if not prometheus.query(concrete(query))]
        empty_metrics = [name for name in empty_metrics if not prometheus.query(name)]
    demo.end()
    assert demo.num_rounds > 1
    assert [query.where for query in empty_panels] == []
    assert empty_metrics == []
    for name in names:
        for sample in prometheus.query(name):
            assert set(SERIES[name].labels) <= sample.labels.keys(), name
    assert prometheus.rule_errors() == {}


def test_figures_are_what_the_clients_saw(cluster: RunningCluster, prometheus: Prometheus) -> None:
    """Counted by hand, for a tenant of its own; then Prometheus knows the same."""
    with BlockingClient(cluster.address) as client:
        usages = [
            client.complete(
                f"# gamma {number // 2}\n{PROMPT}",
                GenerateOptions(max_tokens=7, tenant="gamma"),
                timeout_s=60,
            ).finished.usage
            for number in range(4)
        ]
    num_cached = sum(
        usage.cached.device + usage.cached.dram + usage.cached.nvme + usage.cached.remote for usage in usages
    )
    expected = {
        "requests": 4,
        "cached_tokens": num_cached,
        "computed_tokens": sum(usage.prompt_tokens for usage in usages) - num_cached,
        "output_tokens": sum(usage.completion_tokens for usage in usages),
    }
    assert num_cached > 0
    clock, pause = SystemClock(), threading.Event()
    deadline = clock.now() + 60
    found: dict[str, float] = {}
    while found != expected and clock.now() < deadline:
        pause.wait(1.0)
        found = {
            name: sum(
                sample.value
                for sample in prometheus.query(f'ray_tandem_tenant_{name}_total{{tenant="gamma"}}')
            )
            for name in expected
        }
    assert found == expected
    for share in ("mfu_ratio", "mbu_ratio", "busy_seconds_total"):
        assert all(sample.value > 0 for sample in prometheus.query(f"ray_tandem_{share}")), share
    (held,) = prometheus.query('ray_tandem_tenant_kv_byte_seconds_total{tenant="gamma"}')
    assert held.value > 0
