"""The store server of a node, its *owner*: it alone decides what is kept where in DRAM and on NVMe; ranks
copy.

    engine cores, ranks, admins ----unix-----> ProvenListener -> EngineSession | ArenaManager | AdminService
    other owners, remote admins ----TCP------> ProvenListener -> Exchange | AdminService
    all of these -> StoreNode: catalog, disk, index
"""

from __future__ import annotations

import asyncio
import logging
import socket

from kvtransfer.codec import CONTROL_FRAME_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import frame_stream
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.admin_requests import AdminHello, StoreStat
from kvtransfer.store.messages.arena_mapping import RankHello
from kvtransfer.store.messages.engine_session import EngineHello, StoreWelcome
from kvtransfer.store.messages.owner_codec import MAX_OWNER_BYTES, STORE_PROTOCOL
from kvtransfer.store.messages.record_exchange import OwnerHello
from kvtransfer.store.server.admin_service import AdminService
from kvtransfer.store.server.arena_manager import OFFER_WAIT_S, ArenaManager, MappedRank
from kvtransfer.store.server.listeners import (
    LocalPeer,
    RemotePeer,
    listen_for_local,
    listen_for_remote,
    refuse,
    refuse_remote,
)
from kvtransfer.store.server.node import StoreNode
from kvtransfer.store.server.session import EngineSession
from kvtransfer.store.server.writer_process import is_running

_TICK_S = 0.25
_BACKLOG = 128

_log = logging.getLogger("tandem.store")


class StoreServer:
    """One node's store. `start` and `stop` run it on one event loop.

    Other owners and remote admins connect to `address` (host:port, set by `start`). An internal error ends
    the store: `check_health` and `wait_ended` raise it, and the process must end, to be restarted.
    """

    def __init__(
        self,
        settings: StoreSettings,
        trust: Trust,
        clock: Clock,
        faults: Faults,
        offer_wait_s: float = OFFER_WAIT_S,
    ) -> None:
        self.identity = ReplicaIdentity(settings.node_id, settings.epoch)
        self.address = ""
        self._settings = settings
        self._trust = trust
        self._clock = clock
        self._tasks = SupervisedTasks(self._broke)
        self._node = StoreNode(settings, trust, clock, faults, self._tasks.spawn)
        self._arena_manager = ArenaManager(
            settings, clock, offer_wait_s, self._node.attach, self._rank_left, self._tasks.spawn
        )
        self._listeners: list[ProvenListener] = []
        self._sessions: dict[bytes, EngineSession] = {}
        self._admin = AdminService(self.identity, self._node, clock, self._sessions)
        self._error: BaseException | None = None
        self._is_stopping = False
        self._has_ended = asyncio.Event()

    # -------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Listen at the node's socket and over TCP; `OSError` when one of them is taken. The NVMe tier is
        read in the background."""
        remote = socket.create_server((self._settings.host, 0), backlog=_BACKLOG)
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(f"\0{self._settings.name}")
        local.listen(_BACKLOG)
        self.address = f"{self._settings.host}:{remote.getsockname()[1]}"
        self._tasks.spawn(self._node.run(), "store-node")
        self._tasks.spawn(self._node.open(self.address), "store-open")
        self._tasks.spawn(self._arena_manager.make_without_ranks(), "store-spare-arena")
        self._tasks.spawn(self._tick_forever(), "store-tick")
        trust, spawn, clock = self._trust, self._tasks.spawn, self._clock
        self._listeners = [
            listen_for_local(local, trust, self._serve_local, spawn, clock),
            listen_for_remote(remote, trust, self._serve_remote, spawn, clock),
        ]

    async def stop(self) -> None:
        """Write admitted records to NVMe for at most `flush_s`, then end every connection and close."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        for session in self._sessions.values():
            session.close()
        if self._error is None:
            await self._node.close(self._settings.flush_s)
        await self._tasks.close()
        self._admin.close()
        self._arena_manager.close()
        await self._node.release()
        self._has_ended.set()

    def check_health(self) -> None:
        """Raise the error that ended the store."""
        if self._error is not None:
            raise self._error

    async def wait_ended(self) -> None:
        """Return when the store has stopped; raise the error that ended it."""
        await self._has_ended.wait()
        self.check_health()

    def stat(self) -> StoreStat:
        """Return the statistics of all tiers of the node."""
        return self._admin.stat()

    # --------------------------------------------------------------------------------------- connections

    async def _serve_local(self, peer: LocalPeer) -> None:
        match peer.hello:
            case EngineHello():
                await self._serve_engine_core(peer, peer.hello)
            case RankHello():
                await self._arena_manager.serve(peer, peer.hello)
            case AdminHello(protocol) if protocol == STORE_PROTOCOL:
                stream = await frame_stream(peer.sock, peer.name, max_bytes=CONTROL_FRAME_BYTES)
                await self._admin.serve(stream)
            case _:
                await refuse(peer, f"expected a hello of protocol {STORE_PROTOCOL} from this node")

    async def _serve_remote(self, peer: RemotePeer) -> None:
        match peer.hello:
            case AdminHello(protocol) if protocol == STORE_PROTOCOL:
                await self._admin.serve(peer.stream)
            case OwnerHello():
                sender = self._node.sender
                if sender is None:
                    await refuse_remote(peer, "the node has no host tier yet")
                else:
                    await sender.serve(peer.stream, peer.hello)
            case _:
                await refuse_remote(
                    peer,
                    f"expected a hello of protocol {STORE_PROTOCOL} from another owner or an administrator",
                )

    async def _serve_engine_core(self, peer: LocalPeer, hello: EngineHello) -> None:
        if hello.protocol != STORE_PROTOCOL:
            await refuse(peer, f"expected an engine core with protocol {STORE_PROTOCOL}")
            return
        earlier = self._sessions.get(hello.session)
        if earlier is not None:
            earlier.close()
        session = EngineSession(
            hello,
            await frame_stream(peer.sock, peer.name, max_bytes=MAX_OWNER_BYTES),
            self._arena_manager,
            self._node,
            self._tasks.spawn,
        )
        self._sessions[hello.session] = session
        self._node.catalog.session_opened(hello.session)
        session.send(StoreWelcome(self.identity, self._node.gb_s()))
        try:
            await session.serve()
        finally:
            if self._sessions.get(hello.session) is session:
                del self._sessions[hello.session]
                self._node.catalog.session_lost(hello.session)
                if not self._arena_manager.has_ranks(hello.session):
                    self._node.catalog.writers_gone(hello.session)

    def _rank_left(self, rank: MappedRank) -> None:
        if not self._arena_manager.has_ranks(rank.session):
            self._node.catalog.writers_gone(rank.session)

    # ------------------------------------------------------------------------------------------- upkeep

    async def _tick_forever(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            self._node.catalog.free_orphans(is_running)
            self._node.compact_if_needed()
            if (rates := self._node.changed_gb_s()) is not None:
                for session in self._sessions.values():
                    session.send(StoreWelcome(self.identity, rates))

    def _broke(self, error: BaseException) -> None:
        if self._error is None:
            _log.error("the store of %s failed", self.identity.replica_id, exc_info=error)
            self._error = error
            self._has_ended.set()
