"""Proven frame streams to an owner, on asyncio: over the node's abstract unix socket or over TCP."""

from __future__ import annotations

import asyncio
import socket

from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.framing import HANDSHAKE_TIMEOUT_S, read_frame, write_frame
from kvtransfer.secret import ClientHandshake

_HANDSHAKE_BYTES = 4096


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
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            return await _proven(*await _connect_abstract(name), secret, who)
    except (OSError, TimeoutError) as error:
        raise PeerGoneError(f"no store answers at {name}: {error or 'not in time'}") from error


async def open_tcp(address: str, secret: bytes, who: str) -> FrameStream:
    """Connect to `address` (host:port, or whatever somebody wrote into the index); `PeerGoneError` or
    `ProofError` when it cannot be."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            return await _proven(*await asyncio.open_connection(host, int(port)), secret, who)
    except (OSError, TimeoutError, ValueError, OverflowError) as error:
        raise PeerGoneError(f"no store answers at {address}: {error or 'not in time'}") from error


async def _connect_abstract(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """By a socket of our own: uvloop, which Ray's actors run on, knows no abstract names."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, f"\0{name}")
        return await asyncio.open_unix_connection(sock=sock)
    except (OSError, asyncio.CancelledError):
        sock.close()
        raise


async def _proven(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, who: str
) -> FrameStream:
    handshake = ClientHandshake(secret, who)
    try:
        write_frame(writer, handshake.hello())
        write_frame(writer, handshake.answer(await read_frame(reader, _HANDSHAKE_BYTES)))
        handshake.finish(await read_frame(reader, _HANDSHAKE_BYTES))
    except (TransferError, TimeoutError, asyncio.CancelledError):
        writer.transport.abort()
        raise
    return FrameStream(reader, writer)
