"""The load of the serving benchmarks, drawn from a seed, and what came of it.

Refused, timed-out and failed requests count as sent and never as good. How a request is sent is an argument,
so that the statistics are tested without a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import grpc
import numpy as np

from cluster.errors import CallError
from kvtransfer.common.clock import Clock

PERCENTILES = (50, 90, 99)
# The knee of a sweep: the highest offered rate of which at least this share was good.
KNEE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes what is sent. Lengths are tokens; one of `concurrency` and `rate_per_s` (Poisson) is set."""

    num_requests: int
    concurrency: int
    rate_per_s: float
    input_tokens: int
    output_tokens: int
    shared_prefix_tokens: int
    num_groups: int
    seed: int
    vocab_size: int
    # Request i is of class i modulo their number; by default all are of the tenant's own.
    service_classes: tuple[str, ...] = ("",)

    def prompts(self) -> list[list[int]]:
        """Draw the prompts: prompt i begins with the shared prefix of group i modulo `num_groups`."""
        generator = np.random.default_rng(self.seed)
        shared = min(self.shared_prefix_tokens, self.input_tokens)
        prefixes = generator.integers(0, self.vocab_size, (max(self.num_groups, 1), shared))
        rest = generator.integers(0, self.vocab_size, (self.num_requests, self.input_tokens - shared))
        return [[*prefixes[index % len(prefixes)].tolist(), *row] for index, row in enumerate(rest.tolist())]

    def arrivals_s(self) -> list[float]:
        """Draw when each request is sent, in seconds from the start; 0 for all without a rate (concurrency
        limits them)."""
        if self.rate_per_s <= 0:
            return [0.0] * self.num_requests
        generator = np.random.default_rng((self.seed, 1))
        gaps = generator.exponential(1.0 / self.rate_per_s, self.num_requests)
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]


# Sends (prompt, number of output tokens, class); yields each delta's number of tokens, or raises `CallError`.
Sender = Callable[[list[int], int, str], AsyncIterator[int]]

_OUTCOMES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timed out",
}


class BenchRequest(NamedTuple):
    """Represents one request as its client saw it. `token_times` has one entry per output token (seconds)."""

    sent_at: float
    finished_at: float
    num_input: int
    token_times: tuple[float, ...]
    # "ok", "refused", "timed out" or "failed".
    outcome: str
    # Why it is not "ok".
    reason: str = ""
    service_class: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.finished_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """(end to end - TTFT) / (tokens - 1); None with one token."""
        count = len(self.token_times)
        return (self.e2e_s - self.ttft_s) / (count - 1) if count > 1 else None


class Objectives(NamedTuple):
    """What a good request keeps, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def kept_by(self, record: BenchRequest) -> bool:
        if record.outcome != "ok" or not record.token_times:
            return False
        tpot_s = record.tpot_s
        return record.ttft_s * 1e3 <= self.ttft_ms and (tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)


async def run_workload(
    workload: Workload, send: Sender, clock: Clock, on_done: Callable[[BenchRequest], None]
) -> list[BenchRequest]:
    """Send everything; returns the records in the order of sending."""
    slots: AbstractAsyncContextManager[None] = (
        asyncio.Semaphore(workload.concurrency) if workload.concurrency > 0 else nullcontext()
    )
    started_at = clock.now()

    async def one(prompt: list[int], arrival_s: float, service_class: str) -> BenchRequest:
        if (delay_s := started_at + arrival_s - clock.now()) > 0:
            await clock.sleep(delay_s)
        async with slots:
            return await _record(workload, prompt, service_class, send, clock, on_done)

    pairs = zip(workload.prompts(), workload.arrivals_s(), strict=True)
    classes = cycle(workload.service_classes)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair, next(classes))) for pair in pairs]
    return [task.result() for task in tasks]


async def _record(
    workload: Workload,
    prompt: list[int],
    service_class: str,
    send: Sender,
    clock: Clock,
    on_done: Callable[[BenchRequest], None],
) -> BenchRequest:
    sent_at, outcome, reason = clock.now(), "ok", ""
    times: list[float] = []
    try:
        async for count in send(prompt, workload.output_tokens, service_class):
            times += [clock.now()] * count
        if not times:
            outcome, reason = "failed", "it ended without a token"
    except CallError as error:
        outcome, reason = _OUTCOMES.get(error.code, "failed"), str(error)
    record = BenchRequest(sent_at, clock.now(), len(prompt), tuple(times), outcome, reason, service_class)
    on_done(record)
    return record


def summarize(records: Sequence[BenchRequest], objectives: Objectives) -> dict[str, Any]:
    """Return the statistics of one run as JSON values: milliseconds, tokens and requests a second.

    Latencies are of the requests that finished; `itl_ms` is over all gaps between consecutive tokens (tokens
    of one delta arrive together: their gaps are 0). Rates are over the time from the first sending to the
    last end.
    """
    done = [record for record in records if record.outcome == "ok"]
    good = sum(objectives.kept_by(record) for record in records)
    seconds = max(record.finished_at for record in records) - min(record.sent_at for record in records)
    seconds = max(seconds, 1e-9)
    gaps = [
        later - earlier
        for record in done
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)
    ]
    return {
        "num_requests": len(records),
        "num_ok": len(done),
        "num_refused": sum(record.outcome == "refused" for record in records),
        "num_timed_out": sum(record.outcome == "timed out" for record in records),
        "num_failed": sum(record.outcome == "failed" for record in records),
        "first_reason": next((record.reason for record in records if record.reason), None),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "input_tok_s": sum(record.num_input for record in done) / seconds,
        "output_tok_s": sum(len(record.token_times) for record in done) / seconds,
        "ttft_ms": _percentiles([record.ttft_s for record in done]),
        "tpot_ms": _percentiles([record.tpot_s for record in done if record.tpot_s is not None]),
        "itl_ms": _percentiles(gaps),
        "e2e_ms": _percentiles([record.e2e_s for record in done]),
        "slo_ttft_ms": objectives.ttft_ms,
        "slo_tpot_ms": objectives.tpot_ms,
        "good_share": good / len(records),
        "goodput_per_s": good / seconds,
    }


def by_class(records: Sequence[BenchRequest], objectives: Objectives) -> dict[str, dict[str, Any]]:
    """Return `summarize` of each class; nothing where all requests are of one."""
    names = list(dict.fromkeys(record.service_class for record in records))
    if len(names) < 2:
        return {}
    return {
        name: summarize([record for record in records if record.service_class == name], objectives)
        for name in names
    }


def knee(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the highest offered rate up to which all (rate, good share) points were good enough."""
    best = None
    for rate, share in sorted(points):
        if share < KNEE_SHARE:
            break
        best = rate
    return best


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the milliseconds at each percentile and the mean; None without samples."""
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds), PERCENTILES) * 1e3
    stats = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, values, strict=True)}
    return {**stats, "mean": float(np.mean(seconds)) * 1e3}
