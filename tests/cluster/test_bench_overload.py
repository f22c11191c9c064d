"""The overload benchmark against servers of known behaviour, in virtual time."""

from __future__ import annotations

import pytest

from cluster.cli.bench_overload import OverloadPlan, overload_table, recovered_s, run_overload, verdict
from cluster.cli.serving_load import BenchRequest, Objectives, Workload

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
    assert [load.rate_per_s for load in server.loads[-6:-1]] == [
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


def test_recovery_begins_with_the_first_request_after_the_last_bad_one() -> None:
    good = [BenchRequest(at, at + 0.5, 8, (at + 0.5,), "ok") for at in (10.0, 12.0, 14.0)]
    bad = BenchRequest(11.0, 14.0, 8, (14.0,), "ok")
    assert recovered_s(good, OBJECTIVES) == 0.0
    assert recovered_s([*good, bad], OBJECTIVES) == 2.0
    last = BenchRequest(15.0, 15.1, 8, (), "refused")
    assert recovered_s([*good, last], OBJECTIVES) is None
