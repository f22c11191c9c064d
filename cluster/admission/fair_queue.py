"""The order in which waiting requests go to one replica: weighted fair queueing of flows, with aging.

A flow is the requests of one tenant and class. Flows share the replica's time by their weights (start-time
fair queueing). A flow's *tag* is the virtual time at which its next request may begin, and each request that
goes moves the tag by cost / weight. The flow with the smallest tag is next. The tag of a flow that comes back
is at least the virtual time, the tag of the last request that went, so it claims no time for its absence.

Within a flow requests go in order of arrival. Each step of priority counts as an arrival
`ARRIVAL_PER_PRIORITY_S` earlier, so a high priority starves nobody.

A request that has waited for `aging_s` of its class is *due*, and goes before all that are not, the earliest
due first. Due requests get at most `AGED_PART` of the replica's time this way, which is charged to their
flows like any turn. A flow that sends more than it can be served, and whose requests are therefore all due at
some time, takes nothing from the shares of others. Time is an argument.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from kvtransfer.common.indexed_heap import IndexedHeap
from kvtransfer.common.moving_average import kept_share
from kvtransfer.request_facts import ServiceClass

# How much earlier a request counts as having arrived for each step of priority.
ARRIVAL_PER_PRIORITY_S = 1.0
# The part of the replica's time that due requests may take in addition to the turns of their flows.
AGED_PART = 0.1
# The most of that time that may be saved up.
_MOST_CREDIT_S = 1.0
# The time constant with which arrived work is forgotten.
_INFLOW_S = 5.0
# Less inflow than this, in seconds of work a second, is forgotten.
_LEAST_INFLOW = 1e-3
# Flows without work or debts that are not dropped yet.
_MOST_IDLE = 16


@dataclass(slots=True, eq=False)
class _FlowState:
    """The waiting requests of a flow, the virtual time of its next turn, and the work that has arrived
    recently (without that of requests that left before their turn)."""

    key: Flow
    weight: float
    tag: float
    # Requests by effective arrival.
    waiting: IndexedHeap[QueuedRequest] = field(default_factory=IndexedHeap)
    cost_s: float = 0.0
    came_s: float = 0.0
    counted_until: float = 0.0

    @property
    def head_s(self) -> float:
        """The work of the mean waiting request. A flow may exceed its share by this, since a request is not
        divided."""
        return self.cost_s / len(self.waiting) if self.waiting else 0.0

    def came(self, work_s: float, now: float) -> None:
        self.came_s = max(0.0, self.came_s * kept_share(now - self.counted_until, _INFLOW_S) + work_s)
        self.counted_until = now

    def inflow(self, now: float) -> float:
        """Return the seconds of work that arrive in a second."""
        return self.came_s * kept_share(now - self.counted_until, _INFLOW_S) / _INFLOW_S


def work_ahead(own_s: float, others: Iterable[tuple[float, float, float]]) -> float:
    """Return the work that goes before a request: the least x that is `own_s` + the work that other flows do
    of it, each of them min(cost_s + coming * x, share_s): the work that waits, the work that comes while a
    second of work is done, and the most that the flow's weight allows."""
    # certain_s + growth * x, until another flow comes to its share.
    certain_s, growth = own_s, 0.0
    growing: list[tuple[float, float, float]] = []
    for cost_s, coming, share_s in others:
        if share_s <= cost_s:
            certain_s += share_s
        else:
            certain_s += cost_s
            if coming > 0:
                growth += coming
                growing.append(((share_s - cost_s) / coming, coming, share_s - cost_s))
    return _least_work(certain_s, growth, growing)


def _least_work(certain_s: float, growth: float, growing: list[tuple[float, float, float]]) -> float:
    """Return the least x that is `certain_s` + `growth` * x, until flows come to their shares: the x at which
    each does, the work that comes of a flow for each x, and its sum."""
    if not certain_s:
        return 0.0  # it goes at once, whatever else arrives
    growing.sort()
    for ends_at, coming, most_s in growing:
        if growth < 1 and certain_s / (1 - growth) <= ends_at:
            return certain_s / (1 - growth)
        certain_s += most_s
        growth -= coming
        if growth < 0:
            growth = 0.0
    return certain_s


class _Snapshot(NamedTuple):
    """The flows of a queue until something changes: the state, tag, weight and waiting work of each, its mean
    request, and the work that came in a second when this was made."""

    flows: list[tuple[_FlowState, float, float, float, float, float]]
    made_at: float


class FairQueue:
    """The requests that wait for one replica. Not thread-safe."""

    def __init__(self) -> None:
        # Flows that have waiting requests, owe turns or have brought work recently, and some more.
        self._flows: dict[Flow, _FlowState] = {}
        self._most_flows = _MOST_IDLE
        # Flows with waiting requests, by tag.
        self._turns: defaultdict[ServiceClass, IndexedHeap[_FlowState]] = defaultdict(IndexedHeap)
        # No flow of the class may begin sooner, because it was paused until then.
        self._resumed_s: dict[ServiceClass, float] = {}
        self._due: IndexedHeap[QueuedRequest] = IndexedHeap()
        self._waiting: dict[str, QueuedRequest] = {}
        self._virtual_s = 0.0
        # When a request was last taken out without its turn: a request that is put back at once counts as
        # never removed.
        self._dropped_at = -math.inf
        # The greatest tag of all flows.
        self._greatest_tag = 0.0
        # Snapshots by the class that is left out, until something changes.
        self._snapshots: dict[ServiceClass | None, _Snapshot] = {}
        self._credit_s = 0.0
        self.cost_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(list(self._waiting.values()))

    @property
    def num_flows(self) -> int:
        """The number of flows that are remembered."""
        return len(self._flows)

    def put(self, queued: QueuedRequest, weight: float, now: float) -> None:
        """Add a request to its flow, whose weight is `weight` from now on."""
        assert queued.request_id not in self._waiting
        if not self._waiting and now > self._dropped_at:
            self._virtual_s = self._greatest_tag  # nobody owes anything any more
        self._forget_idle(now)
        self._snapshots.clear()
        flow = self._flows.get(queued.flow)
        if flow is None:
            flow = self._flows[queued.flow] = _FlowState(queued.flow, weight, self._virtual_s)
        flow.weight = weight
        flow.waiting.put(queued, queued.arrived_at - ARRIVAL_PER_PRIORITY_S * queued.priority)
        flow.cost_s += queued.cost_s
        flow.came(queued.cost_s, now)
        if len(flow.waiting) == 1:
            self._set_tag(flow, max(flow.tag, self._virtual_s))
        self.cost_s += queued.cost_s
        self._due.put(queued, queued.due_at)
        self._waiting[queued.request_id] = queued

    def peek(
        self, now: float, *, without: ServiceClass | None = None, passed: Collection[Flow] = ()
    ) -> QueuedRequest | None:
        """Return the next request, or None. `without` names a paused class, of which only due requests
        count; requests of the flows that are `passed` over do not."""
        due = self._due.first() if self._credit_s >= 0 else None
        if due is not None and due[0] <= now and due[1].flow not in passed:
            return due[1]
        return self._next_by_turn(without, passed)

    def pop(
        self, now: float, *, without: ServiceClass | None = None, passed: Collection[Flow] = ()
    ) -> QueuedRequest | None:
        """Remove and return the next request, which goes to the replica, and charge its flow; None: there is
        none. A flow that is `passed` over keeps its turn."""
        queued = self.peek(now, without=without, passed=passed)
        if queued is None:
            return None
        flow, has_turn = self._flows[queued.flow], self._next_by_turn(without, passed) is queued
        if without is not None:
            self._resumed_s[without] = self._virtual_s  # the class claims no time for its pause
        tag = self._tag(flow)
        if has_turn:
            self._virtual_s = max(self._virtual_s, tag)
        else:
            self._credit_s -= queued.cost_s
        self._credit_s = min(_MOST_CREDIT_S, self._credit_s + AGED_PART * queued.cost_s)
        self._set_tag(flow, tag + queued.cost_s / flow.weight)
        self._remove(flow, queued)
        return queued

    def drop(self, request_id: str, now: float) -> QueuedRequest | None:
        """Remove and return a request that does not wait any more, without charging its flow; None: it is not
        here."""
        queued = self._waiting.get(request_id)
        if queued is not None:
            flow = self._flows[queued.flow]
            flow.came(-queued.cost_s, now)
            self._remove(flow, queued)
            self._dropped_at = now
        return queued

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
        `rate` seconds of it a second: the work that waits in the flow, and the work that other flows may do
        until then by their weights, `without` left out. They do their waiting work, and the work that will
        come in that time, at their recent rates."""
        own = self._flows.get(flow)
        own_cost_s, tag = (
            (own.cost_s, max(self._virtual_s, own.tag)) if own is not None else (0.0, self._virtual_s)
        )
        tag += own_cost_s / weight
        snapshot = self._snapshots.get(without)
        if snapshot is None:
            snapshot = self._snapshots[without] = self._snapshot(now, without)
        # All arrived work fades alike.
        faded = kept_share(now - snapshot.made_at, _INFLOW_S) / rate
        # As in `work_ahead`: this runs for every queue and every new request.
        certain_s, growth = own_cost_s, 0.0
        growing: list[tuple[float, float, float]] = []
        for state, its_tag, its_weight, cost_s, share_s, inflow in snapshot.flows:
            if state is own:
                continue
            if tag > its_tag:
                share_s += (tag - its_tag) * its_weight
            if share_s <= cost_s:
                certain_s += share_s
            else:
                certain_s += cost_s
                if inflow:
                    coming = inflow * faded
                    growth += coming
                    growing.append(((share_s - cost_s) / coming, coming, share_s - cost_s))
        return _least_work(certain_s, growth, growing)

    def num_by_class(self) -> dict[ServiceClass, int]:
        """Return how many wait of each class that has any."""
        counts = {name: sum(len(it.waiting) for it in turns) for name, turns in self._turns.items()}
        return {name: count for name, count in counts.items() if count}

    def check(self) -> None:
        """Assert that sums and requests agree, and that flows without requests are few."""
        for key, flow in self._flows.items():
            mine = [it for it in self._waiting.values() if it.flow == key]
            assert len(flow.waiting) == len(mine)
            assert (flow in self._turns[key.service_class]) == bool(mine)
            assert abs(flow.cost_s - sum(it.cost_s for it in mine)) < 1e-6
            assert flow.tag <= self._greatest_tag
            flow.waiting.check()
        self._due.check()
        for turns in self._turns.values():
            turns.check()
        assert len(self._due) == len(self._waiting)
        assert abs(self.cost_s - sum(it.cost_s for it in self._waiting.values())) < 1e-6
        assert len(self._flows) <= self._most_flows + 1

    def _snapshot(self, now: float, without: ServiceClass | None) -> _Snapshot:
        virtual_s = self._virtual_s
        flows = [
            (
                it,
                self._tag(it) if it.waiting else max(virtual_s, it.tag),
                it.weight,
                it.cost_s,
                it.head_s,
                it.inflow(now),
            )
            for key, it in self._flows.items()
            if key.service_class != without
        ]
        return _Snapshot(flows, now)

    def _tag(self, flow: _FlowState) -> float:
        return max(flow.tag, self._resumed_s.get(flow.key.service_class, 0.0))

    def _set_tag(self, flow: _FlowState, tag: float) -> None:
        flow.tag = tag
        self._greatest_tag = max(self._greatest_tag, tag)
        self._turns[flow.key.service_class].put(flow, tag)

    def _next_by_turn(
        self, without: ServiceClass | None, passed: Collection[Flow] = ()
    ) -> QueuedRequest | None:
        """Return the next request of the flow whose turn it is."""
        if passed:  # rare, and so looked for among all
            waiting = (flow for key, flow in self._flows.items() if flow.waiting and key not in passed)
        else:
            firsts = [turns.first() for turns in self._turns.values()]
            waiting = (first[1] for first in firsts if first is not None)
        able = (flow for flow in waiting if flow.key.service_class != without)
        turn = min(able, key=self._tag, default=None)
        next_of_flow = turn.waiting.first() if turn is not None else None
        return next_of_flow[1] if next_of_flow is not None else None

    def _remove(self, flow: _FlowState, queued: QueuedRequest) -> None:
        self._snapshots.clear()
        del self._waiting[queued.request_id]
        self._due.remove(queued)
        flow.waiting.remove(queued)
        flow.cost_s -= queued.cost_s
        self.cost_s -= queued.cost_s
        if not flow.waiting:
            flow.cost_s = 0.0
            self._turns[flow.key.service_class].remove(flow)
        if not self._waiting:
            self.cost_s = 0.0

    def _forget_idle(self, now: float) -> None:
        """Forget flows without waiting requests that would begin at once and have brought no work recently,
        when there may be as many of them as of the others."""
        if len(self._flows) < self._most_flows:
            return
        self._flows = {
            key: flow
            for key, flow in self._flows.items()
            if flow.waiting or flow.tag > self._virtual_s or flow.inflow(now) >= _LEAST_INFLOW
        }
        self._most_flows = 2 * len(self._flows) + _MOST_IDLE
