"""The step loop of a brain: keeps the ranks fed with plans and takes their reports.

At most `PIPELINE_DEPTH` plans are unreported: one runs while the next is on its way. Idle ranks get an empty
plan from time to time, the canary, so that `is_stalled` tells a hung rank from an idle one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.clock import Clock
from workers.engine.batch import StepOutcome
from workers.engine.scheduler import Scheduler
from workers.messages import StepPlan, StepReport

PIPELINE_DEPTH = 2
_PATIENCE = 4.0
"""A step may take this many times what the measured rates predict before `stall_s` begins to count."""
_SLOW_TOK_S = 20.0
"""Assumed until a rate is measured."""
_CANARY = StepPlan(0, (), (), (), ())


@dataclass(slots=True)
class Rates:
    """Moving averages from step reports (0: not yet known)."""

    prefill_tok_s: float = 0.0
    decode_step_s: float = 0.0

    def add(self, num_tokens: int, has_prefill: bool, seconds: float) -> None:
        if seconds <= 0:
            return
        if has_prefill:
            self.prefill_tok_s = _blend(self.prefill_tok_s, num_tokens / seconds, 0.2)
        else:
            self.decode_step_s = _blend(self.decode_step_s, seconds, 0.1)


class StepLoop:
    """Between the scheduler and the ranks; see the module's text."""

    def __init__(self, scheduler: Scheduler, send: Callable[[StepPlan], None], clock: Clock) -> None:
        self._scheduler = scheduler
        self._send = send
        self._clock = clock
        self._unreported: deque[tuple[StepPlan, float]] = deque()
        self._last_report_at = clock.now()
        self.rates = Rates()
        self.num_steps = 0

    def feed(self) -> None:
        """Send plans until two are unreported or nothing can be planned."""
        now = self._clock.now()
        while len(self._unreported) < PIPELINE_DEPTH and (plan := self._scheduler.plan(now)) is not None:
            self._issue(plan, now)

    def probe(self, idle_s: float) -> bool:
        """Send a canary, and tell so, when nothing was reported for `idle_s` and nothing is on its way."""
        now = self._clock.now()
        is_due = not self._unreported and now > self._last_report_at + idle_s
        if is_due:
            self._issue(_CANARY, now)
        return is_due

    def settle(self, report: StepReport) -> StepOutcome | None:
        """Take the report of the oldest plan; None for a canary's."""
        plan, _ = self._unreported.popleft()
        assert plan.step == report.step, f"report of step {report.step}, expected {plan.step}"
        self._last_report_at = self._clock.now()
        if not plan.entries:
            return None
        self.num_steps += 1
        num_tokens = sum(entry.num_tokens for entry in plan.entries)
        has_prefill = any(entry.num_tokens > 1 for entry in plan.entries)
        self.rates.add(num_tokens, has_prefill, report.finished_at - report.started_at)
        return self._scheduler.settle(report, self._last_report_at)

    def is_stalled(self, stall_s: float) -> bool:
        """Whether the oldest unreported plan has run `stall_s` longer than its size can explain."""
        if not self._unreported:
            return False
        plan, sent_at = self._unreported[0]
        waited_s = self._clock.now() - max(sent_at, self._last_report_at)
        return waited_s > stall_s + _PATIENCE * self._expected_s(plan)

    def _expected_s(self, plan: StepPlan) -> float:
        num_tokens = sum(entry.num_tokens for entry in plan.entries)
        if any(entry.num_tokens > 1 for entry in plan.entries):
            return num_tokens / (self.rates.prefill_tok_s or _SLOW_TOK_S)
        return self.rates.decode_step_s or num_tokens / _SLOW_TOK_S

    def _issue(self, plan: StepPlan, now: float) -> None:
        self._unreported.append((plan, now))
        self._send(plan)


def _blend(old: float, new: float, weight: float) -> float:
    return new if old == 0 else (1 - weight) * old + weight * new
