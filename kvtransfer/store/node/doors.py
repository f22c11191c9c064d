"""The owner's listeners: every connection proves the secret and says who it is before anybody serves it.

Nothing is read beyond the first message, so that the descriptor which may follow it is not lost. Whatever is
not of the protocol closes that connection only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvtransfer.clock import Clock
from kvtransfer.errors import PeerGoneError, TransferError, WireError
from kvtransfer.framing import HANDSHAKE_TIMEOUT_S
from kvtransfer.secret import ServerHandshake
from kvtransfer.store.messages import FROM_OWNER_CODEC, TO_OWNER_CODEC, FromOwner, StoreRefusal, ToOwner
from kvtransfer.store.streams import FrameStream
from kvtransfer.store.tasks import Spawn

_LENGTH = struct.Struct("<I")
_HANDSHAKE_BYTES = 4096
_HELLO_BYTES = 64 << 10
_MAX_UNPROVEN = 64
_ACCEPT_PAUSE_S = 0.1
_BACKLOG = 128
_FD_MARK = b"F"

_log = logging.getLogger("tandem.store")


class Visitor(NamedTuple):
    """A proven connection: the non-blocking socket, its name (for logs), and the first message."""

    sock: socket.socket
    name: str
    hello: ToOwner
    is_local: bool


class Door:
    """One listening socket. `serve(visitor)` runs for the life of a connection, which is closed after it."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        serve: Callable[[Visitor], Awaitable[None]],
        spawn: Spawn,
        clock: Clock,
    ) -> None:
        self._sock = sock
        self._secret = secret
        self._serve = serve
        self._spawn = spawn
        self._clock = clock
        self._is_local = sock.family == socket.AF_UNIX
        self._num_unproven = 0
        self._accepting = spawn(self._accept(), "store-accept")

    def close(self) -> None:
        """Take nobody more."""
        self._accepting.cancel()
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # no descriptors left, or the connection is gone already
                _log.warning("the store could not accept a connection: %s", error)
                await self._clock.sleep(_ACCEPT_PAUSE_S)
                continue
            if self._num_unproven >= _MAX_UNPROVEN:
                sock.close()
                continue
            self._num_unproven += 1
            self._spawn(self._run(sock), "store-connection")

    async def _run(self, sock: socket.socket) -> None:
        with sock:
            try:
                try:
                    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):  # also for who sends byte by byte
                        visitor = await self._prove(sock)
                finally:
                    self._num_unproven -= 1
                await self._serve(visitor)
            except PeerGoneError as error:
                _log.debug("a connection ended: %s", error)
            except (TransferError, OSError) as error:  # TimeoutError is an OSError
                _log.warning("a connection to the store was closed: %s", error or "not in time")

    async def _prove(self, sock: socket.socket) -> Visitor:
        handshake = ServerHandshake(self._secret)
        await send_to(sock, handshake.challenge(await _receive(sock, _HANDSHAKE_BYTES)))
        await send_to(sock, handshake.welcome(await _receive(sock, _HANDSHAKE_BYTES)))
        hello = TO_OWNER_CODEC.decode(await _receive(sock, _HELLO_BYTES))
        return Visitor(sock, handshake.client_name, hello, self._is_local)


async def stream_of(visitor: Visitor) -> FrameStream:
    """Frames from here on; the stream takes the connection over."""
    sock = visitor.sock
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=sock.detach()))
    return FrameStream(reader, writer)


async def refuse(visitor: Visitor, reason: str) -> None:
    """Tell why, once."""
    await tell(visitor.sock, StoreRefusal(reason))


async def tell(sock: socket.socket, message: FromOwner) -> None:
    """One message on a connection that is not a stream."""
    await send_to(sock, FROM_OWNER_CODEC.encode(message))


async def send_to(sock: socket.socket, frame: bytes) -> None:
    """One frame; `PeerGoneError` when the connection has ended."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(frame)) + frame)
    except OSError as error:
        raise PeerGoneError(f"connection lost while sending: {error}") from error


def send_descriptor(sock: socket.socket, descriptor: int) -> None:
    """`descriptor` with the next byte; `PeerGoneError` when the connection has ended, or is full."""
    try:
        socket.send_fds(sock, [_FD_MARK], [descriptor])
    except OSError as error:
        raise PeerGoneError(f"connection lost while sending a descriptor: {error}") from error


async def receive_descriptor(sock: socket.socket) -> int:
    """The descriptor that comes with the next byte; it is the caller's to close."""
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
    """Return when the connection has ended; `WireError` when the other side says something instead."""
    try:
        said = await asyncio.get_running_loop().sock_recv(sock, 1)
    except OSError:  # reset: ended
        return
    if said:
        raise WireError("nothing more may be said on this connection")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(sock, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(sock)


async def _receive(sock: socket.socket, max_bytes: int) -> bytes:
    (length,) = _LENGTH.unpack(await _receive_exactly(sock, _LENGTH.size))
    if length > max_bytes:
        raise WireError(f"frame of {length} bytes exceeds the limit of {max_bytes}")
    return await _receive_exactly(sock, length)


async def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < num_bytes:
        try:
            part = await loop.sock_recv(sock, num_bytes - len(received))
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving: {error}") from error
        if not part:
            raise PeerGoneError("connection closed by the other side")
        received += part
    return bytes(received)
