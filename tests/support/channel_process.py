"""The two ends of one lane, without a transfer agent, in this process or in processes of their own. A
process answers every command with one frame, in order; the first command makes it the target or the
writer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, TypeVar

import numpy as np
import torch
from import_path import import_path
from patience import WAIT_S

from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.codec import Codec, Message, framed, read_frame
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.errors import TransferError
from kvtransfer.messages import Endpoint, RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.transfer_orders import BlockMove, Lane, OpenLanding, TransferSettings
from kvtransfer.transfer_reports import LandingClosed, TransferReport, WriterGone
from kvtransfer.transports import TRANSPORTS
from kvtransfer.transports.base import Channel, Listener, TargetRank, WriterRank

WRITER = ReplicaIdentity("writer", 1)
SETTINGS = TransferSettings("127.0.0.1", ())
LAYOUT = BlockLayout(Shard(0, 4, 0, 4), head_dim=32, block_tokens=8, item_bytes=4)


class Setup(Message, frozen=True):
    """The setup of a rank: its pool lies on `device` ("host": a HostPool) and is random (`seed`), or zero
    (0)."""

    transport: str
    shard: Shard
    num_blocks: int
    seed: int
    device: str
    trust: TrustFiles
    faults: tuple[FaultRule, ...] = ()

    @property
    def layout(self) -> BlockLayout:
        return replace(LAYOUT, shard=self.shard)

    def content(self) -> np.ndarray:
        """Return the initial content of the pool, uint8 [num_blocks, block_bytes]."""
        shape = self.num_blocks, self.layout.block_bytes
        if not self.seed:
            return np.zeros(shape, np.uint8)
        return np.random.default_rng(self.seed).integers(0, 256, shape, np.uint8)

    def pool(self) -> KvPool:
        data = self.content()
        if self.device != "host":
            return DevicePool(self.layout, torch.from_numpy(data).to(self.device))
        memory = KvMemory.allocate(data.size)
        memory.buffer[:] = data.tobytes()
        return HostPool(self.layout, memory)


class Connected(Message, frozen=True):
    device: str
    gb_s: float


class TargetEnd:
    """A pool behind a gate, and the transport's listener."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = setup.pool()
        self.reports: list[TransferReport] = []
        self.gate = Gate(self.reports.append)
        rank = TargetRank(0, (self.pool,), self.gate, Trust.read(setup.trust), SETTINGS)
        self.listener: Listener = TRANSPORTS[setup.transport].listen(rank)

    @property
    def address(self) -> str:
        return self.listener.endpoint.address

    def open(self, *block_ids: int) -> bytes:
        landing_id = draw_id()
        self.gate.open(OpenLanding(landing_id, WRITER, block_ids))
        return landing_id

    def data(self) -> np.ndarray:
        """Return the whole pool, uint8 [num_blocks, block_bytes]."""
        return pool_data(self.pool)

    def close(self) -> None:
        self.gate.shut()
        self.listener.close()
        self.pool.close()


class WriterEnd:
    """A pool, and the channel of one lane when it is connected."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = setup.pool()
        self.lost: list[str] = []
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        assert self._channel is not None
        return self._channel

    def connect(self, address: str, target: Shard, piece: Shard) -> Connected:
        setup = self.setup
        rank = WriterRank(WRITER, 0, self.pool, Trust.read(setup.trust), Faults(setup.faults), SETTINGS)
        lane = Lane(RankEndpoints(0, target, "here", (Endpoint(setup.transport, address),)), piece)
        transport = TRANSPORTS[setup.transport]
        self._channel = transport.connect(rank, lane, address, draw_id(), self.lost.append)
        return Connected(self._channel.device, self._channel.measure(SystemClock()).gb_s)

    def push(self, landing_id: bytes, moves: Sequence[tuple[int, int]]) -> list[int]:
        channel = self.channel
        channel.begin(landing_id, _never)
        sums = channel.write(landing_id, [BlockMove(src, dst, src) for src, dst in moves], _never)
        channel.flush(landing_id, _never)
        return sums

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def pool_data(pool: KvPool) -> np.ndarray:
    """Return the whole pool's bytes, uint8 [num_blocks, block_bytes], read without its own methods."""
    if isinstance(pool, DevicePool):
        return pool.tensor.cpu().numpy().copy()
    assert isinstance(pool, HostPool)
    return np.frombuffer(bytes(pool.memory.buffer), np.uint8).reshape(pool.num_blocks, -1)


def piece_of(data: np.ndarray, shard: Shard, piece: Shard) -> np.ndarray:
    """View the piece in every block of `data` [blocks, block_bytes] of `shard`: [blocks, L, 2, H, size]."""
    num_layers, num_heads = shard.layer_end - shard.layer_start, shard.head_end - shard.head_start
    whole = data.reshape(len(data), num_layers, 2, num_heads, -1)
    layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
    return whole[:, layers, :, piece.head_start - shard.head_start : piece.head_end - shard.head_start]


def landed(target: Setup, writer: Setup, piece: Shard, moves: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the content of the target's pool after these moves and nothing else: the reference."""
    expected = target.content()
    sources = piece_of(writer.content(), writer.shard, piece)
    places = piece_of(expected, target.shard, piece)
    for src, dst in moves:
        places[dst] = sources[src]
    return expected


def eventually(condition: object, what: str) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    pause = threading.Event()
    assert callable(condition)
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {WAIT_S} s: {what}")


def _never() -> bool:
    return False


R = TypeVar("R")


class BeTarget(Message, frozen=True):
    setup: Setup


class BeWriter(Message, frozen=True):
    setup: Setup


class Listening(Message, frozen=True):
    """`address` is "" where the transport cannot listen."""

    address: str


class Open(Message, frozen=True):
    landing_id: bytes
    block_ids: tuple[int, ...]


class Close(Message, frozen=True):
    landing_id: bytes


class ReadPool(Message, frozen=True):
    pass


class Pool(Message, frozen=True):
    data: bytes


class Reports(Message, frozen=True):
    """Asks for, and answers with, what the target's gate has reported so far."""

    closed: tuple[LandingClosed, ...] = ()
    gone: tuple[WriterGone, ...] = ()


class Connect(Message, frozen=True):
    address: str
    target: Shard
    piece: Shard


class Push(Message, frozen=True):
    """All of it: begin, write, flush."""

    landing_id: bytes
    moves: tuple[tuple[int, int], ...]


class Pushed(Message, frozen=True):
    sums: tuple[int, ...]


class Leave(Message, frozen=True):
    """Close the channel."""


class Done(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    error: str
    reason: str


_ANY: Codec[Message] = Codec(
    BeTarget
    | BeWriter
    | Listening
    | Open
    | Close
    | ReadPool
    | Pool
    | Reports
    | Connect
    | Connected
    | Push
    | Pushed
    | Leave
    | Done
    | Failed
)


class RankProcess:
    """One of the two ends in a process of its own, with additions to its environment."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment, "PYTHONPATH": import_path(root), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.is_pushing = False

    def be(self, be: BeTarget | BeWriter) -> None:
        """Become this rank, after closing the one that it was."""
        self.setup = be.setup
        self.address = self._call(be, Listening).address

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, *block_ids: int) -> bytes:
        landing_id = draw_id()
        self._call(Open(landing_id, block_ids), Done)
        return landing_id

    def close_landing(self, landing_id: bytes) -> None:
        self._call(Close(landing_id), Done)

    def reports(self) -> Reports:
        return self._call(Reports(), Reports)

    def data(self) -> np.ndarray:
        data = np.frombuffer(self._call(ReadPool(), Pool).data, np.uint8)
        return data.reshape(self.setup.num_blocks, -1)

    def connect(self, address: str, target: Shard, piece: Shard) -> Connected:
        return self._call(Connect(address, target, piece), Connected)

    def push(self, landing_id: bytes, moves: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        self.start_push(landing_id, moves)
        return self.end_push()

    def start_push(self, landing_id: bytes, moves: Sequence[tuple[int, int]]) -> None:
        self.is_pushing = True
        _write(self._stdin, Push(landing_id, tuple(moves)))

    def end_push(self) -> tuple[int, ...]:
        try:
            return self._take(Pushed).sums
        finally:
            self.is_pushing = False

    def leave(self) -> None:
        self._call(Leave(), Done)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def await_state(self, state: str) -> None:
        """Wait until the process is in `state` for the kernel ("T": stopped, "Z": dead)."""
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, f"state {state}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """End it in good order, or collect it when it is dead; returns its exit status."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        with contextlib.suppress(ValueError):
            self._stdout.read()
        self._stdout.close()
        try:
            return self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def _call(self, command: Message, kind: type[R]) -> R:
        _write(self._stdin, command)
        return self._take(kind)

    def _take(self, kind: type[R]) -> R:
        answer = _read(self._stdout)
        if isinstance(answer, Failed):
            raise RemoteError(answer.error, answer.reason)
        assert isinstance(answer, kind), f"the process answered {answer}"
        return answer


class RankProcesses:
    """Processes that serve one test after another, since their start takes long."""

    def __init__(self) -> None:
        self._idle: list[RankProcess] = []

    @contextlib.contextmanager
    def take(self, be: BeTarget | BeWriter) -> Iterator[RankProcess]:
        """Lend a process that is this rank. The process is used again unless it died or the test left it in
        the middle."""
        process = self._idle.pop() if self._idle else RankProcess()
        is_idle = False
        try:
            process.be(be)
            yield process
            is_idle = process.is_alive and not process.is_pushing
        finally:
            process.signal(signal.SIGCONT)
            if is_idle:
                self._idle.append(process)
            else:
                process.close()

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            for process in self._idle:
                ends.callback(process.close)


class RemoteError(Exception):
    """A `TransferError` of a process: its class's name and text."""

    def __init__(self, error: str, reason: str) -> None:
        super().__init__(f"{error}: {reason}")
        self.error = error


def answer_target(end: TargetEnd, command: Message) -> Message:
    match command:
        case Open(landing_id, block_ids):
            end.gate.open(OpenLanding(landing_id, WRITER, block_ids))
            return Done()
        case Close(landing_id):
            end.gate.close(landing_id)
            return Done()
        case ReadPool():
            return Pool(end.data().tobytes())
        case Reports():
            closed = tuple(each for each in end.reports if isinstance(each, LandingClosed))
            return Reports(closed, tuple(each for each in end.reports if isinstance(each, WriterGone)))
    raise AssertionError(command)


def answer_writer(end: WriterEnd, command: Message) -> Message:
    match command:
        case Connect(address, target, piece):
            return end.connect(address, target, piece)
        case Push(landing_id, moves):
            return Pushed(tuple(end.push(landing_id, moves)))
        case Leave():
            end.close()
            return Done()
    raise AssertionError(command)


def _read(stream: IO[bytes]) -> Message | None:
    frame = read_frame(stream)
    return None if frame is None else _ANY.decode(frame)


def _write(stream: IO[bytes], message: Message) -> None:
    stream.write(framed(_ANY.encode(message)))
    stream.flush()


def main() -> None:
    torch.set_num_threads(1)
    answers, commands = sys.stdout.buffer, sys.stdin.buffer
    end: TargetEnd | WriterEnd | None = None
    while (command := _read(commands)) is not None:
        try:
            if isinstance(command, BeTarget | BeWriter):
                if end is not None:
                    end.close()
                end = TargetEnd(command.setup) if isinstance(command, BeTarget) else WriterEnd(command.setup)
                answer: Message = Listening(end.address if isinstance(end, TargetEnd) else "")
            else:
                assert end is not None
                answer = (
                    answer_target(end, command) if isinstance(end, TargetEnd) else answer_writer(end, command)
                )
        except TransferError as error:
            answer = Failed(type(error).__name__, str(error))
        _write(answers, answer)
    if end is not None:
        end.close()


if __name__ == "__main__":
    main()
