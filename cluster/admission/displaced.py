"""Requests that are to be placed again, because a replica that they wait for is gone or avoided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from cluster.admission.fair_queue import ARRIVAL_PER_PRIORITY_S
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest


class DisplacedRequests:
    """Displaced requests in the order in which their turns would come in one queue: by the work of their flow
    that goes before them, over its weight. So the first to be placed are those that could go first."""

    def __init__(self, weight: Callable[[QueuedRequest], float]) -> None:
        """`weight` is that of a request's flow."""
        self._weight = weight
        self._requests: dict[str, QueuedRequest] = {}
        self._left: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._requests.values())

    def add(self, replica_id: str, requests: Iterable[QueuedRequest]) -> None:
        """Add the requests that wait for a replica."""
        self._left.add(replica_id)
        before_s: defaultdict[Flow, float] = defaultdict(float)
        turns: list[tuple[float, QueuedRequest]] = []
        for queued in sorted(requests, key=_effective_arrival):
            flow = queued.flow
            turns.append((before_s[flow], queued))
            before_s[flow] += queued.cost_s / self._weight(queued)
        self._requests |= {queued.request_id: queued for _, queued in sorted(turns, key=itemgetter(0))}

    def first(self) -> QueuedRequest | None:
        """Return the request that is placed next; None: there is none."""
        return next(iter(self._requests.values()), None)

    def remove(self, request_id: str) -> None:
        """Forget a request that is placed, or waits no more; does nothing for others."""
        self._requests.pop(request_id, None)

    def take_left(self) -> set[str]:
        """Return, once, the replicas for which nothing is displaced any more; none while something is."""
        if self._requests:
            return set()
        left, self._left = self._left, set()
        return left


def _effective_arrival(queued: QueuedRequest) -> float:
    return queued.arrived_at - ARRIVAL_PER_PRIORITY_S * queued.priority
