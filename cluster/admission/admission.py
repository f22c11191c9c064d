"""The requests that a gateway accepts, and the moments at which they go to the replicas.

    place: predicted to be late? --yes--> OverloadedError, with the time until enough has left the queue
                  | no
                  v
    FairQueue of the replica that will compute the prompt
                  |  next in the fair order, and the pair of replicas has capacity
    pump ---------+--> `Released`: the request's task submits it

A replica gets no more than a few steps of work (`RouterService.has_capacity`). The rest waits here, where the
order can still change: `FairQueue` has the rules. The predicted wait of a request is the work before it,
divided by the rate at which the replica has recently taken work from here. The work of a request is the time
of its prefill or, if that is longer, the time for which it occupies a place among the decoding sequences, as
measured of those that ended recently.

A prediction may turn out wrong, because a replica became slower or other requests go first. A request is
therefore placed again after each part of the time that it may wait, and when another replica has nothing to
do. It is refused when the wait would make it late or reaches the limit of its class, so no request waits
longer than that.

Retries, migrations and calls that resume broken ones are not judged, since they were accepted before. A
request that a replica has refused waits in `retries` for a replica with capacity, and goes before the rest.

Not thread-safe. Time comes from a `Clock`. The parts, each of which calls only those to its right:

    RequestAdmission --+--> AdmissionChecks --> QueuePlacement --> WaitingRequests --> ReplicaQueues
                       |      +--> OverloadRefusals  +--> Degradation --> Ladder
                       +--> Retries --> RetryQueue
                       |      +--> OutcomeReporter: to the request's task
                       +--> WakeUps: the next `pump`
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from cluster.admission.admission_checks import AdmissionChecks
from cluster.admission.config import AdmissionConfig
from cluster.admission.degradation import Degradation
from cluster.admission.flow import Flow
from cluster.admission.ladder import Rung
from cluster.admission.outcome_reporter import OutcomeReporter
from cluster.admission.overload_refusals import OverloadRefusals
from cluster.admission.queue_placement import QueuePlacement
from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_load import QueuedLoad
from cluster.admission.queued_request import QueuedRequest, Refused
from cluster.admission.replica_queue import ReplicaQueue
from cluster.admission.retries import Retries
from cluster.admission.waiting_requests import WaitingRequests
from cluster.admission.wake_ups import WakeUps
from cluster.metrics.admission_stats import AdmissionStats, ClassStats
from cluster.metrics.served_time import ServedTime
from kvtransfer.common.clock import Clock
from kvtransfer.request_facts import SERVICE_CLASSES, ServiceClass
from router.errors import NoReplicaError
from router.messages import RouteRequest
from router.service import RouterService

# When a replica has nothing else to do, a waiting request is routed again, but not more often than this.
_MOVE_S = 0.05
# The most requests that one pump routes again because a part of their time has passed.
_MOST_REROUTES = 8
# A request that is released later than this after it was placed has waited.
AT_ONCE_S = 0.005
# Timers may fire too early by this much.
_EARLY_S = 0.002
# The most requests that one pump may refuse, place again because their replica is gone, or release: some
# milliseconds of work. The rest is done in later turns of the event loop.
MOST_PER_PUMP = 8
# While anything waits, or a rung of the ladder is taken, the pump looks at all of it at least this often: the
# pressure, and where requests would wait best, change with time too.
_LOOK_S = 0.1


class RequestAdmission:
    """The requests that one gateway has accepted and not yet submitted.

    The parts are public, for reading and for calls that concern one part alone: the checks of new requests
    (`checks`), the requests that a replica has refused (`retries`), the bytes of all (`bytes`), and the
    ladder with its effects (`degradation`).
    """

    def __init__(
        self,
        config: AdmissionConfig,
        router: RouterService,
        clock: Clock,
        seeds: Callable[[], int],
        call_at: Callable[[float, Callable[[], None]], object],
        on_rung: Callable[[Rung], None] = lambda rung: None,
    ) -> None:
        """`seeds` draws integers for jitter. `call_at` calls a function at a time of the clock, in a later
        turn of the event loop. `on_rung` is called with each new rung of the ladder."""
        self.config = config
        self._router = router
        self._clock = clock
        self.bytes = QueuedBytes(config.max_queue_mb * 1e6)
        self.refusals = OverloadRefusals(seeds)
        self.degradation = Degradation(config, clock, on_rung)
        self.waiting = WaitingRequests(config, router)
        self._placement = QueuePlacement(config, router, self.waiting, self.degradation)
        self.checks = AdmissionChecks(
            config,
            router,
            self.waiting,
            self._placement,
            queued_bytes=self.bytes,
            degradation=self.degradation,
            refusals=self.refusals,
        )
        self._reporter = OutcomeReporter(self.bytes)
        self.retries = Retries(router, clock, call_at, self._reporter)
        self._wake_ups = WakeUps(call_at, clock, self.pump)
        # The totals since the start, and the time that each flow was given recently.
        self.num_released: Counter[ServiceClass] = Counter()
        self._served = ServedTime()
        self._is_pumping = False
        # The number of requests that the pump may still handle.
        self._num_left = MOST_PER_PUMP
        self._pumped_at = float("-inf")

    def queued_loads(self) -> dict[str, QueuedLoad]:
        """Return the load that waits here for each replica (`WaitingRequests.loads`)."""
        return self.waiting.loads(self._clock.now(), self.degradation.paused)

    def stats(self) -> AdmissionStats:
        """Return the statistics that operators and metrics show."""
        now, num_waiting = self._clock.now(), self.waiting.queues.num_waiting()
        degradation, rung = self.degradation, self.degradation.ladder.rung
        return AdmissionStats(
            rung=int(rung),
            rung_name=rung.name.lower(),
            pressure=degradation.ladder.pressure,
            num_waiting_bytes=self.bytes.num_bytes,
            waiting_s=self.waiting.queues.waiting_s(),
            num_capped=degradation.num_capped,
            classes={
                name: ClassStats(
                    num_waiting=num_waiting[name],
                    wait_s=self._placement.least_wait_s(Flow("", name), 1.0, now),
                    num_released=self.num_released[name],
                    num_refused=self.refusals.by_reason(name),
                )
                for name in SERVICE_CLASSES
            },
            num_rung_changes=dict(degradation.num_rung_changes),
            changes=tuple(degradation.rung_changes),
            flows=self._served.stats(now),
        )

    def place(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Queue the request for the pair of replicas on which it costs least, or least of those on which it
        is in time. Does nothing if it waits already. The caller has counted its bytes.

        Raises `OverloadedError` if it would be late or too much waits here, `UnattainableError` or
        `DeadlineError` if its prompt alone takes too long, and `NoReplicaError` as the router does. A request
        that `is_judged` is not judged again."""
        if queued in self.waiting:
            return
        now = self._clock.now()
        if not queued.is_judged:
            self.checks.check_load(queued, now)
        decision = self._placement.decide(queued, request, now)
        self.degradation.note(queued, decision.prediction.wait_s, now)
        if not queued.is_judged:
            self.checks.check_lateness(queued, decision, now)
        queued.is_judged = True
        queued.route_request = request
        self._placement.place(queued, decision, now)

    def wait(self, queued: QueuedRequest) -> None:
        """Report one outcome of a queued request, now or later: `Released` when its replicas can take it,
        `Refused` when it has waited for the time that its class allows, or `Unplaced` when no replica is
        left."""
        assert queued.report is not None
        self.pump(queued.decision.compute_id)
        if queued in self.waiting:
            queued.announce()

    def drop(self, queued: QueuedRequest) -> None:
        """Forget a request that has ended, whatever it waits for."""
        self.bytes.forget(queued)
        self.retries.queue.drop(queued)
        if self.waiting.take_out(queued, self._clock.now()):
            self._router.on_finished(queued.request_id)
            self.pump()

    def pump(self, replica_id: str = "") -> None:
        """Refuse requests that have waited too long, and release those that the replicas can take now, in the
        fair order of each replica. Call this whenever a replica may have capacity; the looks that time asks
        for come by themselves. With a `replica_id`, most calls look only at the requests that wait for that
        replica. Work beyond `MOST_PER_PUMP` is done in the next turns of the event loop."""
        if self._is_pumping:
            return
        self._is_pumping = True
        self._num_left = MOST_PER_PUMP
        try:
            now = self._clock.now()
            self.degradation.measure(now)
            self._refuse_overdue(now)
            moved = self._place_displaced(now)
            self.retries.queue.pump()
            is_for_all = not replica_id or now >= self._pumped_at + _LOOK_S
            if is_for_all:
                self._pumped_at = now
            for name, queue in self.waiting.queues.busy() if self.waiting else ():
                if is_for_all or not queue.waits_for or replica_id in queue.waits_for:
                    self._pump_queue(name, queue, now)
            if is_for_all:
                self._reroute(now)
            if self.waiting:
                self._move_some([replica_id] if not is_for_all else self._router.members.compute_ids(), now)
            for queued in moved:
                self._has_moved(queued)
        finally:
            self._is_pumping = False
        if self._num_left <= 0 or self.waiting.displaced:
            self._wake_ups.continue_soon()
        self._wake_in_time()

    def leave(self, replica_id: str) -> None:
        """Let the requests that wait for a replica which is gone, or should be avoided, wait for others. A
        request stays if the others are no better, and its task tries again if there are no others. No request
        is released to the replica before that was decided."""
        self.retries.queue.leave(replica_id)
        self.waiting.displace(replica_id)
        self.pump()

    def check(self) -> None:
        """Assert that queues and waiting requests agree."""
        self.waiting.check()
        assert self._wake_ups.is_continuing or not self.waiting.displaced

    def _pump_queue(self, name: str, queue: ReplicaQueue, now: float) -> None:
        paused = self.degradation.paused
        # Flows that wait for their own share of the KV, and the replicas that the first of them waits for.
        passed: set[Flow] = set()
        waits_for: tuple[str, ...] = ()
        while True:
            queued = queue.order.peek(now, without=paused, passed=passed)
            if queued is None and paused is not None and self._is_idle(name):
                paused = None
                queued = queue.order.peek(now, passed=passed)
            if queued is None:
                break
            if self._num_left <= 0:
                return
            if queued.report is None:
                return  # its task has not begun yet
            if queued.request_id in self.waiting.displaced:
                if self._place_anew(queued, now):
                    self._has_moved(queued)
                continue
            if not self._router.has_capacity(queued.request_id):
                waits_for = waits_for or (queued.decision.prefill, queued.decision.decode)
                if self._router.waits_for_share(queued.request_id):
                    passed.add(queued.flow)
                    continue
                queue.blocked(now, waits_for)
                return
            self._num_left -= 1
            queue.pop(now, paused, passed)
            self.waiting.forget(queued)
            self.num_released[queued.flow.service_class] += 1
            self._served.add(*queued.flow, queued.cost_s, now)
            self._router.on_submitted(queued.request_id)
            self._release(queued)
        queue.blocked(now, waits_for)

    def _release(self, queued: QueuedRequest) -> None:
        """Report a request whose turn it is. If it has waited, the bound of the backlog is dropped: it was
        computed from the state of the other replicas when the request was placed."""
        decision = queued.decision
        if self._clock.now() > queued.routed_at + AT_ONCE_S:
            decision = replace(decision, most_backlog_tokens=None)
        self._reporter.released(queued, decision)

    def _is_idle(self, replica_id: str) -> bool:
        """Return whether the replica has finished all that was sent to it. Then it may take paused
        requests."""
        if replica_id not in self._router.members:
            return True
        state = self._router.loads.state(replica_id)
        return (
            state.num_sequences <= state.num_queued_sequences
            and state.backlog_tokens <= state.num_queued_tokens
        )

    def _refuse_overdue(self, now: float) -> None:
        while (first := self.waiting.first_bound()) is not None and first[0] <= now + _EARLY_S:
            queued = first[1]
            if queued.report is None or self._num_left <= 0:
                return
            self._num_left -= 1
            self.waiting.take_out(queued, self._clock.now())
            self._router.on_finished(queued.request_id)
            because = f"it has waited for {now - queued.arrived_at:.1f} s, {queued.bound}"
            least_wait_s = self._placement.least_wait_s(queued.flow, queued.weight, now)
            queued.report(Refused(self.refusals.overloaded("aged", queued.flow, because, least_wait_s)))

    def _wake_in_time(self) -> None:
        """Schedule the next look at everything, and a wake-up for the end of the next request's longest wait.
        That end may have passed: the pump took time, or the request was moved to a queue with an earlier
        end."""
        is_normal = self.degradation.ladder.rung is Rung.NORMAL
        if self.waiting or len(self.retries.queue) or not is_normal:
            self._wake_ups.wake_by(self._pumped_at + _LOOK_S)
        first = self.waiting.first_bound()
        if first is not None and first[1].report is not None:  # otherwise `wait` pumps when its task begins
            self._wake_ups.wake_by(first[0])

    def _place_displaced(self, now: float) -> list[QueuedRequest]:
        """Place requests again that wait for replicas which are gone or avoided, as many as a pump may.
        Return those that wait for others now."""
        moved: list[QueuedRequest] = []
        displaced = self.waiting.displaced
        while self._num_left > 0 and (queued := displaced.first()) is not None:
            if self._place_anew(queued, now):
                moved.append(queued)
        for replica_id in displaced.take_left():
            self.waiting.queues.forget(replica_id)
        return moved

    def _place_anew(self, queued: QueuedRequest, now: float) -> bool:
        """Place a displaced request again, and return whether it waits for other replicas now. If there are
        no others, its task tries again."""
        self._num_left -= 1
        self.waiting.displaced.remove(queued.request_id)
        try:
            return self._placement.move(queued, now)
        except NoReplicaError as error:
            if queued.report is not None and self.waiting.take_out(queued, self._clock.now()):
                self._router.on_finished(queued.request_id)
                self._reporter.unplaced(queued, error)
            return False

    def _move_some(self, replica_ids: Iterable[str], now: float) -> None:
        """For each of these replicas that has capacity and an empty queue, route the next request of the
        longest queue again, since predictions err. The request moves if the router finds another pair better
        now."""
        queues = self.waiting.queues
        wanted = {name for _, queue in queues.busy() for name in queue.waits_for}
        for replica_id in replica_ids:
            if replica_id in wanted or not self._router.members.takes_more(replica_id):
                continue
            busy = (queue for _, queue in queues.busy())
            longest = max(busy, key=lambda queue: queue.order.cost_s, default=None)
            paused = self.degradation.paused
            queued = longest.order.peek(now, without=paused) if longest is not None else None
            if queued is None:
                return
            if queued.routed_at + _MOVE_S <= now:
                self._try_move(queued, now)

    def _reroute(self, now: float) -> None:
        """Route requests again that have waited for another part of their longest wait, as many as a pump
        may."""
        for _ in range(_MOST_REROUTES):
            queued = self.waiting.next_reroute(now)
            if queued is None:
                return
            self._try_move(queued, now)

    def _try_move(self, queued: QueuedRequest, now: float) -> None:
        """Move a request if that is better, and release it at once if its new replicas have capacity."""
        with contextlib.suppress(NoReplicaError):  # it stays
            if self._placement.move(queued, now):
                name = queued.decision.compute_id
                self._pump_queue(name, self.waiting.queues[name], now)
                self._has_moved(queued)

    def _has_moved(self, queued: QueuedRequest) -> None:
        """Announce a request that has moved to its new replica, if it still waits."""
        if queued.report is not None and queued in self.waiting:
            queued.announce()
