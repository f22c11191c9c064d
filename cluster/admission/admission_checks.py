"""Refuse the requests that a gateway cannot serve in time, or has no space for."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from cluster.admission.config import AdmissionConfig
from cluster.admission.degradation import Degradation
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.lateness import Lateness, ttft_limits
from cluster.admission.overload_refusals import OverloadRefusals
from cluster.admission.queue_placement import QueuePlacement
from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.waiting_requests import WaitingRequests
from router.messages import Decision
from router.service import RouterService

# Flows whose least wait is remembered.
_MAX_EARLY = 1000
# While nothing comes or goes, the least wait of a flow is used for this time, so that a refusal costs next to
# nothing.
_EARLY_WAIT_S = 0.02
# The price of a prompt is believed for this time after the replica last had one to compute. A replica that
# was disturbed while it measured would otherwise never be sent a long prompt again.
_PRICE_MEMORY_S = 30.0


class _EarlyWait(NamedTuple):
    """The least wait of a flow at that time, after this number of changes of the waiting requests."""

    at: float
    num_changes: int
    wait_s: float


class AdmissionChecks:
    """Checks new requests against the load of one gateway and its replicas."""

    def __init__(
        self,
        config: AdmissionConfig,
        router: RouterService,
        waiting: WaitingRequests,
        placement: QueuePlacement,
        *,
        queued_bytes: QueuedBytes,
        degradation: Degradation,
        refusals: OverloadRefusals,
    ) -> None:
        self._config = config
        self._router = router
        self._waiting = waiting
        self._placement = placement
        self._bytes = queued_bytes
        self._degradation = degradation
        self._refusals = refusals
        self._early: dict[Flow, _EarlyWait] = {}

    def check_early(self, queued: QueuedRequest, num_bytes: int) -> None:
        """Raise `OverloadedError` where any request of the flow is refused, or one of this size, or where the
        queues alone make any late: nothing of it has been read yet."""
        flow, weight, now = queued.flow, queued.weight, queued.arrived_at
        self.check_load(queued, now, num_bytes)
        early, num_changes = self._early.get(flow), self._waiting.num_changes
        if early is None or early.num_changes != num_changes or now >= early.at + _EARLY_WAIT_S:
            early = _EarlyWait(now, num_changes, self._placement.least_wait_s(flow, weight, now))
            if len(self._early) >= _MAX_EARLY:
                self._early.clear()
            self._early[flow] = early
        lateness = Lateness(ttft_limits(self._config.of(flow.service_class), queued, now), early.wait_s)
        if lateness.excess_s > 0:
            self._degradation.note(queued, early.wait_s, now)
            self._refuse_late(lateness)

    def check_load(self, queued: QueuedRequest, now: float, num_more_bytes: int = 0) -> None:
        """Raise `OverloadedError` where requests of the flow are not taken on this rung, or where too much
        waits with this many bytes more."""
        flow, weight, queues = queued.flow, queued.weight, self._waiting.queues
        if self._degradation.sheds(flow, weight):
            exit_s = self._degradation.ladder.earliest_exit_s(Rung.LOW_WEIGHT_SHED, now)
            raise self._refusals.overloaded(
                "shed",
                flow,
                f"under this load requests of the class {flow.service_class} with a weight of {weight:g} are "
                "not taken",
                max(queues.drain_s(now), exit_s),
            )
        if (excess_bytes := self._bytes.excess_bytes(num_more_bytes)) > 0:
            num_others = self._bytes.num_bytes
            part = min(1.0, excess_bytes / num_others) if num_others else 1.0
            raise self._refusals.overloaded(
                "bytes",
                flow,
                f"the requests that wait in this gateway have {num_others / 1e6:.0f} MB, "
                f"{self._config.max_queue_mb:g} MB are the most (admission.max_queue_mb)",
                part * queues.drain_s(now),
            )

    def check_lateness(self, queued: QueuedRequest, decision: Decision, now: float) -> None:
        """Raise `OverloadedError` where the request would be late at the replicas of the decision, and
        `UnattainableError` or `DeadlineError` where its prompt alone takes too long: but for one request
        that tests a price which is old."""
        prediction = decision.prediction
        load = self._router.loads.state(decision.compute_id)
        rates = load.rates
        alone_s = prediction.prefill_s / (rates.correction * rates.stretch)
        limits = ttft_limits(self._config.of(queued.flow.service_class), queued, now)
        lateness = Lateness(limits, prediction.wait_s, prediction.prefill_s, alone_s)
        if lateness.excess_s <= 0:
            return
        if lateness.is_late_alone and now - load.had_prompts_at > _PRICE_MEMORY_S:
            queued.tests_price = True  # once it is placed, the replica has a prompt to compute
            return
        self._refuse_late(lateness)

    def _refuse_late(self, lateness: Lateness) -> NoReturn:
        flow = lateness.limits.flow
        if (error := lateness.unattainable) is not None:
            self._refusals.count_unattainable(flow)
            raise error
        raise self._refusals.overloaded("late", flow, lateness.reason, lateness.excess_s)
