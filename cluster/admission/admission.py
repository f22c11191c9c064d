"""The requests that a gateway takes, and the times at which they go to the replicas.
The file is over 600 lines because every change of the waiting requests stands in one place.

    place: route, queue --> predicted to be late? --yes--> OverloadedError, with the time of the drain
                                   | no
                                   v
                      FairQueue of the replica that computes it
                                   |  next in the fair order, and the pair can take it
    pump, at every sign of that ---+--> `Released`: the request's task submits it

A replica is sent no more than some steps of work (`RouterService.has_capacity`); the rest waits here, where
the order can still change. The prediction of a wait is the work that goes before, over the rate at which the
replica has recently taken work from here. The work of a request is the time of its prefill or, where that is
longer, of its place among the sequences that decode, for the time that recently ended ones had one. Where a
prediction turns out to be wrong, because the replica became slower or others are served first, the request is
placed again: after each part of the time that it may wait, and when another replica has nothing to do. When
its wait would make it late, or has reached the limit of its class, it is refused: none waits longer.

Retries, migrations and calls that resume broken ones are not judged: they were taken already. A request that
a replica has refused waits in `retries` for one that has capacity, and goes before the rest. Not thread-safe;
time comes from a `Clock`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

from msgspec.structs import replace

from cluster.admission.config import AdmissionConfig
from cluster.admission.displaced import DisplacedRequests
from cluster.admission.flow import Flow
from cluster.admission.ladder import Ladder, Pressure, Rung
from cluster.admission.lateness import WAIT_MARGIN, Lateness, TtftLimits, wait_bound
from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_load import QueuedLoad
from cluster.admission.queued_request import QueuedRequest, Refused, Released, Unplaced
from cluster.admission.replica_queue import ReplicaQueue, ReplicaQueues, Waits
from cluster.admission.retries import RetryQueue
from cluster.errors import InternalError, OverloadedError, failures_logged
from cluster.metrics.admission_stats import AdmissionStats, ClassStats, RungChange
from cluster.metrics.gateway_counters import Predicted
from cluster.metrics.served_time import ServedTime
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import spread_s
from kvtransfer.common.indexed_heap import IndexedHeap
from kvtransfer.request_facts import SERVICE_CLASSES, ServiceClass
from router.errors import NoReplicaError
from router.messages import Decision, RouteRequest
from router.service import RouterService

_LEAST_RETRY_S = 0.1
# Waiting requests are routed again when a replica has nothing else to do, no more often than this.
_MOVE_S = 0.05
# They are also routed again after this part of the time for which they may wait, at most this number at once.
REROUTE_PART = 0.2
_MOST_REROUTES = 8
# A request that was submitted later after it was placed has waited.
AT_ONCE_S = 0.005
# A retry goes to a replica without capacity after this time: its known load may be wrong.
CAPACITY_WAIT_S = 2.0
# Timers may ring too early by this much.
_EARLY_S = 0.002
# The number of requests that a pump may refuse, place again because their replica is gone, and release: some
# milliseconds of work. The rest is done in later turns of the event loop.
MOST_PER_PUMP = 8
# How often all waiting requests are looked at.
_LOOK_S = 0.1
# Flows whose least wait is remembered.
_MAX_EARLY = 1000
# While nothing comes or goes, the least wait of a flow holds for this time: a refusal costs next to nothing.
_EARLY_WAIT_S = 0.02

# Changes of the rung that are shown.
NUM_CHANGES_KEPT = 8

_log = logging.getLogger(__name__)


class _EarlyWait(NamedTuple):
    """The least wait of a flow at that time, after this number of changes of the waiting requests."""

    at: float
    num_changes: int
    wait_s: float


@dataclass(slots=True)
class AdmissionCounts:
    """Totals since the start of the gateway, and the recently served tenants."""

    # Counts by reason ("late", "unattainable", "bytes", "shed", "aged", "requests") and class.
    num_refused: Counter[tuple[str, ServiceClass]] = field(default_factory=Counter)
    num_capped: int = 0
    num_released: Counter[ServiceClass] = field(default_factory=Counter)
    served: ServedTime = field(default_factory=ServedTime)
    # Changes by the rung that was taken, and the latest changes.
    num_rung_changes: Counter[str] = field(default_factory=Counter)
    rung_changes: deque[RungChange] = field(default_factory=lambda: deque(maxlen=NUM_CHANGES_KEPT))


class RequestAdmission:
    """The requests that one gateway has taken and not yet submitted."""

    def __init__(
        self,
        config: AdmissionConfig,
        router: RouterService,
        clock: Clock,
        seeds: Callable[[], int],
        call_at: Callable[[float, Callable[[], None]], object],
        on_rung: Callable[[Rung], None] = lambda rung: None,
    ) -> None:
        """`seeds` draws integers, for jitter; `call_at` calls at a time of the clock, in a later turn of the
        event loop; `on_rung` hears of each change of the ladder's rung."""
        self._config = config
        self._router = router
        self._clock = clock
        self._seeds = seeds
        self._call_at = call_at
        self._on_rung = on_rung
        self._queues = ReplicaQueues(router)
        self._waiting: dict[str, QueuedRequest] = {}
        # Requests by the time at which they are refused, and by the time at which they are routed again.
        self._bounds: IndexedHeap[QueuedRequest] = IndexedHeap()
        self._reroutes: IndexedHeap[QueuedRequest] = IndexedHeap()
        # The times of the coming calls of `_wake`, each before those that were scheduled earlier.
        self._wakes: list[float] = []
        self._displaced = DisplacedRequests(lambda queued: self._weight(queued.flow, queued.weight))
        self.bytes = QueuedBytes(config.max_queue_mb * 1e6)
        # Puts and removals, and the predictions since the last one.
        self._num_changes = 0
        self._early: dict[Flow, _EarlyWait] = {}
        self._is_pumping = self._has_more = False
        # The number of requests that the pump may still handle.
        self._num_left = MOST_PER_PUMP
        self._pumped_at = float("-inf")
        self.retries = RetryQueue(router, self._release_retry, self._reroute_retry)
        self.ladder = Ladder(self._moved)
        self._pressure = Pressure(self.ladder)
        self.counts = AdmissionCounts()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the requests that are not submitted yet, or wait once more."""
        return self.bytes.num_bytes

    def num_waiting(self) -> dict[ServiceClass, int]:
        """Return how many requests of each class wait."""
        return self._queues.num_waiting()

    def waiting_s(self) -> float:
        """Return the predicted work of all waiting requests."""
        return self._queues.waiting_s()

    def queued_loads(self) -> dict[str, QueuedLoad]:
        """Return by replica the load that waits here until it can take that. Requests behind one that waits
        for a decode replica wait for one, too: more prefill replicas would not help them."""
        sides = self._queues.blocked_sides(self._clock.now(), self._paused)
        loads: defaultdict[str, QueuedLoad] = defaultdict(QueuedLoad)
        for queued in self._waiting.values():
            computing = queued.decision.compute_id
            if sides[computing] == "decode":
                loads[queued.decision.decode].num_sequences += queued.route_request.num_samples
            else:
                loads[computing].num_prompts += 1
                loads[computing].num_tokens += queued.num_tokens
        return dict(loads)

    @property
    def num_refused(self) -> int:
        """The number of requests that were refused since the start because of the load."""
        counts = self.counts.num_refused.items()
        return sum(count for (reason, _), count in counts if reason != "unattainable")

    def stats(self) -> AdmissionStats:
        """Return the statistics for people and metrics."""
        now, num_waiting = self._clock.now(), self.num_waiting()
        refused: dict[str, dict[str, int]] = {name: {} for name in SERVICE_CLASSES}
        for (reason, name), count in self.counts.num_refused.items():
            refused[name][reason] = count
        return AdmissionStats(
            rung=int(self.ladder.rung),
            rung_name=self.ladder.rung.name.lower(),
            pressure=self.ladder.pressure,
            num_waiting_bytes=self.num_bytes,
            waiting_s=self.waiting_s(),
            num_capped=self.counts.num_capped,
            classes={
                name: ClassStats(
                    num_waiting=num_waiting[name],
                    wait_s=self._least_wait_s(Flow("", name), 1.0, now),
                    num_released=self.counts.num_released[name],
                    num_refused=refused[name],
                )
                for name in SERVICE_CLASSES
            },
            num_rung_changes=dict(self.counts.num_rung_changes),
            changes=tuple(self.counts.rung_changes),
            flows=self.counts.served.stats(now),
        )

    # ------------------------------------------------------------------------------------- admission

    def check_early(self, queued: QueuedRequest, num_bytes: int) -> None:
        """Raise `OverloadedError` where any request of the flow is refused, or one of this size, or where the
        queues alone make any late: nothing of it has been read yet."""
        flow, weight, now = queued.flow, queued.weight, queued.arrived_at
        self._check_load(flow, weight, now, num_bytes)
        early = self._early.get(flow)
        if early is None or early.num_changes != self._num_changes or now >= early.at + _EARLY_WAIT_S:
            early = _EarlyWait(now, self._num_changes, self._least_wait_s(flow, weight, now))
            if len(self._early) >= _MAX_EARLY:
                self._early.clear()
            self._early[flow] = early
        lateness = Lateness(self._limits(queued, now), early.wait_s)
        if lateness.excess_s > 0:
            self._note(queued, early.wait_s, now)
            self._refuse_late(lateness)

    def refuse(self, reason: str, flow: Flow, because: str, drain_s: float) -> NoReturn:
        """Count a refusal, and raise its `OverloadedError`; in `drain_s` there may be capacity."""
        self.counts.num_refused[reason, flow.service_class] += 1
        raise OverloadedError(because, self.retry_after_s(drain_s))

    def place(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Let the request wait where it costs least, or least of where it is in time (`_prefers_in_time`),
        unless it waits already; its bytes are counted. Raises `OverloadedError` where it would be late, or
        too much waits here, `UnattainableError` or `DeadlineError` where its prompt alone takes too long, and
        `NoReplicaError` as the router does. One that `is_judged` is not judged again."""
        if self._waiting.get(queued.request_id) is queued:
            return
        now, flow = self._clock.now(), queued.flow
        if not queued.is_judged:
            self._check_load(flow, queued.weight, now, 0)
        limits = self._limits(queued, now)
        waits = self._waits(queued, now)
        limit = limits.time_limit if self._prefers_in_time else None
        decision = self._router.decide(request, limit=limit, **waits._asdict())
        prefill_s = decision.prediction.prefill_s
        wait_s = decision.prediction.wait_s
        self._note(queued, wait_s, now)
        if not queued.is_judged:
            alone_s = prefill_s / self._router.loads.state(decision.compute_id).rates.correction
            lateness = Lateness(limits, wait_s, prefill_s, alone_s)
            if lateness.excess_s > 0:
                self._refuse_late(lateness)
        queued.is_judged = True
        queued.route_request = request
        self._router.place(request, decision, is_queued=True)
        prediction = decision.prediction
        queued.predicted = Predicted(now - queued.arrived_at + prediction.ttft_s, prediction.step_s)
        self._set_place(queued, decision)
        queued.routed_at = now
        self._waiting[queued.request_id] = queued
        self._bounds.put(queued, queued.refused_at)
        self._reroutes.put(queued, now + REROUTE_PART * (queued.refused_at - queued.arrived_at))
        self._put(queued)

    def max_tokens(self, service_class: ServiceClass, max_tokens: int) -> int:
        """Return how many output tokens a request of the class may have on this rung."""
        cap = self._config.of(service_class).capped_tokens
        if cap is None or cap >= max_tokens or self.ladder.rung < Rung.TOKENS_CAPPED:
            return max_tokens
        return cap

    def aging_s(self, service_class: ServiceClass) -> float:
        """Return after how long a request of the class goes before those that have waited less."""
        return self._config.of(service_class).aging_s

    def retry_after_s(self, drain_s: float) -> float:
        """Return when a client may come back that is refused until something has drained."""
        return spread_s(max(_LEAST_RETRY_S, drain_s), self._seeds())

    # --------------------------------------------------------------------------------------- release

    def wait(self, queued: QueuedRequest) -> None:
        """Report one outcome of a placed request: `Released` when its replicas can take it, which may be now,
        or `Refused` when it has waited for the time that its class allows; or `Unplaced` where all of them
        go."""
        assert queued.report is not None
        self.pump(queued.decision.compute_id)
        if self._waiting.get(queued.request_id) is queued:
            queued.announce()

    def wait_for_capacity(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Place a request again that a replica has refused, and report one outcome: `Released` when the pair
        can take it, or after `CAPACITY_WAIT_S` wherever it costs least; or `Unplaced`. Raises
        `NoReplicaError` where there is no place at all."""
        queued.route_request = request
        queued.decision = self._router.route(request, is_queued=True, queued_part=0.0, prefers_capacity=True)
        queued.refused_at = until = self._clock.now() + CAPACITY_WAIT_S

        def send_anyway() -> None:
            if queued.refused_at == until and self.retries.drop(queued):
                with self._reporting_failure(queued):
                    self.send(queued, queued.route_request)

        self._call_at(until, send_anyway)
        self.retries.put(queued)

    def send(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Report `Released` now, wherever the request costs least; raise `NoReplicaError` where there is no
        place: it waits neither for its turn nor for capacity."""
        decision = self._router.route(request, queued_part=0.0)
        self._report_released(queued, decision)

    def drop(self, queued: QueuedRequest) -> None:
        """Forget a request that ended, whatever it waits for."""
        self.bytes.forget(queued)
        self.retries.drop(queued)
        if self._take_out(queued):
            self._router.on_finished(queued.request_id)
            self.pump()

    def pump(self, replica_id: str = "") -> None:
        """Refuse requests that have waited too long, and release those that the replicas can take now, in the
        fair order of each. With news of one replica alone, only the requests that wait for that are looked
        at, most of the time. Work beyond `MOST_PER_PUMP` is done in the next turns of the event loop."""
        if self._is_pumping:
            return
        self._is_pumping = True
        self._num_left = MOST_PER_PUMP
        try:
            now = self._clock.now()
            self._pressure.measure(now)
            self._refuse_overdue(now)
            moved = self._place_displaced(now)
            self.retries.pump()
            is_for_all = not replica_id or now >= self._pumped_at + _LOOK_S
            if is_for_all:
                self._pumped_at = now
            for name, queue in self._queues.busy():
                if is_for_all or not queue.waits_for or replica_id in queue.waits_for:
                    self._pump_queue(name, queue, now)
            if is_for_all:
                self._reroute(now)
            if self._waiting:
                self._move_some([replica_id] if not is_for_all else self._router.members.compute_ids(), now)
            for queued in moved:
                self._has_moved(queued)
        finally:
            self._is_pumping = False
        if (self._num_left <= 0 or self._displaced) and not self._has_more:
            self._has_more = True
            self._call_at(self._clock.now(), self._pump_again)
        self._wake_in_time()

    def leave(self, replica_id: str) -> None:
        """Let the requests that wait for a replica that is gone, or should be avoided, wait for others. A
        request stays where the others are no better; where there are none, its task looks again. Nothing goes
        to the replica before the request was looked at for another."""
        self.retries.leave(replica_id)
        displaced = [
            it for it in self._waiting.values() if replica_id in (it.decision.prefill, it.decision.decode)
        ]
        self._displaced.add(replica_id, displaced)
        self.pump()

    def check(self) -> None:
        """Assert that queues and waiting requests agree."""
        assert sum(len(queue.order) for _, queue in self._queues.busy()) == len(self._waiting)
        for heap in (self._bounds, self._reroutes):
            heap.check()
            assert len(heap) == len(self._waiting)
        assert all(self._waiting.get(it.request_id) is it for it in self._displaced)
        assert self._has_more or not self._displaced
        self._queues.check()

    # --------------------------------------------------------------------------------------- private

    def _check_load(self, flow: Flow, weight: float, now: float, num_more_bytes: int) -> None:
        """Raise `OverloadedError` where requests of the flow are not taken on this rung, or where too much
        waits with this many bytes more."""
        if self.ladder.rung >= Rung.LOW_WEIGHT_SHED and (flow.service_class == "batch" or weight < 1):
            self.refuse(
                "shed",
                flow,
                f"under this load requests of the class {flow.service_class} with a weight of {weight:g} are "
                "not taken",
                max(self._queues.drain_s(now), self.ladder.earliest_exit_s(Rung.LOW_WEIGHT_SHED, now)),
            )
        if (excess_bytes := self.bytes.excess_bytes(num_more_bytes)) > 0:
            num_others = self.num_bytes
            part = min(1.0, excess_bytes / num_others) if num_others else 1.0
            self.refuse(
                "bytes",
                flow,
                f"the requests that wait in this gateway have {num_others / 1e6:.0f} MB, "
                f"{self._config.max_queue_mb:g} MB are the most (admission.max_queue_mb)",
                part * self._queues.drain_s(now),
            )

    def _set_place(self, queued: QueuedRequest, decision: Decision) -> None:
        """Note where the request will wait, and how it counts there."""
        settings = self._config.of(queued.flow.service_class)
        queued.decision = decision
        queued.refused_at, queued.bound = wait_bound(settings, queued, decision.prediction.prefill_s)
        queued.cost_s = self._cost_s(decision)
        queued.num_tokens = max(queued.route_request.num_tokens, 1) - decision.prefill_cached_tokens
        queued.due_at = queued.arrived_at + self.aging_s(queued.flow.service_class)

    def _pump_queue(self, name: str, queue: ReplicaQueue, now: float) -> None:
        paused = self._paused
        while True:
            queued = queue.order.peek(now, without=paused)
            if queued is None and paused is not None and self._is_idle(name):
                paused = None
                queued = queue.order.peek(now)
            if queued is None:
                break
            if self._num_left <= 0:
                return
            if queued.report is None:
                return  # its task is about to begin
            if queued.request_id in self._displaced:
                if self._place_anew(queued, now):
                    self._has_moved(queued)
                continue
            if not self._router.has_capacity(queued.request_id):
                queue.blocked(now, (queued.decision.prefill, queued.decision.decode))
                return
            self._num_left -= 1
            queue.pop(now, paused)
            self._forget(queued)
            self.counts.num_released[queued.flow.service_class] += 1
            self.counts.served.add(*queued.flow, queued.cost_s, now)
            self._router.on_submitted(queued.request_id)
            self._release(queued)
        queue.blocked(now, ())

    def _release(self, queued: QueuedRequest) -> None:
        """Report a request whose turn it is. The facts about other replicas that were known when it was
        placed hold only for a request that did not wait."""
        decision = queued.decision
        if self._clock.now() > queued.routed_at + AT_ONCE_S:
            decision = replace(decision, most_backlog_tokens=None)
        self._report_released(queued, decision)

    def _release_retry(self, queued: QueuedRequest) -> None:
        self._router.on_submitted(queued.request_id)
        self._report_released(queued, queued.decision)

    def _reroute_retry(self, queued: QueuedRequest) -> None:
        """Place a retry once more, one of whose replicas is gone or avoided."""
        self._router.on_finished(queued.request_id)
        with self._reporting_failure(queued):
            self.wait_for_capacity(queued, queued.route_request)

    @contextlib.contextmanager
    def _reporting_failure(self, queued: QueuedRequest) -> Iterator[None]:
        """Report a request for which no place is found within; whatever else is raised ends it alone."""
        is_placed = False
        with failures_logged(_log, f"request {queued.request_id} could not be placed again"):
            try:
                yield
            except NoReplicaError as error:
                self._report_unplaced(queued, error)
            is_placed = True
        if not is_placed and queued.report is not None:
            queued.report(Refused(InternalError()))

    def _report_released(self, queued: QueuedRequest, decision: Decision) -> None:
        assert queued.report is not None
        self.bytes.forget(queued)
        queued.report(Released(decision))

    def _report_unplaced(self, queued: QueuedRequest, error: NoReplicaError) -> None:
        if queued.report is not None:
            queued.report(Unplaced(str(error), error.retry_after_s))

    @property
    def _paused(self) -> ServiceClass | None:
        return "batch" if self.ladder.rung >= Rung.BATCH_PAUSED else None

    @property
    def _prefers_in_time(self) -> bool:
        """Whether a request that would be late where it costs least goes where it is in time: while there is
        no pressure. Under pressure a prompt that a decode replica computes among its streams costs the others
        more than it gains, and more are refused for it later."""
        return self.ladder.rung is Rung.NORMAL

    def _is_idle(self, replica_id: str) -> bool:
        """Return whether nothing was sent to the replica that has not ended: then it may have the paused
        requests."""
        if replica_id not in self._router.members:
            return True
        state = self._router.loads.state(replica_id)
        return (
            state.num_sequences <= state.num_queued_sequences
            and state.backlog_tokens <= state.num_queued_tokens
        )

    def _refuse_overdue(self, now: float) -> None:
        while (first := self._bounds.first()) is not None and first[0] <= now + _EARLY_S:
            queued = first[1]
            if queued.report is None or self._num_left <= 0:
                return
            self._num_left -= 1
            self._take_out(queued)
            self._router.on_finished(queued.request_id)
            self.counts.num_refused["aged", queued.flow.service_class] += 1
            least_wait_s = self._least_wait_s(queued.flow, queued.weight, now)
            because = f"it has waited for {now - queued.arrived_at:.1f} s, {queued.bound}"
            queued.report(Refused(OverloadedError(because, self.retry_after_s(least_wait_s))))

    def _wake_in_time(self) -> None:
        """Schedule a wake-up for the end of the time that the next request may wait, which may be over: time
        has passed in the pump, or the request was moved to where it must go sooner."""
        first = self._bounds.first()
        if first is None or first[1].report is None:
            return  # `wait` pumps when its task begins
        if not self._wakes or first[0] < self._wakes[-1]:
            self._wakes.append(first[0])
            self._call_at(first[0], partial(self._wake, first[0]))

    def _wake(self, at: float) -> None:
        self._wakes.remove(at)
        self.pump()

    def _pump_again(self) -> None:
        self._has_more = False
        self.pump()

    def _place_displaced(self, now: float) -> list[QueuedRequest]:
        """Place again, as many as a pump may, the requests that wait for replicas that are gone or avoided.
        Return those that wait for others now."""
        moved: list[QueuedRequest] = []
        while self._num_left > 0 and (queued := self._displaced.first()) is not None:
            if self._place_anew(queued, now):
                moved.append(queued)
        for replica_id in self._displaced.take_left():
            self._queues.forget(replica_id)
        return moved

    def _place_anew(self, queued: QueuedRequest, now: float) -> bool:
        """Return whether a displaced request waits for other replicas now; where there are none, its task
        looks again."""
        self._num_left -= 1
        self._displaced.remove(queued.request_id)
        try:
            return self._move(queued, now)
        except NoReplicaError as error:
            if queued.report is not None and self._take_out(queued):
                self._router.on_finished(queued.request_id)
                self._report_unplaced(queued, error)
            return False

    def _put(self, queued: QueuedRequest) -> None:
        self._num_changes += 1
        queue = self._queues[queued.decision.compute_id]
        queue.put(queued, self._weight(queued.flow, queued.weight), queued.routed_at)

    def _waits(self, queued: QueuedRequest, now: float) -> Waits:
        """Return the wait of a request in the order of each replica."""
        weight = self._weight(queued.flow, queued.weight)
        return self._queues.waits(queued.flow, weight, now, self._paused)

    def _move_some(self, replica_ids: Iterable[str], now: float) -> None:
        """Let each of these replicas that nothing waits for, and that could take something, have the next
        request of the longest queue, if the router finds that better now: predictions err."""
        wanted = {name for _, queue in self._queues.busy() for name in queue.waits_for}
        for replica_id in replica_ids:
            if replica_id in wanted or not self._router.members.takes_more(replica_id):
                continue
            queues = (queue for _, queue in self._queues.busy())
            longest = max(queues, key=lambda queue: queue.order.cost_s, default=None)
            queued = longest.order.peek(now, without=self._paused) if longest is not None else None
            if queued is None:
                return
            if queued.routed_at + _MOVE_S <= now:
                self._try_move(queued, now)

    def _reroute(self, now: float) -> None:
        """Route again, as many as a pump may, the requests that have waited for a part of their bound."""
        for _ in range(_MOST_REROUTES):
            first = self._reroutes.first()
            if first is None or first[0] > now:
                return
            queued = first[1]
            again_s = REROUTE_PART * (queued.refused_at - queued.arrived_at)
            self._reroutes.put(queued, now + again_s)
            self._try_move(queued, now)

    def _try_move(self, queued: QueuedRequest, now: float) -> None:
        """Move a request, where that is better, and see whether it goes at once."""
        with contextlib.suppress(NoReplicaError):  # it stays
            if self._move(queued, now):
                name = queued.decision.compute_id
                self._pump_queue(name, self._queues[name], now)
                self._has_moved(queued)

    def _has_moved(self, queued: QueuedRequest) -> None:
        """Announce a request to other replicas, unless it does not wait any more."""
        if queued.report is not None and self._waiting.get(queued.request_id) is queued:
            queued.announce()

    def _move(self, queued: QueuedRequest, now: float) -> bool:
        """Whether other replicas are better now, for which the request waits from now on: it is priced as if
        it waited nowhere, so that it is not in its own way where it is. Raises `NoReplicaError` where there
        is no place at all; then it stays."""
        queued.routed_at = now
        self._queues[queued.decision.compute_id].drop(queued.request_id, now)
        try:
            better = self._better(queued, now)
            if better is not None:
                self._router.place(queued.route_request, better, is_queued=True)
                self._set_place(queued, better)
                self._bounds.put(queued, queued.refused_at)
        finally:
            self._put(queued)
        return better is not None

    def _better(self, queued: QueuedRequest, now: float) -> Decision | None:
        """Return where a request that waits nowhere now would wait better; None: where it was. It does not
        leave a place where it is in time for one where it would be late."""
        request = queued.route_request
        limit, waits = self._limits(queued, now).time_limit, self._waits(queued, now)._asdict()
        if self._prefers_in_time:
            return self._router.improve(request, queued.decision, limit=limit, **waits)
        better = self._router.improve(request, queued.decision, **waits)
        if better is None or limit.includes(better.prediction):
            return better
        in_time = self._router.decide(request, limit=limit, **waits)
        pair = queued.decision.prefill, queued.decision.decode
        stays = in_time.limit is not None and (in_time.prefill, in_time.decode) == pair
        return None if stays else better

    def _take_out(self, queued: QueuedRequest) -> bool:
        """Whether it waited."""
        if self._waiting.get(queued.request_id) is not queued:
            return False
        self._queues[queued.decision.compute_id].drop(queued.request_id, self._clock.now())
        self._forget(queued)
        return True

    def _forget(self, queued: QueuedRequest) -> None:
        self._num_changes += 1
        del self._waiting[queued.request_id]
        self._displaced.remove(queued.request_id)
        self._bounds.remove(queued)
        self._reroutes.remove(queued)

    def _cost_s(self, decision: Decision) -> float:
        """Return for how long the request occupies the replica that its queue waits for: for computing its
        prompt or, where that is longer, for the place of its sequence. The places of replicas that only
        decode are those of all queues."""
        place_s = self._router.loads.state(decision.decode).place_s
        if decision.prefill:
            num_compute, num_decode = self._router.members.num_by_side()
            place_s *= num_compute / max(1, num_decode)
        return max(decision.prediction.prefill_s, place_s, 1e-6)

    def _weight(self, flow: Flow, tenant_weight: float) -> float:
        return self._config.of(flow.service_class).weight * tenant_weight

    def _least_wait_s(self, flow: Flow, tenant_weight: float, now: float) -> float:
        """Return the least wait of a request of the flow, of all replicas that it may wait for."""
        weight, paused = self._weight(flow, tenant_weight), self._paused
        return self._queues.least_wait_s(flow, weight, now, paused, includes_all=self._prefers_in_time)

    def _limits(self, queued: QueuedRequest, now: float) -> TtftLimits:
        """Return the limits of the request's time to its first token."""
        settings = self._config.of(queued.flow.service_class)
        objective_s = settings.max_wait_s if settings.ttft_s is None else settings.ttft_s
        left_s = math.inf if queued.deadline_at is None else queued.deadline_at - now
        elapsed_s = now - queued.arrived_at
        return TtftLimits(queued.flow, objective_s, left_s, elapsed_s, settings.refuses_unattainable)

    def _refuse_late(self, lateness: Lateness) -> NoReturn:
        if (error := lateness.unattainable) is not None:
            self.counts.num_refused["unattainable", lateness.limits.flow.service_class] += 1
            raise error
        self.refuse("late", lateness.limits.flow, lateness.reason, lateness.excess_s)

    def _note(self, queued: QueuedRequest, wait_s: float, now: float) -> None:
        """Note how long the request would wait, for the pressure."""
        objective_s = self._config.of(queued.flow.service_class).ttft_s
        if objective_s is None:
            return
        part = wait_s / (WAIT_MARGIN * objective_s)
        self._pressure.note(queued.flow, self._weight(queued.flow, queued.weight), part, now)

    def _moved(self, before: Rung, rung: Rung, pressure: float) -> None:
        _log.warning(
            "admission: from rung %d (%s) to %d (%s): new requests wait for %.2f of their objective",
            before,
            before.name.lower(),
            rung,
            rung.name.lower(),
            pressure,
        )
        self.counts.num_rung_changes[rung.name.lower()] += 1
        change = RungChange(self._clock.wall(), before.name.lower(), rung.name.lower(), pressure)
        self.counts.rung_changes.append(change)
        self._on_rung(rung)
