"""The load of the serving benchmarks, as sessions of requests, and what came of each.

Refused, timed-out and failed requests count as sent and never as good; the session of one ends there. How a
request is sent is an argument, so that the load is tested without a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import grpc
import numpy as np

from cluster.api.generate_options import Turn
from cluster.errors import CallError
from kvtransfer.common.clock import Clock

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

    @property
    def num_output(self) -> int:
        return len(self.token_times)

    @property
    def gaps_s(self) -> Sequence[float]:
        """The times between consecutive tokens."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


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
