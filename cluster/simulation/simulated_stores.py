"""The stores of a simulated cluster, one for each node, and which replica is on which node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.simulation.simulated_exchange import OtherStores
from cluster.simulation.simulated_owner import SimulatedClient, SimulatedOwner
from cluster.simulation.store_shape import StoreShape
from cluster.simulation.virtual_loop import VirtualLoop
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.store.messages.engine_session import EngineHello
from kvtransfer.store.store_client import StoreEvents


class SimulatedStores:
    """All owners. A replica id stays on its node, whatever lives it has."""

    def __init__(self, shape: StoreShape, events: EventQueue) -> None:
        self.shape = shape
        self.owners: list[SimulatedOwner] = []
        self._events = events
        self._loop = VirtualLoop(events)
        self._others = OtherStores() if shape.shares else None
        self._replica_to_owner: dict[str, SimulatedOwner] = {}

    def of(self, replica_id: str, block_bytes: int) -> NodeStore:
        """Return the store of the replica's node: of the first with a place, when the replica is new."""
        owner = self._replica_to_owner.get(replica_id)
        if owner is None:
            num_places = Counter(id(it) for it in self._replica_to_owner.values())
            most = self.shape.replicas_per_node
            owner = next((it for it in self.owners if num_places[id(it)] < most), None)
            if owner is None:
                owner = SimulatedOwner(
                    f"n{len(self.owners):03}",
                    self.shape,
                    block_bytes,
                    self._loop,
                    self._events,
                    self._others,
                )
                self.owners.append(owner)
            self._replica_to_owner[replica_id] = owner
        return NodeStore(owner, self.shape)

    @property
    def num_written_bytes(self) -> int:
        """What all nodes have written to NVMe."""
        return sum(owner.num_written_bytes for owner in self.owners)

    def check(self) -> None:
        """Assert the invariants of all catalogs."""
        for owner in self.owners:
            owner.tiers.catalog.check()


class NodeStore:
    """The store of a node, as one of its replicas connects to it."""

    def __init__(self, owner: SimulatedOwner, shape: StoreShape) -> None:
        self.name = owner.identity.replica_id
        self.link_bytes_s = shape.link_bytes_s
        self._owner = owner
        self._client: SimulatedClient | None = None

    def connect(
        self, hello: EngineHello, events: StoreEvents, catch_up: Callable[[], None]
    ) -> SimulatedClient:
        """Connect to the owner. The replica is called to `catch_up` before what arrives."""
        self._client = SimulatedClient(hello, events, self._owner, catch_up)
        return self._client

    def end(self) -> None:
        """End the connection, because the replica ends."""
        if self._client is not None:
            self._client.end()
