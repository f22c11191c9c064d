"""What waits in a gateway for each replica, how long requests wait there, and when that is too long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from cluster.admission.config import ClassConfig
from cluster.admission.fair_queue import FairQueue, Flow, Waiting
from cluster.admission.held import Candidacy
from cluster.errors import DeadlineError, RequestError, UnattainableError
from router.messages import TimeLimit
from router.service import RouterService
from workers.messages.link import SERVICE_CLASSES, ServiceClass

# How fast a replica takes work is remembered for about this, and before any is measured, it is assumed that
# it took as much as was predicted for so long.
_RATE_S = 10.0
_ASSUMED_S = 0.5
_LEAST_RATE = 0.01
_MOST_RATE = 4.0
# A request is refused when its wait is predicted to take more than `WAIT_MARGIN` of its objective, or of what
# is left of its deadline, or its first token more than `MARGIN`: predictions err, those of waits the most.
WAIT_MARGIN = 0.7
MARGIN = 0.85


class ReplicaLane:
    """What waits for one replica, and how fast that takes work: seconds of predicted work a second, measured
    while something waits that it cannot take."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        # To be computed, of what waits.
        self.num_tokens = 0
        # The replicas one of which cannot take the next request; (): none waits.
        self.waits_for: tuple[str, ...] = ()
        # Work taken, and time in which some waited for it; what is long ago counts less.
        self._taken_s = 0.0
        self._blocked_s = 0.0
        self._counted_until = 0.0

    def put(self, waiting: Waiting, weight: float, now: float) -> None:
        """Let a request wait here."""
        self.queue.put(waiting, weight, now)
        self.num_tokens += waiting.num_tokens

    def pop(self, now: float, without: ServiceClass | None) -> Waiting | None:
        """Take out the next request, which the replica takes; None: there is none."""
        waiting = self.queue.pop(now, without=without)
        if waiting is not None:
            self.num_tokens -= waiting.num_tokens
            self._count(now)
            if self.waits_for:
                self._taken_s += waiting.cost_s
        return waiting

    def drop(self, request_id: str, now: float) -> None:
        """Take out a request that does not wait here any more."""
        waiting = self.queue.drop(request_id, now)
        if waiting is not None:
            self.num_tokens -= waiting.num_tokens
            if not len(self.queue):
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

    def _count(self, now: float) -> None:
        """Let time pass: in which the next request waits, or in which what was measured is forgotten."""
        kept = math.exp((self._counted_until - now) / _RATE_S)
        self._taken_s *= kept
        self._blocked_s *= kept
        if self.waits_for:
            self._blocked_s += _RATE_S * (1 - kept)
        self._counted_until = now


class Waits(NamedTuple):
    """What a request would wait where others wait already: seconds by replica, and of all that waits in this
    gateway the part that goes before it."""

    waits: dict[str, float]
    held_part: float


class ReplicaLanes:
    """The lanes of all replicas for which something has waited."""

    def __init__(self, router: RouterService) -> None:
        self._router = router
        self._lanes: dict[str, ReplicaLane] = {}

    def __getitem__(self, replica_id: str) -> ReplicaLane:
        """Return the lane of a replica, which may be new."""
        lane = self._lanes.get(replica_id)
        if lane is None:
            lane = self._lanes[replica_id] = ReplicaLane()
        return lane

    def busy(self) -> list[tuple[str, ReplicaLane]]:
        """Return the lanes in which something waits."""
        return [(name, lane) for name, lane in self._lanes.items() if len(lane.queue)]

    def blocked_sides(self, now: float, paused: ServiceClass | None) -> dict[str, str]:
        """Return by replica, of the lanes in which something waits, which side cannot take the next request;
        "": both can (`RouterService.blocked_side`)."""
        sides: dict[str, str] = {}
        for name, lane in self.busy():
            waiting = lane.queue.peek(now, without=paused)
            sides[name] = self._router.blocked_side(waiting.request_id) if waiting is not None else ""
        return sides

    def forget(self, replica_id: str) -> None:
        """Forget how fast a replica took work that takes nothing more, unless something waits for it."""
        if (lane := self._lanes.get(replica_id)) is not None and not len(lane.queue):
            del self._lanes[replica_id]

    def num_waiting(self) -> dict[ServiceClass, int]:
        """Return how many requests of each class wait."""
        total: Counter[ServiceClass] = Counter()
        for lane in self._lanes.values():
            total.update(lane.queue.num_by_class())
        return {name: total[name] for name in SERVICE_CLASSES}

    def waiting_s(self) -> float:
        """Return the predicted work of all that waits."""
        return sum(lane.queue.cost_s for lane in self._lanes.values())

    def waits(self, flow: Flow, weight: float, now: float, paused: ServiceClass | None) -> Waits:
        """Return what a request of the flow would wait in the order of each replica."""
        waits: dict[str, float] = {}
        before_s = held_s = 0.0
        for name, lane in self._lanes.items():
            if len(lane.queue) and self._router.is_known(name):
                rate = lane.rate(now)
                ahead_s = lane.queue.ahead_s(flow, weight, now, rate=rate, without=paused)
                waits[name] = self._router.load(name).submitted_wait_s(lane.num_tokens) + ahead_s / rate
                before_s += min(ahead_s, lane.queue.cost_s)
                held_s += lane.queue.cost_s
        return Waits(waits, before_s / held_s if held_s else 1.0)

    def least_wait_s(
        self, flow: Flow, weight: float, now: float, paused: ServiceClass | None, *, includes_all: bool
    ) -> float:
        """Return the least wait of all replicas that compute prompts, for what is there, for what other
        gateways hold, and for what goes before it here; 0 where there is none. `includes_all`: also of those
        that decode, each of which may compute one, too."""
        waits = self.waits(flow, weight, now, paused).waits
        ids = self._router.usable_ids() if includes_all else self._compute_ids()
        return min((self._wait_s(name, waits) for name in ids), default=0.0)

    def drain_s(self, now: float) -> float:
        """Return in how many seconds all that waits will have gone, at the rates of all replicas."""
        lanes = (self._lanes.get(name) for name in self._compute_ids())
        rates = [lane.rate(now) if lane is not None else 1.0 for lane in lanes]
        return self.waiting_s() / sum(rates) if rates else 0.0

    def check(self) -> None:
        """Assert that sums and requests agree."""
        for lane in self._lanes.values():
            lane.queue.check()
            assert lane.num_tokens == sum(it.num_tokens for it in lane.queue)

    def _wait_s(self, replica_id: str, waits: dict[str, float]) -> float:
        wait_s = waits.get(replica_id)
        return self._router.load(replica_id).submitted_wait_s(0) if wait_s is None else wait_s

    def _compute_ids(self) -> Iterator[str]:
        """Return the replicas that may compute a prompt, and decode replicas at which some wait for that."""
        used = (name for name, lane in self._lanes.items() if len(lane.queue) and self._router.is_known(name))
        return iter({*self._router.compute_ids(), *used})


class TtftLimits(NamedTuple):
    """What a request that came here `elapsed_s` ago may take to its first token: the objective of its class
    from its arrival on, and what is left of its deadline."""

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
    """A request that would wait for `wait_s` until its prompt is computed, which takes `prefill_s`, beside
    its limits. On a replica that nothing slows down, its prompt would take `alone_s`."""

    limits: TtftLimits
    wait_s: float
    prefill_s: float = 0.0
    alone_s: float = 0.0

    @property
    def excess_s(self) -> float:
        """By how much it is too late; at most 0: it is not."""
        limit = self.limits.time_limit
        ttft_s = MARGIN * self.limits.left_s if self.is_excused else limit.ttft_s
        return max(self.wait_s - limit.wait_s, self.wait_s + self.prefill_s - ttft_s)

    @property
    def is_excused(self) -> bool:
        """Whether its prompt misses the objective by itself, and is not refused for that."""
        return not self.limits.is_strict and self.alone_s > MARGIN * self.limits.objective_s

    @property
    def reason(self) -> str:
        """Which limit the first token is late for."""
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


def wait_bound(settings: ClassConfig, candidacy: Candidacy, prefill_s: float) -> tuple[float, str]:
    """Return until when a request whose prompt takes `prefill_s` to compute may wait, and the reason, for
    people."""
    name, arrived_at = candidacy.flow.service_class, candidacy.arrived_at
    at = arrived_at + settings.max_wait_s
    bound = f"the most for the class (admission.{name}.max_wait_s)"
    ttft_s = math.inf if settings.ttft_s is None else settings.ttft_s
    is_excused = not settings.refuses_unattainable and prefill_s > MARGIN * ttft_s
    if not is_excused and arrived_at + ttft_s - prefill_s < at:
        at = arrived_at + ttft_s - prefill_s
        bound = f"after which it would miss its objective (admission.{name}.ttft_s)"
    if candidacy.deadline_at is not None and candidacy.deadline_at - prefill_s < at:
        at, bound = candidacy.deadline_at - prefill_s, "after which it would miss its deadline"
    return at, bound


class QueuedBytes:
    """The bytes of all requests of a gateway that are not submitted yet, or are placed anew: those that are
    prepared, and those that wait for their turn, for capacity or for any replica."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> ByteHold:
        """Count a request that has arrived."""
        return ByteHold(self, num_bytes)

    def excess_bytes(self, num_more: int) -> float:
        """Return by how much it is too much with so many more."""
        return self.num_bytes + num_more - self.max_bytes


class ByteHold:
    """The bytes of one request. They count from the beginning; leaving a `with` block releases them."""

    __slots__ = ("_is_counted", "_num_bytes", "_queued")

    def __init__(self, queued: QueuedBytes, num_bytes: int) -> None:
        self._queued = queued
        self._num_bytes = num_bytes
        self._is_counted = False
        self.renew()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the request, which waits no more; again: do nothing."""
        if self._is_counted:
            self._is_counted = False
            self._queued.num_bytes -= self._num_bytes

    def renew(self) -> None:
        """Count the request again, which waits once more."""
        if not self._is_counted:
            self._is_counted = True
            self._queued.num_bytes += self._num_bytes
