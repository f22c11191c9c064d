"""Blocks in the memory of another process, which is mapped here and known by its address alone.

There is no tensor of them. Torch takes the device of a tensor from the driver, which names the card that has
the memory, and under Ray a process sees its own card and no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from kvtransfer.blocks.layout import BlockLayout, piece_grid
from kvtransfer.messages import Shard


class AddressCopier(Protocol):
    """Copies between addresses that a device of this process can reach."""

    def copy(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        """Queue a copy on a stream of the device (`torch.cuda.Stream.cuda_stream`). Raises `PathError`."""


class MappedBlocks(NamedTuple):
    """`num_blocks` blocks of one layout from `address` on. They must outlive all copies."""

    address: int
    num_blocks: int
    layout: BlockLayout
    copier: AddressCopier

    def write(self, packed: torch.Tensor, block_ids: Sequence[int], piece: Shard) -> None:
        """Queue copies of pieces that lie one after another, contiguous uint8 [num_pieces, ...], to these
        blocks, on the current stream and in as many calls as the pieces have rows. For pieces that a kernel
        does not copy, those that are not whole words. Raises `IndexError` for a block that is not there."""
        if any(not 0 <= block_id < self.num_blocks for block_id in block_ids):
            raise IndexError(f"blocks {list(block_ids)} of {self.num_blocks}")
        stream = torch.cuda.current_stream(packed.device).cuda_stream if packed.is_cuda else 0
        grid = piece_grid(replace(self.layout, shard=piece), self.layout, piece)
        source = packed.data_ptr()
        for block_id in block_ids:
            target = self.address + block_id * self.layout.block_bytes + grid.dst_offset
            for row in range(grid.num_rows):
                self.copier.copy(source, target + row * grid.dst_pitch, grid.row_bytes, stream)
                source += grid.row_bytes
