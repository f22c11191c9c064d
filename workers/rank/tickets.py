"""Steps that are launched and not yet collected.

A device may still compute a step when its launch returns: a ticket stands for the step until its report
holds. The next step is launched before that."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from msgspec.structs import replace

from workers.messages.rank_channel import FailedEntry, RowLogprob, StepPlan, StepReport
from workers.messages.sampling import TokenLogprob
from workers.rank.device_queue import CopiedOut, Event
from workers.rank.input_batch import PlannedRows
from workers.rank.prompt_reader import PromptReadings

# The number of steps that a rank whose device runs behind has queued on it: the one that computes, and the
# next.
MOST_LAUNCHED = 2
# The period in which a rank that waits for a step looks whether it is done; a plan that comes in between is
# launched.
_POLL_S = 2e-4


class DrawnRows(NamedTuple):
    """Rows that were drawn together, and what returns their log-probabilities, by row, when their step is
    done."""

    rows: PlannedRows
    logprobs: Callable[[], dict[int, TokenLogprob]]


class Results(NamedTuple):
    """The samples of a step, on their way to the host: int32 tokens [num_samples], and log-probabilities.
    When the tokens are there, `check` returns the sequences that may not go on with them."""

    tokens: CopiedOut
    drawn: Sequence[DrawnRows]
    check: Callable[[], tuple[FailedEntry, ...]] = tuple

    def complete(self, report: StepReport) -> StepReport:
        """Return the report with what was sampled. The tokens' event is passed."""
        logprobs = tuple(logprob for it in self.drawn for logprob in row_logprobs(it.rows, it.logprobs()))
        tokens = self.tokens.host.numpy().astype("<i4").tobytes()
        return replace(report, tokens=tokens, logprobs=logprobs, failed=report.failed + self.check())


class Ticket(NamedTuple):
    """A step that is launched. Its report holds once the device has passed `event`, and `results` and
    `readings`, if there are any, complete it then."""

    report: StepReport
    event: Event
    results: Results | None = None
    readings: PromptReadings | None = None

    def completed(self, report: StepReport) -> StepReport:
        """Return the report with results and readings. The event is passed."""
        if self.results is not None:
            report = self.results.complete(report)
        return report if self.readings is None else self.readings.complete(report)


def row_logprobs(rows: PlannedRows, row_to_logprob: dict[int, TokenLogprob]) -> list[RowLogprob]:
    """Return log-probabilities by row of `rows` as those of the report's rows."""
    return [RowLogprob(int(rows.sample_rows[row]), logprob) for row, logprob in row_to_logprob.items()]


def launched(
    plans: SimpleQueue[StepPlan | None], launch: Callable[[StepPlan], Ticket], most: int
) -> Iterator[Ticket]:
    """Launch the plans of the queue in order, until None comes. Yields each ticket when it is to be
    collected: when `most` are launched, or its step is done and no further plan is there."""
    tickets: deque[Ticket] = deque()
    has_ended = False
    while tickets or not has_ended:
        if has_ended or len(tickets) == most:
            yield tickets.popleft()
            continue
        try:
            plan = _next_plan(plans, tickets)
        except Empty:
            yield tickets.popleft()
            continue
        if plan is None:
            has_ended = True
        else:
            tickets.append(launch(plan))


def _next_plan(plans: SimpleQueue[StepPlan | None], tickets: Sequence[Ticket]) -> StepPlan | None:
    """Wait for the next plan. Raises Empty if the oldest step under way is done before one comes."""
    while tickets:
        if tickets[0].event.query():
            return plans.get_nowait()
        with contextlib.suppress(Empty):
            return plans.get(timeout=_POLL_S)
    return plans.get()
