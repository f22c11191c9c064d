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
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError, TransferError
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S
from kvtransfer.rpc.listener import shut_down
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports.base import Channel, Listener, TargetRank, WriterRank
from kvtransfer.transports.stream_sockets import (
    ChannelHello,
    Connection,
    Stopped,
    greet,
    opening,
)
from kvtransfer.transports.tcp_stream import FRAME_BYTES, StreamReceiver, StreamSender, Task

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
        self._send_welcome(sock, hello)
        pool, gate = self._target.group_to_pool[hello.group], self._target.gate
        with contextlib.suppress(PeerGoneError):  # the writer left
            StreamReceiver(pool, gate, sock, hello.writer, hello.piece, hello.group).run()


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
        """Do one stream's part: `send` frames until none is left or one has failed."""
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
        """Wait until no stream works on it any more; return the results of `send`, in order, or raise the
        first error."""
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
        self._tasks: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in connections[1:]]
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

    def _send(self, sender: StreamSender, tasks: queue.SimpleQueue[Task | None]) -> None:
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
    """Open a channel; the text of `TransferError` gives the reason of a failure."""
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
    """Set no delay, and keepalive to notice a dead host. The kernel sizes the buffers: a size set by hand is
    cut to `rmem_max`, often far below the kernel's own growth, and brought nothing where it was not cut."""
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
    """Return the address family of an address or a name to listen on."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
