"""Pushes and verification as few launches: what is queued, how often the host waits, and every bit of it, for
drawn shapes, on streams that are late and fail."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from channel_process import SETTINGS, WRITER
from host_driver import HostDriver
from late_stream import LateStream
from trust_files import TRUST

from kvtransfer.blocks import copy_stream
from kvtransfer.blocks.checksum import checksum, finish, finish_all
from kvtransfer.blocks.copy_stream import PieceTable
from kvtransfer.blocks.device_pool import Blocks, DevicePool
from kvtransfer.blocks.host_memory import SCRATCH_BYTES
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.mapped_blocks import MappedBlocks
from kvtransfer.blocks.transfer_memory import DEVICE_SCRATCH_BYTES
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import RankEndpoints, Shard
from kvtransfer.protocol.gate import Gate
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import BlockMove, Lane, OpenLanding
from kvtransfer.transports import base
from kvtransfer.transports.base import TargetRank, WriterRank
from kvtransfer.transports.cuda_driver import cuda_driver
from kvtransfer.transports.cuda_ipc import CudaIpcListener, connect_over

WORD = 1 << 64


class DrawnCopy:
    """Pools of two drawn shapes that share a drawn piece, and drawn moves between them."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)

        def inner(most: int) -> tuple[int, int]:
            start, end = sorted(draw.choice(most, 2, False).tolist())
            return start, end

        def around(start: int, end: int, most: int) -> tuple[int, int]:
            return int(draw.integers(0, start + 1)), int(draw.integers(end, most + 1))

        layers, heads = inner(7), inner(6)
        self.piece = Shard(*layers, *heads)
        shards = [Shard(*around(*layers, 7), *around(*heads, 6)) for _ in range(2)]
        sizes = int(draw.choice([4, 12, 20, 80])), int(draw.choice([1, 3, 16])), int(draw.choice([2, 4]))
        self.num_kinds = int(draw.choice([1, 2]))
        self.layouts = [BlockLayout(shard, *sizes, num_kinds=self.num_kinds) for shard in shards]
        num_moves = int(draw.integers(1, 12))
        self.sources = draw.integers(0, 5, num_moves).tolist()  # a block may go to several places
        self.targets = draw.choice(12, num_moves, False).tolist()
        self.data, self.before = (
            draw.integers(0, 256, (count, layout.block_bytes), np.uint8)
            for count, layout in zip((5, 12), self.layouts, strict=True)
        )

    def part(self, data: np.ndarray, index: int) -> np.ndarray:
        """View the piece of every block, [num_blocks, num_layers, num_kinds, num_heads, head_bytes]."""
        shard, piece = self.layouts[index].shard, self.piece
        whole = data.reshape(len(data), shard.num_layers, self.num_kinds, shard.num_heads, -1)
        heads = slice(piece.head_start - shard.head_start, piece.head_end - shard.head_start)
        return whole[:, piece.layer_start - shard.layer_start : piece.layer_end - shard.layer_start, :, heads]

    @property
    def sums(self) -> list[int]:
        pieces = self.part(self.data, 0)
        return [checksum(np.ascontiguousarray(pieces[block]).tobytes()) for block in self.sources]

    @property
    def after(self) -> np.ndarray:
        expected = self.before.copy()
        self.part(expected, 1)[self.targets] = self.part(self.data, 0)[self.sources]
        return expected


@pytest.fixture(autouse=True)
def _fresh_streams() -> None:
    LateStream.forget()


def pool_of(data: np.ndarray, layout: BlockLayout, device: torch.device, **options: Any) -> DevicePool:
    return DevicePool(layout, torch.from_numpy(data.copy()).to(device), kernels=True, **options)


@pytest.mark.parametrize("seed", range(24))
def test_the_sums_of_a_push_are_those_that_the_target_finds_and_the_host_computes(
    device: torch.device, seed: int
) -> None:
    drawn = DrawnCopy(seed)
    own, other = drawn.layouts
    source, target = pool_of(drawn.data, own, device), pool_of(drawn.before, other, device)
    sums = source.copy_to(drawn.sources, drawn.piece, Blocks(target.tensor, other), drawn.targets).result()
    assert sums == drawn.sums
    assert np.array_equal(target.tensor.cpu().numpy(), drawn.after)
    halves = drawn.targets[::2], drawn.targets[1::2]
    found = target.sums_of([(half, drawn.piece) for half in halves])
    assert found == [drawn.sums[::2], drawn.sums[1::2]]


@pytest.mark.parametrize("offset", [0, 8, 3], ids=["aligned", "of words", "odd"])
@pytest.mark.parametrize("seed", range(4))
def test_a_push_goes_to_an_address(device: torch.device, seed: int, offset: int) -> None:
    """By one kernel, or where that cannot write, by copies of the driver; nothing around it is touched."""
    drawn = DrawnCopy(seed)
    own, other = drawn.layouts
    memory = torch.full((offset + drawn.before.size + 5,), 7, dtype=torch.uint8, device=device)
    memory[offset:-5] = torch.from_numpy(drawn.before.reshape(-1)).to(device)
    driver = cuda_driver(0) if device.type == "cuda" else HostDriver()
    target = MappedBlocks(memory.data_ptr() + offset, len(drawn.before), other, driver)
    source = pool_of(drawn.data, own, device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the copies have a stream of their own
    assert source.copy_to(drawn.sources, drawn.piece, target, drawn.targets).result() == drawn.sums
    found = memory.cpu().numpy()
    assert np.array_equal(found[offset:-5], drawn.after.reshape(-1))
    assert (found[:offset] == 7).all()
    assert (found[-5:] == 7).all()


@pytest.mark.parametrize("num_pieces", [1, 7, 65, 130])
def test_a_push_is_one_kernel_one_copy_each_way_and_one_wait(
    device: torch.device, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtransfer.blocks import device_checksum

    counted: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted_call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return call(*args, **kwargs)

        return counted_call

    layout = BlockLayout(Shard(0, 1, 0, 1), 4, 1, 2)
    data = np.random.default_rng(num_pieces).integers(0, 256, (num_pieces, layout.block_bytes), np.uint8)
    pool = pool_of(data, layout, device)
    target = torch.zeros_like(pool.tensor)
    monkeypatch.setattr(device_checksum, "copy_pieces", counting("kernel", device_checksum.copy_pieces))
    for name in ("upload", "download"):
        monkeypatch.setattr(PieceTable, name, counting(name, getattr(PieceTable, name)))
    tables = counting("table", PieceTable)
    monkeypatch.setattr(copy_stream, "PieceTable", tables)
    every = range(num_pieces)
    for _ in range(3):
        pending = pool.copy_to(every, layout.shard, Blocks(target, layout), every)
        pending.mark = SimpleNamespace(event=None, wait=counting("wait", pending.mark.wait))
        sums = pending.result()
        assert pending.result() is sums
    assert sums == [checksum(row.tobytes()) for row in data]
    assert counted.pop("table") <= 1, "used again"
    assert counted == dict.fromkeys(("kernel", "upload", "download", "wait"), 3)


@pytest.mark.parametrize("seed", range(4))
def test_pushes_that_are_queued_together_and_done_late(device: torch.device, seed: int) -> None:
    """Each has a table of its own until its sums are read; the later is awaited first."""
    drawn, second = DrawnCopy(seed), DrawnCopy(seed)
    own, other = drawn.layouts
    pool = pool_of(drawn.data, own, device, streams=LateStream)
    targets = [torch.from_numpy(drawn.before.copy()).to(device) for _ in range(2)]
    backwards = drawn.sources[::-1], drawn.targets[::-1]
    first = pool.copy_to(drawn.sources, drawn.piece, Blocks(targets[0], other), drawn.targets)
    second_push = pool.copy_to(backwards[0], drawn.piece, Blocks(targets[1], other), backwards[1])
    assert np.array_equal(targets[0].cpu().numpy(), drawn.before), "nothing is done yet"
    assert second_push.result() == second.sums[::-1]
    assert first.result() == drawn.sums
    for target in targets:
        assert np.array_equal(target.cpu().numpy(), drawn.after)
    (stream,) = LateStream.made
    assert stream.is_urgent
    assert stream.num_queued == 2


def test_a_device_that_fails_gives_no_sums_and_its_table_is_not_used_again(device: torch.device) -> None:
    drawn = DrawnCopy(1)
    own, other = drawn.layouts
    pool = pool_of(drawn.data, own, device, streams=LateStream)
    target = torch.from_numpy(drawn.before.copy()).to(device)
    assert pool.sums(drawn.sources, drawn.piece) == drawn.sums
    (stream,) = LateStream.made
    LateStream.fails_at = LateStream.num_done
    pending = pool.copy_to(drawn.sources, drawn.piece, Blocks(target, other), drawn.targets)
    table = stream.take(1)
    stream.give_back(table)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pending.result()
    assert stream.take(1) is table
    assert stream.take(1) is not table, "the table of the push is still its own"
    assert np.array_equal(target.cpu().numpy(), drawn.before)


@pytest.mark.parametrize("seed", range(4))
def test_all_sums_are_finished_as_one_is(seed: int) -> None:
    draw = np.random.default_rng(seed)
    totals = np.concatenate([draw.integers(0, WORD, 50, np.uint64), np.array([0, WORD - 1], np.uint64)])
    before, num_bytes = totals.copy(), int(draw.integers(1, 1 << 40))
    assert finish_all(totals, num_bytes) == [finish(int(total), num_bytes) for total in totals]
    assert np.array_equal(totals, before)


# ----------------------------------------------------------------------------------------- the channel


class PushTarget:
    """A target in this process, whose memory a `cuda_ipc` channel has mapped by a driver of the host; the
    writer's kernels run late."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        self.layout = BlockLayout(Shard(0, 2, 0, 2), 4, 2, 2)
        draw = np.random.default_rng(3)
        shape = NUM_BLOCKS, self.layout.block_bytes
        self.data, before = (draw.integers(0, 256, shape, np.uint8) for _ in range(2))
        self.pool = pool_of(before, self.layout, CPU)
        source = pool_of(self.data, self.layout, CPU, streams=LateStream)
        driver = HostDriver()
        gate = Gate(lambda _: None)
        listener = CudaIpcListener(TargetRank(0, (self.pool,), gate, TRUST, SETTINGS), {0: self.pool}, driver)
        ends.enter_context(contextlib.closing(listener))
        shard, address = self.layout.shard, listener.endpoint.address
        lane = Lane(RankEndpoints(0, shard, "here", (listener.endpoint,)), shard)
        rank = WriterRank(WRITER, 0, source, TRUST, Faults(()), SETTINGS)
        self.channel = connect_over(driver, rank, source, lane, address, draw_id(), lambda _: None)
        ends.enter_context(contextlib.closing(self.channel))
        self.landing_id = draw_id()
        gate.open(OpenLanding(self.landing_id, WRITER, tuple(range(NUM_BLOCKS))))
        self.channel.begin(self.landing_id, lambda: False)

    @property
    def moves(self) -> list[BlockMove]:
        return [BlockMove(block, NUM_BLOCKS - 1 - block, block) for block in range(NUM_BLOCKS)]


NUM_BLOCKS = 80
CPU = torch.device("cpu")
on_the_host = pytest.mark.skipif(torch.cuda.is_available(), reason="the driver maps memory of the host")


@pytest.fixture
def target(device: torch.device) -> Iterator[PushTarget]:
    with contextlib.ExitStack() as ends:
        yield PushTarget(ends)


@on_the_host
def test_a_write_of_many_blocks_is_one_launch(target: PushTarget) -> None:
    looks: list[int] = []

    def stopped() -> bool:
        looks.append(sum(stream.num_queued for stream in LateStream.made))
        return False

    LateStream.forget()
    sums = target.channel.write(target.landing_id, target.moves, stopped)
    assert looks == [0], "nothing was queued when it looked whether to stop"
    assert [stream.num_queued for stream in LateStream.made] == [1]
    assert sums == [checksum(row.tobytes()) for row in target.data]
    assert np.array_equal(target.pool.tensor.numpy(), target.data[::-1])
    assert target.pool.sums(range(NUM_BLOCKS), target.layout.shard) == sums[::-1]


@on_the_host
def test_a_device_that_fails_in_a_push_is_no_success(target: PushTarget) -> None:
    before = target.pool.tensor.clone()
    LateStream.fails_at = LateStream.num_done
    with pytest.raises(RuntimeError, match="illegal memory access"):
        target.channel.write(target.landing_id, target.moves, lambda: False)
    assert torch.equal(target.pool.tensor, before)


@on_the_host
def test_a_path_is_measured_by_launches_of_many_pieces(
    target: PushTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each twice as large as the one before, until it takes long enough."""
    written: list[int] = []

    def counted(pool: DevicePool, ids: list[int], *others: Any) -> SimpleNamespace:
        assert max(ids) < pool.num_blocks
        written.append(len(ids) * SCRATCH_BYTES)
        return SimpleNamespace(result=lambda: [])

    monkeypatch.setattr(DevicePool, "copy_to", counted)
    monkeypatch.setattr(base, "_MEASURED_S", 1e9)
    measured = target.channel.measure(SystemClock())
    sizes = [DEVICE_SCRATCH_BYTES << power for power in range(6)]
    assert sizes[-1] == 1 << 30
    assert written[3:] == [size for size in sizes for _ in range(2)]
    assert measured.gb_s > 0


@pytest.mark.gpu
def test_copies_that_someone_waits_for_have_priority(device: torch.device) -> None:
    """One of them ends while kernels that fill the device are queued."""
    layout = BlockLayout(Shard(0, 2, 0, 2), 64, 64, 2)
    data = np.zeros((4, layout.block_bytes), np.uint8)
    pool = pool_of(data, layout, device)
    pool.sums([0], layout.shard)
    large = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    products = [large @ large for _ in range(64)]
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record()
    pool.sums([0, 1, 2, 3], layout.shard)
    assert not end.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    assert len(products) == 64
