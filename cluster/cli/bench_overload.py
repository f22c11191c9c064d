"""`tandem bench serve --overload`: what a cluster is good for when it is offered more than it can do.

    capacity, measured --> 0.5, 0.9, 1.2, 2, 5 times as much, open loop --> half of it again: the recovery

Requests come at random times (Poisson), however long others wait, as they do when a million people send them.
A request is good when it keeps the objectives; a refused one is not, and costs its client next to nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.table import Table

from cluster.cli.serving_load import BenchRequest, Objectives, Workload, by_class, summarize
from cluster.cli.terminal import NONE, made_table
from cluster.errors import BenchError

MULTIPLES = (0.5, 0.9, 1.2, 2.0, 5.0)
# The recovery: so much of the capacity, for so long.
RECOVERY_MULTIPLE = 0.5
RECOVERY_S = 30.0
# Percentiles of the time in which a client has its refusal.
_REFUSAL_PERCENTILE = 99


class OverloadPlan(NamedTuple):
    """What is offered, and for how long. The workload's rate, concurrency and number are replaced."""

    workload: Workload
    # Requests a second; 0: measured by as many requests at once as `concurrency`.
    capacity_per_s: float
    concurrency: int
    # Of the measurement of the capacity, and of each load, in seconds.
    duration_s: float
    multiples: tuple[float, ...] = MULTIPLES


# Runs a workload; its argument names it to whoever watches.
Runner = Callable[[str, Workload], Awaitable[list[BenchRequest]]]


async def run_overload(plan: OverloadPlan, objectives: Objectives, run: Runner) -> list[dict[str, Any]]:
    """Offer one load after the other; return a record for the capacity, for each load and for the recovery,
    the last with the verdict on all."""
    records: list[dict[str, Any]] = []
    capacity = plan.capacity_per_s or await _measured_capacity(plan, objectives, run, records)
    peak = 0.0
    for index, multiple in enumerate(plan.multiples):
        load = _at_rate(plan.workload, multiple * capacity, plan.duration_s, plan.workload.seed + 1 + index)
        done = await run(f"{multiple:g} of capacity", load)
        stats = _of_load(done, objectives, multiple, capacity, plan.duration_s)
        peak = max(peak, stats["goodput_per_s"])
        records.append(stats)
    seed = plan.workload.seed + 1 + len(plan.multiples)
    rest = _at_rate(plan.workload, RECOVERY_MULTIPLE * capacity, RECOVERY_S, seed)
    done = await run("recovery", rest)
    records.append(
        {
            "what": "overload recovery",
            "after_multiple": plan.multiples[-1],
            "recovered_s": recovered_s(done, objectives),
            "last_share_of_peak": records[-1]["goodput_per_s"] / peak if peak else None,
            "peak_goodput_per_s": peak,
        }
    )
    return records


def recovered_s(records: Sequence[BenchRequest], objectives: Objectives) -> float | None:
    """Return how long after the first of these requests the last that was not good was sent; None when the
    very last was not."""
    first = min(record.sent_at for record in records)
    bad = [record.sent_at for record in records if not objectives.kept_by(record)]
    if not bad:
        return 0.0
    later = [record.sent_at for record in records if record.sent_at > max(bad)]
    return min(later) - first if later else None


async def _measured_capacity(
    plan: OverloadPlan, objectives: Objectives, run: Runner, records: list[dict[str, Any]]
) -> float:
    """Return the requests a second that so many clients, each of which waits for its answer, get done."""
    num_requests = plan.concurrency
    while True:
        workload = replace(
            plan.workload, num_requests=num_requests, concurrency=plan.concurrency, rate_per_s=0.0
        )
        done = await run(f"capacity: {num_requests} requests, {plan.concurrency} at once", workload)
        stats = summarize(done, objectives)
        if not stats["num_ok"]:
            raise BenchError(f"no request finished; the first: {stats['first_reason']}")
        if stats["seconds"] >= plan.duration_s / 3:
            break
        num_requests = max(2 * num_requests, round(stats["requests_per_s"] * plan.duration_s / 2))
    records.append({"what": "overload capacity", "concurrency": plan.concurrency, **stats})
    return float(stats["requests_per_s"])


def _at_rate(workload: Workload, rate_per_s: float, duration_s: float, seed: int) -> Workload:
    num_requests = max(1, round(rate_per_s * duration_s))
    return replace(workload, num_requests=num_requests, concurrency=0, rate_per_s=rate_per_s, seed=seed)


def _of_load(
    records: Sequence[BenchRequest],
    objectives: Objectives,
    multiple: float,
    capacity: float,
    duration_s: float,
) -> dict[str, Any]:
    refusals_s = sorted(it.e2e_s for it in records if it.outcome == "refused")
    stats = summarize(records, objectives)
    # Over the time in which requests were sent: the last of them end later at every load.
    stats["goodput_per_s"] = stats["good_share"] * len(records) / duration_s
    rank = min(len(refusals_s) - 1, len(refusals_s) * _REFUSAL_PERCENTILE // 100)
    return {
        "what": "overload",
        "multiple": multiple,
        "offered_per_s": multiple * capacity,
        "capacity_per_s": capacity,
        "refusal_p99_ms": 1e3 * refusals_s[rank] if refusals_s else None,
        **stats,
        **({"classes": classes} if (classes := by_class(records, objectives)) else {}),
    }


def overload_table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each load."""
    table = made_table(
        "overload",
        "load",
        numbers=["offered/s", "good/s", "finished", "refused", "failed", "TTFT p99, ms", "refusal p99, ms"],
    )
    for record in records:
        if record["what"] != "overload":
            continue
        ttft, refusal = record["ttft_ms"], record["refusal_p99_ms"]
        table.add_row(
            f"{record['multiple']:g} of capacity",
            f"{record['offered_per_s']:.2f}",
            f"{record['goodput_per_s']:.2f}",
            str(record["num_ok"]),
            str(record["num_refused"]),
            str(record["num_timed_out"] + record["num_failed"]),
            f"{ttft['p99']:.0f}" if ttft else NONE,
            NONE if refusal is None else f"{refusal:.1f}",
        )
    return table


def verdict(records: Sequence[dict[str, Any]]) -> str:
    """Return the result in one line."""
    last = records[-1]
    share, after_s = last["last_share_of_peak"], last["recovered_s"]
    kept = "no request was good" if share is None else f"{share:.0%} of the best goodput is left"
    back = (
        "it had not recovered at the end" if after_s is None else f"all are good again after {after_s:.1f} s"
    )
    return f"at {last['after_multiple']:g} times the capacity {kept}; {back}"
