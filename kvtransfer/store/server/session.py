"""An engine core's session with the owner: its puts, look-ups and fetches, served from the tiers of the
node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container

from kvtransfer.common.tasks import Spawn
from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.rpc.stream import FrameStream
from kvtransfer.store.messages.engine_session import (
    REFUSED,
    EngineHello,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    NewRecord,
    PutCommit,
    PutGrant,
    PutRequest,
)
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, TO_OWNER_CODEC, FromOwner
from kvtransfer.store.messages.records import Tier
from kvtransfer.store.server.arena_manager import ArenaManager
from kvtransfer.store.server.fetch import Fetch
from kvtransfer.store.server.node import StoreNode
from kvtransfer.store.server.writer_process import writer_of

_MAX_UNSENT_BYTES = 64 << 20
_MAX_FETCHES = 4096
# The number of fetches under way from which on prefetches are ignored.
_MAX_PREFETCHES = 1024

_log = logging.getLogger("tandem.store")


class EngineSession:
    """The session of one engine core, from its hello to the end of its connection."""

    def __init__(
        self,
        hello: EngineHello,
        stream: FrameStream,
        arena_manager: ArenaManager,
        node: StoreNode,
        spawn: Spawn,
    ) -> None:
        self.id = hello.session
        self._hello = hello
        self._stream = stream
        self._arena_manager = arena_manager
        self._node = node
        self._spawn = spawn
        self._view = node.view(hello.compatibility, hello.shards)
        self._fetches: dict[int, Fetch] = {}
        self._finds: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def send(self, message: FromOwner) -> None:
        """Queue a message; an engine core that does not read loses its connection."""
        self._stream.send(FROM_OWNER_CODEC.encode(message))
        if self._stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
            _log.error(
                "engine core %s does not read: its connection is closed", self._hello.replica.replica_id
            )
            self.close()

    def close(self) -> None:
        """End the connection; `serve` returns. Messages that were received and not yet handled are void: the
        engine core may have connected again, and an old commit must not apply to its new grants."""
        self._is_closed = True
        self._stream.abort()

    async def serve(self) -> None:
        """Answer until the connection ends (`PeerGoneError`) or breaks the protocol (`WireError`)."""
        self._view.watch(self.send)
        try:
            while True:
                frame = await self._stream.next_frame()
                if self._is_closed:
                    raise PeerGoneError("its connection was closed")
                if (message := TO_OWNER_CODEC.decode_known(frame)) is not None:
                    self._handle(message)
        finally:
            self._view.unwatch(self.send)
            self._node.forget(self._view)
            self._stream.abort()
            for task in self._finds:
                task.cancel()
            for fetch in self._fetches.values():
                fetch.end()
            self._fetches.clear()

    def _handle(self, message: object) -> None:
        match message:
            case PutRequest():
                self.send(self._grant(message))
            case PutCommit():
                self._commit(message)
            case FindRequest():
                self._find(message)
            case FetchRequest():
                self._fetch(message)
            case FetchRelease():
                self._release(message)
            case _:
                raise WireError(f"an engine core sent {type(message).__name__}")

    # -------------------------------------------------------------------------------------------- puts

    def _grant(self, request: PutRequest) -> PutGrant:
        arena = self._node.catalog.arena
        if arena is None:
            return PutGrant(request.number, b"", (REFUSED,) * len(request.records))
        offsets = tuple(self._allocate(request, new) for new in request.records)
        return PutGrant(request.number, arena.id, offsets)

    def _allocate(self, request: PutRequest, new: NewRecord) -> int:
        """Allocate a record of one of the session's shards, while a rank that holds the shard has the arena
        mapped."""
        if new.shard not in self._hello.shards:
            return REFUSED
        process_id = self._arena_manager.writer_of(self.id, self._hello.shards.index(new.shard))
        writer = None if process_id is None else writer_of(process_id, self.id)
        if writer is None:
            return REFUSED
        return self._node.catalog.allocate(
            self.id,
            request.sharing_group,
            request.chain,
            self._view.space,
            self._hello.compatibility.model_fingerprint,
            new,
            writer,
        )

    def _commit(self, commit: PutCommit) -> None:
        catalog = self._node.catalog
        for offset, checksum in commit.written:
            catalog.commit(self.id, offset, checksum)
        for offset in commit.abandoned:
            catalog.abandon(self.id, offset)

    # ------------------------------------------------------------------------------------------- gets

    def _find(self, request: FindRequest) -> None:
        tiers = self._view.tiers(request.keys, local_only=True)
        states = self._states(request, local_only=True)
        is_all = len(tiers) == len(request.keys) and len(states) == len(request.states)
        if is_all or self._node.index is None:
            self.send(FindAnswer(request.number, tiers, states))
            return
        task = self._spawn(self._find_remote(request, len(tiers), states), "store-find")
        self._finds.add(task)
        task.add_done_callback(self._finds.discard)

    async def _find_remote(self, request: FindRequest, num_local: int, here: Container[int]) -> None:
        states = tuple(key for place, key in enumerate(request.states) if place not in here)
        await self._view.learn(request.chain, (*request.keys[num_local:], *states))
        self.send(FindAnswer(request.number, self._view.tiers(request.keys), self._states(request)))

    def _states(self, request: FindRequest, *, local_only: bool = False) -> dict[int, Tier]:
        tiers = (self._view.tier(key, local_only=local_only) for key in request.states)
        return {place: tier for place, tier in enumerate(tiers) if tier is not None}

    def _fetch(self, request: FetchRequest) -> None:
        if not request.to_device and len(self._fetches) >= _MAX_PREFETCHES:
            return
        if request.number in self._fetches or len(self._fetches) >= _MAX_FETCHES:
            raise WireError(f"fetch {request.number} is not new, or there are too many")
        fetch = Fetch(request, self._view, self._node, self.send)
        self._fetches[request.number] = fetch
        fetch.start(self._spawn, lambda: self._fetched(request))

    def _fetched(self, request: FetchRequest) -> None:
        """Forget a prefetch, which has no release."""
        if not request.to_device:
            self._fetches.pop(request.number, None)

    def _release(self, release: FetchRelease) -> None:
        fetch = self._fetches.pop(release.number, None)
        if fetch is not None:
            fetch.end(release.bad)
