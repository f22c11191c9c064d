"""The overload benchmark against servers of known behaviour, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.overload_cluster import Limits
from benchmarks.overload_cluster import verdict as limits_verdict
from cluster.bench.overload_curve import (
    OverloadPlan,
    of_load,
    overload_table,
    recovered_s,
    run_overload,
    verdict,
)
from cluster.bench.serving_figures import Objectives
from cluster.bench.serving_load import BenchRequest, Workload

OBJECTIVES = Objectives(ttft_ms=1000.0, tpot_ms=100.0)
CAPACITY_PER_S = 4.0
LOAD = Workload(
    num_requests=1,
    concurrency=4,
    rate_per_s=0.0,
    input_tokens=8,
    output_tokens=1,
    shared_prefix_tokens=0,
    num_groups=1,
    seed=7,
    vocab_size=100,
)


class Server:
    """Serves one request after the other, a quarter of a second each. One that `refuses` takes only what it
    can begin in time."""

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self._now = self._free_at = 0.0
        self.loads: list[Workload] = []

    async def run(self, label: str, workload: Workload) -> list[BenchRequest]:
        self.loads.append(workload)
        if workload.rate_per_s:
            arrivals = workload.arrivals_s()
        else:
            arrivals = [index / CAPACITY_PER_S for index in range(workload.num_requests)]
        records = [self._served(self._now + at) for at in arrivals]
        self._now += arrivals[-1]
        return records

    def _served(self, at: float) -> BenchRequest:
        begins = max(at, self._free_at)
        if self._refuses and begins - at > 0.7:
            return BenchRequest(at, at + 0.002, 8, (), "refused", "too much waits")
        self._free_at = begins + 1 / CAPACITY_PER_S
        return BenchRequest(at, self._free_at, 8, (self._free_at,), "ok")


async def test_a_server_that_refuses_keeps_its_goodput_and_recovers_at_once() -> None:
    server = Server(refuses=True)
    records = await run_overload(OverloadPlan(LOAD, 0.0, 4, 120.0), OBJECTIVES, server.run)
    capacity, loads, recovery = records[0], records[1:-1], records[-1]
    assert capacity["requests_per_s"] == pytest.approx(CAPACITY_PER_S, rel=0.05)
    assert [load["multiple"] for load in loads] == [0.5, 0.9, 1.2, 2.0, 5.0]
    assert [load.rate_per_s for load in server.loads[-5:]] == [
        pytest.approx(load["offered_per_s"]) for load in loads
    ]
    assert recovery["last_share_of_peak"] > 0.9
    assert recovery["recovered_s"] < 5.0
    assert loads[0]["num_refused"] < 0.05 * loads[0]["num_requests"]
    assert loads[-1]["refusal_p99_ms"] == pytest.approx(2.0)
    assert overload_table(records).row_count == 5
    assert verdict(records).startswith("at 5 times the capacity 9")


async def test_a_server_that_takes_everything_is_shown_to_collapse() -> None:
    plan = OverloadPlan(LOAD, CAPACITY_PER_S, 4, 120.0)
    records = await run_overload(plan, OBJECTIVES, Server(refuses=False).run)
    assert records[0]["multiple"] == 0.5, "a capacity that is given is not measured"
    assert records[-1]["last_share_of_peak"] < 0.1
    assert records[-1]["recovered_s"] is None
    assert verdict(records).endswith("it had not recovered at the end")


def good_at(at: float, service_class: str = "standard") -> BenchRequest:
    return BenchRequest(at, at + 0.5, 8, (at + 0.5,), "ok", service_class=service_class)


def refused_at(at: float, service_class: str = "standard") -> BenchRequest:
    return BenchRequest(at, at + 0.002, 8, (), "refused", "full", service_class)


def test_goodput_is_back_when_nine_tenths_of_every_window_are_good() -> None:
    good = [good_at(10.0 + index) for index in range(40)]
    assert recovered_s(good, OBJECTIVES) == 0.0
    assert recovered_s([refused_at(10.5), *good, refused_at(40.5)], OBJECTIVES) == 0.0, "one in twenty is"
    start = [refused_at(10.0 + index / 10) for index in range(10)]
    assert recovered_s([*start, *good[1:]], OBJECTIVES) == pytest.approx(0.8)
    end = [refused_at(50.0 + index) for index in range(3)]
    assert recovered_s([*good, *end], OBJECTIVES) is None
    assert recovered_s([*good, *(refused_at(50.0 + index, "batch") for index in range(3))], OBJECTIVES) == 0.0


def test_a_class_has_its_own_objective_and_its_own_row() -> None:
    records = [good_at(0.0, "interactive"), good_at(1.0, "standard"), refused_at(2.0, "batch")]
    objectives = Objectives(1000.0, 100.0, {"interactive": 400.0})
    assert [objectives.kept_by(it) for it in records] == [False, True, False]
    load = of_load(records, objectives, multiple=2.0, capacity=1.0, duration_s=10.0)
    assert {name: (it["goodput_per_s"], it["slo_ttft_ms"]) for name, it in load["classes"].items()} == {
        "interactive": (0.0, 400.0),
        "standard": (0.1, 1000.0),
        "batch": (0.0, 1000.0),
    }
    table = overload_table([load])
    assert [str(cell).strip() for cell in table.columns[0].cells] == [
        "2 of capacity",
        "interactive",
        "standard",
        "batch",
    ]
    assert [str(cell) for cell in table.columns[2].cells] == ["0.10", "0.00", "0.10", "0.00"]


def load_record(multiple: float, gateway_p99_ms: float | None, rss_mb: list[float]) -> dict[str, Any]:
    return {
        "multiple": multiple,
        "refusal_p99_ms": None if gateway_p99_ms is None else gateway_p99_ms + 10.0,
        "gateway": {"refusal_p99_ms": gateway_p99_ms, "rss_mb": rss_mb},
    }


def test_the_verdict_is_on_the_worst_of_all_loads() -> None:
    loads = [load_record(0.5, None, [100.0, 101.0, 102.0]), load_record(5.0, 4.0, [103.0, 110.0, 112.0])]
    recovery = {"last_share_of_peak": 0.95, "recovered_s": 2.0}
    kept = limits_verdict(loads, recovery, Limits())
    assert kept["is_kept"]
    assert kept["rss_growth_mb"] == 12.0
    assert {name: it["measured"] for name, it in kept["limits"].items()} == {
        "goodput_share": 0.95,
        "gateway_refusal_p99_ms": 4.0,
        "client_refusal_p99_ms": 14.0,
        "recovered_s": 2.0,
        "growth_mb": 2.0,
    }
    nothing_refused = limits_verdict(loads[:1], recovery, Limits())["limits"]
    assert [name for name, it in nothing_refused.items() if not it["is_kept"]] == [
        "gateway_refusal_p99_ms",
        "client_refusal_p99_ms",
    ]
    for name, loads_then, recovery_then in (
        ("goodput_share", loads, {**recovery, "last_share_of_peak": 0.89}),
        ("recovered_s", loads, {**recovery, "recovered_s": None}),
        ("gateway_refusal_p99_ms", [load_record(0.5, 5.1, [0.0] * 3), loads[1]], recovery),
        ("growth_mb", [loads[0], load_record(5.0, 4.0, [103.0, 110.0, 119.0])], recovery),
    ):
        missed = limits_verdict(loads_then, recovery_then, Limits())
        assert [key for key, it in missed["limits"].items() if not it["is_kept"]] == [name]
        assert not missed["is_kept"]
