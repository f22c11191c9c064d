"""The owner of a simulated node's store: the tiers and sessions that serve, without bytes, sockets or disks.

StoreConnector --SimulatedClient--> OwnerSession (SessionDecisions) --> NodeTiers
               messages take `LOCAL_S`                          catalog, log of records, write-behind, ...
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulation.simulated_exchange import OtherStores, SimulatedExchange, SimulatedIndex
from cluster.simulation.simulated_media import SimulatedArena, SimulatedLog, SimulatedSegments
from cluster.simulation.store_shape import SEGMENT_BYTES, StoreShape
from cluster.simulation.virtual_loop import LoopClock, VirtualLoop
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.dram.arena import arena_bytes
from kvtransfer.store.messages.engine_session import EngineHello, EngineRequest, StoreWelcome
from kvtransfer.store.messages.owner_codec import FromOwner
from kvtransfer.store.record import Writer, image_bytes
from kvtransfer.store.server.node_tiers import NodeTiers
from kvtransfer.store.server.session_decisions import SessionDecisions
from kvtransfer.store.store_client import StoreEvents, deliver

# What a message between processes of one node takes.
LOCAL_S = 0.0001
# The period in which owners look after their disks, as `kvtransfer.store.server.store_server`.
_TICK_S = 0.25
# A segment takes this many records at least.
_SEGMENT_RECORDS = 4
ARENA = b"simulated arena "


class SimulatedOwner:
    """The owner of one node."""

    def __init__(
        self,
        node_id: str,
        shape: StoreShape,
        block_bytes: int,
        loop: VirtualLoop,
        events: EventQueue,
        others: OtherStores | None,
    ) -> None:
        """Records of blocks have `block_bytes`. With `others`, the node takes part in the exchange of
        records."""
        self.identity = ReplicaIdentity(node_id, 1)
        self.loop = loop
        self.events = events
        clock, tasks = LoopClock(loop), SupervisedTasks(_fail)
        settings = StoreSettings(
            node_id=node_id,
            epoch=1,
            name=node_id,
            host=node_id,
            dram_bytes=shape.dram_bytes,
            nvme_bytes=shape.nvme_bytes,
            segment_bytes=max(SEGMENT_BYTES, _SEGMENT_RECORDS * image_bytes(block_bytes)),
            admission=shape.admission,
        )
        self.spawn = tasks.spawn
        with loop.entered():
            self.tiers = NodeTiers(settings, _log_of(settings, shape, loop), clock, Faults(), tasks.spawn)
            exchange: SimulatedExchange | None = None
            if others is not None:
                exchange = SimulatedExchange(node_id, self.tiers, others, clock, shape.network_bytes_s)
                self.tiers.index = SimulatedIndex(node_id, others, clock)
            arena = SimulatedArena(ARENA, arena_bytes(settings.dram_bytes), settings.granule_bytes)
            self.tiers.use(arena, exchange)
            tasks.spawn(self.tiers.run(), "store-node")
            tasks.spawn(self.tiers.open_disk(), "store-open")
        self._sessions: dict[bytes, OwnerSession] = {}
        events.after(_TICK_S, self._tick)

    @property
    def num_written_bytes(self) -> int:
        """All that went to the disk."""
        stat = self.tiers.disk.stat()
        return 0 if stat is None else stat.num_written_bytes

    def open(self, hello: EngineHello, client: SimulatedClient) -> OwnerSession:
        """Open the session of an engine core."""
        with self.loop.entered():
            session = self._sessions[hello.session] = OwnerSession(hello, self, client)
            self.tiers.catalog.session_opened(hello.session)
            session.send(StoreWelcome(self.identity, self.tiers.gb_s()))
            session.begin()
        return session

    def lose(self, session: OwnerSession) -> None:
        """End the session of an engine core that has ended, with its ranks."""
        with self.loop.entered():
            session.end()
            del self._sessions[session.id]
            self.tiers.catalog.session_lost(session.id)
            self.tiers.catalog.writers_gone(session.id)

    def _tick(self) -> None:
        with self.loop.entered():
            self.tiers.compact_if_needed()
            if (rates := self.tiers.changed_gb_s()) is not None:
                for session in self._sessions.values():
                    session.send(StoreWelcome(self.identity, rates))
        self.events.after(_TICK_S, self._tick)


class OwnerSession(SessionDecisions):
    """The session of one simulated replica."""

    def __init__(self, hello: EngineHello, owner: SimulatedOwner, client: SimulatedClient) -> None:
        def writer(rank: int) -> Writer:
            return Writer(1, 1, hello.session)

        super().__init__(hello, writer, owner.tiers, owner.spawn)
        self._client = client

    def send(self, message: FromOwner) -> None:
        self._client.receive(message)


class SimulatedClient:
    """A replica's connection to the owner of its node (`kvtransfer.store.store_client.OwnerClient`)."""

    def __init__(
        self, hello: EngineHello, events: StoreEvents, owner: SimulatedOwner, catch_up: Callable[[], None]
    ) -> None:
        """The replica is called to `catch_up` before what arrives."""
        self._hello = hello
        self._store_events = events
        self._owner = owner
        self._catch_up = catch_up
        self._session: OwnerSession | None = None
        self._is_up = self._has_ended = False
        owner.events.after(LOCAL_S, self._open)

    async def start(self) -> None:
        """The connection opens by itself."""

    async def close(self) -> None:
        self.end()

    @property
    def is_up(self) -> bool:
        return self._is_up

    def send(self, message: EngineRequest) -> bool:
        if not self._is_up:
            return False
        self._owner.events.after(LOCAL_S, lambda: self._arrive(message))
        return True

    def receive(self, message: FromOwner) -> None:
        """Take a message of the owner, when it has arrived."""
        self._owner.events.after(LOCAL_S, lambda: self._deliver(message))

    def end(self) -> None:
        """End the connection, because the replica ends."""
        self._is_up, self._has_ended = False, True
        if self._session is not None:
            self._owner.lose(self._session)
            self._session = None

    def _open(self) -> None:
        if not self._has_ended:
            self._session = self._owner.open(self._hello, self)

    def _arrive(self, message: EngineRequest) -> None:
        if self._session is not None:
            with self._owner.loop.entered():
                self._session.handle(message)

    def _deliver(self, message: FromOwner) -> None:
        if not self._has_ended:
            self._is_up = True
            self._catch_up()
            deliver(message, self._store_events)


def _log_of(settings: StoreSettings, shape: StoreShape, loop: VirtualLoop) -> SimulatedLog | None:
    if not settings.nvme_bytes:
        return None
    disk = SimulatedSegments(loop.work, shape.read_bytes_s, shape.write_bytes_s)
    return SimulatedLog(settings.nvme_bytes, settings.segment_bytes, disk, loop.work)


def _fail(error: BaseException) -> None:
    """Stop the simulation: an error here is one of the code that serves, or of the simulator."""
    raise error
