"""Proven frame streams to an owner, on asyncio: over the node's abstract unix socket or over TCP."""

from __future__ import annotations

import asyncio
import socket

from kvtransfer.errors import PeerGoneError
from kvtransfer.rpc.framing import (
    HANDSHAKE_TIMEOUT_S,
    connect_tcp,
    prove_as_async_client,
    read_frame,
    write_frame,
)


class FrameStream:
    """A connection after the proof. `send` never waits; `receive` raises `PeerGoneError` at the end and
    `WireError` for a frame that is too long."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, frame: bytes) -> None:
        """Queue one frame; to a connection that has closed, nothing."""
        write_frame(self._writer, frame)

    async def receive(self) -> bytes:
        """The next frame."""
        return await read_frame(self._reader)

    @property
    def num_unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def abort(self) -> None:
        """End it at once, whatever is still to be sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End it after what was sent; waits until that is done, or cannot be."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:  # the other side was faster
            return


async def open_unix(name: str, secret: bytes, who: str) -> FrameStream:
    """Connect to the abstract unix socket `name`; `PeerGoneError` or `ProofError` when it cannot be."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, f"\0{name}")
            return await _proven(sock, secret, who)
    except (OSError, TimeoutError) as error:
        raise PeerGoneError(f"no store answers at {name}: {error or 'not in time'}") from error
    finally:
        sock.close()


async def open_tcp(address: str, secret: bytes, who: str) -> FrameStream:
    """Connect to `address` (host:port, or whatever somebody wrote into the index); `PeerGoneError` or
    `ProofError` when it cannot be."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            with await connect_tcp(address) as sock:
                return await _proven(sock, secret, who)
    except (OSError, TimeoutError, ValueError, OverflowError) as error:
        raise PeerGoneError(f"no store answers at {address}: {error or 'not in time'}") from error


async def _proven(sock: socket.socket, secret: bytes, who: str) -> FrameStream:
    """The stream, which takes the connection over once the other side has proven the secret too."""
    await prove_as_async_client(sock, secret, who)
    taken = socket.socket(fileno=sock.detach())
    if taken.family == socket.AF_UNIX:
        return FrameStream(*await asyncio.open_unix_connection(sock=taken))
    return FrameStream(*await asyncio.open_connection(sock=taken))
