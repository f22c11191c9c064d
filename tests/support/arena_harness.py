"""A stand-in for the store's owner, an arena behind a real socket; and the worker of ranks, in this process
or in one of their own (`python arena_harness.py`: orders on standard input, reports on standard output)."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self, TypeVar

import numpy as np
import numpy.typing as npt
from child_processes import killed_on_error
from patience import WAIT_S

from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.codec import Codec, Message, framed, read_frame
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.errors import TransferError
from kvtransfer.messages import KvGroup, Shard
from kvtransfer.rpc.handshake import prove_as_server, receive_exactly, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.arena_mapping import ArenaGrant, RankHello
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, TO_OWNER_CODEC, StoreRefusal
from kvtransfer.store.messages.records import HEADER_BYTES
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreCopy,
    StoreGet,
    StoreGetDone,
    StoreOrder,
    StorePut,
    StorePutDone,
    StoreRead,
    StoreReport,
)
from kvtransfer.store.worker import StoreWorker
from kvtransfer.transfer_orders import TransferSettings

Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")

TRUST = Trust.of(bytes(range(32)))
SESSION = b"session of tests"
MODEL = Shard(0, 4, 0, 4)
LEFT, RIGHT = Shard(0, 4, 0, 2), Shard(0, 4, 2, 4)
NUM_BLOCKS = 8
# Between two records; the largest, of `MODEL`, has 32 KiB and a header page.
SLOT_BYTES = 128 << 10


def layout(shard: Shard, block_tokens: int = 16) -> BlockLayout:
    return BlockLayout(shard, head_dim=32, block_tokens=block_tokens, item_bytes=2)


class SharedArena:
    """Shared memory with an id; two owners may have the same one, one after the other."""

    def __init__(self, num_bytes: int = 2 << 20) -> None:
        self.id = secrets.token_bytes(16)
        self.memory = KvMemory.allocate(num_bytes)
        self.bytes: Bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)

    def payload(self, offset: int, num_bytes: int) -> Bytes:
        return self.bytes[offset + HEADER_BYTES : offset + HEADER_BYTES + num_bytes]


class StandInOwner:
    """Grants its arena, or takes the one that a rank offers when it has none of its own."""

    def __init__(self, arena: SharedArena | None, *, trust: Trust = TRUST, refusal: str = "") -> None:
        self.arena = arena
        self.adopted = b""
        self.hellos: list[RankHello] = []
        self.address = f"tandem-test-{secrets.token_hex(8)}"
        # Released at the end of each rank's connection.
        self.ended = threading.Semaphore(0)
        self._trust = trust
        self._refusal = refusal
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(f"\0{self.address}")
        self._sock.listen()
        self._ranks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As when its process ends."""
        for sock in (self._sock, *self._ranks):
            _shut_down(sock)
        for thread in list(self._threads):
            thread.join()
        self._sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            self._ranks.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                prove_as_server(sock, self._trust)
                hello = TO_OWNER_CODEC.decode(receive_frame(sock))
                assert isinstance(hello, RankHello)
                self.hellos.append(hello)
                self._grant(sock, hello)
                receive_exactly(sock, 1)
            except TransferError:
                pass
        self.ended.release()

    def _grant(self, sock: socket.socket, hello: RankHello) -> None:
        if self._refusal:
            send_frame(sock, FROM_OWNER_CODEC.encode(StoreRefusal(self._refusal)))
            return
        size = 0
        if hello.arena:
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            size = os.fstat(fds[0]).st_size
            os.close(fds[0])
        if self.arena is None:
            self.adopted = hello.arena
            grant = ArenaGrant(hello.arena, size - (4 << 20), True)
            send_frame(sock, FROM_OWNER_CODEC.encode(grant))
            return
        is_yours = hello.arena == self.arena.id
        grant = ArenaGrant(self.arena.id, self.arena.memory.num_bytes, is_yours)
        send_frame(sock, FROM_OWNER_CODEC.encode(grant))
        if not is_yours:
            socket.send_fds(sock, [b"F"], [self.arena.memory.fd])


class StoreReports:
    """The reports of a worker, in order; tests take the first of a type when it comes."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._waiting: list[StoreReport] = []
        self.all: list[StoreReport] = []

    def put(self, report: StoreReport) -> None:
        with self._arrived:
            self._waiting.append(report)
            self.all.append(report)
            self._arrived.notify_all()

    def take(self, kind: type[R]) -> R:
        with self._arrived:

            def find() -> R | None:
                return next((each for each in self._waiting if isinstance(each, kind)), None)

            self._arrived.wait_for(lambda: find() is not None, WAIT_S)
            report = find()
            assert report is not None, f"no {kind.__name__}; there are {self._waiting}"
            self._waiting.remove(report)  # type: ignore[arg-type]
            return report


class WorkerRank:
    """Hands over a pool of random bytes, in this process."""

    def __init__(
        self,
        shard: Shard = MODEL,
        *,
        seed: int = 0,
        block_tokens: int = 16,
        faults: Faults | None = None,
        governor: TrafficGovernor | None = None,
        make_pool: Callable[[BlockLayout, KvMemory], KvPool] = HostPool,
        report: Callable[[StoreReport], None] | None = None,
    ) -> None:
        self.layout = layout(shard, block_tokens)
        memory = KvMemory.allocate(NUM_BLOCKS * self.layout.block_bytes)
        # [blocks, block_bytes], the memory of the pool itself.
        self.blocks: Bytes = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, dtype=np.uint8)
        self.pool = make_pool(self.layout, memory)
        self.reports = StoreReports()
        self.clock = SystemClock()
        self.governor = governor or TrafficGovernor(TransferSettings("127.0.0.1", ()), self.clock)
        self.worker = StoreWorker(
            (self.pool,), 0, self.governor, TRUST, faults or Faults(), self.clock, report or self.reports.put
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    def attach(self, owner: StandInOwner) -> StoreAttached:
        self.worker.handle(AttachStore(owner.address, SESSION))
        return self.reports.take(StoreAttached)

    def piece(self, piece: Shard) -> Bytes:
        """Return the piece of all blocks, [blocks, piece bytes]: plain slices, the reference."""
        own = self.layout.shard
        shape = (NUM_BLOCKS, own.layer_end - own.layer_start, 2, own.head_end - own.head_start, -1)
        layers = slice(piece.layer_start - own.layer_start, piece.layer_end - own.layer_start)
        heads = slice(piece.head_start - own.head_start, piece.head_end - own.head_start)
        whole = self.blocks.reshape(shape)
        return np.ascontiguousarray(whole[:, layers, :, heads]).reshape(NUM_BLOCKS, -1)


class GroupedRank:
    """Hands over a pool of random bytes for each group of layers; states are last."""

    def __init__(
        self,
        shard: Shard,
        groups: Sequence[KvGroup],
        seed: int,
        make_pool: Callable[[BlockLayout, KvMemory], KvPool],
    ) -> None:
        self.layouts = [layout(shard).of_group(group) for group in groups]
        # Of each group [blocks, block_bytes], the memory of its pool.
        self.kept: list[Bytes] = []
        pools = []
        for number, its in enumerate(self.layouts):
            memory = KvMemory.allocate(NUM_BLOCKS * its.block_bytes)
            blocks: Bytes = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
            blocks[:] = np.random.default_rng((seed, number)).integers(0, 256, blocks.shape, dtype=np.uint8)
            self.kept.append(blocks)
            pools.append(make_pool(its, memory))
        self.reports = StoreReports()
        clock = SystemClock()
        governor = TrafficGovernor(TransferSettings("127.0.0.1", ()), clock)
        self.worker = StoreWorker(pools, 0, governor, TRUST, Faults(), clock, self.reports.put)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    def attach(self, owner: StandInOwner) -> StoreAttached:
        self.worker.handle(AttachStore(owner.address, SESSION))
        return self.reports.take(StoreAttached)


def put(rank: WorkerRank, arena: SharedArena, number: int, pairs: Sequence[tuple[int, int]]) -> StorePutDone:
    """Put the (block, slot) pairs."""
    copies = tuple(StoreCopy(block, slot * SLOT_BYTES) for block, slot in pairs)
    rank.worker.handle(StorePut(number, arena.id, copies))
    done = rank.reports.take(StorePutDone)
    assert done.number == number
    return done


def read(block: int, slot: int, shard: Shard, piece: Shard, total: int) -> StoreRead:
    return StoreRead(block, slot * SLOT_BYTES, shard, piece, layout(shard).block_bytes, total)


def get(rank: WorkerRank, arena: SharedArena, number: int, reads: Sequence[StoreRead]) -> StoreGetDone:
    rank.worker.handle(StoreGet(number, arena.id, tuple(reads)))
    done = rank.reports.take(StoreGetDone)
    assert done.number == number
    return done


# --------------------------------------------------------------------------- worker in another process


class StartWorker(Message, frozen=True):
    """To the process: worker over a pool of this shard's layout, filled from the seed."""

    shard: Shard
    seed: int
    faults: tuple[FaultRule, ...]


TO_PROCESS: Codec[StartWorker | StoreOrder] = Codec(StartWorker | StoreOrder)
FROM_PROCESS: Codec[StoreReport] = Codec(StoreReport)


class RankProcess:
    """`WorkerRank` in a process of its own, which ends with this one."""

    def __init__(self, shard: Shard, seed: int, faults: Sequence[FaultRule] = ()) -> None:
        self.reports = StoreReports()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        with killed_on_error(self._process):
            self._send(StartWorker(shard, seed, tuple(faults)))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with killed_on_error(self._process):
            self._process.stdin.close()
            self._process.wait(WAIT_S)
        self._reader.join()
        self._process.stdout.close()

    def handle(self, order: StoreOrder) -> None:
        self._send(order)

    def wait_killed(self) -> int:
        """Wait for the end of the process; return its exit status."""
        return self._process.wait(WAIT_S)

    def _send(self, message: StartWorker | StoreOrder) -> None:
        assert self._process.stdin is not None
        _write(self._process.stdin, TO_PROCESS.encode(message))

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (frame := read_frame(self._process.stdout)) is not None:
            self.reports.put(FROM_PROCESS.decode(frame))


def _write(stream: IO[bytes], frame: bytes) -> None:
    stream.write(framed(frame))
    stream.flush()


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return


def main() -> None:
    start = TO_PROCESS.decode(read_frame(sys.stdin.buffer) or b"")
    assert isinstance(start, StartWorker)

    def report(report: StoreReport) -> None:
        _write(sys.stdout.buffer, FROM_PROCESS.encode(report))

    rank = WorkerRank(start.shard, seed=start.seed, faults=Faults(start.faults), report=report)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        order = TO_PROCESS.decode(frame)
        assert not isinstance(order, StartWorker)
        rank.worker.handle(order)
    rank.worker.close()


if __name__ == "__main__":
    main()
