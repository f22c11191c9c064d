"""Choose the replica for which a request waits, and move it where it would wait less."""

from __future__ import annotations

from cluster.admission.config import AdmissionConfig
from cluster.admission.degradation import Degradation
from cluster.admission.flow import Flow
from cluster.admission.lateness import ttft_limits, wait_bound
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.replica_queue import Waits
from cluster.admission.waiting_requests import WaitingRequests
from cluster.metrics.gateway_counters import Predicted
from router.messages import Decision, RouteRequest
from router.service import RouterService


class QueuePlacement:
    """Puts requests into the queues of replicas, by the waits and costs that the router predicts there."""

    def __init__(
        self,
        config: AdmissionConfig,
        router: RouterService,
        waiting: WaitingRequests,
        degradation: Degradation,
    ) -> None:
        self._config = config
        self._router = router
        self._waiting = waiting
        self._degradation = degradation

    def least_wait_s(self, flow: Flow, tenant_weight: float, now: float) -> float:
        """Return the shortest wait of a request of the flow, over all replicas for which it may wait."""
        weight, paused = self._config.share(flow.service_class, tenant_weight), self._degradation.paused
        return self._waiting.queues.least_wait_s(
            flow, weight, now, paused, includes_all=self._degradation.prefers_in_time
        )

    def decide(self, queued: QueuedRequest, request: RouteRequest, now: float) -> Decision:
        """Choose the pair on which a new request costs least; with `prefers_in_time`, the cheapest pair on
        which it is not late, if there is one."""
        waits = self._waits(queued, now)
        limits = ttft_limits(self._config.of(queued.flow.service_class), queued, now)
        limit = limits.time_limit if self._degradation.prefers_in_time else None
        return self._router.decide(request, limit=limit, **waits._asdict())

    def place(self, queued: QueuedRequest, decision: Decision, now: float) -> None:
        """Let a new request wait for the replicas of the decision."""
        self._router.place(queued.route_request, decision, is_queued=True)
        prediction = decision.prediction
        queued.predicted = Predicted(now - queued.arrived_at + prediction.ttft_s, prediction.step_s)
        self._set_decision(queued, decision)
        queued.routed_at = now
        self._waiting.add(queued, now)

    def move(self, queued: QueuedRequest, now: float) -> bool:
        """Let the request wait for other replicas if those are better now; return whether they are. The
        request is priced as if it waited nowhere, so that it does not count against its own replica. Raises
        `NoReplicaError` if no replica can be chosen; the request then stays."""
        queued.routed_at = now
        self._waiting.dequeue(queued, now)
        try:
            better = self._better(queued, now)
            if better is not None:
                self._router.place(queued.route_request, better, is_queued=True)
                queued.tests_price &= better.compute_id == queued.decision.compute_id
                self._set_decision(queued, better)
                self._waiting.set_bound(queued)
        finally:
            self._waiting.enqueue(queued)
        return better is not None

    def _better(self, queued: QueuedRequest, now: float) -> Decision | None:
        """Return a better decision for a request that is out of its queue now; None: the present one is best.
        A request that is in time on its present pair does not move to one on which it would be late."""
        request, waits = queued.route_request, self._waits(queued, now)._asdict()
        limit = ttft_limits(self._config.of(queued.flow.service_class), queued, now).time_limit
        if self._degradation.prefers_in_time:
            return self._router.improve(request, queued.decision, limit=limit, **waits)
        better = self._router.improve(request, queued.decision, **waits)
        if better is None or limit.includes(better.prediction):
            return better
        in_time = self._router.decide(request, limit=limit, **waits)
        pair = queued.decision.prefill, queued.decision.decode
        stays = in_time.limit is not None and (in_time.prefill, in_time.decode) == pair
        return None if stays else better

    def _waits(self, queued: QueuedRequest, now: float) -> Waits:
        """Return the wait of a request in the order of each replica."""
        weight = self._config.share(queued.flow.service_class, queued.weight)
        return self._waiting.queues.waits(queued.flow, weight, now, self._degradation.paused)

    def _set_decision(self, queued: QueuedRequest, decision: Decision) -> None:
        """Record the decision with what follows from it: the longest wait, the price and the due time."""
        settings = self._config.of(queued.flow.service_class)
        queued.decision = decision
        queued.waits_until, queued.bound = wait_bound(settings, queued, decision.prediction.prefill_s)
        queued.cost_s = self._cost_s(decision)
        queued.num_tokens = max(queued.route_request.num_tokens, 1) - decision.prefill_cached_tokens
        queued.due_at = queued.arrived_at + settings.aging_s

    def _cost_s(self, decision: Decision) -> float:
        """Return for how long the request occupies the replica that its queue waits for: for computing its
        prompt or, where that is longer, for the place of its sequence. The places of replicas that only
        decode are those of all queues."""
        place_s = self._router.loads.state(decision.decode).place_s
        if decision.prefill:
            num_compute, num_decode = self._router.members.num_by_side()
            place_s *= num_compute / max(1, num_decode)
        return max(decision.prediction.prefill_s, place_s, 1e-6)
