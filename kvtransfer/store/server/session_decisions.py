"""What a session of an engine core decides: puts, look-ups and fetches, served from the node's tiers.

It has no connection: `kvtransfer.store.server.session.EngineSession` runs it behind that of an engine core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine
from typing import Any

from kvtransfer.common.tasks import Spawn
from kvtransfer.errors import WireError
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
    TierPartRequest,
)
from kvtransfer.store.messages.owner_codec import FromOwner
from kvtransfer.store.messages.records import Tier
from kvtransfer.store.record import Writer
from kvtransfer.store.server.fetch import Fetch
from kvtransfer.store.server.node_tiers import NodeTiers

_MAX_FETCHES = 4096
# The number of fetches under way from which on prefetches are ignored.
_MAX_PREFETCHES = 1024


class SessionDecisions:
    """The session of one engine core. Subclasses `send`."""

    def __init__(
        self, hello: EngineHello, writer_of: Callable[[int], Writer | None], node: NodeTiers, spawn: Spawn
    ) -> None:
        """`writer_of(rank)` returns the process of a rank of the session that has the arena mapped."""
        self.id = hello.session
        self._hello = hello
        self._writer_of = writer_of
        self._node = node
        self._spawn = spawn
        self._view = node.view(hello.compatibility, hello.shards)
        self._fetches: dict[int, Fetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: FromOwner) -> None:
        """Send a message to the engine core, later."""
        raise NotImplementedError

    def begin(self) -> None:
        """Send all blocks of the node, and from now on their changes. To an engine core that takes parts, do
        so when it asks for them."""
        self._view.open()
        if not self._hello.takes_parts:
            self.send(self._view.whole())
            self._view.watch(self.send)

    def end(self) -> None:
        """Send nothing more, and end what is under way."""
        self._view.close(self.send)
        self._node.forget(self._view)
        for task in self._tasks:
            task.cancel()
        for fetch in self._fetches.values():
            fetch.end()
        self._fetches.clear()

    def handle(self, message: object) -> None:
        """Serve a message of the engine core. `WireError` for one that breaks the protocol."""
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
            case TierPartRequest(part):
                if part or self._node.is_filled:
                    self._send_part(part)
                else:
                    self._run(self._send_first_part(), "store-first-part")
            case _:
                raise WireError(f"an engine core sent {type(message).__name__}")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this until the session ends."""
        task = self._spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------- tiers

    def _send_part(self, part: int) -> None:
        self._view.watch(self.send)
        self.send(self._view.part(part))

    async def _send_first_part(self) -> None:
        """Send it once the records of the owner before are known: else the engine core would report all of
        them as lost, and then as stored again."""
        await self._node.wait_filled()
        self._send_part(0)

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
        writer = self._writer_of(self._hello.shards.index(new.shard))
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
        self._run(self._find_remote(request, len(tiers), states), "store-find")

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
