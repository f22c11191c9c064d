"""The step loop of an engine core: keeps the ranks fed with plans and takes their reports.

Every rank runs every plan and reports it. At most one plan more is unreported than there are stages: each
stage runs one while the next is on its way. Idle ranks get an empty plan now and then, the canary, so that
`is_stalled` tells a hung rank from an idle one. How long a step may take is not predicted: it depends on more
than its size. Ranks say that they progress, piece by piece, and a hung one does not. Ranks may be on hosts
with other clocks: their times are only compared with times of the same rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvtransfer.common.clock import Clock
from workers.errors import WorkerError
from workers.messages.rank_channel import FailedEntry, StepPlan, StepReport
from workers.replica.expert_copies import ExpertCopies
from workers.replica.step_stats import StepStats
from workers.scheduler.expected_time import ExpectedTime
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepOutcome, StepRates
from workers.scheduler.step_costs import StepCosts

# The most unreported plans of a replica of one stage; every further stage adds one.
PIPELINE_DEPTH = 2
# A piece of a step may take this many times what the rank's measured rate predicts before `stall_s` begins
# to count: others may use the machine as well.
_PATIENCE = 4.0
_CANARY = StepPlan(0)


@dataclass(slots=True)
class _Unreported:
    """A plan that is out, and the ranks that have reported it."""

    plan: StepPlan
    # The time at which it was sent, or at which any rank was last heard to progress with it.
    progressed_at: float
    rank_to_report: dict[int, StepReport] = field(default_factory=dict)
    # What is done when all ranks have reported it.
    then: Callable[[], None] | None = None


class StepLoop:
    """Connects the scheduler and the `tp * pp` ranks; see the module's text."""

    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[StepPlan], None],
        clock: Clock,
        tp: int = 1,
        pp: int = 1,
        stats: StepStats | None = None,
        piece_s: float = 0.0,
        copies: ExpertCopies | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        """`send` gives a plan to every rank; `stats` counts what the steps came to. `piece_s` is how long
        the largest piece of a step, between two marks of progress, takes by the ranks' measured rates. Plans
        carry the orders of `copies`. `costs` learns what steps take."""
        self._scheduler = scheduler
        self._send = send
        self._clock = clock
        self._tp = tp
        self._pp = pp
        self._depth = PIPELINE_DEPTH + pp - 1
        self._piece_s = piece_s
        self._unreported: deque[_Unreported] = deque()
        self._last_settled_at = clock.now()
        self.rates = StepRates()
        self.costs = costs or StepCosts()
        self.stats = stats or StepStats()
        self.copies = copies or ExpertCopies()
        self.work = ExpectedTime()
        self.num_steps = 0

    def feed(self) -> None:
        """Send plans until as many as may be are unreported, or nothing can be planned."""
        now = self._clock.now()
        while len(self._unreported) < self._depth and (plan := self._scheduler.plan(now)) is not None:
            if orders := self.copies.take(self.stats.experts, now):
                plan = replace(plan, expert_copies=orders)
            self._issue(plan, now)

    def probe(self, idle_s: float) -> bool:
        """Send a canary, and return True, when nothing was reported for `idle_s` and nothing is on its
        way."""
        now = self._clock.now()
        is_due = not self._unreported and now > self._last_settled_at + idle_s
        if is_due:
            self._issue(_CANARY, now)
        return is_due

    def give(self, block_ids: tuple[int, ...], then: Callable[[], None]) -> None:
        """Send a plan by which the ranks give one another blocks of which each has received a part, and call
        `then` when all have reported it."""
        self._issue(StepPlan(0, given=block_ids), self._clock.now(), then)

    def settle(self, rank: int, report: StepReport) -> StepOutcome | None:
        """Take a rank's report; return the outcome when it was the last one of its step, None else and for a
        canary.

        Raises `WorkerError` when the rank has left out a step, or reports one that it was not given or has
        reported already.
        """
        expected = next((it for it in self._unreported if rank not in it.rank_to_report), None)
        is_rank = 0 <= rank < self._tp * self._pp
        if not is_rank or expected is None or report.step != expected.plan.step:
            due = "nothing" if expected is None or not is_rank else f"step {expected.plan.step}"
            raise WorkerError(f"rank {rank} reported step {report.step}, but {due} was due")
        expected.rank_to_report[rank] = report
        if report.memory is not None:
            self.stats.rank_to_memory[rank] = report.memory
        if report.experts is not None:
            self.stats.experts.add(report.experts, self._clock.now())
            self.copies.look_at(report.experts.layers)
        if len(expected.rank_to_report) < self._tp * self._pp:
            return None
        self._unreported.popleft()  # it is the oldest: every rank reports in order
        outcome = self._finish(expected.plan, expected.rank_to_report)
        if expected.then is not None:
            expected.then()
        return outcome

    def _finish(self, plan: StepPlan, rank_to_report: dict[int, StepReport]) -> StepOutcome | None:
        self._last_settled_at = self._clock.now()
        if not plan.num_sequences:
            self.work.done(0.0, self._last_settled_at, is_last=not self._unreported)
            return None
        self.num_steps += 1
        rank_to_busy_s = {rank: it.finished_at - it.started_at for rank, it in rank_to_report.items()}
        tp = self._tp
        stage_to_busy_s = [
            max([rank_to_busy_s[rank] for rank in range(first, first + tp)])
            for first in range(0, tp * self._pp, tp)
        ]
        failed = _merged(rank_to_report)
        # The head at every position, or experts that were copied before, would make all chunks look slower.
        is_typical = not (failed or plan.num_targets or plan.expert_copies)
        if is_typical:
            self.rates.add(plan, stage_to_busy_s)
        sampled = rank_to_report[(self._pp - 1) * self._tp]
        started_at = sampled.finished_at - sum(stage_to_busy_s)
        whole = replace(sampled, started_at=started_at, failed=failed)
        outcome = self._scheduler.settle(whole, self._last_settled_at)
        expected_s = max(stage_to_busy_s)
        if is_typical:
            expected_s = self.costs.add(plan, outcome.decode_starts, stage_to_busy_s)
        self.work.done(expected_s, self._last_settled_at, is_last=not self._unreported)
        self.stats.add(plan, outcome.decode_starts, stage_to_busy_s)
        self.stats.settled(outcome)
        return outcome

    @property
    def depth(self) -> int:
        """The most plans that are unreported."""
        return self._depth

    def pass_over(self, step_s: Sequence[float], num_decodes: int, settled_at: float) -> None:
        """Count steps of `num_decodes` decodes alone, of which each took so long, and which were settled at
        once (`workers.scheduler.decode_run`), the last of them then."""
        self.num_steps += len(step_s)
        self._last_settled_at = settled_at
        for each_s in step_s:
            self.rates.add_decode(each_s)
            self.work.done(each_s, settled_at, is_last=False)
        self.stats.pass_over(step_s, num_decodes)

    def skip(self, num_steps: int) -> None:
        """Note that the unreported plans are by now those of so many steps later, of the same sequences."""
        for it in self._unreported:
            it.plan = replace(it.plan, step=it.plan.step + num_steps)

    def steps_under_way(self) -> set[int]:
        """Return the first step that each rank has not reported: the step that a rank that ends or hangs is
        in."""
        unreported = (
            next((it.plan.step for it in self._unreported if rank not in it.rank_to_report), None)
            for rank in range(self._tp * self._pp)
        )
        return {step for step in unreported if step is not None}

    def progressed(self, rank: int, step: int) -> None:
        """Note that the rank has completed a piece of the step."""
        for unreported in self._unreported:
            if unreported.plan.step == step and rank not in unreported.rank_to_report:
                unreported.progressed_at = self._clock.now()

    def is_stalled(self, stall_s: float) -> bool:
        """Whether no rank has progressed with the oldest unreported plan for `stall_s`."""
        return self.stalled_s > stall_s

    @property
    def stalled_s(self) -> float:
        """The time for which no rank has progressed with the oldest unreported plan, beyond the time that the
        largest piece of a step may take; 0.0: one has, or nothing is out.

        Once the plan before it is settled, all that holds it up is its own way through the stages. A rank
        that waits for another makes no progress of its own, and one stage is done while the next computes: so
        the rank that has come furthest counts. Progress with later plans does not: a stage may be ahead of
        one that hangs.
        """
        if not self._unreported:
            return 0.0
        progressed_at = max(self._unreported[0].progressed_at, self._last_settled_at)
        return max(0.0, self._clock.now() - progressed_at - _PATIENCE * self._piece_s)

    def _issue(self, plan: StepPlan, now: float, then: Callable[[], None] | None = None) -> None:
        self._unreported.append(_Unreported(plan, now, then=then))
        self.work.begun(now)
        self._send(plan)


def _merged(rank_to_report: dict[int, StepReport]) -> tuple[FailedEntry, ...]:
    """Return what any rank could not compute, with the reason of the rank that knows it: a stage may have
    reported the step before a later one fails."""
    index_to_failed: dict[int, FailedEntry] = {}
    for rank, report in sorted(rank_to_report.items()):
        for failed in report.failed:
            if failed.reason and failed.code == "internal":
                failed = replace(failed, reason=f"rank {rank}: {failed.reason}")
            earlier = index_to_failed.get(failed.index)
            index_to_failed[failed.index] = earlier if earlier is not None and earlier.reason else failed
    return tuple(failed for _, failed in sorted(index_to_failed.items()))
