"""Which requests a gateway takes, and when what it has taken goes to the replicas.

    admit: route, held --> predicted to be late? --yes--> OverloadedError, with the time of the drain
                                  | no
                                  v
                     FairQueue of the replica that computes it
                                  |  next in the fair order, and the pair can take it
    pump, at every sign of that --+--> release: the request's task submits it

A replica is sent no more than some steps of work (`RouterService.has_capacity`); the rest waits here, where
the order can still change. The prediction of a wait is the work that goes before, over the rate at which the
replica has lately taken work from here: below 1 where something else than prefill is the bottleneck, such as
sequences that decode. Where that turns out to be wrong, because the replica became slower or others are
served first, a request is refused when it has waited as long as its class allows: no request waits longer.

Calls that resume a stream, retries and migrations are not judged: they were taken already. What a replica has
refused waits in `retries` for one that has room, and goes before the rest. Not thread-safe; time comes from a
`Clock`.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.admission.config import AdmissionConfig
from cluster.admission.fair_queue import FairQueue, Flow, Waiting
from cluster.admission.ladder import Ladder, Rung
from cluster.admission.retries import RetryQueue
from cluster.errors import OverloadedError
from kvtransfer.common.clock import Clock
from router.messages import Decision, RouteRequest
from router.service import RouterService
from workers.messages.link import SERVICE_CLASSES, ServiceClass

# A request is refused when it is predicted to take more than this part of its objective, or of what is left
# of its deadline: predictions err.
MARGIN = 0.85
# Of the time after which a refused client may come back: it varies by this part in either direction.
JITTER = 0.25
_LEAST_RETRY_S = 0.1
# How fast a replica takes work is measured over this, and remembered for about that.
_RATE_PERIOD_S = 1.0
_RATE_S = 4.0
_LEAST_RATE = 0.01
# Timers may ring so much too early.
_EARLY_S = 0.002
# How often the pressure is measured, at most.
_PRESSURE_S = 0.1
# How long a flow counts in it after its last request, and how many do.
_ASKING_S = 5.0
_MAX_ASKING = 1000

_log = logging.getLogger(__name__)


class Candidacy(NamedTuple):
    """What admission must know of a request beside what the router must."""

    flow: Flow
    # Of its tenant.
    weight: float
    priority: int
    arrived_at: float
    deadline_at: float | None
    num_bytes: int


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request that was taken: where it was placed, and what it waits for."""

    candidacy: Candidacy
    request: RouteRequest
    decision: Decision
    waiting: Waiting
    # Waits no longer than until then.
    refused_at: float
    # One of them is called, once: when it may be submitted, or when it has waited too long.
    release: Callable[[HeldRequest], None] | None = None
    refuse: Callable[[OverloadedError], None] | None = None


class _Asking(NamedTuple):
    """What the latest request of a flow would have waited, in parts of its objective."""

    at: float
    weight: float
    pressure: float


class _Lane:
    """What waits for one replica, and how fast that takes work: seconds of predicted work a second, measured
    while something waits."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self._rate = 1.0
        self._since: float | None = None
        self._taken_s = 0.0

    def rate(self, now: float) -> float:
        """Return how fast the replica takes work; less than was measured, when it has taken none for long."""
        if self._since is None or now < self._since + _RATE_PERIOD_S:
            return self._rate
        return max(
            _LEAST_RATE, min(self._rate, (self._taken_s + self.queue.mean_cost_s) / (now - self._since))
        )

    def taken(self, cost_s: float, now: float) -> None:
        """Note that the replica took work."""
        if not len(self.queue):
            self._since = None  # it is not the bottleneck
            return
        if self._since is None:
            self._since, self._taken_s = now, 0.0
            return
        self._taken_s += cost_s
        elapsed_s = now - self._since
        if elapsed_s >= _RATE_PERIOD_S:
            measured = min(1.0, max(_LEAST_RATE, self._taken_s / elapsed_s))
            self._rate += min(1.0, elapsed_s / _RATE_S) * (measured - self._rate)
            self._since, self._taken_s = now, 0.0


@dataclass(slots=True)
class AdmissionCounts:
    """Totals since the start of the gateway."""

    # By reason ("late", "bytes", "shed", "aged") and class.
    num_refused: Counter[tuple[str, ServiceClass]] = field(default_factory=Counter)
    num_capped: int = 0
    num_released: Counter[ServiceClass] = field(default_factory=Counter)


class RequestAdmission:
    """The requests that one gateway has taken and not yet submitted."""

    def __init__(
        self,
        config: AdmissionConfig,
        router: RouterService,
        clock: Clock,
        seeds: Callable[[], int],
        on_rung: Callable[[Rung], None] = lambda rung: None,
    ) -> None:
        """`seeds` draws integers, for jitter; `on_rung` hears of each change of the ladder's rung."""
        self._config = config
        self._router = router
        self._clock = clock
        self._seeds = seeds
        self._on_rung = on_rung
        self._lanes: dict[str, _Lane] = {}
        self._held: dict[str, HeldRequest] = {}
        # By when they are refused.
        self._bounds: list[tuple[float, int, HeldRequest]] = []
        self._num_taken = 0
        self._num_bytes = 0
        # The flows that have asked lately, the latest last.
        self._asking: dict[Flow, _Asking] = {}
        self._measured_at = float("-inf")
        self._is_pumping = False
        self.retries = RetryQueue(router)
        self.ladder = Ladder(self._moved)
        self.counts = AdmissionCounts()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of the requests that wait."""
        return self._num_bytes

    def num_waiting(self) -> dict[ServiceClass, int]:
        """Return how many requests of each class wait."""
        total: Counter[ServiceClass] = Counter()
        for lane in self._lanes.values():
            total.update(lane.queue.num_by_class())
        return {name: total[name] for name in SERVICE_CLASSES}

    def waiting_s(self) -> float:
        """Return the predicted work of all that waits."""
        return sum(lane.queue.cost_s for lane in self._lanes.values())

    # ------------------------------------------------------------------------------------- admission

    def check_early(self, flow: Flow, weight: float, now: float, deadline_at: float | None) -> None:
        """Raise `OverloadedError` where the queues alone make any request of the flow late: nothing of it has
        been read yet."""
        limit_s = self._limit_s(flow, now, deadline_at)
        wait_s = self._least_wait_s(flow, weight, now)
        self._note(flow, weight, wait_s, now)
        if wait_s > limit_s:
            self._refuse("late", flow, wait_s, limit_s)

    def admit(self, request: RouteRequest, candidacy: Candidacy) -> HeldRequest:
        """Place the request, which is held; raise `OverloadedError` where it would be late, or too much waits
        here, and `NoReplicaError` as the router does."""
        now, flow = self._clock.now(), candidacy.flow
        limit_bytes = self._config.max_queue_mb * 1e6
        if self._num_bytes + candidacy.num_bytes > limit_bytes:
            self.counts.num_refused["bytes", flow.service_class] += 1
            raise OverloadedError(
                f"the requests that wait in this gateway have {self._num_bytes / 1e6:.0f} MB, "
                f"{self._config.max_queue_mb:g} MB are the most (admission.max_queue_mb)",
                self._retry_s(self.waiting_s()),
            )
        if self.ladder.rung >= Rung.LOW_WEIGHT_SHED and (
            flow.service_class == "batch" or candidacy.weight < 1
        ):
            self.counts.num_refused["shed", flow.service_class] += 1
            raise OverloadedError(
                f"under this load requests of the class {flow.service_class} with a weight of "
                f"{candidacy.weight:g} are not taken",
                self._retry_s(self.waiting_s()),
            )
        waits = {
            name: self._wait_s(name, flow, candidacy.weight, now)
            for name in self._router.compute_ids()
            if (lane := self._lanes.get(name)) is not None and len(lane.queue)
        }
        decision = self._router.route(request, is_held=True, waits=waits)
        prediction = decision.prediction
        ttft_s = prediction.ttft_s
        limit_s = self._limit_s(flow, now, candidacy.deadline_at)
        if now - candidacy.arrived_at + ttft_s > limit_s:
            self._router.on_finished(request.request_id)
            self._refuse("late", flow, ttft_s, limit_s)
        settings = self._config.of(flow.service_class)
        waiting = Waiting(
            request_id=request.request_id,
            flow=flow,
            cost_s=max(prediction.prefill_s, 1e-6),
            arrived_at=candidacy.arrived_at,
            due_at=candidacy.arrived_at + settings.aging_s,
            priority=candidacy.priority,
            num_bytes=candidacy.num_bytes,
        )
        held = HeldRequest(candidacy, request, decision, waiting, candidacy.arrived_at + settings.max_wait_s)
        self._put(held)
        return held

    def max_tokens(self, service_class: ServiceClass, max_tokens: int) -> int:
        """Return how many output tokens a request of the class may have on this rung."""
        cap = self._config.of(service_class).capped_tokens
        if cap is None or cap >= max_tokens or self.ladder.rung < Rung.TOKENS_CAPPED:
            return max_tokens
        self.counts.num_capped += 1
        return cap

    def retry_after_s(self, drain_s: float) -> float:
        """Return when a client may come back that is refused until something has drained."""
        return self._retry_s(drain_s)

    # --------------------------------------------------------------------------------------- release

    def hold(
        self,
        held: HeldRequest,
        release: Callable[[HeldRequest], None],
        refuse: Callable[[OverloadedError], None],
    ) -> None:
        """Call `release` when the request may be submitted, which may be now, or `refuse` when it has waited
        as long as its class allows (`HeldRequest.refused_at`, when somebody must call `pump`)."""
        held.release, held.refuse = release, refuse
        self.pump()

    def drop(self, held: HeldRequest) -> None:
        """Forget a request that ended while it waited."""
        if self._take_out(held):
            self._router.on_finished(held.request.request_id)
            self.pump()

    def pump(self) -> None:
        """Refuse what has waited too long, and release what the replicas can take now, in the fair order of
        each."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            now = self._clock.now()
            self._measure(now)
            self._refuse_overdue(now)
            self.retries.pump()
            for lane in list(self._lanes.values()):
                self._pump_lane(lane, now)
        finally:
            self._is_pumping = False

    def on_gone(self, replica_id: str) -> None:
        """Place again what waits for a replica that takes nothing more."""
        self.retries.on_gone(replica_id)
        moved = [
            held
            for held in self._held.values()
            if replica_id in (held.decision.prefill, held.decision.decode)
        ]
        for held in moved:
            release = held.release
            if self._take_out(held) and release is not None:
                release(held)  # its task finds that a replica is gone, and routes it again

    def check(self) -> None:
        """Assert that queues and held requests agree."""
        assert sum(len(lane.queue) for lane in self._lanes.values()) == len(self._held)
        assert self._num_bytes == sum(it.waiting.num_bytes for it in self._held.values())
        for lane in self._lanes.values():
            lane.queue.check()

    # --------------------------------------------------------------------------------------- private

    def _pump_lane(self, lane: _Lane, now: float) -> None:
        paused: ServiceClass | None = "batch" if self.ladder.rung >= Rung.BATCH_PAUSED else None
        while (waiting := lane.queue.peek(now, without=paused)) is not None:
            held = self._held[waiting.request_id]
            if held.release is None or not self._router.has_capacity(waiting.request_id):
                return
            lane.queue.pop(now, without=paused)
            self._forget(held)
            lane.taken(waiting.cost_s, now)
            self.counts.num_released[waiting.flow.service_class] += 1
            self._router.on_submitted(waiting.request_id)
            held.release(held)

    def _refuse_overdue(self, now: float) -> None:
        while self._bounds and (self._bounds[0][2].waiting.is_gone or self._bounds[0][0] <= now + _EARLY_S):
            held = heapq.heappop(self._bounds)[2]
            refuse, flow = held.refuse, held.candidacy.flow
            if refuse is None or not self._take_out(held):
                continue
            self._router.on_finished(held.request.request_id)
            self.counts.num_refused["aged", flow.service_class] += 1
            refuse(
                OverloadedError(
                    f"it has waited for {now - held.candidacy.arrived_at:.1f} s, the most for the class "
                    f"{flow.service_class} (admission.{flow.service_class}.max_wait_s)",
                    self._retry_s(self._least_wait_s(flow, held.candidacy.weight, now)),
                )
            )

    def _put(self, held: HeldRequest) -> None:
        lane = self._lanes.setdefault(held.decision.prefill or held.decision.decode, _Lane())
        flow = held.candidacy.flow
        lane.queue.put(held.waiting, self._weight(flow, held.candidacy.weight))
        self._held[held.waiting.request_id] = held
        self._num_taken += 1
        heapq.heappush(self._bounds, (held.refused_at, self._num_taken, held))
        self._num_bytes += held.waiting.num_bytes

    def _take_out(self, held: HeldRequest) -> bool:
        """Whether it waited."""
        lane = self._lanes.get(held.decision.prefill or held.decision.decode)
        if lane is None or lane.queue.drop(held.waiting.request_id) is None:
            return False
        self._forget(held)
        return True

    def _forget(self, held: HeldRequest) -> None:
        del self._held[held.waiting.request_id]
        self._num_bytes -= held.waiting.num_bytes

    def _weight(self, flow: Flow, tenant_weight: float) -> float:
        return self._config.of(flow.service_class).weight * tenant_weight

    def _wait_s(self, replica_id: str, flow: Flow, tenant_weight: float, now: float) -> float:
        """Return how long a request of the flow would wait for this replica: for what is there, for what
        other gateways hold, and for what goes before it here."""
        queue_s = self._router.load(replica_id).queue_s
        lane = self._lanes.get(replica_id)
        if lane is None:
            return queue_s
        ahead_s = lane.queue.ahead_s(flow, self._weight(flow, tenant_weight), now)
        return max(0.0, queue_s - lane.queue.cost_s) + ahead_s / lane.rate(now)

    def _least_wait_s(self, flow: Flow, tenant_weight: float, now: float) -> float:
        """Return the least wait of all replicas; 0 where there is none."""
        return min(
            (self._wait_s(name, flow, tenant_weight, now) for name in self._router.compute_ids()),
            default=0.0,
        )

    def _limit_s(self, flow: Flow, now: float, deadline_at: float | None) -> float:
        """Return what a request of the flow may take to its first token."""
        settings = self._config.of(flow.service_class)
        limit_s = settings.max_wait_s if settings.ttft_s is None else settings.ttft_s
        return MARGIN * (limit_s if deadline_at is None else min(limit_s, deadline_at - now))

    def _refuse(self, reason: str, flow: Flow, ttft_s: float, limit_s: float) -> None:
        self.counts.num_refused[reason, flow.service_class] += 1
        raise OverloadedError(
            f"the first token is predicted in {ttft_s:.1f} s, and {limit_s / MARGIN:.1f} s are the objective "
            f"of the class {flow.service_class}, or what is left of the deadline",
            self._retry_s(ttft_s - limit_s),
        )

    def _retry_s(self, drain_s: float) -> float:
        return max(_LEAST_RETRY_S, drain_s) * (1 + JITTER * (self._seeds() % 2001 - 1000) / 1000)

    def _note(self, flow: Flow, weight: float, wait_s: float, now: float) -> None:
        """Note how long a request of the flow would wait, for the pressure."""
        objective_s = self._config.of(flow.service_class).ttft_s
        if objective_s is None:
            return
        self._asking.pop(flow, None)
        self._asking[flow] = _Asking(now, self._weight(flow, weight), wait_s / (MARGIN * objective_s))
        if len(self._asking) > _MAX_ASKING:
            del self._asking[next(iter(self._asking))]
        self._measure(now)

    def _measure(self, now: float) -> None:
        """Update the ladder by the waits of new requests, in parts of their objectives: the mean of the flows
        that have asked lately, by their weights. One that waits for its own many requests counts as one."""
        if now < self._measured_at + _PRESSURE_S:
            return
        self._measured_at = now
        while self._asking and next(iter(self._asking.values())).at < now - _ASKING_S:
            del self._asking[next(iter(self._asking))]
        weights = sum(it.weight for it in self._asking.values())
        pressure = sum(it.weight * it.pressure for it in self._asking.values()) / weights if weights else 0.0
        self.ladder.update(pressure, now)

    def _moved(self, before: Rung, rung: Rung, pressure: float) -> None:
        _log.warning(
            "admission: from rung %d (%s) to %d (%s): new requests wait for %.2f of their objective",
            before,
            before.name.lower(),
            rung,
            rung.name.lower(),
            pressure,
        )
        self._on_rung(rung)
