"""A brain's connection to the owner: what it asks for, answered from what the node holds."""

from __future__ import annotations

import asyncio
import logging

from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.store.messages import (
    FROM_OWNER_CODEC,
    REFUSED,
    TO_OWNER_CODEC,
    BrainHello,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    FromOwner,
    NewRecord,
    PutCommit,
    PutGrant,
    PutRequest,
)
from kvtransfer.store.node.fetching import Fetch
from kvtransfer.store.node.hall import Hall
from kvtransfer.store.node.node import Node
from kvtransfer.store.streams import FrameStream
from kvtransfer.store.tasks import Spawn
from kvtransfer.store.writers import writer_of

_MAX_UNSENT_BYTES = 64 << 20
_MAX_FETCHES = 4096
_MAX_PREFETCHES = 1024
"""With so many fetches under way nothing more is brought near for later."""

_log = logging.getLogger("tandem.store")


class BrainSession:
    """One proven brain, from its hello to the end of its connection."""

    def __init__(self, hello: BrainHello, stream: FrameStream, hall: Hall, node: Node, spawn: Spawn) -> None:
        self.id = hello.session
        self._hello = hello
        self._stream = stream
        self._hall = hall
        self._node = node
        self._spawn = spawn
        self._sight = node.sight(hello.compatibility, hello.shards)
        self._fetches: dict[int, Fetch] = {}
        self._finds: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def send(self, message: FromOwner) -> None:
        """Queue it; a brain that does not read loses its connection."""
        self._stream.send(FROM_OWNER_CODEC.encode(message))
        if self._stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
            _log.error("brain %s does not read: its connection is closed", self._hello.replica.replica_id)
            self.close()

    def close(self) -> None:
        """End its connection; `serve` returns. What it has said and nobody heard yet is void: the brain may
        be back already, and what it is granted then must not be committed by words of before."""
        self._is_closed = True
        self._stream.abort()

    async def serve(self) -> None:
        """Answer until the connection ends (`PeerGoneError`), or it says what it must not (`WireError`)."""
        self._sight.watch(self.send)
        try:
            while True:
                frame = await self._stream.receive()
                if self._is_closed:
                    raise PeerGoneError("its connection was closed")
                self._handle(TO_OWNER_CODEC.decode(frame))
        finally:
            self._sight.unwatch(self.send)
            self._node.forget(self._sight)
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
                raise WireError(f"a brain sent {type(message).__name__}")

    # -------------------------------------------------------------------------------------------- puts

    def _grant(self, request: PutRequest) -> PutGrant:
        arena = self._node.catalog.arena
        if arena is None:
            return PutGrant(request.number, b"", (REFUSED,) * len(request.records))
        offsets = tuple(self._allocate(request, new) for new in request.records)
        return PutGrant(request.number, arena.id, offsets)

    def _allocate(self, request: PutRequest, new: NewRecord) -> int:
        """Only for a shard of its own, and only while a rank that holds it has the arena mapped."""
        if new.shard not in self._hello.shards:
            return REFUSED
        process_id = self._hall.writer_of(self.id, self._hello.shards.index(new.shard))
        writer = None if process_id is None else writer_of(process_id, self.id)
        if writer is None:
            return REFUSED
        return self._node.catalog.allocate(
            self.id,
            request.tenant,
            request.chain,
            self._sight.space,
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
        tiers = self._sight.local_tiers(request.keys)
        if len(tiers) == len(request.keys) or self._node.index is None:
            self.send(FindAnswer(request.number, tiers))
            return
        task = self._spawn(self._find_remote(request, len(tiers)), "store-find")
        self._finds.add(task)
        task.add_done_callback(self._finds.discard)

    async def _find_remote(self, request: FindRequest, num_local: int) -> None:
        await self._sight.learn(request.chain, request.keys[num_local:])
        self.send(FindAnswer(request.number, self._sight.tiers(request.keys)))

    def _fetch(self, request: FetchRequest) -> None:
        if not request.to_device and len(self._fetches) >= _MAX_PREFETCHES:
            return
        if request.number in self._fetches or len(self._fetches) >= _MAX_FETCHES:
            raise WireError(f"fetch {request.number} is not new, or there are too many")
        fetch = Fetch(request, self._sight, self._node, self.send)
        self._fetches[request.number] = fetch
        fetch.start(self._spawn, lambda: self._fetched(request))

    def _fetched(self, request: FetchRequest) -> None:
        """Nobody releases what is only kept in the host tier."""
        if not request.to_device:
            self._fetches.pop(request.number, None)

    def _release(self, release: FetchRelease) -> None:
        fetch = self._fetches.pop(release.number, None)
        if fetch is not None:
            fetch.end(release.bad)
