"""What of `cuda_ipc` runs without a device: who is counted as gone and when, and the channel over a driver
that copies in host memory. `tests/gpu` runs it on CUDA."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from channel_process import LAYOUT, SETTINGS, WRITER, Setup, eventually, landed, piece_of, pool_data
from child_processes import killed_on_error
from host_driver import HostDriver
from import_path import import_path
from trust_files import FILES, TRUST

from benchmarks.drawn_trust import draw_trust
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool, PendingSums
from kvtransfer.blocks.layout import without
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.errors import PathError, PeerGoneError, ProofError, PushStoppedError, TransferError
from kvtransfer.messages import RankEndpoints, Shard
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import BlockMove, Lane, OpenLanding
from kvtransfer.transfer_reports import LandingClosed, TransferReport, WriterGone
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.base import TargetRank, WriterRank
from kvtransfer.transports.cuda_driver import cuda_driver
from kvtransfer.transports.cuda_ipc import CudaIpcListener, halves
from kvtransfer.transports.onesided import REQUEST_CODEC, Begin, Unmapped
from kvtransfer.transports.stream_sockets import HELLO_CODEC

SHARD = LAYOUT.shard
NUM_BLOCKS = 12
MOVES = [(3, 7), (0, 5), (1, 6), (9, 0)]


class CudaIpcHarness:
    """A target in this process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.driver = HostDriver()
        self.reports: list[TransferReport] = []
        self.gate = Gate(self.reports.append)
        self.pool = setup.pool()
        assert isinstance(self.pool, DevicePool)
        target = TargetRank(0, (self.pool,), self.gate, TRUST, SETTINGS)
        self.listener = CudaIpcListener(target, {0: self.pool}, self.driver)

    @property
    def lane(self) -> Lane:
        return Lane(RankEndpoints(0, self.setup.shard, "here", (self.listener.endpoint,)), SHARD)

    def open(self, *block_ids: int) -> bytes:
        landing_id = draw_id()
        self.gate.open(OpenLanding(landing_id, WRITER, block_ids))
        return landing_id

    def close_landing(self, landing_id: bytes) -> tuple[bytes, ...]:
        """The connections that may still be writing it."""
        self.gate.close(landing_id)
        report = self.reports[-1]
        assert isinstance(report, LandingClosed)
        return report.connections

    def gone(self) -> list[bytes]:
        return [report.connection for report in self.reports if isinstance(report, WriterGone)]

    def channel(
        self, setup: Setup, piece: Shard = SHARD, lost: list[str] | None = None
    ) -> cuda_ipc.CudaIpcChannel:
        rank = writer_rank(setup)
        assert isinstance(rank.pool, DevicePool)
        lane, address = replace_piece(self.lane, piece), self.listener.endpoint.address
        on_lost = (lost if lost is not None else []).append
        return cuda_ipc.connect_over(self.driver, rank, rank.pool, lane, address, draw_id(), on_lost)


def setup(shard: Shard = SHARD, seed: int = 0, *faults: FaultRule) -> Setup:
    return Setup("cuda_ipc", shard, NUM_BLOCKS, seed, "cpu", FILES, faults)


def writer_rank(be: Setup) -> WriterRank:
    return WriterRank(WRITER, 0, be.pool(), Trust.read(be.trust), Faults(be.faults), SETTINGS)


def replace_piece(lane: Lane, piece: Shard) -> Lane:
    return Lane(lane.target, piece)


def never() -> bool:
    return False


def blocks(moves: list[tuple[int, int]]) -> list[BlockMove]:
    return [BlockMove(src, dst, src) for src, dst in moves]


@pytest.fixture
def harness() -> Iterator[CudaIpcHarness]:
    harness = CudaIpcHarness(setup(seed=2))
    with contextlib.closing(harness.listener):
        yield harness


# --------------------------------------------------------------------------------- the proof of death


class WriterProcess:
    """`unix_writer.py`, let in and told what to do."""

    def __init__(self, harness: CudaIpcHarness) -> None:
        hello = writer_rank(setup(seed=1)).hello(harness.lane, draw_id())
        script = Path(__file__).parents[1] / "support" / "unix_writer.py"
        address = harness.listener.endpoint.address
        self._process = subprocess.Popen(
            [sys.executable, str(script), address, FILES.secret_file, HELLO_CODEC.encode(hello).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": import_path(Path(__file__).parents[2])},
        )
        with killed_on_error(self._process):
            self._await()

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        self._await()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def await_state(self, state: str) -> None:
        stat = Path(f"/proc/{self._process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == state, f"state {state}")

    def close(self) -> None:
        self._process.communicate()

    def _await(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "\n"


@pytest.fixture
def process(harness: CudaIpcHarness) -> Iterator[WriterProcess]:
    with contextlib.closing(WriterProcess(harness)) as process:
        yield process


def admitted(harness: CudaIpcHarness, process: WriterProcess) -> tuple[bytes, ...]:
    """Let the process write a landing, close that, and return the connection that may still be writing."""
    landing_id = harness.open(1)
    process.do(REQUEST_CODEC.encode(Begin(landing_id)).hex())
    connections = harness.close_landing(landing_id)
    assert len(connections) == 1
    return connections


def test_the_end_of_the_connection_proves_nothing_and_the_end_of_the_process_does(
    harness: CudaIpcHarness, process: WriterProcess
) -> None:
    connections = admitted(harness, process)
    process.do("hang-up")
    pause = threading.Event()
    pause.wait(0.5)
    assert harness.gone() == []
    process.signal(signal.SIGSTOP)
    process.await_state("T")
    pause.wait(0.5)
    assert harness.gone() == []
    process.signal(signal.SIGKILL)
    eventually(lambda: harness.gone() == [*connections], "the proof of its death")


def test_a_killed_writer_is_gone(harness: CudaIpcHarness, process: WriterProcess) -> None:
    connections = admitted(harness, process)
    process.signal(signal.SIGKILL)
    eventually(lambda: harness.gone() == [*connections], "the proof of its death")


def test_a_writer_that_has_unmapped_is_gone_while_its_process_lives(
    harness: CudaIpcHarness, process: WriterProcess
) -> None:
    connections = admitted(harness, process)
    process.do(REQUEST_CODEC.encode(Unmapped()).hex())
    eventually(lambda: harness.gone() == [*connections], "the word of the writer")
    process.await_state("S")


def test_nonsense_is_no_goodbye(harness: CudaIpcHarness, process: WriterProcess) -> None:
    connections = admitted(harness, process)
    process.do(b"nonsense".hex())
    threading.Event().wait(0.5)
    assert harness.gone() == []
    process.signal(signal.SIGKILL)
    eventually(lambda: harness.gone() == [*connections], "the proof of its death")


def test_closing_the_listener_waits_for_no_process(harness: CudaIpcHarness, process: WriterProcess) -> None:
    admitted(harness, process)
    process.do("hang-up")
    harness.listener.close()
    assert harness.gone() == []


# ---------------------------------------------------------------------------------------- the channel


@pytest.mark.parametrize(
    ("target_shard", "writer_shard", "piece"),
    [
        (SHARD, SHARD, SHARD),
        (Shard(0, 4, 0, 2), Shard(2, 4, 0, 4), Shard(2, 4, 0, 2)),
        (Shard(1, 3, 1, 4), Shard(0, 4, 2, 3), Shard(1, 3, 2, 3)),
    ],
)
@pytest.mark.parametrize("is_armed", [False, True])
def test_the_piece_lands_and_nothing_else(
    target_shard: Shard, writer_shard: Shard, piece: Shard, is_armed: bool
) -> None:
    harness = CudaIpcHarness(setup(target_shard, 2))
    rules = [FaultRule("never", "kill", "")] if is_armed else []
    writer = setup(writer_shard, 1, *rules)
    with contextlib.closing(harness.listener), contextlib.closing(harness.channel(writer, piece)) as channel:
        assert channel.measure(SystemClock()).gb_s > 0
        landing_id = harness.open(*(dst for _, dst in MOVES))
        channel.begin(landing_id, never)
        sums = channel.write(landing_id, blocks(MOVES), never)
        channel.flush(landing_id, never)
        assert np.array_equal(pool_data(harness.pool), landed(harness.setup, writer, piece, MOVES))
        sources = piece_of(writer.content(), writer_shard, piece)
        assert sums == [checksum(sources[src].tobytes()) for src, _ in MOVES]


def test_a_flipped_bit_and_the_middle_of_a_block(harness: CudaIpcHarness, tmp_path: Path) -> None:
    rule = FaultRule("push.corrupt", "corrupt", str(tmp_path / "marker"))
    with contextlib.closing(harness.channel(setup(SHARD, 1, rule))) as channel:
        landing_id = harness.open(1, 2)
        channel.begin(landing_id, never)
        first, second = channel.write(landing_id, blocks([(1, 1), (2, 2)]), never)
        assert harness.pool.sums([2], SHARD) == [second]
        assert harness.pool.sums([1], SHARD) != [first] == [checksum(setup(SHARD, 1).content()[1].tobytes())]


def test_a_closed_landing_is_refused_and_a_stopped_push_writes_nothing(harness: CudaIpcHarness) -> None:
    with contextlib.closing(harness.channel(setup(SHARD, 1))) as channel:
        closed = harness.open(1)
        harness.gate.close(closed)
        with pytest.raises(PushStoppedError, match="does not accept"):
            channel.begin(closed, never)
        landing_id = harness.open(1)
        channel.begin(landing_id, never)
        with pytest.raises(PushStoppedError):
            channel.write(landing_id, blocks([(1, 1)]), lambda: True)
        with pytest.raises(PathError, match="outside the target's pool"):
            channel.write(landing_id, blocks([(1, NUM_BLOCKS)]), never)
        assert np.array_equal(pool_data(harness.pool), harness.setup.content())


def test_an_orderly_end_unmaps_and_says_so(harness: CudaIpcHarness) -> None:
    lost: list[str] = []
    channel = harness.channel(setup(SHARD, 1), lost=lost)
    assert len(harness.driver.mapped) == 2
    landing_id = harness.open(1)
    channel.begin(landing_id, never)
    (connection,) = harness.close_landing(landing_id)
    channel.close()
    assert harness.driver.mapped == []
    eventually(lambda: harness.gone() == [connection], "the word of the writer")
    assert lost == []
    with pytest.raises(PeerGoneError):
        channel.begin(landing_id, never)


def test_a_writer_that_cannot_map_leaves_nothing_behind(harness: CudaIpcHarness) -> None:
    for number in (1, 2):
        harness.driver.fails_to_map = number
        with pytest.raises(PathError, match="cannot be mapped"):
            harness.channel(setup(SHARD, 1))
        assert harness.driver.mapped == []
    eventually(lambda: len(harness.gone()) == 2, "the word of the writers")


def test_a_stranger_is_refused(harness: CudaIpcHarness) -> None:
    with pytest.raises(ProofError):
        harness.channel(replace_secret(setup(SHARD, 1)))
    with pytest.raises(PathError, match="refused by the target"):
        harness.channel(setup(SHARD, 1), Shard(0, 9, 0, 1))


def replace_secret(be: Setup) -> Setup:
    return Setup(be.transport, be.shard, be.num_blocks, be.seed, be.device, draw_trust())


# -------------------------------------------------------------------------------------- without CUDA


def test_without_a_device_there_is_neither_listener_nor_channel(harness: CudaIpcHarness) -> None:
    rank = writer_rank(setup(SHARD, 1))
    assert cuda_ipc.listen(TargetRank(0, (rank.pool,), harness.gate, TRUST, SETTINGS)) is None
    with pytest.raises(PathError, match="not for KV on cpu"):
        cuda_ipc.connect(rank, harness.lane, harness.listener.endpoint.address, draw_id(), lambda _: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_the_reason_is_told() -> None:
    with pytest.raises(TransferError, match=r"libcuda|CUDA_ERROR"):
        cuda_driver(0)


@pytest.mark.parametrize("piece", [Shard(0, 4, 0, 4), Shard(1, 4, 2, 3), Shard(2, 3, 1, 4)])
def test_two_halves_are_the_whole_piece(piece: Shard) -> None:
    first, second = halves(piece, LAYOUT)
    assert list(without(piece, [first])) == [second]
    assert halves(Shard(1, 2, 3, 4), LAYOUT) == (Shard(1, 2, 3, 4),)


def test_two_halves_have_the_same_number_of_layers_of_a_group() -> None:
    layout = replace(LAYOUT, group=(0, 3))
    assert halves(Shard(0, 4, 0, 2), layout) == (Shard(0, 3, 0, 2), Shard(3, 4, 0, 2))
    assert halves(Shard(1, 4, 0, 2), layout) == (Shard(1, 4, 0, 1), Shard(1, 4, 1, 2))


def test_batches_are_written_ahead_and_none_is_left_under_way(
    harness: CudaIpcHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the push is stopped, or fails: the channel waits for what it has begun."""
    monkeypatch.setattr(cuda_ipc.CudaIpcChannel, "batch_bytes", 2 * LAYOUT.block_bytes)
    begun: list[PendingSums] = []
    ended: list[PendingSums] = []
    result = PendingSums.result

    def begin(pool: DevicePool, *arguments: Any) -> PendingSums:
        begun.append(copy_to(pool, *arguments))
        return begun[-1]

    def end(pending: PendingSums) -> list[int]:
        ended.append(pending)
        return result(pending)

    copy_to = DevicePool.copy_to
    with contextlib.closing(harness.channel(setup(SHARD, 1))) as channel:
        monkeypatch.setattr(DevicePool, "copy_to", begin)
        monkeypatch.setattr(PendingSums, "result", end)
        moves = [(block, block) for block in range(9)]
        landing_id = harness.open(*range(9))
        channel.begin(landing_id, never)
        asked: list[int] = []

        def num_ahead() -> bool:
            asked.append(len(begun) - len(ended))
            return False

        sums = channel.write(landing_id, blocks(moves), num_ahead)
        assert sums == [checksum(row.tobytes()) for row in setup(SHARD, 1).content()[:9]]
        assert asked == [0, 1, 1, 1, 1]
        assert ended == begun
        answers = iter([False, False, True])
        with pytest.raises(PushStoppedError):
            channel.write(landing_id, blocks(moves), lambda: next(answers))
        assert len(begun) == 7
        assert ended == begun
        errors = iter([RuntimeError("first"), RuntimeError("second")])

        def fail(pending: PendingSums) -> list[int]:
            ended.append(pending)
            raise next(errors)

        monkeypatch.setattr(PendingSums, "result", fail)
        with pytest.raises(RuntimeError, match="first"):
            channel.write(landing_id, blocks(moves), never)
        assert len(begun) == 9
        assert ended == begun, "those after one that failed, too"
