"""Pieces that no kernel copies, as they are not whole words, to memory that has an address and no tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_driver import HostDriver
from late_stream import LateStream

from kvtransfer.blocks import device_pool
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.mapped_blocks import MappedBlocks
from kvtransfer.errors import PathError
from kvtransfer.messages import Shard

OWN, OTHER, PIECE = Shard(0, 4, 0, 4), Shard(1, 5, 1, 6), Shard(1, 3, 2, 4)
SOURCES, TARGETS = [2, 0, 3, 2, 1], [6, 1, 0, 3, 5]


def layout(shard: Shard) -> BlockLayout:
    """Of heads of 6 bytes."""
    return BlockLayout(shard, head_dim=3, block_tokens=1, item_bytes=2)


def drawn(num_blocks: int, shard: Shard) -> np.ndarray:
    shape = num_blocks, layout(shard).block_bytes
    return np.random.default_rng(num_blocks).integers(0, 256, shape, np.uint8)


def part(data: np.ndarray, shard: Shard, piece: Shard) -> np.ndarray:
    """View the piece of every block, [num_blocks, num_layers, 2, num_heads, head_bytes]."""
    whole = data.reshape(len(data), shard.num_layers, 2, shard.num_heads, -1)
    heads = slice(piece.head_start - shard.head_start, piece.head_end - shard.head_start)
    return whole[:, piece.layer_start - shard.layer_start : piece.layer_end - shard.layer_start, :, heads]


class AwaitedStream(LateStream):
    """Counts how often it was awaited."""

    num_waits = 0

    def catch_up(self, num_queued: int) -> None:
        AwaitedStream.num_waits += 1
        super().catch_up(num_queued)


@pytest.mark.parametrize("batch_pieces", [1, 2, 100])
@pytest.mark.parametrize("piece", [PIECE, Shard(1, 4, 1, 4), Shard(3, 4, 3, 4)])
def test_pieces_of_odd_sizes_land_row_by_row(
    piece: Shard, batch_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, memory = drawn(4, OWN), drawn(7, OTHER)
    expected, pieces = memory.copy(), part(data, OWN, piece)[SOURCES]
    part(expected, OTHER, piece)[TARGETS] = pieces
    pool = DevicePool(layout(OWN), torch.from_numpy(data))
    monkeypatch.setattr(device_pool, "_BATCH_BYTES", batch_pieces * pool.piece_bytes(piece))
    target = MappedBlocks(memory.ctypes.data, len(memory), layout(OTHER), HostDriver())
    sums = pool.copy_to(SOURCES, piece, target, TARGETS).result()
    assert np.array_equal(memory, expected)
    assert sums == [checksum(np.ascontiguousarray(each).tobytes()) for each in pieces]


def test_whole_blocks_are_a_copy_each() -> None:
    data, memory, driver = drawn(4, OWN), drawn(4, OWN) ^ 1, HostDriver()
    target = MappedBlocks(memory.ctypes.data, len(memory), layout(OWN), driver)
    DevicePool(layout(OWN), torch.from_numpy(data)).copy_to(range(4), OWN, target, range(4)).result()
    assert driver.num_copies == 4
    assert np.array_equal(memory, data)


def test_no_copy_is_under_way_after_one_that_was_refused() -> None:
    AwaitedStream.num_waits = 0
    memory, driver = drawn(7, OTHER), HostDriver()
    driver.fails_to_copy = 6
    pool = DevicePool(layout(OWN), torch.from_numpy(drawn(4, OWN)), streams=AwaitedStream)
    target = MappedBlocks(memory.ctypes.data, len(memory), layout(OTHER), driver)
    with pytest.raises(PathError, match="cannot be copied"):
        pool.copy_to(SOURCES, PIECE, target, TARGETS)
    assert driver.num_copies == 6
    assert AwaitedStream.num_waits == 1


@pytest.mark.parametrize("block", [-1, 7])
def test_a_block_that_is_not_there_is_refused_before_any_copy(block: int) -> None:
    memory, driver = drawn(7, OTHER), HostDriver()
    pool = DevicePool(layout(OWN), torch.from_numpy(drawn(4, OWN)))
    target = MappedBlocks(memory.ctypes.data, len(memory), layout(OTHER), driver)
    with pytest.raises(IndexError, match="of 7"):
        pool.copy_to([0, 1], PIECE, target, [3, block])
    assert driver.num_copies == 0
