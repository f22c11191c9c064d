"""Judge whether a request would be too late, and how long it may wait."""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.admission.config import ClassConfig
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from cluster.errors import DeadlineError, RequestError, UnattainableError
from router.messages import TimeLimit

# A request is refused when its wait is predicted to take more than `WAIT_MARGIN` of its objective, or of the
# rest of its deadline, or its first token more than `MARGIN`: predictions err, those of waits the most.
WAIT_MARGIN = 0.7
MARGIN = 0.85


class TtftLimits(NamedTuple):
    """The limits of the time to the first token of a request that came here `elapsed_s` ago: the objective of
    its class from its arrival on, and the rest of its deadline."""

    flow: Flow
    objective_s: float
    left_s: float
    elapsed_s: float = 0.0
    # Whether a prompt that misses the objective by itself is refused for that (`refuses_unattainable`).
    is_strict: bool = True

    @property
    def time_limit(self) -> TimeLimit:
        """The longest predictions with which it is not late, since predictions err."""
        ttft_s = min(MARGIN * self.objective_s - self.elapsed_s, MARGIN * self.left_s)
        return TimeLimit(WAIT_MARGIN * min(self.objective_s, self.left_s), ttft_s)

    @property
    def is_deadline_shorter(self) -> bool:
        """Whether less is left of the deadline than of the objective."""
        return self.left_s < self.objective_s - self.elapsed_s

    @property
    def shorter_text(self) -> str:
        """The one of which less is left, for people."""
        if self.is_deadline_shorter:
            return f"{self.left_s:.1f} s are left of the deadline"
        return f"{self.objective_s:.1f} s are the objective of the class {self.flow.service_class}"


class Lateness(NamedTuple):
    """A request that would wait for `wait_s` until its prompt is computed, which takes `prefill_s`, with its
    limits. On a replica that nothing slows down, its prompt would take `alone_s`."""

    limits: TtftLimits
    wait_s: float
    prefill_s: float = 0.0
    alone_s: float = 0.0

    @property
    def excess_s(self) -> float:
        """The time by which the request is too late; at most 0: it is not."""
        limit = self.limits.time_limit
        ttft_s = MARGIN * self.limits.left_s if self.is_excused else limit.ttft_s
        return max(self.wait_s - limit.wait_s, self.wait_s + self.prefill_s - ttft_s)

    @property
    def is_late_alone(self) -> bool:
        """Whether the request would be late for the time of its prompt, and not for its wait."""
        limits = self.limits
        is_slow = self.alone_s > MARGIN * min(limits.objective_s, limits.left_s)
        return limits.left_s > 0 and self.wait_s <= limits.time_limit.wait_s and is_slow

    @property
    def is_excused(self) -> bool:
        """Whether its prompt misses the objective by itself, and is not refused for that."""
        return not self.limits.is_strict and self.alone_s > MARGIN * self.limits.objective_s

    @property
    def reason(self) -> str:
        """The limit that the first token would miss."""
        limits, ttft_s = self.limits, self.wait_s + self.prefill_s
        if not limits.is_deadline_shorter:  # the objective is from its arrival on
            if self.is_excused:
                return f"its prompt would wait for {self.wait_s:.1f} s, and {limits.shorter_text}"
            ttft_s += limits.elapsed_s
        return f"the first token is predicted in {ttft_s:.1f} s, and {limits.shorter_text}"

    @property
    def unattainable(self) -> RequestError | None:
        """The error of a request that would be late even if nothing waited; None: it is not one."""
        limits = self.limits
        if limits.left_s <= 0:
            return DeadlineError("the deadline passed before the request was accepted")
        objective_s = math.inf if self.is_excused else limits.objective_s
        if self.alone_s <= MARGIN * min(objective_s, limits.left_s):
            return None
        because = f"the prompt alone takes {self.alone_s:.1f} s to compute"
        if self.alone_s <= MARGIN * objective_s:
            return DeadlineError(
                f"{because}, and {limits.left_s:.1f} s are left of the deadline: allow more time"
            )
        remedy = "coming back does not help; send it in a class with a longer objective"
        return UnattainableError(f"{because}, and {limits.shorter_text}: {remedy}")


def ttft_limits(settings: ClassConfig, queued: QueuedRequest, now: float) -> TtftLimits:
    """Return the limits of the time to the first token of a request."""
    objective_s = settings.max_wait_s if settings.ttft_s is None else settings.ttft_s
    left_s = math.inf if queued.deadline_at is None else queued.deadline_at - now
    elapsed_s = now - queued.arrived_at
    return TtftLimits(queued.flow, objective_s, left_s, elapsed_s, settings.refuses_unattainable)


def wait_bound(settings: ClassConfig, queued: QueuedRequest, prefill_s: float) -> tuple[float, str]:
    """Return until when a request whose prompt takes `prefill_s` to compute may wait, and the reason, for
    people."""
    if queued.tests_price:
        prefill_s = 0.0  # it is not believed
    name, arrived_at = queued.flow.service_class, queued.arrived_at
    at = arrived_at + settings.max_wait_s
    bound = f"the most for the class (admission.{name}.max_wait_s)"
    ttft_s = math.inf if settings.ttft_s is None else settings.ttft_s
    is_excused = not settings.refuses_unattainable and prefill_s > MARGIN * ttft_s
    if not is_excused and arrived_at + ttft_s - prefill_s < at:
        at = arrived_at + ttft_s - prefill_s
        bound = f"after which it would miss its objective (admission.{name}.ttft_s)"
    if queued.deadline_at is not None and queued.deadline_at - prefill_s < at:
        at, bound = queued.deadline_at - prefill_s, "after which it would miss its deadline"
    return at, bound
