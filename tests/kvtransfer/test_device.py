"""The pool on a torch device against a plain slice of the bytes, on the CPU; `tests/gpu` runs it on CUDA."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks import cuda_memory, device_pool
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.torch_checksum import checksum_torch
from kvtransfer.messages import Shard

NUM_BLOCKS = 11


def make_pool(layout: BlockLayout, seed: int) -> tuple[DevicePool, np.ndarray]:
    """A pool of random bytes, and an own copy of them, [blocks, layers, 2, heads, head_bytes]."""
    data = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, layout.block_bytes), dtype=np.uint8)
    shard = layout.shard
    shape = (NUM_BLOCKS, shard.layer_end - shard.layer_start, 2, shard.head_end - shard.head_start, -1)
    return DevicePool(layout, torch.from_numpy(data.copy())), data.reshape(shape)


def sliced(data: np.ndarray, shard: Shard, piece: Shard) -> np.ndarray:
    """The piece of every block, [blocks, piece bytes]: the reference."""
    layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
    heads = slice(piece.head_start - shard.head_start, piece.head_end - shard.head_start)
    return np.ascontiguousarray(data[:, layers, :, heads]).reshape(NUM_BLOCKS, -1)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[BlockLayout, Shard]:
    def inner(start: int, end: int) -> tuple[int, int]:
        first = draw(st.integers(start, end - 1))
        return first, draw(st.integers(first + 1, end))

    shard = Shard(*inner(0, 6), *inner(0, 5))
    layout = BlockLayout(shard, draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 4])), 2)
    return layout, Shard(*inner(shard.layer_start, shard.layer_end), *inner(shard.head_start, shard.head_end))


BLOCK_IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


@given(pieces(), BLOCK_IDS, st.booleans(), st.booleans())
def test_what_is_gathered_and_summed_is_the_piece(
    shapes: tuple[BlockLayout, Shard], ids: list[int], on_host: bool, small: bool
) -> None:
    layout, piece = shapes
    pool, data = make_pool(layout, 1)
    expected = sliced(data, layout.shard, piece)[ids]
    staging = torch.zeros(expected.size, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        if small:  # several operations, the last of which may be a smaller one
            patch.setattr(device_pool, "_BATCH_BYTES", 3 * pool.piece_bytes(piece))
        sums = pool.gather(ids, piece, staging.numpy().data if on_host else staging)
        assert pool.sums(ids, piece) == sums
    assert staging.numpy().tobytes() == expected.tobytes()
    assert sums == [checksum(row.tobytes()) for row in expected]


@given(pieces(), BLOCK_IDS, st.booleans())
def test_what_is_scattered_lands_there_and_nowhere_else(
    shapes: tuple[BlockLayout, Shard], ids: list[int], on_host: bool
) -> None:
    layout, piece = shapes
    pool, expected = make_pool(layout, 2)
    _, other = make_pool(layout, 3)
    packed = sliced(other, layout.shard, piece)[ids]
    staging = torch.from_numpy(packed.copy()).reshape(-1)
    pool.scatter(ids, piece, staging.numpy().data if on_host else staging)
    layers = slice(piece.layer_start - layout.shard.layer_start, piece.layer_end - layout.shard.layer_start)
    heads = slice(piece.head_start - layout.shard.head_start, piece.head_end - layout.shard.head_start)
    for block_id in ids:
        expected[block_id, layers, :, heads] = other[block_id, layers, :, heads]
    assert pool.tensor.numpy().tobytes() == expected.tobytes()


def test_what_lies_outside_is_an_error() -> None:
    layout = BlockLayout(Shard(2, 4, 1, 3), head_dim=4, block_tokens=4, item_bytes=2)
    pool, _ = make_pool(layout, 1)
    staging = pool.allocate_staging(layout.block_bytes)
    for ids in ([NUM_BLOCKS], [-1]):
        with pytest.raises(IndexError, match="not all within the 11"):
            pool.gather(ids, layout.shard, staging)
        with pytest.raises(IndexError, match="not all within the 11"):
            pool.scatter(ids, layout.shard, staging)
    for piece in (Shard(1, 3, 1, 3), Shard(2, 4, 0, 1)):
        with pytest.raises(ValueError, match="is not part of"):
            pool.sums([0], piece)
    with pytest.raises(ValueError, match="is no pool"):
        DevicePool(layout, torch.zeros(3, layout.block_bytes + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not contiguous"):
        DevicePool(layout, torch.zeros(6, layout.block_bytes, dtype=torch.uint8)[::2])


def test_a_tensor_made_in_inference_mode_can_be_written() -> None:
    """The rank makes its pool in it, and other threads scatter."""
    layout = BlockLayout(Shard(0, 1, 0, 1), head_dim=4, block_tokens=4, item_bytes=2)
    with torch.inference_mode():
        tensor = torch.zeros(3, layout.block_bytes, dtype=torch.uint8)
    pool = DevicePool(layout, tensor)
    staging = pool.allocate_staging(layout.block_bytes)
    staging[:] = bytes([7]) * layout.block_bytes
    pool.scatter([1], layout.shard, staging)
    assert pool.tensor.sum(dim=1).tolist() == [0, 7 * layout.block_bytes, 0]
    assert pool.sums([1], layout.shard) == [checksum(staging)] == [checksum_torch(tensor[1])]


def test_after_close_nothing_is_held() -> None:
    layout = BlockLayout(Shard(0, 1, 0, 1), head_dim=4, block_tokens=4, item_bytes=2)
    pool, _ = make_pool(layout, 1)
    pool.close()
    assert pool.tensor.numel() == 0
    with pytest.raises(IndexError):
        pool.sums([0], layout.shard)


class RefusingRuntime:
    """Stands for CUDA's runtime: a call that it refuses leaves an error, which torch raises with the next
    kernel."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.pending = False

    def cudaHostRegister(self, *_: int) -> int:
        self.pending = True
        return 2

    def launch(self, *_: object, **__: object) -> None:
        if self.pending:
            self.pending = False
            raise torch.AcceleratorError("CUDA error: out of memory")


def test_a_refused_pin_leaves_no_error_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RefusingRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch, "zeros", runtime.launch)
    assert not cuda_memory.pin(4096, 4096, torch.device("cuda:0"))
    runtime.launch()
