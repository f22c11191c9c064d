"""Frames on a byte stream: a uint32 little-endian length, then that many bytes. Blocking and asyncio.

Used by the rank channel and by the control part of the data connections. Every such connection starts with
the proof of `kvtransfer.secret`.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.secret import ClientHandshake, ServerHandshake
from kvtransfer.wire import MAX_FRAME_BYTES

_LENGTH = struct.Struct("<I")
HANDSHAKE_TIMEOUT_S = 10.0
_HANDSHAKE_BYTES = 4096
"""No frame of the proof is longer: a stranger must not make us take memory."""


def send_frame(sock: socket.socket, frame: bytes) -> None:
    """Write one frame; `PeerGoneError` when the connection is closed."""
    try:
        sock.sendall(_LENGTH.pack(len(frame)) + frame)
    except OSError as error:
        raise PeerGoneError(f"connection lost while sending: {error}") from error


def receive_frame(sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Read one frame; `PeerGoneError` when the connection ends, `WireError` when the frame is longer."""
    return receive_exactly(sock, _checked_length(receive_exactly(sock, _LENGTH.size), max_bytes))


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes`; `PeerGoneError` when the connection ends before."""
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving: {error}") from error
        if count == 0:
            raise PeerGoneError("connection closed by the other side")
        view = view[count:]
    return bytes(buffer)


def prove_as_client(sock: socket.socket, secret: bytes, name: str) -> None:
    """The connecting side's handshake; `ProofError` or `PeerGoneError` when it fails."""
    handshake = ClientHandshake(secret, name)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    send_frame(sock, handshake.hello())
    send_frame(sock, handshake.answer(receive_frame(sock, _HANDSHAKE_BYTES)))
    handshake.finish(receive_frame(sock, _HANDSHAKE_BYTES))
    sock.settimeout(None)


def prove_as_server(sock: socket.socket, secret: bytes) -> str:
    """The accepting side's handshake; returns the client's name."""
    handshake = ServerHandshake(secret)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    send_frame(sock, handshake.challenge(receive_frame(sock, _HANDSHAKE_BYTES)))
    send_frame(sock, handshake.welcome(receive_frame(sock, _HANDSHAKE_BYTES)))
    sock.settimeout(None)
    return handshake.client_name


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Read one frame; `PeerGoneError` when the connection ends, `WireError` when the frame is longer."""
    try:
        length = _checked_length(await reader.readexactly(_LENGTH.size), max_bytes)
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise PeerGoneError(f"connection closed by the other side: {error}") from error


def write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Queue one frame for sending; to a connection that has closed, nothing: its reader hears of the end."""
    if not writer.is_closing():
        writer.write(_LENGTH.pack(len(frame)) + frame)


async def prove_as_async_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
) -> str:
    """The accepting side's handshake on asyncio streams; returns the client's name."""
    handshake = ServerHandshake(secret)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        write_frame(writer, handshake.challenge(await read_frame(reader, _HANDSHAKE_BYTES)))
        write_frame(writer, handshake.welcome(await read_frame(reader, _HANDSHAKE_BYTES)))
        await writer.drain()
    return handshake.client_name


def _checked_length(header: bytes, max_bytes: int) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > max_bytes:
        raise WireError(f"frame of {length} bytes exceeds the limit of {max_bytes}")
    return int(length)
