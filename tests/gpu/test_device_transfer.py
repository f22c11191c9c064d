"""KV between two processes on CUDA devices, or on one that they share.

NCCL refuses two ranks that share a device, so its pair needs two; one alone sends to itself.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from channel_process import (
    LAYOUT,
    BeTarget,
    BeWriter,
    RankProcess,
    RankProcesses,
    Setup,
    eventually,
    landed,
    piece_of,
)
from trust_files import FILES

from benchmarks.rank_cards import own_card
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool, StagingArea
from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import Shard
from kvtransfer.transports.nccl import make_group

pytestmark = pytest.mark.gpu

SHARD = LAYOUT.shard
NUM_BLOCKS = 40
MOVES = [(3, 7), (0, 5), (1, 6), (9, 0), (8, 33)]
LANES = [
    (SHARD, SHARD, SHARD),
    (Shard(0, 4, 0, 2), Shard(2, 4, 0, 4), Shard(2, 4, 0, 2)),
    (Shard(1, 3, 1, 4), Shard(0, 4, 2, 3), Shard(1, 3, 2, 3)),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with closing(RankProcesses()) as processes:
        yield processes


def setup(transport: str, shard: Shard, seed: int, device: str, *faults: FaultRule) -> Setup:
    return Setup(transport, shard, NUM_BLOCKS, seed, device, FILES, faults)


def devices(transport: str) -> tuple[str, str]:
    """Of the target and the writer. Skips where the transport cannot run."""
    if torch.cuda.device_count() > 1:
        return "cuda:0", "cuda:1"
    if transport == "nccl":
        pytest.skip("NCCL refuses two ranks on one device, and there is only one")
    return "cuda:0", "cuda:0"


# -------------------------------------------------------------------------------------- between ranks


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "tcp"])
@pytest.mark.parametrize(("target_shard", "writer_shard", "piece"), LANES)
def test_the_piece_lands_and_nothing_else(
    processes: RankProcesses, transport: str, target_shard: Shard, writer_shard: Shard, piece: Shard
) -> None:
    target_device, writer_device = devices(transport)
    target_is = setup(transport, target_shard, 2, target_device)
    writer_is = setup(transport, writer_shard, 1, writer_device)
    with ExitStack() as ends:
        target = ends.enter_context(processes.take(BeTarget(target_is)))
        writer = ends.enter_context(processes.take(BeWriter(writer_is)))
        assert_lands(target, writer, piece)


def assert_lands(target: RankProcess, writer: RankProcess, piece: Shard) -> None:
    """Push `MOVES`; the piece lands there and nothing else, and the sums are those of the source."""
    assert writer.connect(target.address, target.setup.shard, piece).gb_s > 0
    sums = writer.push(target.open(*(dst for _, dst in MOVES)), MOVES)
    assert np.array_equal(target.data(), landed(target.setup, writer.setup, piece, MOVES))
    sources = piece_of(writer.setup.content(), writer.setup.shard, piece)
    assert list(sums) == [checksum(sources[src].tobytes()) for src, _ in MOVES]
    writer.leave()


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[RankProcess, RankProcess]]:
    """A target and a writer, each of which sees a card of its own alone, as under Ray."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one card")
    with closing(RankProcess(own_card(0))) as target, closing(RankProcess(own_card(1))) as writer:
        yield target, writer


@pytest.mark.parametrize(("target_shard", "writer_shard", "piece"), LANES)
def test_the_piece_lands_on_a_card_that_the_writer_does_not_see(
    apart: tuple[RankProcess, RankProcess], target_shard: Shard, writer_shard: Shard, piece: Shard
) -> None:
    target, writer = apart
    target.be(BeTarget(setup("cuda_ipc", target_shard, 2, "cuda:0")))
    writer.be(BeWriter(setup("cuda_ipc", writer_shard, 1, "cuda:0")))
    assert_lands(target, writer, piece)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_a_writer_dies_and_another_takes_its_place(transport: str) -> None:
    target_device, writer_device = devices(transport)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        rule = FaultRule("push.half", "kill", str(Path(folder) / "marker"), 3)
        target = started(ends, BeTarget(setup(transport, SHARD, 0, target_device)))
        writer = started(ends, BeWriter(setup(transport, SHARD, 1, writer_device, rule)))
        writer.connect(target.address, SHARD, SHARD)
        landing_id = target.open(*(dst for _, dst in MOVES))
        writer.start_push(landing_id, MOVES)
        writer.await_state("Z")
        target.close_landing(landing_id)
        if transport == "cuda_ipc":  # let in one-sided: quarantined until it is gone
            eventually(lambda: target.reports().gone, "the proof of its death")
        following = started(ends, BeWriter(setup(transport, SHARD, 3, writer_device)))
        following.connect(target.address, SHARD, SHARD)
        following.push(target.open(11), [(4, 11)])
        assert np.array_equal(target.data()[11], following.setup.content()[4])


def test_a_stopped_writer_is_not_gone(processes: RankProcesses) -> None:
    target_device, writer_device = devices("cuda_ipc")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        rule = FaultRule("push.half", "stop", str(Path(folder) / "marker"))
        target = ends.enter_context(processes.take(BeTarget(setup("cuda_ipc", SHARD, 0, target_device))))
        writer = started(ends, BeWriter(setup("cuda_ipc", SHARD, 1, writer_device, rule)))
        writer.connect(target.address, SHARD, SHARD)
        landing_id = target.open(1)
        writer.start_push(landing_id, [(1, 1)])
        writer.await_state("T")
        target.close_landing(landing_id)
        reports = target.reports()
        assert len(reports.closed[0].connections) == 1
        assert not reports.gone
        writer.signal(signal.SIGKILL)
        eventually(lambda: target.reports().gone, "the proof of its death")


def test_what_is_queued_no_longer_uses_new_memory_for_pieces() -> None:
    """A step has freed it for its own stream alone."""
    pool = DevicePool(LAYOUT, torch.zeros(NUM_BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8, device="cuda:0"))
    freed = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    freed.fill_(1)
    address = freed.data_ptr()
    del freed
    area = StagingArea(pool, 1 << 20)
    assert area.data.data_ptr() == address
    with torch.cuda.stream(torch.cuda.Stream(area.data.device)):  # type: ignore[no-untyped-call]
        area.data.fill_(2)
    torch.cuda.synchronize()
    assert int(area.data.min()) == 2


def test_nccl_sends_to_itself_on_one_device() -> None:
    """The group and its settings, where a pair of ranks cannot be had."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    store = dist.HashStore()  # type: ignore[attr-defined]  # there, but not in the stubs
    group = make_group(store, 0, 1, torch.device("cuda:0"))
    sent = torch.arange(1 << 20, dtype=torch.uint8, device="cuda:0")
    received = torch.zeros_like(sent)
    group._start_coalescing()  # of the backend itself, which takes no device: torch 2.11 and 2.13
    group.send([sent], 0, 0)
    group.recv([received], 0, 0)
    group._end_coalescing().wait(timedelta(seconds=60))
    torch.cuda.synchronize()
    assert torch.equal(sent, received)
    group.abort()


def started(ends: ExitStack, be: BeTarget | BeWriter) -> RankProcess:
    process = ends.enter_context(closing(RankProcess()))
    process.be(be)
    return process
