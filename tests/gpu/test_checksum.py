"""Copies and checksums of KV on the device, by the kernels, against plain slices of the bytes on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.blocks import device_pool
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.cuda_memory import pin, unpin
from kvtransfer.blocks.device_pool import Blocks, DevicePool
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.blocks.torch_checksum import checksum_torch
from kvtransfer.messages import Shard

NUM_BLOCKS = 7
IDS = [5, 0, 6, 2]
# Layers and heads of the pool, of another pool, and of a piece that both hold; head_dim, block_tokens.
SHAPES = [
    (Shard(0, 2, 0, 2), Shard(0, 2, 0, 2), Shard(0, 2, 0, 2), 16, 8),
    (Shard(0, 3, 0, 4), Shard(1, 4, 1, 3), Shard(1, 3, 1, 3), 12, 1),
    (Shard(2, 4, 1, 2), Shard(3, 4, 0, 3), Shard(3, 4, 1, 2), 3, 4),
    (Shard(0, 1, 0, 3), Shard(0, 2, 2, 3), Shard(0, 1, 2, 3), 80, 64),
]


def layout_of(shard: Shard, head_dim: int, block_tokens: int) -> BlockLayout:
    return BlockLayout(shard, head_dim, block_tokens, item_bytes=2)


def random_bytes(num_blocks: int, layout: BlockLayout, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)


def pool_of(data: np.ndarray, layout: BlockLayout, device: torch.device) -> DevicePool:
    return DevicePool(layout, torch.from_numpy(data.copy()).to(device), kernels=True)


def part(data: np.ndarray, shard: Shard, piece: Shard) -> np.ndarray:
    """A view of the piece of packed `shard`s, [num_blocks, num_layers, 2, num_heads, head_bytes]."""
    layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
    heads = slice(piece.head_start - shard.head_start, piece.head_end - shard.head_start)
    return data.reshape(len(data), shard.num_layers, 2, shard.num_heads, -1)[:, layers, :, heads]


def sums_of(pieces: np.ndarray) -> list[int]:
    return [checksum(np.ascontiguousarray(piece).tobytes()) for piece in pieces]


@pytest.mark.parametrize("num_bytes", [8, 4096, (1 << 20) + 8, 13])
def test_sums_by_torch_are_those_of_the_host(device: torch.device, num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    assert checksum_torch(torch.from_numpy(data).to(device)) == checksum(data.tobytes())


@pytest.mark.parametrize("fill", [0, 255])
def test_a_block_of_many_tiles_with_a_rest(device: torch.device, fill: int) -> None:
    layout = layout_of(Shard(0, 1, 0, 5), 20, 84)
    data = np.full((2, layout.block_bytes), fill, np.uint8)
    data[1] = random_bytes(1, layout, 3)
    assert pool_of(data, layout, device).sums([0, 1], layout.shard) == sums_of(data)


@pytest.mark.parametrize(("own", "other", "piece", "head_dim", "block_tokens"), SHAPES)
@pytest.mark.parametrize("is_staged_on_host", [False, True])
def test_pieces_are_packed_and_unpacked(
    device: torch.device,
    own: Shard,
    other: Shard,
    piece: Shard,
    head_dim: int,
    block_tokens: int,
    is_staged_on_host: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = layout_of(own, head_dim, block_tokens)
    target = layout_of(other, head_dim, block_tokens)
    data, before = random_bytes(NUM_BLOCKS, layout, 1), random_bytes(NUM_BLOCKS, target, 2)
    pool, other_pool = pool_of(data, layout, device), pool_of(before, target, device)
    size = pool.piece_bytes(piece)
    monkeypatch.setattr(device_pool, "_BATCH_BYTES", 3 * size)
    staging: memoryview | torch.Tensor = torch.empty(len(IDS) * size, dtype=torch.uint8, device=device)
    if is_staged_on_host:
        staging = pool.allocate_staging(len(IDS) * size)
        assert torch.frombuffer(staging, dtype=torch.uint8).is_pinned() == (device.type == "cuda")
    pieces = part(data, own, piece)[IDS]
    assert pool.gather(IDS, piece, staging) == pool.sums(IDS, piece) == sums_of(pieces)
    packed = bytes(staging) if isinstance(staging, memoryview) else staging.cpu().numpy().tobytes()
    assert packed == np.ascontiguousarray(pieces).tobytes()
    other_pool.scatter(IDS, piece, staging)
    part(before, other, piece)[IDS] = pieces
    assert np.array_equal(other_pool.tensor.cpu().numpy(), before)


@pytest.mark.parametrize(("own", "other", "piece", "head_dim", "block_tokens"), SHAPES)
def test_pieces_are_copied_to_blocks_of_another_shape(
    device: torch.device, own: Shard, other: Shard, piece: Shard, head_dim: int, block_tokens: int
) -> None:
    """As `cuda_ipc` writes into the memory of another process."""
    layout = layout_of(own, head_dim, block_tokens)
    target = layout_of(other, head_dim, block_tokens)
    data, expected = random_bytes(NUM_BLOCKS, layout, 1), random_bytes(9, target, 2)
    memory = torch.from_numpy(expected.copy()).to(device)
    targets = [8, 1, 0, 3]
    pending = pool_of(data, layout, device).copy_to(IDS, piece, Blocks(memory, target), targets)
    pieces = part(data, own, piece)[IDS]
    assert pending.result() == sums_of(pieces)
    part(expected, other, piece)[targets] = pieces
    assert np.array_equal(memory.cpu().numpy(), expected)


@pytest.mark.parametrize(("own", "other", "piece", "head_dim", "block_tokens"), SHAPES)
def test_records_of_host_memory_are_stored_and_loaded(
    device: torch.device, own: Shard, other: Shard, piece: Shard, head_dim: int, block_tokens: int
) -> None:
    """Through memory that is attached, so pinned on CUDA."""
    layout = layout_of(own, head_dim, block_tokens)
    data = random_bytes(NUM_BLOCKS, layout, 1)
    pool = pool_of(data, layout, device)
    page = 4096
    step = -(-layout.block_bytes // page) * page
    memory = np.zeros((len(IDS) + 1) * step, np.uint8)
    region = ByteRegion(memory.data)
    pool.attach(region)
    offsets = [step * place + 64 for place in range(len(IDS))]
    assert pool.store(IDS, region, offsets) == sums_of(data[IDS])
    for block_id, offset in zip(IDS, offsets, strict=True):
        assert np.array_equal(memory[offset : offset + layout.block_bytes], data[block_id])
    target = replace(layout, shard=other)
    before = random_bytes(NUM_BLOCKS, target, 2)
    other_pool = pool_of(before, target, device)
    assert other_pool.load(IDS, piece, region, offsets, own) == sums_of(data[IDS])
    part(before, other, piece)[IDS] = part(data, own, piece)[IDS]
    assert np.array_equal(other_pool.tensor.cpu().numpy(), before)
    pool.detach(region)


def test_what_no_block_holds_is_an_error_and_nothing_is_no_error(device: torch.device) -> None:
    layout = layout_of(Shard(0, 2, 0, 2), 8, 4)
    pool = pool_of(random_bytes(3, layout, 1), layout, device)
    with pytest.raises(IndexError, match="not all within the 3"):
        pool.sums([3], layout.shard)
    with pytest.raises(ValueError, match="is not part of"):
        pool.sums([0], Shard(0, 3, 0, 1))
    assert pool.sums([], layout.shard) == []
    assert pool.gather([], layout.shard, pool.allocate_staging(1)) == []


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_leaves_no_error_behind(device: torch.device) -> None:
    """Neither what was never mapped, nor what is pinned already. The next kernel would raise it."""
    page = 4096
    memory = np.zeros(4 * page, np.uint8)
    region = ByteRegion(memory[-memory.ctypes.data % page :][:page].data)
    assert pin(region.address, page, device)
    assert not pin(region.address, page, device)
    assert torch.ones(4, device=device).sum().item() == 4
    assert not pin(page, page, device)
    layout = layout_of(Shard(0, 2, 0, 2), 8, 4)
    data = random_bytes(3, layout, 1)
    assert pool_of(data, layout, device).sums([0, 1, 2], layout.shard) == sums_of(data)
    unpin(region.address)


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_step_that_computes(device: torch.device) -> None:
    layout = layout_of(Shard(0, 2, 0, 2), 64, 64)
    data = random_bytes(NUM_BLOCKS, layout, 1)
    pool = pool_of(data, layout, device)
    staging = pool.allocate_staging(len(IDS) * layout.block_bytes)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # a second
    step = torch.cuda.Event()  # type: ignore[no-untyped-call]
    step.record()
    assert pool.gather(IDS, layout.shard, staging) == sums_of(data[IDS])
    assert not step.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


def test_as_compiled_for_hopper_24_warps_share_a_multiprocessor(device: torch.device, tmp_path: Path) -> None:
    """So that the memory has enough reads under way, although the sums take many registers."""
    from hopper_compiler import compile_by_script

    kernels = compile_by_script(Path(__file__).parent / "compile_copies.py", tmp_path)
    assert [kernel["name"] for kernel in kernels] == ["_copy_tile"] * 3
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0, "no register is spilled"
        assert kernel["programs"] * kernel["num_warps"] >= 24
