"""Goodput of a real local cluster that is offered more than it can do, as JSON lines.

A cluster of one prefill and one decode replica is started: `tandem serve` with the bundled model, whose ranks
run at nice 10 and are paced (`debug.pace`), so that its capacity of 2 to 4 requests a second does not depend
on the machine. The capacity is measured; then requests of all classes come at random times (Poisson, whatever
becomes of the others) at 0.5, 0.9, 1.2, 2 and 5 times as many a second, and at half of it right after the
last. The objectives are those below; batch requests only have to end. Times of refusals in the gateway are
those of its access log: from the headers of the call to its status.

    python -m benchmarks.overload_cluster [--minutes 3] [--multiples 0.5,0.9,1.2,2,5]

The last line is the verdict: every limit, and whether it was kept. Where one was not, or nothing was measured
that it limits, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from rich.console import Console

from benchmarks.served import ROOT, Service, serving
from cluster.api.admin_client import AdminClient
from cluster.bench.grpc_target import grpc_target
from cluster.bench.overload_curve import (
    MULTIPLES,
    OverloadPlan,
    Runner,
    measured_capacity,
    overload_table,
    quantile_ms,
    run_overload,
)
from cluster.bench.serving_figures import Objectives
from cluster.bench.serving_load import BenchRequest, Workload, run_sessions
from cluster.bench.targets import Target
from cluster.metrics.logs import ACCESS_LOGGER
from kvtransfer.common.clock import SystemClock

RANK_NICENESS = 10
# Requests at once while the capacity is measured, and for how long that takes.
CONCURRENCY = 10
CAPACITY_S = 30.0
# Six interactive requests to three standard ones and one of batch.
_TURN = ("interactive", "standard", "interactive", "interactive", "standard")
CLASSES = (*_TURN, "interactive", "interactive", "batch", "interactive", "standard")
INTERACTIVE_TTFT_S, STANDARD_TTFT_S = 3.0, 8.0
# The second objective is for an output token; a batch request only has to end.
OBJECTIVES = Objectives(1e3 * STANDARD_TTFT_S, 300.0, {"interactive": 1e3 * INTERACTIVE_TTFT_S, "batch": 1e6})
LOAD = Workload(
    num_requests=1,
    concurrency=CONCURRENCY,
    rate_per_s=0.0,
    input_tokens=128,
    output_tokens=16,
    shared_prefix_tokens=0,
    num_groups=1,
    seed=7,
    vocab_size=4000,
    service_classes=CLASSES,
)
ENGINE = {"block_tokens": 16, "kv_tokens": 16384, "max_sequences": 16, "max_batch_tokens": 64}
CLUSTER = {
    "model": str(ROOT / "models" / "tiny"),
    "pools": [
        {"name": role, "role": role, "dtype": "fp32", "cpus_per_rank": 0.25, "engine": ENGINE}
        for role in ("prefill", "decode")
    ],
    "admission": {
        "interactive": {
            "ttft_s": INTERACTIVE_TTFT_S,
            "max_wait_s": INTERACTIVE_TTFT_S,
            "aging_s": INTERACTIVE_TTFT_S / 2,
            "weight": 8,
        },
        "standard": {
            "ttft_s": STANDARD_TTFT_S,
            "max_wait_s": STANDARD_TTFT_S,
            "aging_s": STANDARD_TTFT_S / 2,
            "weight": 4,
        },
    },
    "logs": {"format": "json"},
    "debug": {"pace": {"base_s": 0.04, "sequence_s": 0.002, "token_s": 0.003}},
}
MEBIBYTE = 1 << 20


class Limits(NamedTuple):
    """The promised limits."""

    goodput_share: float = 0.9
    gateway_refusal_p99_ms: float = 5.0
    client_refusal_p99_ms: float = 50.0
    recovered_s: float = 5.0
    # Growth of the gateway's resident memory in the second half of the greatest load, when all that is
    # bounded by a number of requests is full at last.
    growth_mb: float = 8.0


class LoadSpan(NamedTuple):
    """The span of a load (Unix time), and the gateway's resident memory during it, second by second."""

    label: str
    began_at: float
    ended_at: float
    rss_mb: list[float]


class Measurement:
    """Runs loads and watches the gateway during them."""

    def __init__(self, target: Target, gateway: psutil.Process) -> None:
        self.spans: list[LoadSpan] = []
        self._target = target
        self._gateway = gateway
        self._clock = SystemClock()

    async def run(self, label: str, workload: Workload) -> list[BenchRequest]:
        """Run a load, as a `Runner` does."""
        print(f"{label}: {workload.num_requests} requests", file=sys.stderr, flush=True)
        span = LoadSpan(label, self._clock.wall(), 0.0, [])
        watching = asyncio.create_task(self._watch(span.rss_mb))
        try:
            return await run_sessions(
                workload.sessions(),
                workload.concurrency,
                self._target.send,
                self._clock,
                lambda _: None,
                workload.service_classes,
            )
        finally:
            watching.cancel()
            self.spans.append(span._replace(ended_at=self._clock.wall()))

    async def _watch(self, rss_mb: list[float]) -> None:
        while True:
            rss_mb.append(self._gateway.memory_info().rss / MEBIBYTE)
            await self._clock.sleep(1.0)


@contextmanager
def running_service(folder: Path) -> Iterator[Service]:
    """Start the cluster, and stop it in the end."""
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(CLUSTER))
    with serving("--file", str(file)) as service:
        yield service


async def gateway_process(service: Service) -> psutil.Process:
    """Lower the priority of all threads of the ranks, and return the gateway's process."""
    async with AdminClient(service.admin_address) as client:
        status = await client.status()
    for replica in status.replicas:
        for process_id in replica.rank_process_ids:
            for thread in psutil.Process(process_id).threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, RANK_NICENESS)
    return psutil.Process(status.gateways[0].process_id)


def refusals_s(logs: Path) -> list[tuple[float, float]]:
    """Return, of each refused request in the access log, its end (Unix time) and its time in the gateway."""
    found = []
    for file in logs.glob("worker-*.err"):
        for line in file.read_text().splitlines():
            if not line.startswith("{"):
                continue
            fields = json.loads(line)
            if fields["logger"] == ACCESS_LOGGER and fields["state"] == "refused":
                found.append((datetime.fromisoformat(fields["ts"]).timestamp(), fields["e2e_ms"] / 1e3))
    return found


def with_gateway(
    records: Sequence[dict[str, Any]], spans: Sequence[LoadSpan], refused: Sequence[tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return the records of the loads with the observations at the gateway."""
    found = []
    for record, span in zip(records, spans, strict=True):
        times_s = [it_s for at, it_s in refused if span.began_at <= at <= span.ended_at]
        half = len(span.rss_mb) // 2
        gateway = {
            "num_refused": len(times_s),
            "refusal_p50_ms": quantile_ms(times_s, 0.5),
            "refusal_p99_ms": quantile_ms(times_s, 0.99),
            "rss_mb": [span.rss_mb[0], span.rss_mb[half], span.rss_mb[-1]],
        }
        found.append({**record, "gateway": gateway})
    return found


def verdict(loads: Sequence[dict[str, Any]], recovery: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Return every limit with its measurement: the worst of all loads, where there are several. A limit
    without a measurement is not kept."""
    _, middle_mb, end_mb = loads[-1]["gateway"]["rss_mb"]

    def worst(values: Sequence[float | None]) -> float | None:
        return max((it for it in values if it is not None), default=None)

    goodput_share = recovery["last_share_of_peak"]
    measured = {
        "gateway_refusal_p99_ms": worst([it["gateway"]["refusal_p99_ms"] for it in loads]),
        "client_refusal_p99_ms": worst([it["refusal_p99_ms"] for it in loads]),
        "recovered_s": recovery["recovered_s"],
        "growth_mb": end_mb - middle_mb,
    }
    lines = {"goodput_share": (goodput_share, goodput_share and goodput_share >= limits.goodput_share)}
    for name, value in measured.items():
        lines[name] = (value, value is not None and value <= getattr(limits, name))
    return {
        "what": "overload verdict",
        "is_kept": all(is_kept for _, is_kept in lines.values()),
        "limits": {
            name: {"measured": value, "limit": getattr(limits, name), "is_kept": bool(is_kept)}
            for name, (value, is_kept) in lines.items()
        },
        "rss_growth_mb": end_mb - loads[0]["gateway"]["rss_mb"][0],
    }


async def measure(service: Service, duration_s: float, multiples: tuple[float, ...]) -> bool:
    """Offer all loads, and print their results; return whether all limits were kept."""
    gateway = await gateway_process(service)
    console = Console(stderr=True, width=120)
    async with grpc_target(service.address, 60.0, None) as target:
        measurement = Measurement(target, gateway)
        run: Runner = measurement.run
        # The class that waits longest, alone, so that no refusals are measured.
        alone = replace(LOAD, service_classes=("standard",))
        capacity = await measured_capacity(
            OverloadPlan(alone, 0.0, CONCURRENCY, min(CAPACITY_S, 3 * duration_s)), OBJECTIVES, run
        )
        print(json.dumps(capacity), flush=True)
        measurement.spans.clear()
        plan = OverloadPlan(LOAD, capacity["requests_per_s"], CONCURRENCY, duration_s, multiples)
        *loads, recovery = await run_overload(plan, OBJECTIVES, run)
    loads = with_gateway(loads, measurement.spans, refusals_s(service.logs))
    judged = verdict(loads, recovery, Limits())
    for record in (*loads, recovery, judged):
        print(json.dumps(record), flush=True)
    console.print(overload_table(loads))
    return bool(judged["is_kept"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="of each load")
    parser.add_argument("--multiples", default=",".join(f"{it:g}" for it in MULTIPLES))
    arguments = parser.parse_args()
    multiples = tuple(map(float, arguments.multiples.split(",")))
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as service:
        is_kept = asyncio.run(measure(service, 60.0 * arguments.minutes, multiples))
    sys.exit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
