"""The order in which what waits for one replica goes there: weighted fair queueing of flows, with aging.

A flow is a class of one tenant. Flows share the replica's time by their weights (start-time fair queueing):
a flow's *tag* is the virtual time at which its next request may begin, and each request that goes moves it by
cost / weight. The flow with the least tag is next. A flow that comes back does not claim the time in which it
was absent: its tag is at least the virtual time, the tag of what went last. Within a flow a higher priority
goes first, and counts as having arrived `PRIORITY_S` earlier a step, so that it starves nobody.

Who has waited as long as its class allows is *due*, and goes before all that are not, the earliest due first.
That is bounded to `AGED_PART` of the replica's time, and charged to the flow like any turn: a flow that is
given more than it can be served, all of which is due at some time, takes nothing from the shares of others.
Time is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.messages.link import ServiceClass

# How much earlier a request of one priority more counts as having arrived.
PRIORITY_S = 1.0
# What requests that are due may take of the replica's time beside the turns of their flows.
AGED_PART = 0.1
# So much of that time may be saved up.
_MOST_CREDIT_S = 1.0
# For about how long it is remembered what has come.
_INFLOW_S = 5.0
# Less inflow than this, in seconds of work a second, is forgotten.
_LEAST_INFLOW = 1e-3


class Flow(NamedTuple):
    """Whose requests share a place in the order."""

    tenant: str
    service_class: ServiceClass


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. `cost_s` is how long it will occupy the replica."""

    request_id: str
    flow: Flow
    cost_s: float
    arrived_at: float
    # When it may go before those that have waited less.
    due_at: float
    priority: int = 0
    num_bytes: int = 0
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class _FlowState:
    weight: float
    tag: float
    # By (effective arrival, number).
    heap: list[tuple[float, int, Waiting]] = field(default_factory=list)
    cost_s: float = 0.0
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class _Inflow:
    """The work that has come to a flow lately, less what left without its turn. What is long ago counts
    less."""

    weight: float
    work_s: float = 0.0
    counted_until: float = 0.0

    def add(self, work_s: float, now: float) -> None:
        self.work_s = max(0.0, self.work_s * math.exp((self.counted_until - now) / _INFLOW_S) + work_s)
        self.counted_until = now

    def rate(self, now: float) -> float:
        """Return the seconds of work that come in a second."""
        return self.work_s * math.exp((self.counted_until - now) / _INFLOW_S) / _INFLOW_S


class OtherFlow(NamedTuple):
    """What may go before a request of another flow: the work that waits, what comes while a second of work is
    done, and the most that its weight allows."""

    cost_s: float
    coming: float
    share_s: float


def work_ahead(own_s: float, others: Iterable[OtherFlow]) -> float:
    """Return the work that goes before a request: the least x that is `own_s` + what the others do of it,
    each of them min(cost_s + coming * x, share_s)."""
    # certain_s + growth * x, as long as no more of the others come to their share.
    certain_s, growth = own_s, 0.0
    growing: list[tuple[float, OtherFlow]] = []
    for it in others:
        certain_s += min(it.cost_s, it.share_s)
        if it.share_s > it.cost_s and it.coming > 0:
            growth += it.coming
            growing.append(((it.share_s - it.cost_s) / it.coming, it))
    for ends_at, it in sorted(growing):
        if growth < 1 and certain_s / (1 - growth) <= ends_at:
            return certain_s / (1 - growth)
        certain_s += it.share_s - it.cost_s
        growth = max(0.0, growth - it.coming)
    return certain_s


class FairQueue:
    """What waits for one replica. Not thread-safe."""

    def __init__(self) -> None:
        self._flows: dict[Flow, _FlowState] = {}
        # Also of flows of which nothing waits.
        self._inflows: dict[Flow, _Inflow] = {}
        self._due: list[tuple[float, int, Waiting]] = []
        self._waiting: dict[str, Waiting] = {}
        self._virtual_s = 0.0
        self._credit_s = 0.0
        self._num_put = 0
        self.cost_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._waiting.values()))

    @property
    def mean_cost_s(self) -> float:
        return self.cost_s / len(self._waiting) if self._waiting else 0.0

    def put(self, waiting: Waiting, weight: float, now: float) -> None:
        """Append a request to its flow, whose weight is from now on `weight`."""
        assert waiting.request_id not in self._waiting
        flow = self._flows.get(waiting.flow)
        if flow is None:
            flow = self._flows[waiting.flow] = _FlowState(weight, self._virtual_s)
        if not flow.num_waiting:
            flow.tag = max(flow.tag, self._virtual_s)
        flow.weight = weight
        flow.num_waiting += 1
        flow.cost_s += waiting.cost_s
        self.cost_s += waiting.cost_s
        self._num_put += 1
        arrival = waiting.arrived_at - PRIORITY_S * waiting.priority
        heapq.heappush(flow.heap, (arrival, self._num_put, waiting))
        heapq.heappush(self._due, (waiting.due_at, self._num_put, waiting))
        self._waiting[waiting.request_id] = waiting
        self._note_inflow(waiting.flow, weight, waiting.cost_s, now)

    def peek(self, now: float, *, without: ServiceClass | None = None) -> Waiting | None:
        """Return who is next; None: nobody. `without` leaves out a class that is paused, unless it is due."""
        self._clean(self._due)
        if self._credit_s >= 0 and self._due and self._due[0][0] <= now:
            return self._due[0][2]
        turn = self._turn(without)
        return turn.heap[0][2] if turn is not None else None

    def pop(self, now: float, *, without: ServiceClass | None = None) -> Waiting | None:
        """Take out who is next, which goes to the replica, and charge its flow; None: nobody."""
        waiting = self.peek(now, without=without)
        if waiting is None:
            return None
        flow = self._flows[waiting.flow]
        turn = self._turn(without)
        for key, other in self._flows.items():
            if key.service_class == without:
                other.tag = max(other.tag, self._virtual_s)  # it does not claim the time of its pause
        if turn is flow and turn.heap[0][2] is waiting:
            self._virtual_s = max(self._virtual_s, flow.tag)
        else:
            self._credit_s -= waiting.cost_s
        self._credit_s = min(_MOST_CREDIT_S, self._credit_s + AGED_PART * waiting.cost_s)
        flow.tag += waiting.cost_s / flow.weight
        self._remove(waiting)
        return waiting

    def drop(self, request_id: str, now: float) -> Waiting | None:
        """Take out a request that does not wait any more; its flow is not charged. None: it is not here."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            weight = self._flows[waiting.flow].weight
            self._remove(waiting)
            self._note_inflow(waiting.flow, weight, -waiting.cost_s, now)
        return waiting

    def ahead_s(
        self,
        flow: Flow,
        weight: float,
        now: float,
        *,
        rate: float = 1.0,
        without: ServiceClass | None = None,
    ) -> float:
        """Return the work that goes before a request of this flow that arrives now, where the replica takes
        `rate` seconds of it a second: what waits in the flow, and what other flows may do until then by their
        weights, `without` left out. They do what waits of them, and what will come meanwhile, as it came
        lately."""
        own = self._flows.get(flow)
        own_cost_s = own.cost_s if own is not None else 0.0
        tag = max(self._virtual_s, own.tag if own is not None else 0.0) + own_cost_s / weight
        others: list[OtherFlow] = []
        for key in {**self._flows, **self._inflows}:
            if key == flow or key.service_class == without:
                continue
            other, inflow = self._flows.get(key), self._inflows.get(key)
            coming = inflow.rate(now) / rate if inflow is not None else 0.0
            if other is not None and other.num_waiting:
                share_s = max(0.0, (tag - other.tag) * other.weight) + self._head_s(other)
                others.append(OtherFlow(other.cost_s, coming, share_s))
            elif inflow is not None:
                other_tag = self._virtual_s if other is None else max(self._virtual_s, other.tag)
                others.append(OtherFlow(0.0, coming, max(0.0, (tag - other_tag) * inflow.weight)))
        return work_ahead(own_cost_s, others)

    def num_by_class(self) -> dict[ServiceClass, int]:
        """Return how many wait of each class that has any."""
        counts: dict[ServiceClass, int] = {}
        for key, flow in self._flows.items():
            if flow.num_waiting:
                counts[key.service_class] = counts.get(key.service_class, 0) + flow.num_waiting
        return counts

    def check(self) -> None:
        """Assert that sums and requests agree, and that flows without requests are few."""
        for key, flow in self._flows.items():
            mine = [it for it in self._waiting.values() if it.flow == key]
            assert flow.num_waiting == len(mine)
            assert abs(flow.cost_s - sum(it.cost_s for it in mine)) < 1e-6
        assert abs(self.cost_s - sum(it.cost_s for it in self._waiting.values())) < 1e-6

    def _turn(self, without: ServiceClass | None) -> _FlowState | None:
        """Return the flow whose turn it is, its next request at the head of its heap."""
        best: _FlowState | None = None
        for key, flow in self._flows.items():
            if flow.num_waiting and key.service_class != without and (best is None or flow.tag < best.tag):
                best = flow
        if best is not None:
            self._clean(best.heap)
        return best

    def _head_s(self, flow: _FlowState) -> float:
        """Part of a request more than its share a flow may be ahead: requests are not divided."""
        return flow.cost_s / flow.num_waiting

    def _note_inflow(self, key: Flow, weight: float, work_s: float, now: float) -> None:
        inflow = self._inflows.setdefault(key, _Inflow(weight))
        inflow.weight = weight
        inflow.add(work_s, now)
        if len(self._inflows) > len(self._flows):
            known = self._inflows.items()
            self._inflows = {
                it: each for it, each in known if it in self._flows or each.rate(now) >= _LEAST_INFLOW
            }

    def _remove(self, waiting: Waiting) -> None:
        waiting.is_gone = True
        del self._waiting[waiting.request_id]
        flow = self._flows[waiting.flow]
        flow.num_waiting -= 1
        flow.cost_s -= waiting.cost_s
        self.cost_s -= waiting.cost_s
        if not flow.num_waiting:
            flow.cost_s = 0.0
            flow.heap.clear()
            if flow.tag <= self._virtual_s:
                del self._flows[waiting.flow]  # it would begin there again
        if not self._waiting:
            self.cost_s = 0.0
            self._due.clear()
            self._flows.clear()
            self._virtual_s = 0.0

    @staticmethod
    def _clean(heap: list[tuple[float, int, Waiting]]) -> None:
        while heap and heap[0][2].is_gone:
            heapq.heappop(heap)
