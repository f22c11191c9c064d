"""The load of the serving benchmarks, as sessions of requests, and what came of it.

Refused, timed-out and failed requests count as sent and never as good; the session of one ends there. How a
request is sent is an argument, so that the statistics are tested without a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
import numpy as np

from cluster.api.generate_options import Turn
from cluster.errors import CallError
from kvtransfer.common.clock import Clock

PERCENTILES = (50, 90, 99)
# The knee of a sweep: the highest offered rate of which at least this share was good.
KNEE_SHARE = 0.9
# Later turns of sessions are summed up as this one.
MAX_TURN = 16

# Token ids, or a chat for the model's template.
BenchPrompt = Sequence[int] | Sequence[Turn]


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One request of a session. Its prompt is what was said before and what `new` returns, which is made when
    the turn comes: prompts may be long."""

    new: Callable[[], BenchPrompt]
    output_tokens: int
    # After the answer to the turn before.
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of which each waits for the answer to the one before."""

    turns: Sequence[PlannedTurn]
    # From the start of the run.
    arrival_s: float = 0.0
    # What stands in the next prompt for an answer of so many tokens whose ids are not known; None: the
    # answers are not part of the prompts.
    stand_in: Callable[[int], Sequence[int]] | None = None


class AnswerEnd(NamedTuple):
    """What is known of a request at its end, beside the times of its tokens."""

    num_input: int = 0
    num_cached: int = 0
    # Of all its tokens; may be more than were seen one by one.
    num_output: int = 0
    # Empty: not known.
    token_ids: Sequence[int] = ()


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
    # So many of the requests come after the others, at a rate of their own.
    num_after: int = 0
    rate_after_per_s: float = 0.0

    def prompts(self) -> list[list[int]]:
        """Draw the prompts: prompt i begins with the shared prefix of group i modulo `num_groups`."""
        generator = np.random.default_rng(self.seed)
        shared = min(self.shared_prefix_tokens, self.input_tokens)
        prefixes = generator.integers(0, self.vocab_size, (max(self.num_groups, 1), shared))
        rest = generator.integers(0, self.vocab_size, (self.num_requests, self.input_tokens - shared))
        return [[*prefixes[index % len(prefixes)].tolist(), *row] for index, row in enumerate(rest.tolist())]

    def arrivals_s(self) -> list[float]:
        """Draw when each request is sent, in seconds from the start."""
        first = poisson_arrivals_s(self.num_requests - self.num_after, self.rate_per_s, self.seed)
        if not self.num_after:
            return first
        after = poisson_arrivals_s(self.num_after + 1, self.rate_after_per_s, self.seed + 1)
        return first + [first[-1] + at for at in after[1:]]

    def sessions(self) -> list[Session]:
        """Return a session of one request for each prompt."""
        return [
            Session((PlannedTurn(partial(list, prompt), self.output_tokens),), at)
            for prompt, at in zip(self.prompts(), self.arrivals_s(), strict=True)
        ]


def poisson_arrivals_s(num: int, rate_per_s: float, seed: int) -> list[float]:
    """Draw arrivals, in seconds from the first; 0 for all without a rate (concurrency limits them)."""
    if rate_per_s <= 0:
        return [0.0] * num
    gaps = np.random.default_rng((seed, 1)).exponential(1.0 / rate_per_s, num)
    return [float(at) for at in np.cumsum(gaps) - gaps[:1].sum()]


# Sends (prompt, number of output tokens, class); yields each delta's number of tokens, 0 when the request was
# accepted, in the end perhaps what else is known, or raises `CallError`.
Sender = Callable[[BenchPrompt, int, str], AsyncIterator[int | AnswerEnd]]

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
    # "ok", "refused", "expired" (refused after it had been accepted), "timed out" or "failed".
    outcome: str
    # Why it is not "ok".
    reason: str = ""
    service_class: str = ""
    # Of its session, from 1.
    turn: int = 1
    # Of `num_input`: what was not computed.
    num_cached: int = 0

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
    """What a good request keeps, in milliseconds. Classes may have times to the first token of their own."""

    ttft_ms: float
    tpot_ms: float
    class_to_ttft_ms: Mapping[str, float] = MappingProxyType({})

    def of_class(self, service_class: str) -> Objectives:
        """Return those of one class alone."""
        return Objectives(self.class_to_ttft_ms.get(service_class, self.ttft_ms), self.tpot_ms)

    def kept_by(self, record: BenchRequest) -> bool:
        if record.outcome != "ok" or not record.token_times:
            return False
        tpot_s = record.tpot_s
        ttft_ms = self.class_to_ttft_ms.get(record.service_class, self.ttft_ms)
        return record.ttft_s * 1e3 <= ttft_ms and (tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)


async def run_workload(
    workload: Workload, send: Sender, clock: Clock, on_done: Callable[[BenchRequest], None]
) -> list[BenchRequest]:
    """Send everything; returns the records in the order of sending."""
    return await run_sessions(
        workload.sessions(), workload.concurrency, send, clock, on_done, workload.service_classes
    )


async def run_sessions(
    sessions: Iterable[Session],
    concurrency: int,
    send: Sender,
    clock: Clock,
    on_done: Callable[[BenchRequest], None],
    service_classes: Sequence[str] = ("",),
) -> list[BenchRequest]:
    """Run all sessions, at most `concurrency` at once (0: any number); return the records session by
    session."""
    slots: AbstractAsyncContextManager[None] = (
        asyncio.Semaphore(concurrency) if concurrency > 0 else nullcontext()
    )
    started_at = clock.now()

    async def one(session: Session, service_class: str) -> list[BenchRequest]:
        if (delay_s := started_at + session.arrival_s - clock.now()) > 0:
            await clock.sleep(delay_s)
        async with slots:
            return await _run_session(session, service_class, send, clock, on_done)

    pairs = zip(sessions, cycle(service_classes), strict=False)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in pairs]
    return [record for task in tasks for record in task.result()]


async def _run_session(
    session: Session,
    service_class: str,
    send: Sender,
    clock: Clock,
    on_done: Callable[[BenchRequest], None],
) -> list[BenchRequest]:
    """Send one turn after the other, until one has no answer."""
    records: list[BenchRequest] = []
    said: list[Any] = []
    for number, turn in enumerate(session.turns, 1):
        if turn.think_s > 0:
            await clock.sleep(turn.think_s)
        said += turn.new()
        record, end = await _send(list(said), turn.output_tokens, service_class, send, clock)
        records.append(record._replace(turn=number))
        on_done(records[-1])
        if record.outcome != "ok":
            break
        if session.stand_in is not None:
            said += end.token_ids or session.stand_in(len(record.token_times))
    return records


async def _send(
    prompt: BenchPrompt, num_tokens: int, service_class: str, send: Sender, clock: Clock
) -> tuple[BenchRequest, AnswerEnd]:
    sent_at, outcome, reason, is_accepted = clock.now(), "ok", "", False
    times: list[float] = []
    end = AnswerEnd()
    try:
        async for event in send(prompt, num_tokens, service_class):
            is_accepted = True
            if isinstance(event, AnswerEnd):
                end = event
            else:
                times += [clock.now()] * event
        if not times:
            outcome, reason = "failed", "it ended without a token"
    except CallError as error:
        outcome, reason = _OUTCOMES.get(error.code, "failed"), str(error)
        if outcome == "refused" and is_accepted:
            outcome = "expired"
    times += times[-1:] * (end.num_output - len(times))
    num_input = end.num_input or len(prompt)
    record = BenchRequest(
        sent_at,
        clock.now(),
        num_input,
        tuple(times),
        outcome,
        reason,
        service_class,
        num_cached=end.num_cached,
    )
    return record, end


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
        "num_expired": sum(record.outcome == "expired" for record in records),
        "num_timed_out": sum(record.outcome == "timed out" for record in records),
        "num_failed": sum(record.outcome == "failed" for record in records),
        "first_reason": next((record.reason for record in records if record.reason), None),
        "first_failure": next((record.reason for record in records if record.outcome == "failed"), None),
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
        "cached_share": _cached_share(done),
    }


def by_turn(records: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    """Return, for each turn of sessions, the requests that finished, their times to first token and how much
    of their prompts was cached; nothing where all sessions have one turn."""
    done = [record for record in records if record.outcome == "ok"]
    if all(record.turn == 1 for record in done):
        return []
    turns = sorted({min(record.turn, MAX_TURN) for record in done})
    found = ([record for record in done if min(record.turn, MAX_TURN) == turn] for turn in turns)
    return [
        {
            "turn": turn,
            "or_later": turn == MAX_TURN,
            "num_ok": len(those),
            "input_tokens": sum(record.num_input for record in those) / len(those),
            "ttft_ms": _percentiles([record.ttft_s for record in those]),
            "cached_share": _cached_share(those),
        }
        for turn, those in zip(turns, found, strict=True)
    ]


def _cached_share(done: Sequence[BenchRequest]) -> float | None:
    """Return the part of the prompts' tokens that was not computed; None without a request."""
    num_input = sum(record.num_input for record in done)
    return sum(record.num_cached for record in done) / num_input if num_input else None


def by_class(records: Sequence[BenchRequest], objectives: Objectives) -> dict[str, dict[str, Any]]:
    """Return `summarize` of each class; nothing where all requests are of one."""
    names = list(dict.fromkeys(record.service_class for record in records))
    if len(names) < 2:
        return {}
    return {
        name: summarize(
            [record for record in records if record.service_class == name], objectives.of_class(name)
        )
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
