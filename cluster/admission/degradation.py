"""Serve less before requests are refused: the ladder of a gateway, and the effects of each rung."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.ladder import Ladder, Pressure, Rung
from cluster.admission.lateness import WAIT_MARGIN
from cluster.admission.queued_request import QueuedRequest
from cluster.metrics.admission_stats import RungChange
from kvtransfer.common.clock import Clock
from kvtransfer.request_facts import ServiceClass

# Changes of the rung that are shown.
NUM_CHANGES_KEPT = 8

_log = logging.getLogger(__name__)


class Degradation:
    """The degradation of one gateway under its load, with totals since its start."""

    def __init__(self, config: AdmissionConfig, clock: Clock, on_rung: Callable[[Rung], None]) -> None:
        """`on_rung` hears of each change of the ladder's rung."""
        self._config = config
        self._clock = clock
        self._on_rung = on_rung
        self.ladder = Ladder(self._changed)
        self._pressure = Pressure(self.ladder)
        self.num_capped = 0
        # Changes by the rung that was taken, and the latest changes.
        self.num_rung_changes: Counter[str] = Counter()
        self.rung_changes: deque[RungChange] = deque(maxlen=NUM_CHANGES_KEPT)

    def note(self, queued: QueuedRequest, wait_s: float, now: float) -> None:
        """Note how long a new request would wait, for the pressure."""
        objective_s = self._config.of(queued.flow.service_class).ttft_s
        if objective_s is None:
            return
        part = wait_s / (WAIT_MARGIN * objective_s)
        weight = self._config.share(queued.flow.service_class, queued.weight)
        self._pressure.note(queued.flow, weight, part, now)

    def measure(self, now: float) -> None:
        """Move the ladder by the pressure, unless that was done a moment ago."""
        self._pressure.measure(now)

    @property
    def paused(self) -> ServiceClass | None:
        """The class whose requests wait for a replica that is idle."""
        return "batch" if self.ladder.rung >= Rung.BATCH_PAUSED else None

    @property
    def prefers_in_time(self) -> bool:
        """Whether a request that would be late where it costs least goes where it is in time: while there is
        no pressure. Under pressure a prompt that a decode replica computes among its streams costs the others
        more than it gains, and more are refused for it later."""
        return self.ladder.rung is Rung.NORMAL

    def sheds(self, flow: Flow, tenant_weight: float) -> bool:
        """Whether new requests of the flow are refused."""
        is_low = flow.service_class == "batch" or tenant_weight < 1
        return self.ladder.rung >= Rung.LOW_WEIGHT_SHED and is_low

    def max_tokens(self, service_class: ServiceClass, max_tokens: int) -> int:
        """Return how many output tokens a request of the class may have on this rung."""
        cap = self._config.of(service_class).capped_tokens
        if cap is None or cap >= max_tokens or self.ladder.rung < Rung.TOKENS_CAPPED:
            return max_tokens
        return cap

    def _changed(self, before: Rung, rung: Rung, pressure: float) -> None:
        _log.warning(
            "admission: from rung %d (%s) to %d (%s): new requests wait for %.2f of their objective",
            before,
            before.name.lower(),
            rung,
            rung.name.lower(),
            pressure,
        )
        self.num_rung_changes[rung.name.lower()] += 1
        change = RungChange(self._clock.wall(), before.name.lower(), rung.name.lower(), pressure)
        self.rung_changes.append(change)
        self._on_rung(rung)
