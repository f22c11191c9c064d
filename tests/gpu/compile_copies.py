"""Compiles the kernel of copies and checksums for Hopper and prints a JSON line about each of its kinds:
copies with sums, sums alone, copies alone. It is a process of its own, because that of the tests may
interpret it."""

from __future__ import annotations

import warnings

import torch
from hopper_compiler import compiled_for_hopper, print_kernels

from kvtransfer.blocks.device_checksum import copy_pieces
from kvtransfer.blocks.layout import BlockLayout, piece_grid
from kvtransfer.messages import Shard

if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    layout = BlockLayout(Shard(0, 32, 0, 8), head_dim=128, block_tokens=64, item_bytes=2)
    blocks = torch.zeros(1, layout.block_bytes // 8, dtype=torch.int64)
    table = torch.zeros(3, dtype=torch.int64)
    grid = piece_grid(layout, layout, layout.shard)
    with compiled_for_hopper() as kernels:
        for target, is_summed in ((blocks.data_ptr(), True), (None, True), (blocks.data_ptr(), False)):
            copy_pieces(blocks, target, layout.block_bytes, table, 1, grid, is_summed=is_summed)
    print_kernels(kernels)
