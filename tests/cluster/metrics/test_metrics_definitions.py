"""Every exported metric is declared, and what is declared is exported, documented and asked for correctly."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus import (
    DASHBOARDS,
    ROOT,
    SERIES,
    dashboard,
    known_labels,
    labels_of,
    panel_queries,
    panels,
    rule_queries,
    rules,
    series_names,
    series_of,
    table,
)
from prometheus_client.parser import text_string_to_metric_families

from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.request_recording import RequestRecording
from cluster.metrics.admission_stats import AdmissionStats, ClassStats
from cluster.metrics.config import CostConfig, RecordingConfig
from cluster.metrics.definitions import METRICS, SECTIONS
from cluster.metrics.exporters import GatewayMetrics
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.metrics.ray_registry import RayRegistry
from cluster.metrics.replica_exporter import ReplicaMetrics, StoreMetrics
from cluster.metrics.scraped_registry import ScrapedRegistry
from cluster.metrics.tenant_usage import PoolTime
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.messages.admin_requests import IndexStat, StoreStat, TierStat
from workers.messages.link import LoadReport
from workers.stats_record import BATCH_BOUNDS, DeviceMemory, PathMeasure

HERE = ReplicaIdentity("decode-a", 1)
LOAD = LoadReport(
    identity=HERE,
    sequence=1,
    num_running=2,
    num_waiting=3,
    num_landings=1,
    num_backlog_tokens=7,
    num_free_blocks=60,
    num_cached_blocks=20,
    num_quarantined_blocks=10,
    num_total_blocks=100,
    num_leaked_blocks=0,
    prefill_tok_s=100.0,
    decode_step_s=0.01,
    num_steps=9,
    num_checksum_failures=0,
    num_preemptions=1,
    transfer_gb_s=2.0,
    num_moved_bytes={"hand_over": 5},
    start_phase_s={"warming up": 3.0},
    num_lost_landings={"stalled": 1},
    paths=(PathMeasure(ReplicaIdentity("prefill-a", 1), 0, 0, "shm", 3.0, 20.0, "memory"),),
    load_tok_s={"dram": 50.0},
    num_loaded_tokens={"dram": 16},
    num_stored_blocks=4,
    num_unstored_blocks={"queue": 1},
    num_unfilled_tokens=48,
    num_steps_by_batch=tuple(range(len(BATCH_BOUNDS) + 1)),
    num_batched_sequences=500,
    num_hit_tokens={"device": 32},
    num_transport_bytes={"shm": 5},
    transport_s={"shm": 0.5},
    memory=(DeviceMemory(10, 20),),
    load_s=(1.5,),
    warm_up_s=(0.25,),
    expert_imbalance=1.75,
    expert_rank_imbalance=1.25,
    num_idle_experts=3,
    hottest_expert_layer=3,
    hottest_expert=17,
    hottest_expert_share=0.125,
    expert_uncopied_imbalance=2.5,
    num_expert_copies=6,
    layers_token_bytes={"full": 4096, "window 128": 1024},
    layers_sequence_bytes={"window 128": 131072},
    num_layers_blocks={"full": 100, "window 128": 40},
    num_free_layers_blocks={"full": 60, "window 128": 30},
    num_cached_layers_blocks={"full": 20, "window 128": 10},
    num_snapshot_hits=4,
    num_snapshot_misses=2,
    num_recomputed_tokens=96,
    num_stored_states=3,
    num_evicted_snapshot_tokens=64,
)


class Recorder:
    """What a registry exported: of each series the values that were set, or the sum of increments."""

    def __init__(self) -> None:
        self.help: dict[str, str] = {}
        self.labels: dict[str, tuple[str, ...]] = {}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.increments: list[float] = []

    def registry(self, **common: str) -> RayRegistry:
        return RayRegistry(
            lambda name, text, labels: _Instrument(self, name, text, labels),
            lambda name, text, labels: _Instrument(self, f"{name}_total", text, labels),
            common,
        )

    def names(self) -> set[str]:
        return {name.removeprefix("tandem_") for name, _ in self.values}

    def value(self, name: str, **labels: str) -> float:
        """Of the one series with these labels among others."""
        (found,) = (
            value
            for (each, tags), value in self.values.items()
            if each == f"tandem_{name}" and labels.items() <= dict(tags).items()
        )
        return found


class _Instrument:
    def __init__(self, recorder: Recorder, name: str, text: str, labels: tuple[str, ...]) -> None:
        assert name not in recorder.help, f"{name} is made twice"
        recorder.help[name], recorder.labels[name] = text, labels
        self._recorder, self._name, self._labels = recorder, name, labels

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._recorder.values[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        key = self._key(tags)
        self._recorder.increments.append(value)
        self._recorder.values[key] = self._recorder.values.get(key, 0.0) + value

    def _key(self, tags: dict[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
        assert set(tags) == set(self._labels), "Ray refuses missing labels"
        assert all(isinstance(value, str) for value in tags.values())
        return self._name, tuple(sorted(tags.items()))


def replica_metrics(recorder: Recorder) -> ReplicaMetrics:
    return ReplicaMetrics(recorder.registry(app="a", pool="decode", replica="decode-a", model="m"), 16)


def gateway_status(*moves: admin_pb.ScalingChange) -> admin_pb.StatusResponse:
    return admin_pb.StatusResponse(
        replicas=[admin_pb.Replica(replica_id="decode-a", pool="decode", state=admin_pb.REPLICA_STATE_READY)],
        pools=[admin_pb.Pool(name="decode", desired=2, pinned=True, num_reassigned=1)],
        scaling_changes=moves,
    )


RECORDED = RequestRecording(RecordingConfig(), ManualClock())
UNREAD = UnreadOutput(1e6)
ADMITTED = AdmissionStats(
    num_rung_changes={"refusing": 1}, classes={"batch": ClassStats(num_refused={"late": 2})}
)


def test_everything_that_is_declared_can_be_exported_and_nothing_else() -> None:
    recorder = Recorder()
    replica_metrics(recorder).update(LOAD, "decode")
    tiers = TierStat("dram", 1, 2, 3), TierStat("nvme", 1, 2, 3)
    StoreMetrics(recorder.registry(app="a", node="n")).update(StoreStat(HERE, tiers, IndexStat("up")))
    counters = GatewayCounters(lambda replica_id: "decode", lambda: 1)
    counters.num_hand_overs["shm"] = counters.num_hand_over_bytes["shm"] = 1
    counters.attempt_failed("decode-a", "refused", 0.0)
    counters.over_quota("a", "requests_per_s")
    replica = counters.replicas["decode-a"]
    replica.num_routed["decode"] = 1
    for histogram in replica.histograms.values():
        histogram.observe(0.1)
    use = counters.tenants.use("t")
    use.took(PoolTime("decode", 1.0))
    use.class_to_outcomes["batch"].num_requests["good"] = 1
    use.class_to_outcomes["batch"].num_output_tokens["good"] = 1
    registry = recorder.registry(app="a", gateway="g", model="m")
    gateway = GatewayMetrics(registry, 1.0, CostConfig(device_hour=1.0))
    list(gateway.update(counters, ADMITTED, gateway_status(), 0.0, 0, RECORDED, UNREAD))
    declared = {name for metric in METRICS.values() for name in series_names(metric)}
    assert recorder.names() == declared
    for name, text in recorder.help.items():
        metric = SERIES[f"ray_{name}"]
        assert text == metric.help
        assert set(recorder.labels[name]) - {"le"} == set(metric.labels)


def test_names_are_unique_and_say_their_unit() -> None:
    assert len(METRICS) == sum(map(len, SECTIONS.values()))
    for metric in METRICS.values():
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith("."), metric.name
        if metric.unit == "seconds" and metric.kind != "counter":
            assert metric.name.endswith("_seconds")
        if metric.unit in ("bytes", "bytes/s") and metric.kind == "gauge":
            assert "bytes" in metric.name


def test_a_registry_refuses_what_is_not_declared() -> None:
    registry = Recorder().registry()
    with pytest.raises(KeyError):
        registry.set("surprises", 1.0)


def test_a_counter_begins_at_nothing_and_follows_its_total() -> None:
    recorder = Recorder()
    registry = recorder.registry(app="a", gateway="g", model="m")
    registry.total("output_tokens_total", 0)
    assert 0 < recorder.value("output_tokens_total") < 1e-300
    for total in (3, 3, 2, 10):
        registry.total("output_tokens_total", total)
    assert recorder.value("output_tokens_total") == 10.0
    assert recorder.increments[1:] == [3.0, 7.0]


def test_a_histogram_is_exported_as_totals_by_bucket() -> None:
    recorder = Recorder()
    replica_metrics(recorder).update(LOAD, "decode")
    counts = range(len(BATCH_BOUNDS) + 1)
    assert recorder.value("batch_size_bucket", le="1") == 0
    assert recorder.value("batch_size_bucket", le="8") == sum(range(4))
    assert recorder.value("batch_size_bucket", le="+Inf") == sum(counts)
    assert recorder.value("batch_size_count") == sum(counts)
    assert recorder.value("batch_size_sum") == 500


def test_scrapers_of_the_gateway_see_what_ray_exports() -> None:
    recorder, scraped = Recorder(), ScrapedRegistry(app="a", gateway="g", model="m")
    counters = GatewayCounters(lambda replica_id: "decode", lambda: 1)
    counters.over_quota("a", "requests_per_s")
    counters.num_prompt_tokens = 1 << 60
    counters.attempt_failed("decode-a", "refused", 0.0)
    for number, histogram in enumerate(counters.replicas["decode-a"].histograms.values()):
        histogram.observe(0.1 * number)
    for registry in (recorder.registry(app="a", gateway="g", model="m"), scraped):
        list(
            GatewayMetrics(registry, 1.0).update(
                counters, ADMITTED, gateway_status(), 0.0, 2, RECORDED, UNREAD
            )
        )
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(scraped.text().decode())
        for sample in family.samples
    }
    assert found.keys() == recorder.values.keys()
    assert found == {key: value if value > 1e-300 else 0.0 for key, value in recorder.values.items()}
    scraped.clear()
    assert scraped.text() == b""


def test_shares_of_the_blocks() -> None:
    recorder = Recorder()
    replica_metrics(recorder).update(LOAD, "decode")
    assert recorder.value("kv_usage_ratio") == pytest.approx(30 / 100)
    assert recorder.value("kv_fragmentation_ratio") == pytest.approx(48 / (30 * 16))


def test_experts_are_exported_where_there_are_any() -> None:
    recorder, without = Recorder(), Recorder()
    replica_metrics(recorder).update(LOAD, "decode")
    ratios = "expert_imbalance", "expert_rank_imbalance", "hottest_expert", "expert_uncopied_imbalance"
    names = *(f"{name}_ratio" for name in ratios), "idle_experts", "expert_copies"
    assert [recorder.value(name) for name in names] == [1.75, 1.25, 0.125, 2.5, 3, 6]
    replica_metrics(without).update(LoadReport(identity=HERE, sequence=2), "decode")
    assert without.names().isdisjoint(names)


def test_a_path_and_a_role_that_are_gone_are_zero() -> None:
    recorder = Recorder()
    metrics = replica_metrics(recorder)
    metrics.update(LOAD, "decode")
    assert recorder.value("path_bytes_per_second", transport="shm") == 3e9
    metrics.update(LoadReport(identity=HERE, sequence=2), "prefill")
    assert recorder.value("path_bytes_per_second", transport="shm") == 0.0
    assert recorder.value("replica_role", role="decode") == 0.0
    assert recorder.value("replica_role", role="prefill") == 1.0


def test_scaling_moves_are_counted_from_the_first_look_on() -> None:
    recorder = Recorder()
    metrics = GatewayMetrics(recorder.registry(app="a", gateway="g", model="m"), 0.0)
    counters = GatewayCounters(lambda replica_id: "", lambda: 0)
    old = admin_pb.ScalingChange(at=10.0, pool="decode", by="operator")
    new = admin_pb.ScalingChange(at=11.0, pool="decode", by="autoscaler")
    list(metrics.update(counters, ADMITTED, gateway_status(old), 0.0, 0, RECORDED, UNREAD))
    assert recorder.value("scaling_changes_total", by="operator") < 1
    for _ in range(2):
        list(metrics.update(counters, ADMITTED, gateway_status(old, new), 1.0, 0, RECORDED, UNREAD))
    assert recorder.value("scaling_changes_total", by="operator") < 1
    assert recorder.value("scaling_changes_total", by="autoscaler") == 1
    assert recorder.value("pool_replicas", state="ready") == 1
    assert recorder.value("pool_desired_replicas") == 2


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_lists_every_metric_as_it_is(section: str) -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    expected = f"### {section}\n\n{table(SECTIONS[section])}"
    assert expected in page, "tests/support/prometheus.py prints the tables"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_what_there_is(path: Path) -> None:
    loaded = dashboard(path)
    ids = [panel["id"] for panel in loaded["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [(panel["title"], panel["gridPos"]["y"]) for panel in loaded["panels"]]
    assert len(set(titles)) == len(titles)
    variables = {variable["name"] for variable in loaded["templating"]["list"]}
    assert "datasource" in variables
    for variable in loaded["templating"]["list"][1:]:
        assert series_of(variable["definition"]) <= SERIES.keys()
    for panel in panels(path):
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        assert panel["datasource"]["uid"] == "${datasource}"
    for query in panel_queries(path):
        names = series_of(query.text)
        assert names, query.where
        assert names <= SERIES.keys(), query.where
        assert labels_of(query) <= known_labels(query), query.where
        used = {name for name in ("app", "model", "pool", "replica") if f"${name}" in query.text}
        assert used <= variables, query.where


def test_the_dashboards_are_apart_and_the_first_one_is_an_overview() -> None:
    assert [path.stem for path in DASHBOARDS] == ["kv-tiers", "overview", "pools", "requests", "router"]
    assert len({dashboard(path)["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)
    (overview,) = (dashboard(path) for path in DASHBOARDS if path.stem == "overview")
    assert len(overview["panels"]) <= 12


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    queries = [query for path in DASHBOARDS for query in panel_queries(path)] + rule_queries()
    seen = {SERIES[name].name for query in queries for name in series_of(query.text)}
    assert METRICS.keys() - seen == set()


def test_rules_ask_for_what_there_is_and_say_what_to_do() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for query in rule_queries():
        assert series_of(query.text) <= SERIES.keys(), query.where
        names = set(query.text.split()) & {f"{name}" for name in recorded}
        assert series_of(query.text) or names, query.where
        if series_of(query.text):
            assert labels_of(query) <= known_labels(query), query.where
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    page = (ROOT / "docs" / "observability.md").read_text()
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    assert runbooks.count("\n### ") == len(alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert f"### {rule['alert']}\n" in runbooks, "each alert has its section"
        name = rule["alert"].removesuffix("Slow")
        assert f"`{rule['alert']}`" in page or f"`{name}Fast`, `...Slow`" in page, rule["alert"]
