"""Count the requests that a gateway refuses because of the load, and say when their clients may come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.admission.flow import Flow
from cluster.errors import OverloadedError
from kvtransfer.common.health import spread_s
from kvtransfer.request_facts import ServiceClass

_LEAST_RETRY_S = 0.1
# The reason of requests that would be late on an idle replica, too.
_UNATTAINABLE = "unattainable"


class OverloadRefusals:
    """The refusals of one gateway since its start, by reason ("late", "unattainable", "bytes", "shed",
    "aged", "requests") and class."""

    def __init__(self, seeds: Callable[[], int]) -> None:
        """`seeds` draws integers, for jitter."""
        self.counts: Counter[tuple[str, ServiceClass]] = Counter()
        self._seeds = seeds

    @property
    def num_by_load(self) -> int:
        """The number of requests that were refused because of the load."""
        return sum(count for (reason, _), count in self.counts.items() if reason != _UNATTAINABLE)

    def by_reason(self, service_class: ServiceClass) -> dict[str, int]:
        """Return the refusals of a class by reason."""
        return {reason: count for (reason, name), count in self.counts.items() if name == service_class}

    def overloaded(self, reason: str, flow: Flow, because: str, drain_s: float) -> OverloadedError:
        """Count a refusal, and return its error; in `drain_s` there may be capacity."""
        self.counts[reason, flow.service_class] += 1
        return OverloadedError(because, spread_s(max(_LEAST_RETRY_S, drain_s), self._seeds()))

    def count_unattainable(self, flow: Flow) -> None:
        """Count a request that would be late even if nothing waited."""
        self.counts[_UNATTAINABLE, flow.service_class] += 1
