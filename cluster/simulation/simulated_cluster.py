"""A cluster in virtual time.

    arrivals --> SimulatedGateway (RequestAdmission, RouterService, RequestTask)
                       |  ^                      one or several, which exchange placements
             Submission|  |StepFrame, KvEvents
                       v  |
                 SimulatedReplica (EngineDecisions: Scheduler, BlockPool, KvSender, KvReceiver, ...)
                       |  ^
               StepPlan|  |StepReport
                       v  |
                 SimulatedRanks (StepModel): the only part that is modelled

Everything that crosses the network takes `NETWORK_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cluster.admission.config import AdmissionConfig
from cluster.simulation.placement_links import PlacementLinks
from cluster.simulation.simulated_call import CallRecord, SimulatedRequest
from cluster.simulation.simulated_gateway import SimulatedGateway
from cluster.simulation.simulated_peers import NETWORK_S, SimulatedPeers
from cluster.simulation.simulated_replica import SimulatedEngine, SimulatedReplica
from cluster.simulation.simulated_stores import SimulatedStores
from cluster.simulation.store_shape import StoreShape
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.messages import ReplicaIdentity
from router.config import RouterConfig

_TICK_S = 0.25


class ClusterShape(NamedTuple):
    """The replicas of a cluster, by role with their engines, and its gateways. Without `holds_back`, gateways
    route and submit requests as they arrive, whatever the load."""

    replicas: Sequence[tuple[str, SimulatedEngine]]
    num_gateways: int = 1
    admission: AdmissionConfig = AdmissionConfig()
    router: RouterConfig = RouterConfig()
    holds_back: bool = True
    # Do steps that only decode in runs, where that changes nothing.
    skips: bool = True
    # The store of every node; None: there is none.
    store: StoreShape | None = None
    # What a request takes beside steps and the network: in its client, its gateway and the engine cores.
    request_s: float = 0.0


class ReplicaLife(NamedTuple):
    """A replica that has ended: when it was ordered, and when it ended."""

    replica: SimulatedReplica
    began_at: float
    ended_at: float


class SimulatedCluster:
    """Gateways, replicas, and the requests that have arrived."""

    def __init__(self, shape: ClusterShape, seed: int) -> None:
        self.shape = shape
        self._random = np.random.default_rng(seed)
        self.events = EventQueue()
        self.clock = self.events.clock
        self.records: list[CallRecord] = []
        # Requests that have not come to their gateways.
        self._num_coming = 0
        self._replicas: dict[str, SimulatedReplica] = {}
        self._links: dict[ReplicaIdentity, SimulatedPeers] = {}
        self._epochs: dict[str, int] = {}
        self._began_at: dict[ReplicaIdentity, float] = {}
        self.past: list[ReplicaLife] = []
        self.stores = None if shape.store is None else SimulatedStores(shape.store, self.events)
        (block_tokens,) = {engine.block_tokens for _, engine in shape.replicas}
        self.placements = PlacementLinks(self.events, shape.num_gateways)
        self.gateways = [
            SimulatedGateway(
                f"g{index}",
                self.events,
                self,
                admission=shape.admission,
                router=shape.router,
                block_tokens=block_tokens,
                seed=seed + index,
                holds_back=shape.holds_back,
                observer=self.placements.senders[index],
            )
            for index in range(shape.num_gateways)
        ]
        self.placements.join([gateway.router for gateway in self.gateways])
        for index, (role, engine) in enumerate(shape.replicas):
            self.add_replica(f"r{index:04}", role, engine)

    @property
    def replicas(self) -> list[SimulatedReplica]:
        """The replicas that live."""
        return list(self._replicas.values())

    @property
    def num_running(self) -> int:
        """The requests that have arrived and not ended."""
        return self._num_coming + sum(gateway.num_running for gateway in self.gateways)

    def find(self, replica_id: str) -> SimulatedReplica | None:
        """Return the replica of this id that lives."""
        return self._replicas.get(replica_id)

    def add_replica(
        self, replica_id: str, role: str, engine: SimulatedEngine, ordered_at: float | None = None
    ) -> SimulatedReplica:
        """Add a replica that is ready now, in a new life where there was one of this id. It was `ordered_at`
        (None: now)."""
        epoch = self._epochs[replica_id] = self._epochs.get(replica_id, 0) + 1
        identity = ReplicaIdentity(replica_id, epoch)
        phase_s = _TICK_S * float(self._random.random())
        store = None if self.stores is None else self.stores.of(replica_id, engine.block_bytes)
        replica = SimulatedReplica(
            identity, role, engine, self.events, self.find, self._links, self.shape.skips, phase_s, store
        )
        self._replicas[replica_id] = replica
        self._began_at[identity] = self.clock.now() if ordered_at is None else ordered_at
        for gateway in self.gateways:
            gateway.join(replica)
        return replica

    def end_replica(self, replica_id: str, reason: str) -> None:
        """Let a replica die, as soon as what it has sent so far has arrived: gateways and peers see its links
        end."""
        replica = self._replicas[replica_id]
        replica.stop_runs()
        self.events.after(2 * NETWORK_S, lambda: self._end(replica, reason))

    def remove_replica(self, replica_id: str) -> None:
        """Let a replica that is drained go, as soon as what it has sent so far has arrived."""
        replica = self._replicas[replica_id]
        replica.stop_runs()
        self.events.after(2 * NETWORK_S, lambda: self._end(replica, "it has left", replica.stop))

    def replica_s(self, since_s: float, until_s: float) -> float:
        """Return the seconds of all replicas together between two times, each from its order to its end."""
        lives = [(life.began_at, life.ended_at) for life in self.past]
        lives += [(self._began_at[replica.identity], until_s) for replica in self.replicas]
        return sum(max(0.0, min(ended, until_s) - max(began, since_s)) for began, ended in lives)

    def _end(self, replica: SimulatedReplica, reason: str, stop: Callable[[], None] | None = None) -> None:
        if self._replicas.pop(replica.identity.replica_id, None) is not replica:
            return
        del self._links[replica.identity]
        began_at = self._began_at.pop(replica.identity)
        self.past.append(ReplicaLife(replica, began_at, self.clock.now()))
        if stop is None:
            replica.end(reason)
        else:
            stop()
        for links in list(self._links.values()):
            links.lost(replica.identity)
        for other in self._replicas.values():
            other.catch_up()
            other.kv_receiver.writer_lost(replica.identity)
            other.wake()
        for gateway in self.gateways:
            gateway.lost(replica.identity, reason)

    def arrive(
        self,
        request: SimulatedRequest,
        on_end: Callable[[CallRecord], None] = lambda record: None,
        gateway: int | None = None,
    ) -> CallRecord:
        """Let a request arrive now, at this gateway (None: at one that is drawn)."""
        record = CallRecord(
            len(self.records),
            request.tenant,
            request.service_class,
            request.num_prompt,
            request.num_output,
            self.clock.now(),
        )
        self.records.append(record)
        if gateway is None:
            gateway = int(self._random.integers(len(self.gateways))) if len(self.gateways) > 1 else 0
        begin = partial(self.gateways[gateway].arrive, request, record, on_end)
        if self.shape.request_s:
            self._num_coming += 1
            self.events.after(self.shape.request_s, lambda: self._came(begin))
        else:
            begin()
        return record

    def _came(self, begin: Callable[[], None]) -> None:
        self._num_coming -= 1
        begin()

    def finish(self, limit_s: float) -> None:
        """Let time pass until no request is left, or for so long."""
        until_s = self.clock.now() + limit_s
        while self.num_running and self.events.next_at <= until_s:
            self.events.step()

    def check(self) -> None:
        """Assert that every request has ended, and that no block is held."""
        assert not self.num_running
        for gateway in self.gateways:
            gateway.router.check()
            gateway.admission.check()
        for replica in self._replicas.values():
            replica.reports.check_when_idle()
            assert not replica.has_work
            assert replica.pool.num_references == 0
        if self.stores is not None:
            self.stores.check()
