"""The connections of a store server, and the arena that ranks map over them.

The arena is adopted from a rank that mapped it before the owner started, and otherwise created.

A rank's connection stays open as long as it has the arena mapped; as in `kvtransfer.transports.shm`, and for
the same reasons, its end proves that the rank writes no more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.common.os_errors import os_reason
from kvtransfer.common.tasks import Spawn
from kvtransfer.config import StoreSettings
from kvtransfer.errors import PeerGoneError, StoreError, WireError
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, receive_from, send_to
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import FrameStream, frame_stream
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.dram.arena import Arena, Prefault, arena_bytes
from kvtransfer.store.messages import (
    FROM_OWNER_CODEC,
    MAX_OWNER_BYTES,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    ArenaGrant,
    FromOwner,
    RankHello,
    StoreRefusal,
    ToOwner,
)
from kvtransfer.store.record import Writer

# A rank without an arena waits for so long after the owner's start: another rank may offer one.
OFFER_WAIT_S = 1.0
# Without any rank, the owner creates a spare arena then, so that its memory is populated at the first
# request; an arena that a rank offers later replaces the spare one.
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


# ----------------------------------------------------------------------------------------------
# Whether a process that mapped the arena still lives: by its id and its start time, from procfs.

_STATE = 0
# Fields of /proc/<pid>/stat after the name, which is the only one that may hold spaces.
_STARTED_AT = 19
_DEAD = "ZX"


def writer_of(process_id: int, session: bytes = b"") -> Writer | None:
    """Return the living process with this id as a `Writer` for `session`; None when there is none."""
    fields = _fields(process_id)
    if fields is None or fields[_STATE] in _DEAD:
        return None
    return Writer(process_id, int(fields[_STARTED_AT]), session)


def is_running(writer: Writer) -> bool:
    """Whether that very process lives. A zombie does not: its memory is gone."""
    found = writer_of(writer.process_id)
    return found is not None and found.started_at == writer.started_at


def _fields(process_id: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


# ----------------------------------------------------------------------------------------------
# The owner's listeners: every connection proves the secret and sends a hello before it is served.
#
# On a unix socket nothing is read beyond the first message, so that a descriptor which may follow it is not
# lost. A violation of the protocol closes only its own connection.

_HELLO_BYTES = 64 << 10
_FD_MARK = b"F"


class LocalPeer(NamedTuple):
    """A proven connection of this node: the non-blocking socket, its name for logs, and the first message."""

    sock: socket.socket
    name: str
    hello: ToOwner


class RemotePeer(NamedTuple):
    """A proven connection over TCP, and the first message."""

    stream: FrameStream
    hello: ToOwner


def listen_for_local(
    sock: socket.socket,
    trust: Trust,
    serve: Callable[[LocalPeer], Awaitable[None]],
    spawn: Spawn,
    clock: Clock,
) -> ProvenListener:
    """Listen on a unix socket. `serve(peer)` runs for the life of a connection, which is closed after it."""

    async def receive_hello(sock: socket.socket, name: str) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            hello = TO_OWNER_CODEC.decode(await receive_from(sock, _HELLO_BYTES))
        await serve(LocalPeer(sock, name, hello))

    return ProvenListener(sock, trust, receive_hello, spawn, clock, "store")


def listen_for_remote(
    sock: socket.socket,
    trust: Trust,
    serve: Callable[[RemotePeer], Awaitable[None]],
    spawn: Spawn,
    clock: Clock,
) -> ProvenListener:
    """Listen on a TCP socket, as `listen_for_local` does."""

    async def receive_hello(sock: socket.socket, name: str) -> None:
        stream = await frame_stream(
            sock, name, trust.server_tls(sock), max_bytes=MAX_OWNER_BYTES, max_first_bytes=_HELLO_BYTES
        )
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = TO_OWNER_CODEC.decode(await stream.next_frame())
            await serve(RemotePeer(stream, hello))
        finally:
            stream.abort()

    return ProvenListener(sock, trust, receive_hello, spawn, clock, "store")


async def refuse(peer: LocalPeer, reason: str) -> None:
    """Send the reason why the connection is refused."""
    await send_message(peer.sock, StoreRefusal(reason))


async def refuse_remote(peer: RemotePeer, reason: str) -> None:
    """Send the reason, and return when the other side has it or is gone."""
    peer.stream.send(FROM_OWNER_CODEC.encode(StoreRefusal(reason)))
    peer.stream.close()
    await peer.stream.wait_closed()


async def send_message(sock: socket.socket, message: FromOwner) -> None:
    """Send one message on a connection that is not a stream."""
    await send_to(sock, FROM_OWNER_CODEC.encode(message))


def send_descriptor(sock: socket.socket, descriptor: int) -> None:
    """Send `descriptor` with the next byte; `PeerGoneError` when the connection has ended, or is full."""
    try:
        socket.send_fds(sock, [_FD_MARK], [descriptor])
    except OSError as error:
        raise PeerGoneError(f"connection lost while sending a descriptor: {error}") from error


async def receive_descriptor(sock: socket.socket) -> int:
    """Return the descriptor that arrives with the next byte, which the caller must close."""
    while True:
        try:
            mark, descriptors, _, _ = socket.recv_fds(sock, len(_FD_MARK), 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await _readable(sock)
            continue
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving a descriptor: {error}") from error
        if not mark:
            raise PeerGoneError("connection closed by the other side")
        if not descriptors:
            raise WireError("no descriptor came with the byte")
        return descriptors[0]


async def await_end(sock: socket.socket) -> None:
    """Return when the connection has ended; `WireError` when the other side sends anything instead."""
    try:
        data = await asyncio.get_running_loop().sock_recv(sock, 1)
    except OSError:  # reset: ended
        return
    if data:
        raise WireError("nothing more may be sent on this connection")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(sock, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(sock)
