"""Ranks with transfer agents in processes of their own, whose pools the test sees through a mapping."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from agent_process import (
    FROM_PROCESS,
    ORDERS,
    REPORTS,
    TO_PROCESS,
    EndRank,
    Order,
    RankEnded,
    RankStarted,
    Report,
    StartRank,
    write,
)
from child_processes import close_all, closed_on_error, killed_on_error
from import_path import import_path
from inner_tls import TLS_FILES
from patience import WAIT_S
from trust_files import FILES

from kvtransfer.blocks.layout import BlockLayout, piece_runs
from kvtransfer.codec import read_frame
from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import PieceSum
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import TrustFiles
from kvtransfer.transfer_orders import (
    BlockMove,
    CloseLanding,
    ConnectPeer,
    Lane,
    OpenLanding,
    PieceCheck,
    PushOrder,
    TransferOrder,
    TransferSettings,
    VerifyOrder,
)
from kvtransfer.transfer_reports import LandingClosed, PeerConnected, PushDone, TransferReport, Verified

SHARD = Shard(0, 4, 0, 4)
LAYOUT = BlockLayout(SHARD, head_dim=32, block_tokens=16, item_bytes=4)
NUM_BLOCKS = 24
TRANSPORTS = ("shm", "tcp", "gloo", "rdma")
TLS = " with TLS"
ONE_SIDED = ("shm", "rdma")
WRITER = ReplicaIdentity("writer", 1)
TARGET = ReplicaIdentity("target", 1)

R = TypeVar("R")
Bytes = npt.NDArray[np.uint8]


def require(transport: str) -> None:
    """Skip the test where the transport's package is missing."""
    if transport == "rdma" and not any(map(importlib.util.find_spec, ("nixl_cu13", "nixl_cu12"))):
        pytest.skip("rdma needs NIXL: pip install '.[rdma]'")


def settings(*transports: str) -> TransferSettings:
    return TransferSettings("127.0.0.1", transports, rdma_devices=("lo",))


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


class Reports:
    """The reports of a rank, in order; tests take the first of a type when it comes."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._waiting: list[TransferReport] = []
        self._has_ended = False
        self.all: list[TransferReport] = []

    def put(self, report: TransferReport) -> None:
        with self._arrived:
            self._waiting.append(report)
            self.all.append(report)
            self._arrived.notify_all()

    def end(self) -> None:
        """Note that nothing comes any more."""
        with self._arrived:
            self._has_ended = True
            self._arrived.notify_all()

    def take(self, kind: type[R]) -> R:
        """Take the oldest report of this type that was not taken yet."""
        with self._arrived:

            def find() -> R | None:
                return next((each for each in self._waiting if isinstance(each, kind)), None)

            self._arrived.wait_for(lambda: find() is not None or self._has_ended, WAIT_S)
            report = find()
            assert report is not None, f"no {kind.__name__}; there are {self._waiting}"
            self._waiting.remove(report)  # type: ignore[arg-type]
            return report

    def has(self, kind: type[R]) -> bool:
        with self._arrived:
            return any(isinstance(each, kind) for each in self._waiting)


class Rank:
    """One rank, seen from the test: its agent by orders and reports, its pool by a mapping."""

    def __init__(self, process: AgentProcess, key: int, start: StartRank) -> None:
        self.process = process
        self.key = key
        self.identity = start.identity
        # The layouts of its pools, one for each group of layers, and of the first.
        self.layouts = start.layouts
        self.layout = self.layouts[0]
        self.num_blocks = start.num_blocks
        self.reports = Reports()
        self.started = threading.Event()
        self.ended = threading.Event()

    def attach(self, started: RankStarted) -> None:
        self.endpoints = started.endpoints
        # Each [num_blocks, block_bytes], the very memory of the rank.
        self.pools: list[Bytes] = [
            self._map(fd, layout) for fd, layout in zip(started.fds, self.layouts, strict=True)
        ]
        self.pool = self.pools[0]
        self.started.set()

    def _map(self, number: int, layout: BlockLayout) -> Bytes:
        shape = self.num_blocks, layout.block_bytes
        if not layout.block_bytes:
            return np.empty(shape, dtype=np.uint8)
        fd = os.open(f"/proc/{self.process.pid}/fd/{number}", os.O_RDWR)
        try:
            mapping = mmap.mmap(fd, math.prod(shape))
        finally:
            os.close(fd)
        return np.frombuffer(mapping, dtype=np.uint8).reshape(shape)

    def handle(self, order: TransferOrder) -> None:
        self.process.send(Order(self.key, ORDERS.encode(order)))

    def fill(self, seed: int) -> None:
        """Fill all pools with random bytes."""
        random = np.random.default_rng(seed)
        for pool in self.pools:
            pool[:] = random.integers(0, 256, pool.shape, dtype=np.uint8)

    def piece(self, block_id: int, piece: Shard) -> bytes:
        """Return the piece's bytes of a block, as they lie in this pool."""
        block = self.pool[block_id].tobytes()
        return b"".join(
            block[run.src_offset : run.src_offset + run.num_bytes] for run in piece_runs(self.layout, piece)
        )

    # ------------------------------------------------------------------------------------- as a writer

    def connect(
        self,
        lanes: Sequence[Lane],
        *transports: str,
        min_gb_s: float = 0.0,
        refuse_slow: bool = True,
    ) -> bytes:
        """Order a connection; returns its id."""
        connection_id = draw_id()
        order = ConnectPeer(
            connection_id, self.identity, TARGET, tuple(lanes), transports, min_gb_s, refuse_slow
        )
        self.handle(order)
        return connection_id

    def connected(self, target: Rank, transport: str) -> bytes:
        """Open a connection with one lane, for the piece that both hold whole."""
        connection_id = self.connect([lane(target)], transport)
        eventually(lambda: len(self.reports.all) > 0, "an answer")
        (path,) = self.reports.take(PeerConnected).paths
        assert path.transport == transport
        return connection_id

    def push(
        self,
        push_id: int,
        connection_id: bytes,
        landing_id: bytes,
        moves: Sequence[tuple[int, int]],
        *,
        group: int = 0,
    ) -> None:
        """Push (local block, target block) pairs of a group; `block_index` is the local block's number."""
        pairs = tuple(BlockMove(src, dst, src) for src, dst in moves)
        self.handle(PushOrder(push_id, connection_id, landing_id, pairs, group=group))

    def move(
        self, target: Rank, connection_id: bytes, push_id: int, moves: Sequence[tuple[int, int]]
    ) -> PushDone:
        """Move blocks in a whole landing: open, push, wait."""
        landing_id = target.open(self, *(dst for _, dst in moves))
        self.push(push_id, connection_id, landing_id, moves)
        return self.reports.take(PushDone)

    # ------------------------------------------------------------------------------------- as a target

    def open(
        self,
        writer: Rank,
        *block_ids: int,
        landing_id: bytes = b"",
        windows: tuple[tuple[int, ...], ...] = (),
    ) -> bytes:
        landing_id = landing_id or draw_id()
        self.handle(OpenLanding(landing_id, writer.identity, block_ids, windows))
        return landing_id

    def close_landing(self, landing_id: bytes) -> tuple[bytes, ...]:
        """Close the landing; return the one-sided connections that may still write it."""
        self.handle(CloseLanding(landing_id))
        closed = self.reports.take(LandingClosed)
        assert closed.landing_id == landing_id
        return closed.connections

    def verify(
        self, landing_id: bytes, pieces: Sequence[PieceSum], block_ids: dict[int, int], group: int = 0
    ) -> Verified:
        """Verify sums; `block_ids` maps block indices to this rank's blocks of the group."""
        checks = tuple(
            PieceCheck(block_ids[piece.block_index], piece.block_index, piece.shard, piece.checksum)
            for piece in pieces
        )
        self.handle(VerifyOrder(landing_id, checks, group))
        return self.reports.take(Verified)

    def end(self) -> None:
        """Close its agent."""
        self.process.send(EndRank(self.key))
        assert self.ended.wait(WAIT_S), "the agent does not close"


def lane(target: Rank, piece: Shard | None = None, group: int = 0) -> Lane:
    """Return a lane to this rank; `piece` None: all that it holds."""
    return Lane(target.endpoints, piece or target.layout.shard, group)


class AgentProcess:
    """A process that holds ranks."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("agent_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": import_path(root), "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._ranks: dict[int, Rank] = {}
        self._num_started = 0
        self._reader = threading.Thread(target=self._read, name="reports")
        self._reader.start()

    def start(
        self,
        transport: str,
        identity: ReplicaIdentity,
        *,
        rank: int = 0,
        shard: Shard = SHARD,
        num_blocks: int = NUM_BLOCKS,
        trust: TrustFiles = FILES,
        faults: Sequence[FaultRule] = (),
        is_device: bool = False,
        groups: tuple[tuple[int, ...], ...] = (),
        seed: int | None = None,
    ) -> Rank:
        """Start a rank that offers `transport`, with pools of zeros or of random bytes from `seed`."""
        key = self._num_started
        self._num_started += 1
        sizes = LAYOUT.head_dim, LAYOUT.block_tokens, LAYOUT.item_bytes, num_blocks
        start = StartRank(
            key, identity, rank, shard, *sizes, trust, tuple(faults), settings(transport), is_device, groups
        )
        handle = self._ranks[key] = Rank(self, key, start)
        self.send(start)
        assert handle.started.wait(WAIT_S), "the rank does not start"
        if seed is not None:
            handle.fill(seed)
        return handle

    def send(self, message: StartRank | EndRank | Order) -> None:
        write(self._stdin, TO_PROCESS.encode(message))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def await_death(self) -> None:
        """Wait until all its threads have ended, and with them its connections are closed."""
        self._process.wait(WAIT_S)

    def await_state(self, state: str) -> None:
        """Wait until the process is in `state` for the kernel ("T": stopped)."""
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, f"state {state}")

    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def close(self) -> int:
        """End it in good order (or collect it when it was killed); returns its exit status."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        with killed_on_error(self._process):
            status = self._process.wait(WAIT_S)
        self._reader.join()
        self._stdout.close()
        return status

    def _read(self) -> None:
        while (frame := read_frame(self._stdout)) is not None:
            message = FROM_PROCESS.decode(frame)
            rank = self._ranks[message.key]
            match message:
                case RankStarted():
                    rank.attach(message)
                case Report():
                    rank.reports.put(REPORTS.decode(message.report))
                case RankEnded():
                    rank.ended.set()
        for rank in self._ranks.values():
            rank.reports.end()


class TransferHarness:
    """Two long-lived processes, writers' and targets', and victims that tests start. Its ranks end with the
    test (`one_test`), the processes with the harness."""

    def __init__(self, kind: str) -> None:
        """`kind` is a transport, or one with certificates at both ends ("tcp with TLS")."""
        self.transport = kind.removesuffix(TLS)
        self.trust = TLS_FILES if kind.endswith(TLS) else FILES
        require(self.transport)
        self.writers = AgentProcess()
        with closed_on_error(self.writers):
            self.targets = AgentProcess()
        self._test_ranks: list[Rank] = []
        self._victims: list[AgentProcess] = []

    def writer(self, process: AgentProcess | None = None, **start: object) -> Rank:
        """Start a writing rank (see `AgentProcess.start`), its pool filled from `seed` (1)."""
        identity = start.pop("identity", WRITER)
        start.setdefault("seed", 1)
        return self._start(process or self.writers, identity, start)

    def target(self, process: AgentProcess | None = None, **start: object) -> Rank:
        """Start a target rank with a pool of zeros."""
        return self._start(process or self.targets, start.pop("identity", TARGET), start)

    def victim(self) -> AgentProcess:
        """Start a process that the test may stop or kill."""
        process = AgentProcess()
        self._victims.append(process)
        return process

    @contextlib.contextmanager
    def one_test(self) -> Iterator[TransferHarness]:
        """Return from the block after the ranks and victims that one test started have ended."""
        with contextlib.ExitStack() as stays:
            stays.callback(self._test_ranks.clear)
            stays.callback(self._victims.clear)
            stays.callback(self._end_ranks)
            stays.callback(lambda: close_all(self._victims))
            yield self

    def close(self) -> None:
        assert close_all((self.writers, self.targets)) == [0, 0]

    def _end_ranks(self) -> None:
        for rank in reversed(self._test_ranks):
            if rank.process in (self.writers, self.targets) and not rank.ended.is_set():
                rank.end()

    def _start(self, process: AgentProcess, identity: object, start: dict[str, object]) -> Rank:
        start.setdefault("trust", self.trust)
        rank = process.start(self.transport, identity, **start)  # type: ignore[arg-type]
        self._test_ranks.append(rank)
        return rank
