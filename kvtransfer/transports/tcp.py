"""TCP between hosts: bytes go from the pool into the socket and from the socket into the pool, uncopied.

Frames: a header (kind, landing id, block, number of bytes), then the bytes of the block's piece in the
order of the target's layout. Two-sided: the receiver looks up the landing for every block frame and takes
bytes into the pool only under the landing's lock and while it is open, each time as many as have arrived
already. So when a landing is closed nothing of it can follow, be the writer dead, stopped or late: the rest
is drained into the scratch area and the landing is named in the next Ack as refused.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import ClassVar

from kvtransfer.errors import PathError, PeerGoneError, TransferError, WireError
from kvtransfer.framing import HANDSHAKE_TIMEOUT_S, receive_exactly, send_frame
from kvtransfer.gate import OpenedLanding
from kvtransfer.layout import Run, plan_runs
from kvtransfer.memory import SCRATCH_BYTES, scratch_offset
from kvtransfer.messages import RankEndpoints
from kvtransfer.transports.base import (
    ACK_CODEC,
    STALLED_S,
    Ack,
    Channel,
    ChannelHello,
    Listener,
    Stopped,
    TargetRank,
    WriterRank,
    greet,
    target_layout,
)

_HEADER = struct.Struct("<B16sIQ")
_BLOCK, _SCRATCH, _SYNC = 1, 2, 3
_NO_LANDING = bytes(16)
_MAX_VECTORS = 512
_BACKLOG = 128


class TcpListener(Listener):
    """Receives blocks into the pool, as far as the gate allows."""

    transport: ClassVar[str] = "tcp"

    def __init__(self, target: TargetRank) -> None:
        sock = socket.create_server((target.data_host, 0), family=_family(target.data_host), backlog=_BACKLOG)
        super().__init__(target, sock, f"{target.data_host}:{sock.getsockname()[1]}")

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        _tune(sock)
        send_frame(sock, self._welcome())
        with contextlib.suppress(PeerGoneError):  # the writer left
            _Receiver(self._target, sock, hello).run()


class _Receiver:
    """One connection's frames, until it ends."""

    def __init__(self, target: TargetRank, sock: socket.socket, hello: ChannelHello) -> None:
        self._gate = target.gate
        self._sock = sock
        self._writer = hello.writer
        self._runs = plan_runs(hello.layout, target.layout)
        self._piece_bytes = sum(run.num_bytes for run in self._runs)
        self._block_bytes = target.layout.block_bytes
        self._pool = target.memory.buffer
        scratch_start = scratch_offset(target.memory.num_bytes)
        self._scratch = target.memory.whole[scratch_start : scratch_start + SCRATCH_BYTES]
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._num_done = 0
        self._refused: list[bytes] = []

    def run(self) -> None:
        while True:
            kind, landing_id, block_id, num_bytes = _HEADER.unpack(receive_exactly(self._sock, _HEADER.size))
            if kind == _BLOCK:
                self._receive_block(landing_id, block_id, num_bytes)
            elif kind == _SCRATCH:
                self._drain(num_bytes)
            elif kind == _SYNC:
                self._num_done += 1
                send_frame(self._sock, ACK_CODEC.encode(Ack(self._num_done, tuple(self._refused))))
                self._refused.clear()
            else:
                raise WireError(f"no frame of kind {kind}")

    def _receive_block(self, landing_id: bytes, block_id: int, num_bytes: int) -> None:
        if num_bytes != self._piece_bytes:
            raise WireError(f"a block frame of {num_bytes} bytes, expected {self._piece_bytes}")
        landing = self._gate.find(landing_id, self._writer)
        if landing is not None and block_id in landing.block_ids:
            num_bytes -= self._receive_into(landing, block_id)
        if num_bytes:
            self._drain(num_bytes)
            if landing_id not in self._refused:
                self._refused.append(landing_id)

    def _receive_into(self, landing: OpenedLanding, block_id: int) -> int:
        """Receive into the block while the landing is open; returns the number of bytes taken."""
        views = _views(self._pool, block_id * self._block_bytes, [run[1:] for run in self._runs])
        num_taken = 0
        while views:
            with landing.lock:
                if not landing.is_open:
                    break
                count = self._receive_some(views)
            if count == 0:
                self._readable.poll()
            num_taken += count
            _consume(views, count)
        return num_taken

    def _drain(self, num_bytes: int) -> None:
        while num_bytes:
            count = self._receive_some([self._scratch[: min(num_bytes, SCRATCH_BYTES)]])
            if count == 0:
                self._readable.poll()
            num_bytes -= count

    def _receive_some(self, views: list[memoryview]) -> int:
        """Take what has arrived, without waiting; 0: nothing has. `PeerGoneError` at the end."""
        try:
            count, _, _, _ = self._sock.recvmsg_into(views[:_MAX_VECTORS], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving: {error}") from error
        if count == 0:
            raise PeerGoneError("connection closed by the other side")
        return count


class TcpChannel(Channel):
    """Sends frames; one socket per writer rank and target rank."""

    transport: ClassVar[str] = "tcp"

    def __init__(
        self, sock: socket.socket, rank: WriterRank, target: RankEndpoints, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(sock, rank, target_layout(rank, target.shard), on_lost)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._reader.start()

    def write(
        self,
        landing_id: bytes,
        dst_block: int,
        source: memoryview,
        half: Callable[[], None],
        stopped: Stopped,
    ) -> None:
        header = _HEADER.pack(_BLOCK, landing_id, dst_block, self.num_bytes)
        first, second = self._halves
        self._send([memoryview(header), *_views(source, 0, [_source(run) for run in first])], stopped)
        half()
        self._send(_views(source, 0, [_source(run) for run in second]), stopped)

    def interrupt(self, reason: str = "closed on request") -> None:
        super().interrupt(reason)
        with contextlib.suppress(OSError):  # the target was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def _request_ack(self, stopped: Stopped) -> None:
        self._send([memoryview(_HEADER.pack(_SYNC, _NO_LANDING, 0, 0))], stopped)

    def _write_scratch(self, source: memoryview, stopped: Stopped) -> None:
        header = _HEADER.pack(_SCRATCH, _NO_LANDING, 0, len(source))
        self._send([memoryview(header), source], stopped)

    def _send(self, views: list[memoryview], stopped: Stopped) -> None:
        """Send everything. A frame cannot be left half sent, so a push that is stopped while the target
        takes nothing costs the connection (`PeerGoneError`)."""
        while views:
            self.check()
            try:
                count = self._sock.sendmsg(views[:_MAX_VECTORS], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
                if not self._writable.poll(STALLED_S * 1e3) and stopped():
                    self.interrupt("given up: a push was stopped and the target took no bytes")
            except OSError as error:
                raise PeerGoneError(f"connection lost while sending: {error}") from error
            _consume(views, count)


def listen(target: TargetRank) -> TcpListener:
    return TcpListener(target)


def connect(
    rank: WriterRank,
    target: RankEndpoints,
    address: str,
    connection_id: bytes,
    on_lost: Callable[[str], None],
) -> TcpChannel:
    """Open a channel; `TransferError` says why it could not be."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise PathError(f"tcp {address}: {error}") from error
    try:
        _tune(sock)
        greet(sock, rank, connection_id)
        return TcpChannel(sock, rank, target, on_lost)
    except TransferError:
        sock.close()
        raise


def _tune(sock: socket.socket) -> None:
    """No delay, and a dead host is noticed. The kernel sizes the buffers: a size set by hand is cut to
    `rmem_max`, often far below what it grows them to, and brought nothing where it was not cut."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _source(run: Run) -> tuple[int, int]:
    return run.src_offset, run.num_bytes


def _views(buffer: memoryview, base: int, spans: list[tuple[int, int]]) -> list[memoryview]:
    return [buffer[base + offset : base + offset + count] for offset, count in spans]


def _consume(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of the views."""
    num_whole = 0
    while num_whole < len(views) and count >= len(views[num_whole]):
        count -= len(views[num_whole])
        num_whole += 1
    del views[:num_whole]
    if count:
        views[0] = views[0][count:]
