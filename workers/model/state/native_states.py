"""Describe the states of a layer, and the sequences that continue them, to the CPU kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from workers.model.state.state_step import StateStep


class StateBlocks(ctypes.Structure):
    """`StateBlocks` of `native/state_blocks.h`."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_stride", "part_stride", "num_parts")),
    )

    @staticmethod
    def of(blocks: Tensor, num_passed: int = 0) -> StateBlocks:
        """Describe float32 `blocks` [num_blocks, num_parts, ...], of which each part is contiguous, without
        the first `num_passed` elements of each part. They must live until the result is used no more."""
        assert blocks.dtype == torch.float32
        assert blocks[0, 0].is_contiguous()
        address = blocks.data_ptr() + num_passed * blocks.itemsize
        return StateBlocks(address, blocks.stride(0), blocks.stride(1), blocks.shape[1])


class StateSequences(ctypes.Structure):
    """`StateSequences` of `native/state_blocks.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("reads", "writes", "lengths")),
        ("num_sequences", ctypes.c_int64),
    )

    @staticmethod
    def of(step: StateStep) -> StateSequences:
        """Describe the sequences of a step, which must live until the result is used no more."""
        arrays = step.reads, step.writes, step.lengths
        assert all(it.dtype == np.int32 and it.flags.c_contiguous for it in arrays)
        return StateSequences(*(it.ctypes.data for it in arrays), len(step.lengths))
