"""Blocks that landed in parts at the ranks of a stage, which hold copies of them, and are given on to all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtransfer.blocks.layout import layers_of_copy
from workers.model.attention.interface import to_device
from workers.rank.collectives import RankGroups
from workers.rank.progress import Progress

# The bytes of blocks that are exchanged at a time.
_PIECE_BYTES = 32 << 20


class BlockGiver:
    """Gives blocks of `kv` [num_blocks, num_layers, ...] on: each rank has received the layers of its part
    (`kvtransfer.blocks.layout.landing_shards`), of which it verified the checksums."""

    def __init__(self, kv: Tensor, groups: RankGroups, progress: Progress) -> None:
        self._kv, self._groups, self._progress = kv, groups, progress
        self._parts = [layers_of_copy(kv.shape[1], rank, groups.tp) for rank in range(groups.tp)]

    @torch.inference_mode()
    def give(self, block_ids: Sequence[int]) -> None:
        """Exchange the parts of these blocks, at all ranks of the stage at the same point of their steps."""
        num_blocks = max(1, _PIECE_BYTES // self._kv[0].nbytes)
        for first in range(0, len(block_ids), num_blocks):
            self._exchange(block_ids[first : first + num_blocks])
            self._progress.mark_layer()

    def _exchange(self, block_ids: Sequence[int]) -> None:
        groups, kv = self._groups, self._kv
        blocks = to_device(np.array(block_ids, dtype=np.int64), kv.device)
        of_layer = kv[0, 0].numel()
        own = self._parts[groups.tp_rank]
        given = kv[:, own.start : own.stop].index_select(0, blocks).view(-1, of_layer)
        num_rows = [len(blocks) * len(part) for part in self._parts]
        for rank, received in enumerate(groups.all_gather(given, num_rows)):
            part = self._parts[rank]
            if rank != groups.tp_rank and len(part):
                layers = kv[:, part.start : part.stop]
                layers.index_copy_(0, blocks, received.view(len(blocks), *layers.shape[1:]))
