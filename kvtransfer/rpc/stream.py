"""Framed streams on asyncio over TCP and unix sockets, and the server of the links between replicas.

A connection starts with the proof of the cluster secret on the bare socket (`kvtransfer.rpc.listener`). A
`FrameStream` then takes the socket over, with TLS below it where certificates are configured. On a Link
(gateway to replica) and a Peer link (replica to replica) the client first sends the kind of link as a frame,
then the messages of `workers.messages` follow. Both sides of a link send an empty frame when they have
nothing else to send, which reveals dead hosts and stopped processes.

The links are not gRPC streams, because a gRPC server offers no bound on what strangers cost: its size limit
holds for unproven and proven streams alike, and idle connections are neither counted nor evicted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Literal, cast

from kvtransfer.codec import LENGTH, MAX_FRAME_BYTES, framed
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.rpc.handshake import (
    HANDSHAKE_TIMEOUT_S,
    WELCOME,
    check_welcome,
    connect_tcp,
    prove_as_async_client,
)
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.mutual_tls import welcome_failure
from kvtransfer.rpc.tls_layer import TlsLayer
from kvtransfer.rpc.trust import Trust

LinkKind = Literal["link", "peer"]

_PING = framed(b"")
_PING_S = 1.5
_NUM_SILENT_PINGS = 6
_STOP_GRACE_S = 1.0
_BACKLOG = 128
_MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
# Frames that wait for `receive` beyond this many bytes stop the reading, until they are taken.
_MAX_UNREAD_BYTES = 1 << 20
# After this number of frames that had come already, a receiver lets others have their turns of the event
# loop: what came while this process did not run may be much.
MOST_AT_ONCE = 4
# A frame longer than this is not joined with its header before it is written.
_JOINED_BYTES = 64 << 10
_STAGED_BYTES = 64 << 10
# No name of a kind of link is longer.
_KIND_BYTES = 16

# The field `tcpi_unacked` of Linux's `struct tcp_info`: segments that were sent and not acknowledged.
_UNACKNOWLEDGED = struct.Struct("=I")
_UNACKNOWLEDGED_AT = 24
_TCP_INFO_BYTES = 104

_log = logging.getLogger("tandem.links")

_Handler = Callable[["FrameStream"], Awaitable[None]]


class FrameStream(asyncio.BufferedProtocol):
    """One side of an open, proven stream. `send` never blocks; frames arrive in order.

    A reader that falls `_MAX_QUEUED_BYTES` behind loses the stream, or its frames would take all memory here.
    With a heartbeat, which both sides then need, so does one from which nothing has come for
    `_NUM_SILENT_PINGS` times `_PING_S` seconds. A frame that is announced with more than `max_bytes`, the
    first one with more than `max_first_bytes`, ends the stream before memory is taken for it; memory for a
    shorter one is taken as its bytes come.
    """

    def __init__(
        self,
        name: str,
        *,
        has_heartbeat: bool,
        max_bytes: int = MAX_FRAME_BYTES,
        max_first_bytes: int | None = None,
    ) -> None:
        self.name = name
        self._has_heartbeat = has_heartbeat
        self._max_bytes = max_bytes
        self._max_next_bytes = max_bytes if max_first_bytes is None else max_first_bytes
        self._transport: asyncio.Transport | None = None
        self._staged = bytearray(_STAGED_BYTES)
        self._num_staged_bytes = 0
        self._long: bytearray | None = None  # a frame that does not fit there, as far as it has come
        self._long_length = 0
        self._num_long_bytes = 0
        self._frames: deque[bytes] = deque()
        self._num_unread_bytes = 0
        self._is_paused = False
        self._has_heard = self._has_sent = False
        self._num_silent = 0
        self._waiting: asyncio.Future[None] | None = None
        self._pinging: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._has_ended = False  # the other side sends nothing more
        # Frames taken since the receiver last waited.
        self._num_at_once = 0
        self._is_over = asyncio.get_running_loop().create_future()
        # The error by which the connection was lost.
        self.error: Exception | None = None

    @property
    def closed(self) -> bool:
        return self._is_closed or self._is_over.done()

    def allow(self, max_bytes: int) -> None:
        """Take frames of up to `max_bytes` bytes from now on."""
        self._max_bytes = self._max_next_bytes = max_bytes

    def send(self, frame: bytes) -> None:
        """Queue a frame; dropped when the stream is closed (its reader sees the end)."""
        if self.closed or self._transport is None or self._transport.is_closing():
            return
        if len(frame) > MAX_FRAME_BYTES:
            _log.error("%s: a frame of %d bytes is more than any reader takes", self.name, len(frame))
            self.abort()
            return
        self._has_sent = True
        header = LENGTH.pack(len(frame))
        if len(frame) <= _JOINED_BYTES:
            self._transport.write(header + frame)
        else:
            self._transport.write(header)
            self._transport.write(memoryview(frame))  # of which the loop keeps the rest without a copy
        num_queued_bytes = self._transport.get_write_buffer_size()
        if num_queued_bytes > _MAX_QUEUED_BYTES:
            _log.error("%s does not read: %d bytes wait for it", self.name, num_queued_bytes)
            self.abort()

    async def receive(self) -> bytes | None:
        """Return the next frame, or None when the stream has ended (for whatever reason)."""
        while not self._is_closed:
            if self._frames and self._num_at_once < MOST_AT_ONCE:
                self._num_at_once += 1
                return self._take()
            self._num_at_once = 0
            if self._has_ended and not self._frames:
                self.close()
                break
            assert self._waiting is None, "one task receives"
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            if self._frames:
                loop.call_soon(self._wake)
            try:
                await self._waiting
            finally:
                self._waiting = None
        return None

    async def next_frame(self) -> bytes:
        """Return the next frame; `PeerGoneError` when the stream has ended."""
        frame = await self.receive()
        if frame is None:
            raise PeerGoneError("connection closed by the other side")
        return frame

    @property
    def num_unread(self) -> int:
        """Frames that have come and were not received."""
        return len(self._frames)

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_acknowledged(self) -> bool:
        """Whether the other host has acknowledged all that was sent, as it does for a process that is stopped
        too; False where that is not known."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None or self.closed or sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return False
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (num_unacknowledged,) = _UNACKNOWLEDGED.unpack_from(info, _UNACKNOWLEDGED_AT)
        return bool(num_unacknowledged == 0)

    def ping(self) -> None:
        """Send an empty frame now, which the other side does not answer but its host acknowledges."""
        if not self.closed and self._transport is not None and not self._transport.is_closing():
            self._transport.write(_PING)

    def close(self) -> None:
        """End the stream after the frames that were sent; both sides' `receive` return None."""
        if self._is_closed:
            return
        self._is_closed = True
        self._frames.clear()
        self._wake()
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # reset by the other side, of which the event loop has not heard yet
            self._transport.abort()
            return
        if self._has_ended:
            self._transport.close()
            return
        # To close at once would reset the connection and drop what is on its way: the other side ends first.
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._give_up_later()

    def abort(self) -> None:
        """End the stream at once, even with frames still to be sent."""
        self.close()
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Return when the connection is gone."""
        await asyncio.shield(self._is_over)

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._has_heartbeat:
            self._ping_later()

    def get_buffer(self, _: int) -> memoryview:
        if self._long is not None:
            return memoryview(self._long)[self._num_long_bytes :]
        return memoryview(self._staged)[self._num_staged_bytes :]

    def buffer_updated(self, num_bytes: int) -> None:
        self._has_heard = True
        if self._is_closed:
            return
        if self._long is None:
            self._num_staged_bytes += num_bytes
            self._unpack()
        else:
            self._num_long_bytes += num_bytes
            if self._num_long_bytes == self._long_length:
                self._append(bytes(self._long))
                self._long = None
            elif self._num_long_bytes == len(self._long):
                self._long = self._long + bytes(min(len(self._long), self._long_length - len(self._long)))
        if self._frames:
            self._wake()
        if self._num_unread_bytes > _MAX_UNREAD_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._has_ended = True
        self._wake()
        if self._is_closed and self._transport is not None:
            self._transport.close()
        return True  # what is still to be sent is sent; `close` then ends it

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = True
        self.error = error
        if self._pinging is not None:
            self._pinging.cancel()
        self._wake()
        if not self._is_over.done():
            self._is_over.set_result(None)

    # ------------------------------------------------------------------------------- private

    def _unpack(self) -> None:
        """Take the whole frames out of the staged bytes; one that cannot fit there gets a buffer of its
        own."""
        start, end = 0, self._num_staged_bytes
        while end - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._staged, start)
            if length > self._max_next_bytes:
                _log.warning(
                    "%s announced a frame of %d bytes and is cut off, %d are the most here",
                    self.name,
                    length,
                    self._max_next_bytes,
                )
                self.abort()
                return
            first = start + LENGTH.size
            if length:
                self._max_next_bytes = self._max_bytes
            if first + length <= end:
                if length:
                    self._append(bytes(memoryview(self._staged)[first : first + length]))
                start = first + length
                continue
            if length > _STAGED_BYTES - LENGTH.size:
                self._long = bytearray(min(length, _STAGED_BYTES))
                self._long_length = length
                self._num_long_bytes = end - first
                self._long[: end - first] = memoryview(self._staged)[first:end]
                start = end
            break
        self._staged[: end - start] = self._staged[start:end]
        self._num_staged_bytes = end - start

    def _append(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._num_unread_bytes += len(frame)

    def _take(self) -> bytes:
        frame = self._frames.popleft()
        self._num_unread_bytes -= len(frame)
        if self._is_paused and self._num_unread_bytes <= _MAX_UNREAD_BYTES:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return frame

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _ping_later(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(_PING_S, self._ping)

    def _ping(self) -> None:
        # Turns are counted rather than seconds: after a pause of this process, the bytes that came are read.
        assert self._transport is not None
        if not self._has_sent and not self._is_closed:
            self._transport.write(_PING)
        self._num_silent = 0 if self._has_heard or self._is_paused else self._num_silent + 1
        self._has_heard = self._has_sent = False
        if self._num_silent >= _NUM_SILENT_PINGS:
            _log.warning("%s: nothing has come for %g s", self.name, _NUM_SILENT_PINGS * _PING_S)
            self.abort()
        else:
            self._ping_later()

    def _give_up_later(self) -> None:
        assert self._transport is not None
        num_unsent_bytes = self._transport.get_write_buffer_size()
        asyncio.get_running_loop().call_later(_STOP_GRACE_S, self._give_up, num_unsent_bytes)

    def _give_up(self, num_unsent_bytes: int) -> None:
        """Abort unless the connection is over, or some of the unsent bytes have been sent since."""
        assert self._transport is not None
        if self._is_over.done():
            return
        if self._transport.get_write_buffer_size() < num_unsent_bytes:
            self._give_up_later()
        else:
            self._transport.abort()


async def open_unix(
    socket_name: str, trust: Trust, name: str, *, max_bytes: int = MAX_FRAME_BYTES
) -> FrameStream:
    """Connect to an abstract unix socket and prove the secret. Frames have at most `max_bytes`.

    Raises `ProofError` when the other side does not know the secret, `PeerGoneError` when it cannot be
    reached within 10 s.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)

    async def connect() -> socket.socket:
        await asyncio.get_running_loop().sock_connect(sock, f"\0{socket_name}")
        return sock

    with sock:
        return await _open(connect(), socket_name, trust, name, max_bytes=max_bytes)


async def open_tcp(
    address: str, trust: Trust, name: str, *, has_heartbeat: bool = False, max_bytes: int = MAX_FRAME_BYTES
) -> FrameStream:
    """Connect to "host:port", as `open_unix` does to a unix socket."""
    connecting = connect_tcp(address)
    return await _open(connecting, address, trust, name, has_heartbeat=has_heartbeat, max_bytes=max_bytes)


async def open_link(
    address: str, kind: LinkKind, trust: Trust, name: str, *, max_bytes: int = MAX_FRAME_BYTES
) -> FrameStream:
    """Open a link to the `LinkServer` of a replica, as `open_tcp` does."""
    stream = await open_tcp(address, trust, name, has_heartbeat=True, max_bytes=max_bytes)
    stream.send(kind.encode())
    return stream


async def frame_stream(
    sock: socket.socket,
    name: str,
    tls: ssl.SSLContext | None = None,
    *,
    has_heartbeat: bool = False,
    max_bytes: int = MAX_FRAME_BYTES,
    max_first_bytes: int | None = None,
) -> FrameStream:
    """Return the stream over a proven connection, which it takes over; for its limits see `FrameStream`. The
    text of `TransferError` or `OSError` gives the reason why there is no TLS where `tls` requires it."""
    taken = socket.socket(fileno=sock.detach())
    loop = asyncio.get_running_loop()
    is_unix = taken.family == socket.AF_UNIX
    connect = loop.create_unix_connection if is_unix else loop.create_connection
    try:
        if not is_unix:
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = FrameStream(
            name, has_heartbeat=has_heartbeat, max_bytes=max_bytes, max_first_bytes=max_first_bytes
        )
        layer = None if tls is None else TlsLayer(tls, stream, name)
        await connect(lambda: layer or stream, sock=taken)
    except (OSError, asyncio.CancelledError):
        with contextlib.suppress(OSError):
            taken.close()
        raise
    if layer is not None:
        await _secure(layer, stream)
    return stream


async def _secure(layer: TlsLayer, stream: FrameStream) -> None:
    """Finish the TLS handshake, after which the server sends its welcome."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await layer.opened
            if layer.is_server:
                stream.send(WELCOME)
                return
            frame = await stream.receive()
            if frame is None:
                raise welcome_failure(stream.error, stream.name)
            check_welcome(frame)
    except (TransferError, OSError, asyncio.CancelledError):  # TimeoutError is an OSError
        layer.abort()
        raise


async def _open(
    connecting: Coroutine[None, None, socket.socket],
    address: str,
    trust: Trust,
    name: str,
    *,
    has_heartbeat: bool = False,
    max_bytes: int,
) -> FrameStream:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            with await connecting as sock:
                await prove_as_async_client(sock, trust, name)
                tls = trust.client_tls(sock)
                return await frame_stream(
                    sock, address, tls, has_heartbeat=has_heartbeat, max_bytes=max_bytes
                )
    except (OSError, ValueError, OverflowError) as error:  # TimeoutError is an OSError
        raise PeerGoneError(f"{address} cannot be reached: {error or 'not in time'}") from error


class LinkServer:
    """Serves the links of an engine core: passes each proven Link and Peer link to its handler.

    A handler runs for the life of its stream; when it returns, the stream closes. No frame that comes has
    more than `max_bytes`.
    """

    def __init__(
        self, trust: Trust, on_link: _Handler, on_peer: _Handler, max_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self._trust = trust
        self._max_bytes = max_bytes
        self._handlers: dict[bytes, _Handler] = {b"link": on_link, b"peer": on_peer}
        self._listener: ProvenListener | None = None
        self._tasks = SupervisedTasks()
        self._streams: set[FrameStream] = set()
        self.port = 0

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; return the port (a free one when `port` is 0)."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port = sock.getsockname()[1]
        self._listener = ProvenListener(
            sock, self._trust, self._serve, self._tasks.spawn, SystemClock(), "links"
        )
        return self.port

    async def stop(self) -> None:
        """Take no new streams; cut those that do not end within a moment."""
        if self._listener is not None:
            self._listener.close()
        await self._tasks.wait(_STOP_GRACE_S)
        await self._tasks.close()
        for stream in list(self._streams):
            stream.abort()
            await stream.wait_closed()

    async def _serve(self, sock: socket.socket, name: str) -> None:
        stream = await frame_stream(
            sock,
            name,
            self._trust.server_tls(sock),
            has_heartbeat=True,
            max_bytes=self._max_bytes,
            max_first_bytes=_KIND_BYTES,
        )
        self._streams.add(stream)
        try:
            kind = await stream.receive()
            handler = self._handlers.get(kind or b"")
            if handler is not None:
                await handler(stream)
            elif kind is not None:
                _log.warning("%s opened a link of unknown kind %r", name, kind)
        finally:
            stream.close()
        await stream.wait_closed()
        self._streams.discard(stream)
