"""The connections of a store server, and the arena that ranks map over them.

The arena is adopted from a rank that mapped it before the owner started, and otherwise created.

A rank's connection stays open as long as it has the arena mapped; as in `kvtransfer.transports.shm`, and for
the same reasons, its end proves that the rank writes no more.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.common.clock import Clock
from kvtransfer.common.os_errors import os_reason
from kvtransfer.common.tasks import Spawn
from kvtransfer.config import StoreSettings
from kvtransfer.errors import StoreError
from kvtransfer.store.dram.arena import Arena, arena_bytes
from kvtransfer.store.dram.prefault import Prefault
from kvtransfer.store.messages.arena_mapping import ArenaGrant, RankHello
from kvtransfer.store.messages.owner_codec import STORE_PROTOCOL
from kvtransfer.store.server.listeners import (
    LocalPeer,
    await_end,
    receive_descriptor,
    refuse,
    send_descriptor,
    send_message,
)

# A rank without an arena waits for so long after the owner's start: another rank may offer one.
OFFER_WAIT_S = 1.0
# Without any rank, the owner creates a spare arena after this time, so that its memory is populated at the
# first request; an arena that a rank offers later replaces the spare one.
SPARE_WAIT_S = 1.0
# The spare arena is used from then on, to serve other nodes and administrators.
UNUSED_WAIT_S = 10.0

_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger("tandem.store")


@dataclass(eq=False)
class MappedRank:
    """A rank that has the arena mapped."""

    session: bytes
    rank: int
    process_id: int


class ArenaManager:
    """Adopts or creates the arena, and serves the ranks that map it. `on_arena(arena, prefault)` is called
    once, `on_left(rank)` when a rank's connection has ended."""

    def __init__(
        self,
        settings: StoreSettings,
        clock: Clock,
        offer_wait_s: float,
        on_arena: Callable[[Arena, Prefault], None],
        on_left: Callable[[MappedRank], None],
        spawn: Spawn,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._offer_wait_s = offer_wait_s
        self._on_arena = on_arena
        self._on_left = on_left
        self._spawn = spawn
        self._started_at = clock.now()
        self._ranks: set[MappedRank] = set()
        self._spare: tuple[Arena, Prefault] | None = None
        self.arena: Arena | None = None

    def writer_of(self, session: bytes, rank: int) -> int | None:
        """Return the process of that rank, if it has the arena mapped."""
        return next(
            (each.process_id for each in self._ranks if (each.session, each.rank) == (session, rank)), None
        )

    def has_ranks(self, session: bytes) -> bool:
        """Whether any rank of the session has the arena mapped."""
        return any(each.session == session for each in self._ranks)

    async def make_without_ranks(self) -> None:
        """Create an arena, and use it in the end, when no rank connects."""
        await self._clock.sleep(SPARE_WAIT_S)
        if self.arena is not None:
            return
        try:
            arena, prefault = self._spare = self._create()
        except StoreError as error:
            _log.error("the node has no host tier: %s", error)
            return
        prefault.top_up(at_once=True)  # nothing computes here yet that it would slow down
        await self._clock.sleep(UNUSED_WAIT_S - SPARE_WAIT_S)
        if self.arena is None:
            self._use(arena, prefault)

    def close(self) -> None:
        """Close a spare arena; the one in use belongs to the receiver of `on_arena`."""
        if self._spare is not None:
            self._spare[0].close()
            self._spare = None

    async def serve(self, peer: LocalPeer, hello: RankHello) -> None:
        """Serve a rank until its connection ends. `StoreError` when the host refuses the memory."""
        if hello.protocol != STORE_PROTOCOL:
            await refuse(peer, f"expected a rank with protocol {STORE_PROTOCOL}")
            return
        if hello.arena:
            self._adopt(hello, await receive_descriptor(peer.sock))
        try:
            arena = self.arena or await self._arena_for_rank()
        except StoreError as error:
            await refuse(peer, str(error))
            raise
        mapped = MappedRank(hello.session, hello.rank, _process_of(peer.sock))
        self._ranks.add(mapped)
        try:
            is_yours = hello.arena == arena.id
            await send_message(peer.sock, ArenaGrant(arena.id, arena.num_bytes, is_yours))
            if not is_yours:
                send_descriptor(peer.sock, arena.fd)
            await await_end(peer.sock)
        finally:
            self._ranks.discard(mapped)
            self._on_left(mapped)

    def _adopt(self, hello: RankHello, descriptor: int) -> None:
        """Adopt the offered arena if there is none yet; takes over the descriptor."""
        if self.arena is not None:
            os.close(descriptor)
            return
        try:
            arena = Arena.adopt(descriptor, self._settings.granule_bytes)
        except StoreError as error:
            _log.warning("the arena that rank %d offers is not adopted: %s", hello.rank, error)
            return
        if arena.id != hello.arena or arena.num_bytes != arena_bytes(self._settings.dram_bytes):
            _log.warning("the arena that rank %d offers is not adopted: of another size or id", hello.rank)
            arena.close()
            return
        _log.info("the earlier arena is adopted from rank %d", hello.rank)
        self.close()
        self._use(arena, Prefault(arena, self._spawn, self._clock))

    async def _arena_for_rank(self) -> Arena:
        waiting_s = self._started_at + self._offer_wait_s - self._clock.now()
        if waiting_s > 0:
            await self._clock.sleep(waiting_s)
        if self.arena is None:
            self._use(*(self._spare or self._create()))
        assert self.arena is not None
        return self.arena

    def _create(self) -> tuple[Arena, Prefault]:
        settings = self._settings
        try:
            arena = Arena.create(settings.dram_bytes, settings.granule_bytes, settings.huge_pages)
        except OSError as error:
            raise StoreError(
                f"{settings.dram_bytes} bytes of shared memory are refused: {os_reason(error)}"
            ) from error
        return arena, Prefault(arena, self._spawn, self._clock)

    def _use(self, arena: Arena, prefault: Prefault) -> None:
        self._spare = None
        self.arena = arena
        self._on_arena(arena, prefault)


def _process_of(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id: int = _CREDENTIALS.unpack(credentials)[0]
    return process_id
