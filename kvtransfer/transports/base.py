"""What a transport is: a `Listener` at the target rank and a `Channel` at the writer rank.

Each module offers `listen(target) -> Listener | None` (None: not possible here) and
`connect(rank, lane, address, connection_id, on_lost) -> Channel` (`TransferError`: why it could not be).
Write: `begin(landing)`, then `write` batch by batch; each moves the lane's piece of its blocks.
Completion: when `flush` returns, everything written is visible in the target's memory.
Abort: `stopped()` is asked between blocks and wherever a write could wait; it ends with `PushStoppedError`.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.blocks.host_memory import SCRATCH_BYTES
from kvtransfer.blocks.layout import plan_runs
from kvtransfer.blocks.pool import KvPool
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import IncompatibleError, PathError, PeerGoneError, PushStoppedError, TransferError
from kvtransfer.messages import PROTOCOL_VERSION, Endpoint, ReplicaIdentity
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.handshake import (
    HANDSHAKE_TIMEOUT_S,
    receive_frame,
    secure,
    send_frame,
    wrapped,
)
from kvtransfer.rpc.listener import ListeningThread, shut_down
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import BlockMove, Lane, TransferSettings
from kvtransfer.transports.stream_sockets import (
    HELLO_CODEC,
    ChannelHello,
    ChannelRefusal,
    ChannelWelcome,
    Connection,
    Stopped,
)

_NUM_ROUND_TRIPS = 8
_NUM_RATE_PASSES = 2
_MEASURE_PATIENCE = 10
# A measurement by large writes takes this long, or moves so much.
_MEASURED_S = 0.005
_MOST_MEASURED_BYTES = 1 << 30

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetRank:
    """A rank as a listener serves it: its pools behind its gate, one for each group of layers. Blocks of a
    group of which the rank has no layer are empty."""

    rank: int
    pools: Sequence[KvPool]
    gate: Gate
    trust: Trust
    settings: TransferSettings

    @property
    def group_to_pool(self) -> dict[int, KvPool]:
        """The pools that have something."""
        return pools_by_group(self.pools)

    @property
    def device(self) -> str:
        """Where all pools lie."""
        return any_with_layers(self.pools).device


@dataclass(frozen=True)
class WriterRank:
    """A rank as a channel writes for it: its identity, and its pool of the channel's group of layers."""

    identity: ReplicaIdentity
    rank: int
    pool: KvPool
    trust: Trust
    faults: Faults
    settings: TransferSettings

    def hello(self, lane: Lane, connection_id: bytes) -> ChannelHello:
        """Return the hello of the lane's channel."""
        layout = self.pool.layout
        return ChannelHello(
            PROTOCOL_VERSION,
            self.identity,
            connection_id,
            lane.target.rank,
            lane.piece,
            layout.shard,
            layout.head_dim,
            layout.block_tokens,
            layout.item_bytes,
            layout.scale_bytes,
            layout.num_kinds,
            lane.group,
            layout.group,
        )


def pools_by_group(pools: Sequence[KvPool]) -> dict[int, KvPool]:
    """Return the pools of the groups of which the rank has layers."""
    return {group: pool for group, pool in enumerate(pools) if pool.layout.num_layers(pool.layout.shard)}


def any_with_layers(pools: Sequence[KvPool]) -> KvPool:
    """Return a pool of a group of which the rank has layers; where a stage has no layer that keeps anything,
    any pool."""
    return next(iter(pools_by_group(pools).values()), pools[0])


class Measured(NamedTuple):
    """A path's rate (1e9 bytes a second) and one-way latency."""

    gb_s: float
    latency_us: float


def patient() -> Stopped:
    """Return what ends a measurement whose target does not answer: it stops after a number of looks."""
    looks = iter(range(_MEASURE_PATIENCE))
    return lambda: next(looks, None) is None


class Listener(ABC):
    """The target's side: serves each connection that has proven the secret on a thread of its own.

    Whatever arrives on a connection that is not of the protocol closes that connection only.
    """

    transport: str

    def __init__(self, target: TargetRank, sock: socket.socket, address: str) -> None:
        self._target = target
        self.endpoint = Endpoint(self.transport, address)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._listening = ListeningThread(sock, target.trust, self._accepted, self.transport)

    def close(self) -> None:
        """Stop listening and end every connection; returns when its threads have ended."""
        self._closing.set()
        self._listening.close()
        with self._lock:
            connections = dict(self._connections)
        for sock in connections:
            shut_down(sock)
        for thread in connections.values():
            thread.join()

    @abstractmethod
    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        """Serve one accepted writer until its connection ends (sends the welcome first)."""

    def _send_welcome(self, sock: socket.socket, hello: ChannelHello) -> None:
        num_blocks = self._target.group_to_pool[hello.group].num_blocks
        send_frame(sock, HELLO_CODEC.encode(ChannelWelcome(num_blocks)))

    def _accepted(self, proven: socket.socket, name: str) -> None:
        """Serve a proven connection from now on."""
        sock = wrapped(proven, self._target.trust.server_tls(proven))
        thread = threading.Thread(
            target=self._run, args=(sock, name), name=f"{self.transport}-serve", daemon=True
        )
        with self._lock:
            self._connections[sock] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no threads left: others can be served again later
            _log.warning("%s: a connection was not taken: %s", self.transport, error)
            with self._lock:
                del self._connections[sock]
            sock.close()

    def _run(self, sock: socket.socket, name: str) -> None:
        try:
            with sock:
                secure(sock, name)
                hello = self._greet(sock)
                self._serve(sock, hello)
        except (TransferError, OSError) as error:
            if not self._closing.is_set():
                _log.warning("%s: a connection was closed: %s", self.transport, error)
        finally:
            with self._lock:
                self._connections.pop(sock, None)

    def _greet(self, sock: socket.socket) -> ChannelHello:
        """Check the layout; raises after sending the writer why it is refused."""
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        hello = HELLO_CODEC.decode(receive_frame(sock))
        sock.settimeout(None)
        try:
            if not isinstance(hello, ChannelHello) or hello.protocol != PROTOCOL_VERSION:
                raise IncompatibleError(f"expected ChannelHello of protocol {PROTOCOL_VERSION}")
            self._check(hello)
        except IncompatibleError as error:
            send_frame(sock, HELLO_CODEC.encode(ChannelRefusal(str(error))))
            raise
        return hello

    def _check(self, hello: ChannelHello) -> None:
        """Check the hello; `IncompatibleError` when the writer means another rank, or a piece that one of the
        two lacks."""
        if hello.target_rank != self._target.rank:
            raise IncompatibleError(f"this is rank {self._target.rank}, not {hello.target_rank}")
        pool = self._target.group_to_pool.get(hello.group)
        if pool is None:
            raise IncompatibleError(f"rank {self._target.rank} has no blocks of group {hello.group}")
        if hello.layout.group != pool.layout.group:
            raise IncompatibleError(f"group: {hello.layout.group} at the source, {pool.layout.group} there")
        try:
            runs = plan_runs(hello.layout, pool.layout, hello.piece)
        except ValueError as error:
            raise IncompatibleError(str(error)) from error
        if not runs:
            raise IncompatibleError(f"no layer of {hello.piece} is of group {hello.group}")


class Channel(ABC):
    """The writer's side of a lane, used by one writing thread.

    `on_lost(reason)` is called once, from another thread, when the target closes or dies. `num_blocks` is
    the size of the target's pool, `device` what carries the bytes ("memory", "lo", "mlx5_0", "cuda:0").
    """

    transport: str

    def __init__(
        self,
        rank: WriterRank,
        lane: Lane,
        connections: Sequence[Connection],
        num_blocks: int,
        device: str,
        on_lost: Callable[[str], None],
    ) -> None:
        self.device = device
        # Bytes that one block moves.
        self.piece_bytes = rank.pool.piece_bytes(lane.piece)
        self._rank = rank
        self._faults = rank.faults
        self._pool = rank.pool
        self._piece = lane.piece
        self._num_blocks = num_blocks
        self._connections = tuple(connections)
        # Why the connection is lost or closed; "" while it is open.
        self.lost = ""
        self._on_lost = on_lost
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to listen for the target's answers, as the last act of `connect`."""
        for connection in self._connections:
            connection.start(self._end)

    def begin(self, landing_id: bytes, stopped: Stopped) -> None:
        """Prepare for the first `write` of a push. `PushStoppedError` when the target refuses the landing."""
        self.check()

    def write(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        """Write the lane's piece of each block; returns the pieces' checksums at the source, in order. The
        bytes may arrive later (`flush`). After an error `drain` says when nothing of it is under way.

        `PathError` for a block outside the pools, `PeerGoneError` when the connection is lost,
        `PushStoppedError` when stopped: part of the batch may have been written.
        """
        self.check()
        self._check_moves(moves)
        if not self._faults.armed:
            return self._write_batch(landing_id, moves, stopped)
        sums: list[int] = []
        for move in moves:
            if stopped():
                raise PushStoppedError("stopped on request")
            self._faults.at("push.copy")
            corrupt = self._faults.at("push.corrupt")
            sums.append(self._write_block(landing_id, move, corrupt, stopped))
        return sums

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        """Return when all that was written is visible. `PushStoppedError` when the target refused any of
        it, or when it was stopped and the target does not answer."""
        self._sync(stopped)
        self._check_accepted(landing_id)

    def drain(self) -> None:
        """Wait after a push that was stopped or failed; return when nothing of it is read from this rank's
        pool any more, nor written by this channel. Here: no write leaves anything behind when it ends."""
        return

    def measure(self, clock: Clock) -> Measured:
        """Time empty round trips, and writes into the target's scratch memory.

        `TransferError` when the target stops answering.
        """
        stopped = patient()
        latency_s = min(self._timed(clock, 0, stopped) for _ in range(_NUM_ROUND_TRIPS)) / 2
        self._timed(clock, SCRATCH_BYTES, stopped)  # the first pass takes the pages
        seconds = min(self._timed(clock, SCRATCH_BYTES, stopped) for _ in range(_NUM_RATE_PASSES))
        return Measured(SCRATCH_BYTES / max(seconds, 1e-9) / 1e9, latency_s * 1e6)

    def _measure_large(self, clock: Clock, num_bytes: int) -> Measured:
        """Do what `measure` does, but take the rate from writes that begin with `num_bytes` and double until
        one takes a few milliseconds: between devices the time of a small one is that of its messages. The
        round trip of the answer is taken off."""
        latency_us = Channel.measure(self, clock).latency_us
        round_trip_s = 2 * latency_us / 1e6
        while (seconds := self._large_s(clock, num_bytes)) < _MEASURED_S:
            if num_bytes >= _MOST_MEASURED_BYTES:
                break
            num_bytes *= 2
        return Measured(num_bytes / max(seconds - round_trip_s, seconds / 4, 1e-9) / 1e9, latency_us)

    def check(self) -> None:
        """Raise `PeerGoneError` when the connection is lost."""
        if self.lost:
            raise PeerGoneError(self.lost)

    def interrupt(self, reason: str = "closed on request") -> None:
        """End all waiting for the target with `PeerGoneError`; callable from any thread."""
        self._lose(reason)

    def close(self) -> None:
        """Close the connections; the writing thread's last call."""
        self.interrupt()
        for connection in self._connections:
            connection.close()

    # ------------------------------------------------------------------------- what a transport defines

    @abstractmethod
    def _write_batch(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        """Write at full speed, as `write` promises; ask `stopped` every few megabytes at least."""

    @abstractmethod
    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        """Write one block with faults armed: pass `push.half` when half of its bytes are written; with
        `corrupt` one bit arrives flipped. Return the sum of the bytes at the source."""

    @abstractmethod
    def _request_ack(self, connection: Connection, stopped: Stopped) -> None:
        """Send a request that only asks for an Ack."""

    @abstractmethod
    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        """Write `num_bytes` of anything into the target's scratch memory, over and over where it is smaller.
        They are `SCRATCH_BYTES`, and more only where the transport's `measure` is `_measure_large`."""

    # ------------------------------------------------------------------------------------------ shared

    def _sync(self, stopped: Stopped) -> None:
        """Return when the target has seen everything that was sent."""
        self.check()
        numbers = [
            connection.request(functools.partial(self._request_ack, connection, stopped))
            for connection in self._connections
        ]
        for connection, number in zip(self._connections, numbers, strict=True):
            connection.await_answer(number, stopped)

    def _check_accepted(self, landing_id: bytes) -> None:
        if any(connection.has_refused(landing_id) for connection in self._connections):
            raise PushStoppedError("the target does not accept this landing (closed, or not for this writer)")

    def _check_moves(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            if not 0 <= move.src_block < self._pool.num_blocks:
                raise PathError(f"block {move.src_block} is outside this rank's pool")
            if not 0 <= move.dst_block < self._num_blocks:
                raise PathError(f"block {move.dst_block} is outside the target's pool")

    def _timed(self, clock: Clock, num_bytes: int, stopped: Stopped) -> float:
        started = clock.now()
        if num_bytes:
            self._write_scratch(num_bytes, stopped)
        self._sync(stopped)
        return clock.now() - started

    def _large_s(self, clock: Clock, num_bytes: int) -> float:
        """Return how long it takes to write so much scratch memory and to have that confirmed."""
        stopped = patient()
        return min(self._timed(clock, num_bytes, stopped) for _ in range(_NUM_RATE_PASSES))

    def _end(self, reason: str) -> None:
        if self._lose(reason):
            self._on_lost(reason)

    def _lose(self, reason: str) -> bool:
        """Set the reason of the loss and return True, unless one was set before, which stays."""
        with self._lock:
            first = not self.lost
            self.lost = self.lost or reason
        for connection in self._connections:
            connection.lose(reason)
        return first
