"""Queue the requests of a gateway for each replica, and measure how fast each replica takes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from cluster.admission.fair_queue import FairQueue
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from kvtransfer.common.moving_average import kept_share
from kvtransfer.request_facts import SERVICE_CLASSES, ServiceClass
from router.service import RouterService

# The time for which the rate at which a replica takes work is remembered, roughly; before any rate is
# measured, the replica is assumed to have taken as much as was predicted for `_ASSUMED_S`.
_RATE_S = 10.0
_ASSUMED_S = 0.5
_LEAST_RATE = 0.01
_MOST_RATE = 4.0


class ReplicaQueue:
    """The requests that wait for one replica, and the rate at which the replica takes work: seconds of
    predicted work a second, measured while some work waits that the replica cannot take."""

    def __init__(self, replica_id: str, busy: dict[str, ReplicaQueue]) -> None:
        """`busy` gets this queue while something waits in it."""
        self._replica_id = replica_id
        self._busy = busy
        self.order = FairQueue()
        # Tokens to be computed of the waiting requests.
        self.num_tokens = 0
        # The replicas that cannot take the next request; (): none waits.
        self.waits_for: tuple[str, ...] = ()
        # Work taken, and time in which some work waited to be taken; older values count less.
        self._taken_s = 0.0
        self._blocked_s = 0.0
        self._counted_until = 0.0

    def put(self, queued: QueuedRequest, weight: float, now: float) -> None:
        """Let a request wait here."""
        self.order.put(queued, weight, now)
        self.num_tokens += queued.num_tokens
        self._busy[self._replica_id] = self

    def pop(
        self, now: float, without: ServiceClass | None, passed: Collection[Flow] = ()
    ) -> QueuedRequest | None:
        """Take out the next request, which the replica takes, flows that are `passed` over left out; None:
        there is none."""
        queued = self.order.pop(now, without=without, passed=passed)
        if queued is not None:
            self._took_out(queued)
            self._count(now)
            if self.waits_for:
                self._taken_s += queued.cost_s
        return queued

    def drop(self, request_id: str, now: float) -> None:
        """Take out a request that does not wait here any more."""
        queued = self.order.drop(request_id, now)
        if queued is not None:
            self._took_out(queued)
            if not len(self.order):
                self.blocked(now, ())

    def rate(self, now: float) -> float:
        """Return how fast the replica takes work."""
        self._count(now)
        rate = (self._taken_s + _ASSUMED_S) / (self._blocked_s + _ASSUMED_S)
        return min(max(rate, _LEAST_RATE), _MOST_RATE)

    def blocked(self, now: float, waits_for: tuple[str, ...]) -> None:
        """Note which replicas the next request waits for, from now on; (): none."""
        self._count(now)
        self.waits_for = waits_for

    def _took_out(self, queued: QueuedRequest) -> None:
        self.num_tokens -= queued.num_tokens
        if not len(self.order):
            del self._busy[self._replica_id]

    def _count(self, now: float) -> None:
        """Let time pass: in which the next request waits, or in which what was measured is forgotten."""
        kept = kept_share(now - self._counted_until, _RATE_S)
        self._taken_s *= kept
        self._blocked_s *= kept
        if self.waits_for:
            self._blocked_s += _RATE_S * (1 - kept)
        self._counted_until = now


class Waits(NamedTuple):
    """The wait of a request where others wait already: seconds by replica, and the part of all waiting work
    in this gateway that goes before the request."""

    waits: dict[str, float]
    queued_part: float


class ReplicaQueues:
    """The queues of all replicas for which something has waited."""

    def __init__(self, router: RouterService) -> None:
        self._router = router
        self._queues: dict[str, ReplicaQueue] = {}
        # Those in which something waits: few, as a rule.
        self._busy: dict[str, ReplicaQueue] = {}

    def __getitem__(self, replica_id: str) -> ReplicaQueue:
        """Return the queue of a replica, which may be new."""
        queue = self._queues.get(replica_id)
        if queue is None:
            queue = self._queues[replica_id] = ReplicaQueue(replica_id, self._busy)
        return queue

    def busy(self) -> list[tuple[str, ReplicaQueue]]:
        """Return the queues in which something waits."""
        return list(self._busy.items())

    def blocked_sides(self, now: float, paused: ServiceClass | None) -> dict[str, str]:
        """Return by replica, of the queues in which something waits, which side cannot take the next request;
        "": both can (`RouterService.blocked_side`)."""
        sides: dict[str, str] = {}
        for name, queue in self._busy.items():
            queued = queue.order.peek(now, without=paused)
            sides[name] = self._router.blocked_side(queued.request_id) if queued is not None else ""
        return sides

    def forget(self, replica_id: str) -> None:
        """Forget how fast a replica took work that takes nothing more, unless something waits for it."""
        if replica_id not in self._busy:
            self._queues.pop(replica_id, None)

    def num_waiting(self) -> dict[ServiceClass, int]:
        """Return how many requests of each class wait."""
        total: Counter[ServiceClass] = Counter()
        for queue in self._busy.values():
            total.update(queue.order.num_by_class())
        return {name: total[name] for name in SERVICE_CLASSES}

    def waiting_s(self) -> float:
        """Return the predicted work of all waiting requests."""
        return sum(queue.order.cost_s for queue in self._busy.values())

    def waits(self, flow: Flow, weight: float, now: float, paused: ServiceClass | None) -> Waits:
        """Return the wait of a request of the flow in the order of each replica."""
        waits: dict[str, float] = {}
        before_s = total_s = 0.0
        for name, queue in self._busy.items():
            if name in self._router.members:
                rate = queue.rate(now)
                ahead_s = queue.order.ahead_s(flow, weight, now, rate=rate, without=paused)
                waits[name] = (
                    self._router.loads.state(name).submitted_wait_s(queue.num_tokens) + ahead_s / rate
                )
                before_s += min(ahead_s, queue.order.cost_s)
                total_s += queue.order.cost_s
        return Waits(waits, before_s / total_s if total_s else 1.0)

    def least_wait_s(
        self, flow: Flow, weight: float, now: float, paused: ServiceClass | None, *, includes_all: bool
    ) -> float:
        """Return the least wait of all replicas that compute prompts, for what is there, for what other
        gateways have queued, and for what goes before it here; 0 where there is none. `includes_all`: also
        of those that decode, each of which may compute one, too."""
        waits = self.waits(flow, weight, now, paused).waits
        ids = self._router.members.usable_ids() if includes_all else self._compute_ids()
        least_s = math.inf
        for name in ids:
            wait_s = self._wait_s(name, waits)
            if wait_s <= 0.0:
                return 0.0
            least_s = min(least_s, wait_s)
        return 0.0 if least_s == math.inf else least_s

    def drain_s(self, now: float) -> float:
        """Return in how many seconds all waiting requests will have gone, at the rates of all replicas."""
        queues = (self._queues.get(name) for name in self._compute_ids())
        rates = [queue.rate(now) if queue is not None else 1.0 for queue in queues]
        return self.waiting_s() / sum(rates) if rates else 0.0

    def check(self) -> None:
        """Assert that sums and requests agree."""
        assert self._busy == {name: queue for name, queue in self._queues.items() if len(queue.order)}
        for queue in self._queues.values():
            queue.order.check()
            assert queue.num_tokens == sum(it.num_tokens for it in queue.order)

    def _wait_s(self, replica_id: str, waits: dict[str, float]) -> float:
        wait_s = waits.get(replica_id)
        return self._router.loads.state(replica_id).submitted_wait_s(0) if wait_s is None else wait_s

    def _compute_ids(self) -> Iterator[str]:
        """Return the replicas that may compute a prompt, and decode replicas at which some wait for that."""
        used = (name for name in self._busy if name in self._router.members)
        return iter({*self._router.members.compute_ids(), *used})
