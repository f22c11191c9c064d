"""`tandem bench serve --overload`: what a cluster is good for when it is offered more than it can do.

    capacity, measured --> 0.5, 0.9, 1.2, 2, 5 times as much, open loop --> at once half of it: the recovery

Requests come at random times (Poisson), however long others wait, as they do when a million people send them.
A request is good when it keeps the objectives; a refused one is not, and costs its client next to nothing.
One that expires was accepted, waited, and was refused then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from rich.table import Table

from cluster.bench.serving_figures import Objectives, by_class, summarize
from cluster.bench.serving_load import BenchRequest, Workload
from cluster.cli.terminal import NONE, made_table
from cluster.errors import BenchError
from cluster.gateway.history import percentile

MULTIPLES = (0.5, 0.9, 1.2, 2.0, 5.0)
# The recovery: so much of the capacity, for so long.
RECOVERY_MULTIPLE = 0.5
RECOVERY_S = 30.0
# Goodput is back when this part of so many requests that follow each other is good.
WINDOW = 20
RECOVERED_PART = 0.9


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
    capacity = plan.capacity_per_s
    if not capacity:
        records.append(await measured_capacity(plan, objectives, run))
        capacity = records[0]["requests_per_s"]
    peak, recovery = 0.0, []
    for index, multiple in enumerate(plan.multiples):
        load = _at_rate(plan.workload, multiple * capacity, plan.duration_s, plan.workload.seed + 1 + index)
        label = f"{multiple:g} of capacity"
        if index == len(plan.multiples) - 1:
            rate_per_s = RECOVERY_MULTIPLE * capacity
            num_after = max(1, round(rate_per_s * RECOVERY_S))
            load = replace(
                load,
                num_requests=load.num_requests + num_after,
                num_after=num_after,
                rate_after_per_s=rate_per_s,
            )
            label += f", then {RECOVERY_MULTIPLE:g}"
        done = await run(label, load)
        num_sent = load.num_requests - load.num_after
        recovery = done[num_sent:]
        stats = of_load(done[:num_sent], objectives, multiple, capacity, plan.duration_s)
        peak = max(peak, stats["goodput_per_s"])
        records.append(stats)
    records.append(
        {
            "what": "overload recovery",
            "after_multiple": plan.multiples[-1],
            "recovered_s": recovered_s(recovery, objectives),
            "last_share_of_peak": records[-1]["goodput_per_s"] / peak if peak else None,
            "peak_goodput_per_s": peak,
        }
    )
    return records


def recovered_s(records: Sequence[BenchRequest], objectives: Objectives) -> float | None:
    """Return how long after the first of these requests goodput was back, as `recovered_after_s` has it. The
    class batch does not count: it is let in when the others are well."""
    counted = sorted((it for it in records if it.service_class != "batch"), key=lambda it: it.sent_at)
    marks = [objectives.kept_by(it) for it in counted]
    first_at = min(it.sent_at for it in records)
    return recovered_after_s([it.sent_at - first_at for it in counted], marks)


def recovered_after_s(times_s: Sequence[float], marks: Sequence[bool]) -> float | None:
    """Return when `RECOVERED_PART` of every `WINDOW` requests that follow each other is good from then on, of
    requests that were sent at `times_s`; None: not at all."""
    window = min(WINDOW, len(marks))
    for index in range(len(marks) - window, -1, -1):
        if sum(marks[index : index + window]) < RECOVERED_PART * window:
            last = index + 1
            return times_s[last] if last + window <= len(marks) else None
    return 0.0


async def measured_capacity(plan: OverloadPlan, objectives: Objectives, run: Runner) -> dict[str, Any]:
    """Return the record of so many clients, each of which waits for its answer: `requests_per_s` is the
    capacity."""
    num_requests = plan.concurrency
    for attempt in count(1):
        workload = replace(
            plan.workload,
            num_requests=num_requests,
            concurrency=plan.concurrency,
            rate_per_s=0.0,
            # Other prompts than before, which are cached by now, and than those of the loads.
            seed=plan.workload.seed + 1000 * attempt,
        )
        done = await run(f"capacity: {num_requests} requests, {plan.concurrency} at once", workload)
        stats = summarize(done, objectives).as_json()
        if not stats["num_ok"]:
            raise BenchError(f"no request finished; the first: {stats['first_reason']}")
        if stats["seconds"] >= plan.duration_s / 3:
            break
        num_requests = max(2 * num_requests, round(stats["requests_per_s"] * plan.duration_s / 2))
    return {"what": "overload capacity", "concurrency": plan.concurrency, **stats}


def _at_rate(workload: Workload, rate_per_s: float, duration_s: float, seed: int) -> Workload:
    num_requests = max(1, round(rate_per_s * duration_s))
    return replace(workload, num_requests=num_requests, concurrency=0, rate_per_s=rate_per_s, seed=seed)


def of_load(
    records: Sequence[BenchRequest],
    objectives: Objectives,
    multiple: float,
    capacity: float,
    duration_s: float,
) -> dict[str, Any]:
    """Return the record of one load, which was offered for `duration_s`."""
    refusals_s = [it.e2e_s for it in records if it.outcome == "refused"]
    stats = summarize(records, objectives).as_json()
    # Over the time in which requests were sent: the last of them end later at every load.
    stats["goodput_per_s"] = stats["good_share"] * len(records) / duration_s
    classes = {name: each.as_json() for name, each in by_class(records, objectives).items()}
    for each in classes.values():
        each["goodput_per_s"] = each["good_share"] * each["num_requests"] / duration_s
    return {
        "what": "overload",
        "multiple": multiple,
        "offered_per_s": multiple * capacity,
        "capacity_per_s": capacity,
        "refusal_p50_ms": quantile_ms(refusals_s, 0.5),
        "refusal_p99_ms": quantile_ms(refusals_s, 0.99),
        **stats,
        **({"classes": classes} if classes else {}),
    }


def quantile_ms(times_s: Iterable[float], share: float) -> float | None:
    """Return the time, in milliseconds, within which this share of them is; None without any."""
    ordered = sorted(times_s)
    return 1e3 * percentile(ordered, share) if ordered else None


def overload_table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each load, and below it one for each of its classes where there are several."""
    columns = ["offered/s", "good/s", "good", "finished", "refused", "expired", "failed"]
    table = made_table("overload", "load", numbers=[*columns, "TTFT p99, ms", "refusal p99, ms"])
    for record in records:
        if record["what"] != "overload":
            continue
        refusal = record["refusal_p99_ms"]
        table.add_row(
            f"{record['multiple']:g} of capacity",
            f"{record['offered_per_s']:.2f}",
            *_cells(record),
            NONE if refusal is None else f"{refusal:.1f}",
        )
        for name, stats in record.get("classes", {}).items():
            offered_per_s = record["offered_per_s"] * stats["num_requests"] / record["num_requests"]
            table.add_row(f"  {name}", f"{offered_per_s:.2f}", *_cells(stats), "")
    return table


def _cells(stats: dict[str, Any]) -> list[str]:
    ttft = stats["ttft_ms"]
    return [
        f"{stats['goodput_per_s']:.2f}",
        f"{stats['good_share']:.0%}",
        str(stats["num_ok"]),
        str(stats["num_refused"]),
        str(stats["num_expired"]),
        str(stats["num_timed_out"] + stats["num_failed"]),
        f"{ttft['p99']:.0f}" if ttft else NONE,
    ]


def verdict(records: Sequence[dict[str, Any]]) -> str:
    """Return the result in one line."""
    last = records[-1]
    share, after_s = last["last_share_of_peak"], last["recovered_s"]
    kept = "no request was good" if share is None else f"{share:.0%} of the best goodput is left"
    back = "it had not recovered at the end" if after_s is None else f"goodput is back after {after_s:.1f} s"
    return f"at {last['after_multiple']:g} times the capacity {kept}; {back}"
