"""TCP between hosts: several connections per lane, each with a thread of its own at either end.

Two-sided: the receiver puts bytes into the pool only while the landing is open
(`OpenedLanding.start_receiving`), each time as many as have arrived already. So when a landing is closed
nothing of it can follow, be the writer dead, stopped or late: the rest is drained and the landing is named in
the next Ack as refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtransfer.blocks.pool import HostPool, KvPool, piece_table
from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError, TransferError, WireError
from kvtransfer.messages import BlockMove, Lane, ReplicaIdentity, Shard
from kvtransfer.protocol.fence import Gate, OpenedLanding
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, receive_exactly, send_frame
from kvtransfer.rpc.listener import shut_down
from kvtransfer.rpc.mutual_tls import TlsSocket
from kvtransfer.transports.base import (
    ACK_CODEC,
    STALLED_S,
    Ack,
    Channel,
    ChannelHello,
    Connection,
    Listener,
    Stopped,
    TargetRank,
    WriterRank,
    greet,
    opening,
)

_BACKLOG = 128

Frame = TypeVar("Frame")
Result = TypeVar("Result")


class TcpListener(Listener):
    """Receives blocks into the pool, as far as the gate allows."""

    transport = "tcp"

    def __init__(self, target: TargetRank) -> None:
        super().__init__(target, *listen_tcp(target))

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        tune(sock)
        self._send_welcome(sock)
        with contextlib.suppress(PeerGoneError):  # the writer left
            StreamReceiver(self._target.pool, self._target.gate, sock, hello.writer, hello.piece).run()


class _Job(Generic[Frame, Result]):
    """Frames that the channel's streams share: each takes the next when it has sent one."""

    def __init__(self, frames: Sequence[Frame], num_streams: int, stopped: Stopped) -> None:
        self._stopped = stopped
        self._frames = enumerate(frames)
        self._results: dict[int, Result] = {}
        self._num_working = self.num_streams = min(num_streams, len(frames))
        self._changed = threading.Condition()
        self._error: TransferError | None = None

    def work(self, send: Callable[[Frame, Stopped], Result]) -> None:
        """One stream's part: `send` frames until none is left or one has failed."""
        error: TransferError | None = PeerGoneError("a sending thread failed")
        try:
            while (taken := self._take()) is not None:
                self._results[taken[0]] = send(taken[1], self._stopped)
            error = None
        except TransferError as failure:
            error = failure
        finally:
            with self._changed:
                self._error = self._error or error
                self._num_working -= 1
                self._changed.notify_all()

    def finish(self) -> list[Result]:
        """Wait until no stream works on it any more; what `send` returned, in order, or the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_working == 0)
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(len(self._results))]

    def _take(self) -> tuple[int, Frame] | None:
        with self._changed:
            if self._error is not None:
                return None
            if self._stopped():
                raise PushStoppedError("stopped on request")
            return next(self._frames, None)


class TcpChannel(Channel):
    """Deals frames out over its streams: the writing thread sends on the first, others on the rest."""

    transport = "tcp"

    def __init__(
        self,
        rank: WriterRank,
        lane: Lane,
        connections: Sequence[Connection],
        num_blocks: int,
        on_lost: Callable[[str], None],
    ) -> None:
        device = interface_of(connections[0].sock.getsockname()[0])
        super().__init__(rank, lane, connections, num_blocks, device, on_lost)
        self._streams = [StreamSender(connection, rank.pool, lane.piece) for connection in connections]
        self._tasks: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in connections[1:]]
        self._threads = [
            threading.Thread(target=self._send, args=pair, name="tcp-send", daemon=True)
            for pair in zip(self._streams[1:], self._tasks, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def interrupt(self, reason: str = "closed on request") -> None:
        super().interrupt(reason)
        for connection in self._connections:
            shut_down(connection.sock)

    def close(self) -> None:
        self.interrupt()
        for tasks, thread in zip(self._tasks, self._threads, strict=True):
            tasks.put(None)
            thread.join()
        super().close()

    def _write_batch(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        def send(sender: StreamSender, frame: Sequence[BlockMove], stopped: Stopped) -> list[int]:
            return sender.send_blocks(landing_id, frame, stopped)

        count = self._streams[0].packing.blocks_per_frame
        frames = [moves[start : start + count] for start in range(0, len(moves), count)]
        return list(itertools.chain.from_iterable(self._share(send, frames, stopped)))

    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        def send(sender: StreamSender, frame: BlockMove, stopped: Stopped) -> int:
            half = functools.partial(self._faults.at, "push.half")
            return sender.send_block(landing_id, frame, corrupt, half, stopped)

        return self._share(send, [move], stopped)[0]

    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        source = memoryview(bytes(num_bytes))
        frames = [source[start : start + FRAME_BYTES] for start in range(0, num_bytes, FRAME_BYTES)]

        def send(sender: StreamSender, frame: memoryview, _: Stopped) -> None:
            sender.send_scratch(frame, stopped)

        self._share(send, frames, lambda: False)  # `stopped` counts how often it is asked: only when stalled

    def _request_ack(self, connection: Connection, stopped: Stopped) -> None:
        self._streams[self._connections.index(connection)].request_ack(stopped)

    def _share(
        self,
        send: Callable[[StreamSender, Frame, Stopped], Result],
        frames: Sequence[Frame],
        stopped: Stopped,
    ) -> list[Result]:
        """Send the frames over all streams; returns when none of them works on one any more."""
        job: _Job[Frame, Result] = _Job(frames, len(self._streams), stopped)

        def send_or_end(sender: StreamSender, frame: Frame, stopped: Stopped) -> Result:
            try:
                return send(sender, frame, stopped)
            except PeerGoneError as error:
                self.interrupt(str(error))  # a frame is half sent; the other streams end too
                raise

        def work(sender: StreamSender) -> None:
            job.work(functools.partial(send_or_end, sender))

        for tasks in self._tasks[: max(0, job.num_streams - 1)]:
            tasks.put(work)
        if frames:
            work(self._streams[0])
        return job.finish()

    def _send(self, sender: StreamSender, tasks: queue.SimpleQueue[_Task | None]) -> None:
        reason = "a sending thread failed"
        try:
            while (work := tasks.get()) is not None:
                work(sender)
            reason = "closed on request"
        finally:
            self.interrupt(reason)


def listen(target: TargetRank) -> TcpListener:
    return TcpListener(target)


def connect(
    rank: WriterRank, lane: Lane, address: str, connection_id: bytes, on_lost: Callable[[str], None]
) -> TcpChannel:
    """Open a channel; `TransferError` says why it could not be."""
    hello = rank.hello(lane, connection_id)
    connections: list[Connection] = []
    with opening("tcp", address) as undo:
        for _ in range(rank.settings.tcp_streams):
            sock, welcome = greet(undo, open_socket(address), rank.trust, hello)
            connections.append(Connection(sock, "tcp"))
        channel = TcpChannel(rank, lane, connections, welcome.num_blocks, on_lost)
    channel.start()
    return channel


def listen_tcp(target: TargetRank) -> tuple[socket.socket, str]:
    """Return a socket that listens on the address for KV, and its "host:port"."""
    host = target.settings.data_host
    sock = socket.create_server((host, 0), family=family(host), backlog=_BACKLOG)
    return sock, f"{host}:{sock.getsockname()[1]}"


def open_socket(address: str) -> socket.socket:
    """Connect to a listener of "host:port" and `tune` it; `PathError` when it cannot be reached."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise PathError(f"{address}: {error}") from error
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """No delay, and a dead host is noticed. The kernel sizes the buffers: a size set by hand is cut to
    `rmem_max`, often far below what it grows them to, and brought nothing where it was not cut."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address; the address itself when none has, or
    where psutil is not installed: ranks need it for nothing else."""
    try:
        import psutil
    except ModuleNotFoundError:
        return address
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return address


def family(host: str) -> socket.AddressFamily:
    """Of an address or a name to listen on."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# ----------------------------------------------------------------------------------------------
# The two ends of one TCP connection of a lane: what a frame is, who puts its bytes where.
#
# A frame is a header (kind, landing id, number of blocks, number of bytes), the block ids, then the packed
# pieces of those blocks. Long runs go from the pool into the socket and from the socket into the pool,
# uncopied; short ones, and pools on a device, are packed in staging memory.

_HEADER = struct.Struct("<B16sIQ")
_BLOCKS, _SCRATCH, _SYNC = 1, 2, 3
_NO_LANDING = bytes(16)
FRAME_BYTES = 1 << 20
# Pieces whose runs are shorter on average are packed before they are sent, and unpacked after: at 2 KiB that
# is as fast as a vector of runs, from 4 KiB on slower. A sender over TLS packs all that are shorter than a
# frame, since each call encrypts one run.
_SHORT_RUN_BYTES = 4 << 10
_MAX_VECTORS = 512


class Packing:
    """How a lane's pieces lie in one rank's pool: in place where that is worth it, else in staging memory."""

    def __init__(self, pool: KvPool, piece: Shard, *, min_run_bytes: int = _SHORT_RUN_BYTES) -> None:
        self.pool = pool
        self.piece = piece
        self.piece_bytes = pool.piece_bytes(piece)
        self.blocks_per_frame = max(1, FRAME_BYTES // self.piece_bytes)
        runs = piece_table(pool.layout, piece).runs
        self._spans = [(run.src_offset, run.src_offset + run.num_bytes) for run in runs]
        short = self.piece_bytes < min_run_bytes * len(runs)
        self._buffer = pool.memory.buffer if isinstance(pool, HostPool) and not short else None

    @property
    def in_place(self) -> bool:
        return self._buffer is not None

    def allocate_staging(self) -> memoryview:
        """Allocate memory for the packed pieces of a frame."""
        return self.pool.allocate_staging(self.blocks_per_frame * self.piece_bytes)

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The pieces' bytes where they lie, in the order in which they are sent."""
        assert self._buffer is not None
        starts = [block_id * self.pool.layout.block_bytes for block_id in block_ids]
        return [self._buffer[base + start : base + end] for base in starts for start, end in self._spans]


class StreamReceiver:
    """One connection's frames, until it ends."""

    def __init__(
        self, pool: KvPool, gate: Gate, sock: socket.socket, writer: ReplicaIdentity, piece: Shard
    ) -> None:
        self._gate = gate
        self._sock = sock
        self._writer = writer
        self._packing = Packing(pool, piece)
        self._staging = memoryview(b"") if self._packing.in_place else self._packing.allocate_staging()
        self._waste = memoryview(bytearray(FRAME_BYTES))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._num_done = 0
        self._refused: list[bytes] = []

    def run(self) -> None:
        while True:
            kind, landing_id, num_blocks, num_bytes = _HEADER.unpack(
                receive_exactly(self._sock, _HEADER.size)
            )
            if kind == _BLOCKS:
                self._receive_blocks(landing_id, num_blocks, num_bytes)
            elif kind == _SCRATCH:
                self._drain(num_bytes)
            elif kind == _SYNC:
                self._num_done += 1
                send_frame(self._sock, ACK_CODEC.encode(Ack(self._num_done, tuple(self._refused))))
                self._refused.clear()
            else:
                raise WireError(f"no frame of kind {kind}")

    def _receive_blocks(self, landing_id: bytes, num_blocks: int, num_bytes: int) -> None:
        packing = self._packing
        if not 0 < num_blocks <= packing.blocks_per_frame or num_bytes != num_blocks * packing.piece_bytes:
            raise WireError(f"{num_blocks} pieces of {packing.piece_bytes} bytes in a frame of {num_bytes}")
        ids = struct.unpack(f"<{num_blocks}I", receive_exactly(self._sock, 4 * num_blocks))
        landing = self._gate.find(landing_id, self._writer)
        if landing is None or not landing.block_ids.issuperset(ids):
            self._drain(num_bytes)
            is_taken = False
        elif packing.in_place:
            is_taken = self._receive_in_place(landing, ids)
        else:
            is_taken = self._receive_packed(landing, ids, num_bytes)
        if not is_taken and landing_id not in self._refused:
            self._refused.append(landing_id)

    def _receive_in_place(self, landing: OpenedLanding, block_ids: Sequence[int]) -> bool:
        """Into the blocks while the landing is open; False when it was closed before the last byte."""
        views = self._packing.views(block_ids)
        while views:
            if not landing.start_receiving():
                self._drain(sum(len(view) for view in views))
                return False
            try:
                count = self._receive_some(views)
            finally:
                landing.end_receiving()
            if count == 0:
                self._readable.poll()
            _consume(views, count)
        return True

    def _receive_packed(self, landing: OpenedLanding, block_ids: Sequence[int], num_bytes: int) -> bool:
        staging = self._staging[:num_bytes]
        self._receive_all(staging)
        if not landing.start_receiving():
            return False
        try:
            self._packing.pool.scatter(block_ids, self._packing.piece, staging)
        finally:
            landing.end_receiving()
        return True

    def _drain(self, num_bytes: int) -> None:
        while num_bytes:
            count = min(num_bytes, len(self._waste))
            self._receive_all(self._waste[:count])
            num_bytes -= count

    def _receive_all(self, buffer: memoryview) -> None:
        views = [buffer]
        while views:
            count = self._receive_some(views)
            if count == 0:
                self._readable.poll()
            _consume(views, count)

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


class StreamSender:
    """One connection's sending side, used by one thread at a time."""

    def __init__(self, connection: Connection, pool: KvPool, piece: Shard) -> None:
        self.connection = connection
        is_encrypted = isinstance(connection.sock, TlsSocket)
        self.packing = Packing(pool, piece, min_run_bytes=FRAME_BYTES if is_encrypted else _SHORT_RUN_BYTES)
        self._sock = connection.sock
        self._staging: memoryview | None = None
        self._writable = select.poll()
        self._writable.register(self._sock, select.POLLOUT)

    def send_blocks(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        """Sum the pieces, which brings them into the cache, and send them."""
        packing = self.packing
        ids = [move.src_block for move in moves]
        header = self._header(landing_id, moves)
        if packing.in_place:
            sums = packing.pool.sums(ids, packing.piece)
            self.send([header, *packing.views(ids)], stopped)
            return sums
        sums, packed = self._pack(ids)
        self.send([header, packed], stopped)
        return sums

    def send_block(
        self, landing_id: bytes, move: BlockMove, corrupt: bool, half: Callable[[], object], stopped: Stopped
    ) -> int:
        """The same for one block, with `half` called in the middle of its bytes."""
        (checksum,), packed = self._pack([move.src_block])
        packed[0] ^= corrupt
        middle = len(packed) // 2
        self.send([self._header(landing_id, [move]), packed[:middle]], stopped)
        half()
        self.send([packed[middle:]], stopped)
        return checksum

    def send(self, views: list[memoryview], stopped: Stopped) -> None:
        """Send everything. A frame cannot be left half sent, so a push that is stopped while the target
        takes nothing costs the connection (`PeerGoneError`)."""
        while views:
            self.connection.check()
            try:
                count = self._sock.sendmsg(views[:_MAX_VECTORS], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
                if not self._writable.poll(STALLED_S * 1e3) and stopped():
                    reason = "given up: a push was stopped and the target took no bytes"
                    raise PeerGoneError(reason) from None
            except OSError as error:
                raise PeerGoneError(f"connection lost while sending: {error}") from error
            _consume(views, count)

    def send_scratch(self, source: memoryview, stopped: Stopped) -> None:
        header = _HEADER.pack(_SCRATCH, _NO_LANDING, 0, len(source))
        self.send([memoryview(header), source], stopped)

    def request_ack(self, stopped: Stopped) -> None:
        self.send([memoryview(_HEADER.pack(_SYNC, _NO_LANDING, 0, 0))], stopped)

    def _header(self, landing_id: bytes, moves: Sequence[BlockMove]) -> memoryview:
        num_bytes = len(moves) * self.packing.piece_bytes
        ids = struct.pack(f"<{len(moves)}I", *(move.dst_block for move in moves))
        return memoryview(_HEADER.pack(_BLOCKS, landing_id, len(moves), num_bytes) + ids)

    def _pack(self, block_ids: Sequence[int]) -> tuple[list[int], memoryview]:
        if self._staging is None:
            self._staging = self.packing.allocate_staging()
        sums = self.packing.pool.gather(block_ids, self.packing.piece, self._staging)
        return sums, self._staging[: len(block_ids) * self.packing.piece_bytes]


def _consume(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of the views."""
    num_whole = 0
    while num_whole < len(views) and count >= len(views[num_whole]):
        count -= len(views[num_whole])
        num_whole += 1
    del views[:num_whole]
    if count:
        views[0] = views[0][count:]


_Task = Callable[[StreamSender], None]
