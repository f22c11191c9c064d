"""The owner's listeners: every connection proves the secret and sends a hello before it is served.

On a unix socket nothing is read beyond the first message, so that a descriptor which may follow it is not
lost. A violation of the protocol closes only its own connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import Spawn
from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, receive_from, send_to
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import FrameStream, frame_stream
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.owner_codec import (
    FROM_OWNER_CODEC,
    MAX_OWNER_BYTES,
    TO_OWNER_CODEC,
    FromOwner,
    StoreRefusal,
    ToOwner,
)

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
