"""Pairs of `nccl` on a simulated device: the order of packing, sending, receiving and unpacking, messages
that fail or never end, and what an abort leaves. `tests/gpu` runs them between two cards."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from channel_process import LAYOUT, SETTINGS, WRITER, eventually
from simulated_nccl import (
    DEVICE_ERROR,
    LINK_ERROR,
    Failure,
    SimulatedDevice,
    SimulatedGroup,
    SimulatedPair,
    SimulatedPool,
    SimulatedStream,
    Step,
)
from trust_files import TRUST

from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool, StagingArea
from kvtransfer.blocks.host_memory import SCRATCH_BYTES
from kvtransfer.blocks.transfer_memory import DEVICE_SCRATCH_BYTES
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.errors import PeerGoneError, PushStoppedError, TransferError
from kvtransfer.messages import RankEndpoints
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import BlockMove, Lane, OpenLanding
from kvtransfer.transports import base, pair
from kvtransfer.transports.base import TargetRank, WriterRank
from kvtransfer.transports.pair import PairChannel, connect_pair, listen_pair, staging_bytes
from kvtransfer.transports.pair_group import TARGET

WRITES = 1  # the rank of the writer in a pair
SHARD = LAYOUT.shard
NUM_BLOCKS = 40
# In a message.
NUM_PIECES = 3
ORDERS: list[tuple[Step, ...]] = list(itertools.permutations(("pack", "read", "fill")))
MOVES = [BlockMove(block, NUM_BLOCKS - 1 - block, block) for block in range(NUM_BLOCKS)]


def never() -> bool:
    return False


class PairHarness:
    """Both sides of a pair in this process, each with a pool; random bytes at the writer, zeros at the
    target."""

    def __init__(self, device: SimulatedDevice, kind: type[SimulatedPair]) -> None:
        self.device = device
        self.kind = kind
        shape = NUM_BLOCKS, LAYOUT.block_bytes
        self.data = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self.source = SimulatedPool(device, LAYOUT, torch.from_numpy(self.data.copy()))
        self.target = DevicePool(LAYOUT, torch.zeros(shape, dtype=torch.uint8))
        self.gate = Gate(lambda _: None)
        self.listener = listen_pair(kind, TargetRank(0, (self.target,), self.gate, TRUST, SETTINGS))
        self.lost: list[str] = []

    def connect(self, *rules: FaultRule) -> PairChannel:
        assert self.listener is not None
        rank = WriterRank(WRITER, 0, self.source, TRUST, Faults(rules), SETTINGS)
        endpoint = self.listener.endpoint
        lane = Lane(RankEndpoints(0, SHARD, "here", (endpoint,)), SHARD)
        return connect_pair(self.kind, rank, lane, endpoint.address, draw_id(), self.lost.append)

    def open(self) -> bytes:
        landing_id = draw_id()
        self.gate.open(OpenLanding(landing_id, WRITER, tuple(range(NUM_BLOCKS))))
        return landing_id

    def give_source_back(self) -> None:
        """Use the source blocks for something else."""
        self.source.tensor.zero_()

    def close(self) -> None:
        self.gate.shut()
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    @property
    def sums(self) -> list[int]:
        return [checksum(self.data[move.src_block].tobytes()) for move in MOVES]


def pair_threads() -> list[str]:
    ends = "send", "receive", "abort", "serve"
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name in {f"nccl-{end}" for end in ends}]


def await_both_sides(device: SimulatedDevice) -> None:
    """Return when a message is under way at both sides and the writer has no staging area left."""
    eventually(lambda: device.num_packings == 3, "three packings")
    eventually(lambda: device.num_works(WRITES) > 0, "a send")
    eventually(lambda: device.num_works(TARGET) > 0, "a receipt")


def left_over(kind: type) -> set[int]:
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is kind}


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(("pack", "read", "fill"))


@pytest.fixture
def harness(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[PairHarness]:
    """Whatever a test does, both sides are free of the pair when they are closed."""
    monkeypatch.setattr(pair, "staging_bytes", lambda num_bytes, _: NUM_PIECES * num_bytes)
    monkeypatch.setattr(SimulatedStream, "fails", False)
    before = left_over(StagingArea) | left_over(SimulatedGroup)
    harness = PairHarness(device, device.install(monkeypatch))
    with contextlib.closing(harness):
        yield harness
    eventually(lambda: pair_threads() == [], "the end of the pair's threads")
    assert device.num_packings == 0
    device.groups.clear()
    assert not (left_over(StagingArea) | left_over(SimulatedGroup)) - before


def push(channel: PairChannel, landing_id: bytes) -> list[int]:
    sums = channel.write(landing_id, MOVES, never)
    channel.flush(landing_id, never)
    return sums


class Pushing:
    """A write on a thread of its own."""

    def __init__(self, channel: PairChannel, landing_id: bytes) -> None:
        self._error: TransferError | None = None
        self._thread = threading.Thread(target=self._run, args=(channel, landing_id))
        self._thread.start()

    def join(self) -> TransferError | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._error

    def _run(self, channel: PairChannel, landing_id: bytes) -> None:
        try:
            channel.write(landing_id, MOVES, never)
        except TransferError as error:
            self._error = error.with_traceback(None)  # which would hold the channel


# ------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("is_armed", [False, True])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_the_bytes_that_land_are_those_of_the_write(
    harness: PairHarness, device: SimulatedDevice, order: Sequence[Step], newest_first: bool, is_armed: bool
) -> None:
    """Whatever the device does first, and when the source blocks have another use once the write returns."""
    device.order, device.newest_first = order, newest_first
    rules = [FaultRule("never", "kill", "")] if is_armed else []
    with contextlib.closing(harness.connect(*rules)) as channel:
        landing_id = harness.open()
        sums = channel.write(landing_id, MOVES, never)
        harness.give_source_back()
        channel.flush(landing_id, never)
        assert sums == harness.sums
        assert np.array_equal(harness.target.tensor.numpy(), harness.data[::-1])
    assert harness.lost == []


def test_a_write_that_is_stopped_has_packed_what_it_queued(
    harness: PairHarness, device: SimulatedDevice
) -> None:
    """Its blocks may have another use at once; the pair goes on."""
    device.looks = 0
    answers = iter([False, False, True])
    with contextlib.closing(harness.connect()) as channel:
        landing_id = harness.open()
        with pytest.raises(PushStoppedError):
            channel.write(landing_id, MOVES, lambda: next(answers))
        assert device.num_packings == 0
        harness.source.tensor[: 2 * NUM_PIECES] = 0
        device.looks = 1
        rest = MOVES[2 * NUM_PIECES :]
        sums = channel.write(landing_id, rest, never)
        channel.flush(landing_id, never)
        assert sums == harness.sums[2 * NUM_PIECES :]
        assert np.array_equal(harness.target.tensor.numpy(), harness.data[::-1])


def test_nothing_is_unpacked_and_no_staging_used_again_before_its_message_is_done(
    harness: PairHarness, device: SimulatedDevice
) -> None:
    """While no message moves, the writer queues no more than its staging areas hold."""
    device.looks = 0
    with contextlib.closing(harness.connect()) as channel:
        pushing = Pushing(channel, harness.open())
        await_both_sides(device)
        threading.Event().wait(0.2)
        assert device.num_packings == 3
        assert device.num_works(WRITES) <= 2
        assert device.num_works(TARGET) <= 2
        assert not harness.target.tensor.any()
        device.looks = 1
        assert pushing.join() is None
        channel.flush(harness.open(), never)
        assert np.array_equal(harness.target.tensor.numpy(), harness.data[::-1])


# ------------------------------------------------------------------------------------ failures, aborts


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("send", LINK_ERROR),
        ("look at send", DEVICE_ERROR),
        ("wait for event", DEVICE_ERROR),
        ("receive", "closed"),
        ("look at receive", "closed"),
    ],
)
def test_a_failure_ends_both_sides_and_the_next_pair_works(
    harness: PairHarness, device: SimulatedDevice, failure: Failure, reason: str
) -> None:
    with contextlib.closing(harness.connect()) as channel:
        device.failure, SimulatedStream.fails = failure, failure == "wait for event"
        landing_id = harness.open()
        with pytest.raises(PeerGoneError):
            push(channel, landing_id)
        eventually(lambda: harness.lost, "the loss")
        assert reason in harness.lost[0]
        assert device.num_packings == 0
        assert not harness.target.tensor.any()
    eventually(lambda: pair_threads() == [], "the end of both sides")
    device.failure, SimulatedStream.fails = None, False
    with contextlib.closing(harness.connect()) as channel:
        assert push(channel, landing_id) == harness.sums
    assert np.array_equal(harness.target.tensor.numpy(), harness.data[::-1])


@pytest.mark.parametrize("failure", ["sent", "received"])
def test_a_failure_that_counts_as_done_shows_in_the_sums(
    harness: PairHarness, device: SimulatedDevice, failure: Failure
) -> None:
    device.failure, device.looks = failure, 0
    with contextlib.closing(harness.connect()) as channel:
        landing_id = harness.open()
        channel.write(landing_id, [BlockMove(1, 2, 1)], never)
        eventually(lambda: device.num_works(WRITES) == 1, "the send")
        device.groups[WRITES].works[0].data.zero_()  # before it is read
        device.looks = 1
        channel.flush(landing_id, never)
        assert harness.target.sums([2], SHARD) != harness.sums[1:2]


@pytest.mark.parametrize("end", ["the writer", "the target"])
def test_what_never_ends_is_ended_by_either_side(
    harness: PairHarness, device: SimulatedDevice, end: str
) -> None:
    """The fixture then finds neither a thread, nor a group, nor staging memory."""
    device.looks = 0
    channel = harness.connect()
    pushing = Pushing(channel, harness.open())
    await_both_sides(device)
    if end == "the writer":
        channel.interrupt("for the test")
    else:
        harness.close()
    assert isinstance(pushing.join(), PeerGoneError)
    eventually(lambda: pair_threads() == [], "the end of both sides before the channel is closed")
    channel.close()
    assert len(harness.lost) == (end == "the target")
    assert not harness.target.tensor.any()


@pytest.mark.parametrize("without", ["the writer", "the target"])
def test_a_device_without_memory_for_messages_has_no_path_and_no_pair(
    harness: PairHarness, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    poor = harness.source if without == "the writer" else harness.target

    def allocate(pool: DevicePool, num_bytes: int) -> StagingArea:
        if pool is poor:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StagingArea(pool, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(pair, "StagingArea", allocate)
        with pytest.raises(TransferError, match="no memory" if without == "the writer" else "closed"):
            harness.connect()
    with contextlib.closing(harness.connect()) as channel:
        assert push(channel, harness.open()) == harness.sums


def test_a_message_that_the_abort_has_ended_is_not_done(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel has left, as that of a complete one, but not all of its bytes have come."""
    group = device.install(monkeypatch).form(None, TARGET, "cpu", "")  # type: ignore[arg-type]
    work = group.start_receive(torch.zeros(4, dtype=torch.uint8))

    def aborted() -> None:
        group.abort()
        eventually(lambda: device.groups[TARGET].is_aborted, "the abort")

    monkeypatch.setattr(device, "look", aborted)
    with pytest.raises(PeerGoneError, match="was ended"):
        group.wait(work)
    assert group.close(5)


def test_an_abort_that_hangs_keeps_the_memory_that_messages_may_still_reach(
    harness: PairHarness, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_END_TIMEOUT_S", 0.1)
    device.looks = 0
    device.abort_returns.clear()
    before = left_over(StagingArea)
    channel = harness.connect()
    pushing = Pushing(channel, harness.open())
    await_both_sides(device)
    channel.interrupt("for the test")
    assert isinstance(pushing.join(), PeerGoneError)
    channel.close()
    del channel, pushing
    harness.close()
    eventually(lambda: set(pair_threads()) == {"nccl-abort"}, "the end of all that does not hang")
    assert len(left_over(StagingArea) - before) == 5, "three of the writer, two of the target"
    pair.release_left_behind()
    assert len(left_over(StagingArea) - before) == 5, "the aborts still hang"
    device.abort_returns.set()
    eventually(lambda: pair_threads() == [], "the end of the aborts")
    pair.release_left_behind()
    assert left_over(StagingArea) == before


# ---------------------------------------------------------------------------------------- the rate


def test_a_path_is_measured_by_messages_of_full_size(
    harness: PairHarness, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write twice as large as the one before, until it takes long enough."""
    size = NUM_PIECES * LAYOUT.block_bytes
    written: list[list[int]] = []

    def write_scratch(channel: PairChannel, *arguments: Any) -> None:
        written.append([])
        PairChannel._write_scratch(channel, *arguments)

    def announce(channel: PairChannel, landing_id: bytes, moves: Sequence[Any], *part_bytes: int) -> None:
        assert (landing_id, moves) == (b"", ())
        written[-1] += part_bytes
        PairChannel._announce(channel, landing_id, moves, *part_bytes)

    device.looks = 1
    with contextlib.closing(harness.connect()) as channel, monkeypatch.context() as patch:
        patch.setattr(base, "SCRATCH_BYTES", 1000)
        patch.setattr(base, "_MEASURED_S", 1e9)
        patch.setattr(base, "_MOST_MEASURED_BYTES", 8 * size)
        patch.setattr(channel, "_write_scratch", write_scratch.__get__(channel))
        patch.setattr(channel, "_announce", announce.__get__(channel))
        assert channel.measure(SystemClock()).gb_s > 0
    assert written[:3] == [[1000]] * 3
    assert written[3:] == [[size] * count for count in (1, 2, 4, 8) for _ in range(2)]
    assert not harness.target.tensor.any()


@pytest.mark.parametrize("bytes_s", [0.5e9, 12e9, 180e9, 350e9])
def test_the_rate_of_a_path_is_that_of_its_bytes(
    harness: PairHarness, monkeypatch: pytest.MonkeyPatch, bytes_s: float
) -> None:
    """Not of the round trip and the messages, which take most of the time of 4 MiB."""
    clock = ManualClock()
    size = staging_bytes(LAYOUT.block_bytes, "cuda:0")
    assert size == DEVICE_SCRATCH_BYTES
    with contextlib.closing(harness.connect()) as channel, monkeypatch.context() as patch:
        patch.setattr(channel, "_message_bytes", size)
        patch.setattr(channel, "_sync", lambda _: clock.advance(200e-6))
        patch.setattr(channel, "_write_scratch", lambda count, _: clock.advance(20e-6 + count / bytes_s))
        measured = channel.measure(clock)
    assert measured.latency_us == pytest.approx(100)
    assert measured.gb_s == pytest.approx(bytes_s / 1e9, rel=0.02)
    assert SCRATCH_BYTES / (220e-6 + SCRATCH_BYTES / bytes_s) < 0.98 * bytes_s
