"""The owner's listeners: every connection proves the secret and sends a hello before it is served.

Nothing is read beyond the first message, so that a descriptor which may follow it is not lost. A violation of
the protocol closes only its own connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import Spawn
from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.rpc.framing import HANDSHAKE_TIMEOUT_S, receive_from, send_to
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.store.messages import FROM_OWNER_CODEC, TO_OWNER_CODEC, FromOwner, StoreRefusal, ToOwner

_HELLO_BYTES = 64 << 10
_FD_MARK = b"F"


class PeerConnection(NamedTuple):
    """A proven connection: the non-blocking socket, its name (for logs), and the first message."""

    sock: socket.socket
    name: str
    hello: ToOwner
    is_local: bool


class StoreListener:
    """One listening socket. `serve(peer)` runs for the life of a connection, which is closed after it."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        serve: Callable[[PeerConnection], Awaitable[None]],
        spawn: Spawn,
        clock: Clock,
    ) -> None:
        self._serve = serve
        self._is_local = sock.family == socket.AF_UNIX
        self._listener = ProvenListener(sock, secret, self._receive_hello, spawn, clock, "store")

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    async def _receive_hello(self, sock: socket.socket, name: str) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            hello = TO_OWNER_CODEC.decode(await receive_from(sock, _HELLO_BYTES))
        await self._serve(PeerConnection(sock, name, hello, self._is_local))


async def refuse(peer: PeerConnection, reason: str) -> None:
    """Send the reason why the connection is refused."""
    await send_message(peer.sock, StoreRefusal(reason))


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
