"""The requests that wait in a gateway for their turns: by id, by replica, and by the times that matter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from cluster.admission.config import AdmissionConfig
from cluster.admission.displaced import DisplacedRequests
from cluster.admission.queued_load import QueuedLoad
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.replica_queue import ReplicaQueues
from kvtransfer.common.indexed_heap import IndexedHeap
from kvtransfer.request_facts import ServiceClass
from router.service import RouterService

# Requests are routed again after this part of the time for which they may wait.
REROUTE_PART = 0.2


class WaitingRequests:
    """The waiting requests of one gateway. Each is in the queue of the replica that will compute it, and has
    a time at which it is refused and one at which it is routed again; those that are `displaced` are to be
    placed again now."""

    def __init__(self, config: AdmissionConfig, router: RouterService) -> None:
        self._config = config
        self.queues = ReplicaQueues(router)
        self.displaced = DisplacedRequests(self._share)
        # Puts and removals.
        self.num_changes = 0
        self._requests: dict[str, QueuedRequest] = {}
        # Requests by the time at which they are refused, and by the time at which they are routed again.
        self._bounds: IndexedHeap[QueuedRequest] = IndexedHeap()
        self._reroutes: IndexedHeap[QueuedRequest] = IndexedHeap()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._requests.values())

    def __contains__(self, queued: object) -> bool:
        return isinstance(queued, QueuedRequest) and self._requests.get(queued.request_id) is queued

    def add(self, queued: QueuedRequest, now: float) -> None:
        """Let a request wait for the replicas of its decision."""
        self._requests[queued.request_id] = queued
        self._bounds.put(queued, queued.waits_until)
        self._reroutes.put(queued, now + _reroute_s(queued))
        self.enqueue(queued)

    def enqueue(self, queued: QueuedRequest) -> None:
        """Put a request into the queue of the replica that will compute it."""
        self.num_changes += 1
        self.queues[queued.decision.compute_id].put(queued, self._share(queued), queued.routed_at)

    def dequeue(self, queued: QueuedRequest, now: float) -> None:
        """Take a request out of its queue, to `enqueue` it again."""
        self.queues[queued.decision.compute_id].drop(queued.request_id, now)

    def set_bound(self, queued: QueuedRequest) -> None:
        """Note that the time at which the request is refused has changed."""
        self._bounds.put(queued, queued.waits_until)

    def take_out(self, queued: QueuedRequest, now: float) -> bool:
        """Remove a request that waits no more; return whether it waited."""
        if queued not in self:
            return False
        self.dequeue(queued, now)
        self.forget(queued)
        return True

    def forget(self, queued: QueuedRequest) -> None:
        """Remove a request that its queue has given out."""
        self.num_changes += 1
        del self._requests[queued.request_id]
        self.displaced.remove(queued.request_id)
        self._bounds.remove(queued)
        self._reroutes.remove(queued)

    def first_bound(self) -> tuple[float, QueuedRequest] | None:
        """Return the request that is refused next, with the time; None: none waits."""
        return self._bounds.first()

    def next_reroute(self, now: float) -> QueuedRequest | None:
        """Return a request that is to be routed again now, once a part of the time that it may wait."""
        first = self._reroutes.first()
        if first is None or first[0] > now:
            return None
        self._reroutes.put(first[1], now + _reroute_s(first[1]))
        return first[1]

    def displace(self, replica_id: str) -> None:
        """Note that the requests that wait for this replica are to be placed again."""
        requests = [it for it in self if replica_id in (it.decision.prefill, it.decision.decode)]
        self.displaced.add(replica_id, requests)

    def loads(self, now: float, paused: ServiceClass | None) -> dict[str, QueuedLoad]:
        """Return by replica the load that waits here until it can take that. Requests behind one that waits
        for a decode replica wait for one, too: more prefill replicas would not help them."""
        sides = self.queues.blocked_sides(now, paused)
        loads: defaultdict[str, QueuedLoad] = defaultdict(QueuedLoad)
        for queued in self:
            computing = queued.decision.compute_id
            if sides[computing] == "decode":
                loads[queued.decision.decode].num_sequences += queued.route_request.num_samples
            else:
                loads[computing].num_prompts += 1
                loads[computing].num_tokens += queued.num_tokens
        return dict(loads)

    def check(self) -> None:
        """Assert that queues and waiting requests agree."""
        assert sum(len(queue.order) for _, queue in self.queues.busy()) == len(self._requests)
        for heap in (self._bounds, self._reroutes):
            heap.check()
            assert len(heap) == len(self._requests)
        assert all(it in self for it in self.displaced)
        self.queues.check()

    def _share(self, queued: QueuedRequest) -> float:
        return self._config.share(queued.flow.service_class, queued.weight)


def _reroute_s(queued: QueuedRequest) -> float:
    return REROUTE_PART * (queued.waits_until - queued.arrived_at)
