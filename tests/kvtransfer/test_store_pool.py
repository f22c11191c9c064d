"""Blocks to and from records outside the pool, on both kinds of pools, against plain slices of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks import device_pool as device_pool_module
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.messages import Shard

NUM_BLOCKS = 5


def host_pool(layout: BlockLayout, data: np.ndarray) -> KvPool:
    memory = KvMemory.allocate(data.size)
    np.frombuffer(memory.buffer, dtype=np.uint8)[:] = data.reshape(-1)
    return HostPool(layout, memory)


def device_pool(layout: BlockLayout, data: np.ndarray) -> KvPool:
    return DevicePool(layout, torch.from_numpy(data.copy()))


POOLS: dict[str, Callable[[BlockLayout, np.ndarray], KvPool]] = {
    "host": host_pool,
    "device": device_pool,
}


def blocks_of(pool: KvPool) -> np.ndarray:
    """The pool's bytes, [blocks, block_bytes]."""
    if isinstance(pool, HostPool):
        return pool.region.bytes.reshape(pool.num_blocks, -1)
    assert isinstance(pool, DevicePool)
    return pool.tensor.numpy()


def part(data: np.ndarray, shard: Shard, piece: Shard) -> np.ndarray:
    """A view of the piece of packed `shard`s: [n, layers, 2, heads, bytes]."""
    shape = (len(data), shard.layer_end - shard.layer_start, 2, shard.head_end - shard.head_start, -1)
    layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
    heads = slice(piece.head_start - shard.head_start, piece.head_end - shard.head_start)
    return data.reshape(shape)[:, layers, :, heads]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[BlockLayout, Shard, Shard]:
    """The pool's layout, a record's shard, and a piece that both hold."""

    def around(start: int, end: int, limit: int) -> tuple[int, int]:
        return draw(st.integers(0, start)), draw(st.integers(end, limit))

    layer, head = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    layers, heads = (layer, draw(st.integers(layer + 1, 5))), (head, draw(st.integers(head + 1, 4)))
    piece = Shard(*layers, *heads)
    own, other = (Shard(*around(*layers, 5), *around(*heads, 4)) for _ in range(2))
    layout = BlockLayout(own, draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 4])), 2)
    return layout, other, piece


def bytes_of(layout: BlockLayout, shard: Shard, count: int, seed: int) -> np.ndarray:
    size = BlockLayout(shard, layout.head_dim, layout.block_tokens, layout.item_bytes).block_bytes
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


@pytest.mark.parametrize("kind", POOLS)
@given(shapes(), IDS, st.integers(0, 9), st.booleans())
def test_blocks_are_stored_whole(
    kind: str, shape: tuple[BlockLayout, Shard, Shard], ids: list[int], gap: int, small: bool
) -> None:
    layout, _, _ = shape
    data = bytes_of(layout, layout.shard, NUM_BLOCKS, 1)
    pool = POOLS[kind](layout, data)
    step = layout.block_bytes + gap
    memory = np.full(NUM_BLOCKS * step + 3, 7, dtype=np.uint8)
    offsets = [3 + step * block for block in ids]
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(device_pool_module, "_BATCH_BYTES", 2 * layout.block_bytes)
        sums = pool.store(ids, ByteRegion(memory.data), offsets)
    expected = np.full_like(memory, 7)
    for block, offset in zip(ids, offsets, strict=True):
        expected[offset : offset + layout.block_bytes] = data[block]
    assert (memory == expected).all()
    assert sums == [checksum(data[block].tobytes()) for block in ids]
    assert (blocks_of(pool) == data).all()


@pytest.mark.parametrize("kind", POOLS)
@given(shapes(), IDS, st.integers(0, 9), st.booleans())
def test_a_piece_is_loaded_from_a_record_of_any_shape(
    kind: str, shape: tuple[BlockLayout, Shard, Shard], ids: list[int], gap: int, small: bool
) -> None:
    layout, shard, piece = shape
    data = bytes_of(layout, layout.shard, NUM_BLOCKS, 1)
    records = bytes_of(layout, shard, NUM_BLOCKS, 2)
    pool = POOLS[kind](layout, data)
    size = records.shape[1]
    memory = np.zeros(NUM_BLOCKS * (size + gap) + 3, dtype=np.uint8)
    offsets = [3 + (size + gap) * block for block in range(len(ids))]
    for record, offset in zip(records, offsets, strict=False):
        memory[offset : offset + size] = record
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(device_pool_module, "_BATCH_BYTES", 2 * size)
        sums = pool.load(ids, piece, ByteRegion(memory.data), offsets, shard)
    expected = data.copy()
    part(expected, layout.shard, piece)[ids] = part(records, shard, piece)[: len(ids)]
    assert (blocks_of(pool) == expected).all()
    assert sums == [checksum(record.tobytes()) for record in records[: len(ids)]]


@pytest.mark.parametrize("kind", POOLS)
def test_what_does_not_fit_is_refused_and_nothing_is_written(kind: str) -> None:
    own = Shard(0, 2, 0, 2)
    layout = BlockLayout(own, 8, 4, 2)
    data = bytes_of(layout, own, NUM_BLOCKS, 1)
    pool = POOLS[kind](layout, data)
    memory = np.zeros(2 * layout.block_bytes, dtype=np.uint8)
    region = ByteRegion(memory.data)
    for ids, offsets in (
        ([NUM_BLOCKS], [0]),
        ([-1], [0]),
        ([0], [layout.block_bytes + 1]),
        ([0, 1], [0, -1]),
    ):
        with pytest.raises(IndexError):
            pool.store(ids, region, offsets)
        with pytest.raises(IndexError):
            pool.load(ids, own, region, offsets, own)
    with pytest.raises(ValueError, match="not part of"):
        pool.load([0], Shard(0, 3, 0, 2), region, [0], Shard(0, 3, 0, 2))
    with pytest.raises(ValueError, match="not part of"):
        pool.load([0], own, region, [0], Shard(0, 1, 0, 2))
    assert not memory.any()
    assert (blocks_of(pool) == data).all()


def group_pool(layout: BlockLayout, data: np.ndarray, group: tuple[int, ...]) -> HostPool:
    """A pool with these layers of blocks of all, `data` [blocks, block_bytes]."""
    own = replace(layout, group=group)
    shard = layout.shard
    held = [layer - shard.layer_start for layer in own.layers_of(shard)]
    blocks = data.reshape(len(data), shard.num_layers, -1)[:, held].reshape(len(data), -1)
    pool = host_pool(own, np.ascontiguousarray(blocks))
    assert isinstance(pool, HostPool)
    return pool


@given(shapes(), IDS, st.sets(st.integers(0, 4)))
def test_groups_of_layers_share_a_record(
    shape: tuple[BlockLayout, Shard, Shard], ids: list[int], first: set[int]
) -> None:
    """What the pools of two groups have stored is a block of all layers, and what they load of a record is
    what one pool would."""
    layout, shard, piece = shape
    groups = tuple(sorted(first)), tuple(sorted(set(range(5)) - first))
    data = bytes_of(layout, layout.shard, NUM_BLOCKS, 1)
    pools = [pool for group in groups if (pool := group_pool(layout, data, group)).layout.block_bytes]
    size = layout.block_bytes
    stored = np.zeros(NUM_BLOCKS * size, dtype=np.uint8)
    for pool in pools:
        sums = pool.store(ids, ByteRegion(stored.data), [size * block for block in ids])
        assert sums == []
    expected = np.zeros_like(data)
    expected[ids] = data[ids]
    assert (stored == expected.reshape(-1)).all()
    records = bytes_of(layout, shard, NUM_BLOCKS, 2)
    offsets = [records.shape[1] * index for index in range(len(ids))]
    for pool in pools:
        assert pool.load(ids, piece, ByteRegion(records.reshape(-1).data), offsets, shard) == []
    part(data, layout.shard, piece)[ids] = part(records, shard, piece)[: len(ids)]
    for pool in pools:
        assert pool.layout.group is not None
        assert (blocks_of(pool) == blocks_of(group_pool(layout, data, pool.layout.group))).all()
