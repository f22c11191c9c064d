"""What a transport is: a `Listener` at the target rank and a `Channel` at the writer rank.

Register and describe: the listener makes the rank's pool reachable and names it in an `Endpoint`.
Write: `Channel.begin(landing)`, then `write` block by block; each moves what both ranks' shards hold.
Completion: when `flush` returns, everything written is visible in the target's memory.
Abort: `stopped()` is asked wherever a write could wait; then it ends with `PushStoppedError`.
Close: `Channel.close` by the writing thread; `interrupt` from any thread makes it come soon.

Every connection is one stream socket: proof of the secret, `ChannelHello`, `ChannelWelcome` (or a refusal),
then what the transport needs. The target answers requests in order with `Ack`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from kvtransfer.clock import Clock
from kvtransfer.errors import IncompatibleError, PathError, PeerGoneError, PushStoppedError, TransferError
from kvtransfer.framing import (
    HANDSHAKE_TIMEOUT_S,
    prove_as_client,
    prove_as_server,
    receive_frame,
    send_frame,
)
from kvtransfer.gate import Gate, RecentIds
from kvtransfer.layout import BlockLayout, Run, plan_runs, split_runs
from kvtransfer.memory import KvMemory
from kvtransfer.messages import PROTOCOL_VERSION, Endpoint, ReplicaIdentity, Shard
from kvtransfer.wire import Codec, Message

STALLED_S = 1.0
"""A stopped push waits this long for a target that neither reads nor answers before it gives up."""

_MAX_UNPROVEN = 64
_NUM_ROUND_TRIPS = 8
_NUM_RATE_PASSES = 2
_MEASURE_PATIENCE = 10

Stopped = Callable[[], bool]
"""Asked wherever a write could wait: True when it shall end."""

_log = logging.getLogger(__name__)


class ChannelHello(Message, frozen=True):
    """Writer to target, after the proof: who writes, and how its blocks are laid out."""

    protocol: int
    writer: ReplicaIdentity
    connection_id: bytes
    shard: Shard
    head_dim: int
    block_tokens: int
    item_bytes: int

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.shard, self.head_dim, self.block_tokens, self.item_bytes)


class ChannelWelcome(Message, frozen=True):
    """Target to writer: accepted. `num_bytes` is the size of the target's pool."""

    num_bytes: int


class ChannelRefusal(Message, frozen=True):
    """Target to writer: not accepted, and why; the connection closes."""

    reason: str


class Ack(Message, frozen=True):
    """Target to writer: the first `num_done` requests are done, and so is all that was sent before them.
    `refused` are landings of which something was not accepted since the Ack before."""

    num_done: int
    refused: tuple[bytes, ...]


HELLO_CODEC: Codec[ChannelHello | ChannelWelcome | ChannelRefusal] = Codec(
    ChannelHello | ChannelWelcome | ChannelRefusal
)
ACK_CODEC: Codec[Ack] = Codec(Ack)


@dataclass(frozen=True)
class TargetRank:
    """What a listener serves: this rank's pool behind its gate."""

    layout: BlockLayout
    memory: KvMemory
    gate: Gate
    secret: bytes
    data_host: str


@dataclass(frozen=True)
class WriterRank:
    """What a channel writes from, and for whom."""

    identity: ReplicaIdentity
    rank: int
    layout: BlockLayout
    memory: KvMemory
    secret: bytes

    def hello(self, connection_id: bytes) -> ChannelHello:
        layout = self.layout
        return ChannelHello(
            PROTOCOL_VERSION,
            self.identity,
            connection_id,
            layout.shard,
            layout.head_dim,
            layout.block_tokens,
            layout.item_bytes,
        )


class Measured(NamedTuple):
    """A path's rate (1e9 bytes a second) and one-way latency."""

    gb_s: float
    latency_us: float


class Listener(ABC):
    """The target's side: accepts connections, proves them, and serves each on a thread of its own.

    Whatever arrives on a connection that is not of the protocol closes that connection only.
    """

    transport: ClassVar[str]

    def __init__(self, target: TargetRank, sock: socket.socket, address: str) -> None:
        self._target = target
        self._sock = sock
        self._endpoint = Endpoint(self.transport, address)
        self._closing = threading.Event()
        self._unproven = threading.BoundedSemaphore(_MAX_UNPROVEN)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name=f"{self.transport}-listen", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def close(self) -> None:
        """Stop listening and end every connection; returns when its threads have ended."""
        self._closing.set()
        _shut_down(self._sock)
        self._thread.join()
        self._sock.close()
        with self._lock:
            connections = dict(self._connections)
        for sock in connections:
            _shut_down(sock)
        for thread in connections.values():
            thread.join()

    @abstractmethod
    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        """Serve one accepted writer until its connection ends (sends the welcome first)."""

    def _welcome(self) -> bytes:
        return HELLO_CODEC.encode(ChannelWelcome(self._target.memory.num_bytes))

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if not self._closing.wait(0.1):  # no descriptors left, or the connection is gone already
                    _log.warning("%s: accept failed: %s", self.transport, error)
                continue
            if not self._unproven.acquire(blocking=False):
                sock.close()
                continue
            thread = threading.Thread(
                target=self._run, args=(sock,), name=f"{self.transport}-serve", daemon=True
            )
            with self._lock:
                self._connections[sock] = thread
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        try:
            with sock:
                hello = self._prove(sock)
                self._serve(sock, hello)
        except (TransferError, OSError) as error:
            if not self._closing.is_set():
                _log.warning("%s: a connection was closed: %s", self.transport, error)
        finally:
            with self._lock:
                self._connections.pop(sock, None)

    def _prove(self, sock: socket.socket) -> ChannelHello:
        """Check the secret and the layout; raises after telling the writer why it is refused."""
        try:
            prove_as_server(sock, self._target.secret)
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            hello = HELLO_CODEC.decode(receive_frame(sock))
            sock.settimeout(None)
        finally:
            self._unproven.release()
        try:
            if not isinstance(hello, ChannelHello) or hello.protocol != PROTOCOL_VERSION:
                raise IncompatibleError(f"expected ChannelHello of protocol {PROTOCOL_VERSION}")
            plan_runs(hello.layout, self._target.layout)
        except IncompatibleError as error:
            send_frame(sock, HELLO_CODEC.encode(ChannelRefusal(str(error))))
            raise
        return hello


class Channel(ABC):
    """The writer's side, used by one writing thread; a second thread reads the target's answers.

    `on_lost(reason)` is called once, from that second thread, when the target closes or dies.
    """

    transport: ClassVar[str]

    def __init__(
        self, sock: socket.socket, rank: WriterRank, target: BlockLayout, on_lost: Callable[[str], None]
    ) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._on_lost = on_lost
        self._target = target
        runs = plan_runs(rank.layout, target)
        self.num_bytes = sum(run.num_bytes for run in runs)
        """Bytes that one block moves."""
        self._halves: tuple[list[Run], list[Run]] = split_runs(runs, self.num_bytes // 2)
        self._answered = threading.Condition()
        self._num_requests = 0
        self._num_done = 0
        self._refused = RecentIds()
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name=f"{self.transport}-acks", daemon=True)

    def begin(self, landing_id: bytes, stopped: Stopped) -> None:
        """Before the first `write` of a push. `PushStoppedError` when the target refuses the landing."""
        self.check()

    @abstractmethod
    def write(
        self,
        landing_id: bytes,
        dst_block: int,
        source: memoryview,
        half: Callable[[], None],
        stopped: Stopped,
    ) -> None:
        """Write a block's bytes (`source`, whole) into the target's block; calls `half` in the middle.

        `PeerGoneError` when the connection is lost.
        """

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        """Return when all that was written is visible. `PushStoppedError` when the target refused any of
        it, or when it was stopped and the target does not answer."""
        self._ask(self._request_ack, stopped)
        self._check_accepted(landing_id)

    def measure(self, clock: Clock, source: memoryview) -> Measured:
        """Time empty round trips, and writes of `source` into the target's scratch area.

        `TransferError` when the target stops answering.
        """
        patience = iter(range(_MEASURE_PATIENCE))

        def stopped() -> bool:
            return next(patience, None) is None

        latency_s = min(self._timed(clock, None, stopped) for _ in range(_NUM_ROUND_TRIPS)) / 2
        self._timed(clock, source, stopped)  # the first pass takes the pages
        seconds = min(self._timed(clock, source, stopped) for _ in range(_NUM_RATE_PASSES))
        return Measured(len(source) / max(seconds, 1e-9) / 1e9, latency_s * 1e6)

    def check(self) -> None:
        """`PeerGoneError` when the connection is lost."""
        if self._lost:
            raise PeerGoneError(self._lost)

    @property
    def lost(self) -> str:
        """Why the connection is lost or closed; "" while it is open."""
        return self._lost

    def interrupt(self, reason: str = "closed on request") -> None:
        """From any thread: what waits for the target ends with `PeerGoneError`."""
        self._lose(reason)

    def close(self) -> None:
        """Close the connection; the writing thread's last call."""
        self.interrupt()
        _shut_down(self._sock)
        self._reader.join()
        self._sock.close()

    @abstractmethod
    def _request_ack(self, stopped: Stopped) -> None:
        """Send a request that only asks for an Ack."""

    @abstractmethod
    def _write_scratch(self, source: memoryview, stopped: Stopped) -> None:
        """Write `source` into the target's scratch area."""

    def _ask(self, send: Callable[[Stopped], None], stopped: Stopped) -> None:
        """Send one request and wait for its Ack."""
        self._num_requests += 1
        send(stopped)
        with self._answered:
            while self._num_done < self._num_requests:
                self.check()
                if not self._answered.wait(STALLED_S) and stopped():
                    raise PushStoppedError("stopped while the target did not answer")

    def _check_accepted(self, landing_id: bytes) -> None:
        if landing_id in self._refused:
            raise PushStoppedError("the target does not accept this landing (closed, or not for this writer)")

    def _timed(self, clock: Clock, source: memoryview | None, stopped: Stopped) -> float:
        started = clock.now()
        if source is not None:
            self._write_scratch(source, stopped)
        self._ask(self._request_ack, stopped)
        return clock.now() - started

    def _read(self) -> None:
        try:
            while True:
                ack = ACK_CODEC.decode(receive_frame(self._sock))
                with self._answered:
                    self._num_done = ack.num_done
                    for landing_id in ack.refused:
                        self._refused.add(landing_id)
                    self._answered.notify_all()
        except TransferError as error:
            if self._lose(str(error)):
                self._on_lost(str(error))

    def _lose(self, reason: str) -> bool:
        """True for the first reason, which stays."""
        with self._answered:
            first = not self._lost
            self._lost = self._lost or reason
            self._answered.notify_all()
        return first


def greet(sock: socket.socket, rank: WriterRank, connection_id: bytes) -> ChannelWelcome:
    """The writer's opening: proof, hello. `ProofError`, `PathError` or `PeerGoneError` when it fails. The
    socket keeps a timeout until a channel takes it."""
    prove_as_client(sock, rank.secret, f"{rank.identity.replica_id} rank {rank.rank}")
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    send_frame(sock, HELLO_CODEC.encode(rank.hello(connection_id)))
    answer = HELLO_CODEC.decode(receive_frame(sock))
    if not isinstance(answer, ChannelWelcome):
        raise PathError(f"refused by the target: {getattr(answer, 'reason', answer)}")
    return answer


def target_layout(rank: WriterRank, shard: Shard) -> BlockLayout:
    """The layout of a target that holds `shard` of the same model."""
    return replace(rank.layout, shard=shard)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)
