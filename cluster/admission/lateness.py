"""When a request is refused because its first token would be late, and with what error."""

from __future__ import annotations

from typing import NamedTuple

from cluster.admission.fair_queue import Flow

# A request is refused when its wait is predicted to take more than `WAIT_MARGIN` of its objective, or of what
# is left of its deadline, or its first token more than `MARGIN`: predictions err, those of waits the most.
WAIT_MARGIN = 0.7
MARGIN = 0.85


class Lateness(NamedTuple):
    """A request that would wait for `wait_s` until its prompt is computed, which takes `prefill_s`, and that
    came here `elapsed_s` ago, beside the objective of its class or what is left of its deadline. On a replica
    that nothing slows down, its prompt would take `alone_s`."""

    flow: Flow
    wait_s: float
    prefill_s: float
    alone_s: float
    elapsed_s: float
    limit_s: float

    @property
    def ttft_s(self) -> float:
        return self.elapsed_s + self.wait_s + self.prefill_s

    @property
    def excess_s(self) -> float:
        """By how much the wait is too long; at most 0: it is not."""
        return max(self.wait_s - WAIT_MARGIN * self.limit_s, self.ttft_s - MARGIN * self.limit_s)

    @property
    def is_hopeless(self) -> bool:
        """Whether it would be late even if nothing waited."""
        return self.alone_s > MARGIN * self.limit_s

    def __str__(self) -> str:
        limit = (
            f"{self.limit_s:.1f} s are the objective of the class {self.flow.service_class}, "
            "or what is left of the deadline"
        )
        if self.is_hopeless:
            return (
                f"the prompt alone takes {self.alone_s:.1f} s to compute, and {limit}: coming back does not "
                "help; send it in a class whose objective is longer, or allow more time"
            )
        return f"the first token is predicted in {self.ttft_s:.1f} s, and {limit}"
