"""A target rank's transfer agent in this process, and writers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from agent_process import ORDER_CODEC, REPORT_CODEC, SETUP_CODEC, AgentSetup, read, write

from kvtransfer.clock import SystemClock
from kvtransfer.faults import FaultRule, Faults
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import (
    BlockMove,
    CloseLanding,
    ConnectPeer,
    LandingClosed,
    OpenLanding,
    PeerConnected,
    PeerConnectFailed,
    PieceCheck,
    PieceSum,
    PushDone,
    PushOrder,
    ReplicaIdentity,
    Shard,
    TransferOrder,
    TransferReport,
    Verified,
    VerifyOrder,
)
from kvtransfer.secret import draw_id, draw_secret
from kvtransfer.service import TransferAgent

WAIT_S = 30.0
SHARD = Shard(0, 4, 0, 2)
LAYOUT = BlockLayout(SHARD, head_dim=64, block_tokens=16, item_bytes=4)
NUM_BLOCKS = 24
TARGET = ReplicaIdentity("target", 1)

R = TypeVar("R")


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


class Reports:
    """What an agent has reported, in order; tests take the first of a type when it comes."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._waiting: list[TransferReport] = []
        self.all: list[TransferReport] = []

    def put(self, report: TransferReport) -> None:
        with self._arrived:
            self._waiting.append(report)
            self.all.append(report)
            self._arrived.notify_all()

    def take(self, kind: type[R]) -> R:
        """The oldest report of this type that was not taken yet."""
        with self._arrived:

            def find() -> R | None:
                return next((each for each in self._waiting if isinstance(each, kind)), None)

            assert self._arrived.wait_for(lambda: find() is not None, WAIT_S), (
                f"no {kind.__name__}; there are {self._waiting}"
            )
            report = find()
            assert report is not None
            self._waiting.remove(report)  # type: ignore[arg-type]
            return report

    def has(self, kind: type[R]) -> bool:
        with self._arrived:
            return any(isinstance(each, kind) for each in self._waiting)


class WriterProcess:
    """A writer rank in a process; its pool holds `pool`."""

    def __init__(
        self,
        secret: bytes,
        *,
        name: str = "writer",
        shard: Shard = SHARD,
        seed: int = 1,
        num_blocks: int = NUM_BLOCKS,
        faults: Sequence[FaultRule] = (),
    ) -> None:
        self.identity = ReplicaIdentity(name, 1)
        self.layout = BlockLayout(shard, LAYOUT.head_dim, LAYOUT.block_tokens, LAYOUT.item_bytes)
        self.pool = np.frombuffer(
            np.random.default_rng(seed).bytes(num_blocks * self.layout.block_bytes), dtype=np.uint8
        )
        self.reports = Reports()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("agent_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        setup = AgentSetup(
            self.identity,
            shard,
            LAYOUT.head_dim,
            LAYOUT.block_tokens,
            LAYOUT.item_bytes,
            num_blocks,
            secret,
            seed,
            tuple(faults),
        )
        write(self._stdin, SETUP_CODEC.encode(setup))
        self._reader = threading.Thread(target=self._read, name="reports")
        self._reader.start()

    def handle(self, order: TransferOrder) -> None:
        write(self._stdin, ORDER_CODEC.encode(order))

    def connect(self, target: TargetRankHouse, *transports: str, min_gb_s: float = 0.0) -> bytes:
        """Order a connection; returns its id."""
        connection_id = draw_id()
        endpoints = (target.agent.endpoints(),)
        self.handle(ConnectPeer(connection_id, self.identity, TARGET, endpoints, transports, min_gb_s))
        return connection_id

    def connected(self, target: TargetRankHouse, transport: str) -> bytes:
        connection_id = self.connect(target, transport)
        eventually(
            lambda: self.reports.has(PeerConnected) or self.reports.has(PeerConnectFailed), "an answer"
        )
        assert self.reports.take(PeerConnected).transport == transport
        return connection_id

    def push(
        self, push_id: int, connection_id: bytes, landing_id: bytes, moves: Sequence[tuple[int, int]]
    ) -> None:
        """Push (local block, target block) pairs; `block_index` is the local block's number."""
        pairs = tuple(BlockMove(src, dst, src) for src, dst in moves)
        self.handle(PushOrder(push_id, connection_id, landing_id, pairs))

    def block(self, block_id: int) -> bytes:
        size = self.layout.block_bytes
        return self.pool[block_id * size : (block_id + 1) * size].tobytes()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def await_state(self, state: str) -> None:
        """Wait until the kernel says that the process is in `state` ("T": stopped, "Z": dead)."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, f"state {state}")

    def close(self) -> int:
        """End it in good order (or collect it when it was killed); returns its exit status."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        status = self._process.wait(WAIT_S)
        self._reader.join()
        self._stdout.close()
        return status

    def _read(self) -> None:
        while (frame := read(self._stdout)) is not None:
            self.reports.put(REPORT_CODEC.decode(frame))


class TargetRankHouse:
    """The target rank: an agent of this process over a pool of zeros, and the writers that tests start."""

    def __init__(self, shard: Shard = SHARD, faults: Faults | None = None) -> None:
        self.secret = draw_secret()
        self.layout = BlockLayout(shard, LAYOUT.head_dim, LAYOUT.block_tokens, LAYOUT.item_bytes)
        self.memory = KvMemory.allocate(NUM_BLOCKS * self.layout.block_bytes)
        self.reports = Reports()
        self.agent = TransferAgent(
            identity=TARGET,
            rank=0,
            layout=self.layout,
            memory=self.memory,
            secret=self.secret,
            clock=SystemClock(),
            faults=faults or Faults(),
            report=self.reports.put,
            transports=("shm", "tcp"),
            data_host="127.0.0.1",
        )
        self._writers: list[WriterProcess] = []

    def writer(self, **settings: object) -> WriterProcess:
        """Start a writer (see `WriterProcess` for the settings); it ends with the house."""
        secret = settings.pop("secret", self.secret)
        writer = WriterProcess(secret, **settings)  # type: ignore[arg-type]
        self._writers.append(writer)
        return writer

    def open(self, writer: WriterProcess, *block_ids: int) -> bytes:
        landing_id = draw_id()
        self.agent.handle(OpenLanding(landing_id, writer.identity, block_ids))
        return landing_id

    def close_landing(self, landing_id: bytes) -> bool:
        """Returns whether a one-sided writer may still write it."""
        self.agent.handle(CloseLanding(landing_id))
        closed = self.reports.take(LandingClosed)
        assert closed.landing_id == landing_id
        return bool(closed.connections)

    def verify(self, landing_id: bytes, pieces: Sequence[PieceSum], block_ids: dict[int, int]) -> Verified:
        """Verify sums; `block_ids` maps block indices to this rank's blocks."""
        checks = tuple(
            PieceCheck(block_ids[piece.block_index], piece.block_index, piece.shard, piece.checksum)
            for piece in pieces
        )
        self.agent.handle(VerifyOrder(landing_id, checks))
        return self.reports.take(Verified)

    def move(
        self, writer: WriterProcess, connection_id: bytes, push_id: int, moves: Sequence[tuple[int, int]]
    ) -> PushDone:
        """A whole landing: open, push, wait."""
        landing_id = self.open(writer, *(dst for _, dst in moves))
        writer.push(push_id, connection_id, landing_id, moves)
        return writer.reports.take(PushDone)

    def block(self, block_id: int) -> bytes:
        size = self.layout.block_bytes
        return bytes(self.memory.buffer[block_id * size : (block_id + 1) * size])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
        self.agent.close()
        self.memory.close()
