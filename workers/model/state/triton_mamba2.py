"""Scan tokens by the states of Mamba-2 on CUDA. Where a sequence has few, and in deterministic mode, the
Triton kernel of `workers.model.cuda.mamba2_scan_kernels` takes one after another; else torch takes chunks."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from workers.model.attention.interface import to_device
from workers.model.cuda.mamba2_scan_kernels import ScanSequences, scan_sequences
from workers.model.state.layer_states import LayerStates
from workers.model.state.mamba2_scan import ScanHeads, TorchScan
from workers.model.state.state_step import StateStep

# Sequences of more tokens are computed in chunks.
_MOST_TOKENS = 16


class TritonScan:
    """Does the same as `TorchScan`."""

    def __init__(self, heads: ScanHeads, *, is_deterministic: bool) -> None:
        self._heads, self._is_deterministic = heads, is_deterministic
        self._groups = heads.groups.int()
        self._chunks = TorchScan(heads, is_deterministic=False)

    def __call__(self, convolved: Tensor, steps: Tensor, states: LayerStates) -> Tensor:
        """Scan tokens, as `TorchScan` describes it."""
        blocks, step = states
        mixed = torch.empty(len(convolved), self._heads.inner_size, device=blocks.device)
        operands = self._heads, self._groups, convolved, steps, blocks
        if step.is_decode and step.device is not None:
            known = ScanSequences(step.device.reads, step.device.writes)
            scan_sequences(*operands, known, mixed)
            return mixed
        firsts = (step.lengths.cumsum() - step.lengths).astype(np.int32)
        is_long = (step.lengths > _MOST_TOKENS) & (not self._is_deterministic)
        if not is_long.all():
            few = ~is_long
            chosen = (it[few] for it in (step.reads, step.writes, firsts, step.lengths))
            sequences = ScanSequences(*(to_device(it, blocks.device) for it in chosen))
            scan_sequences(*operands, sequences, mixed)
        for number in np.flatnonzero(is_long):
            rows = slice(int(firsts[number]), int(firsts[number] + step.lengths[number]))
            own = LayerStates(blocks, _alone(step, int(number)))
            mixed[rows] = self._chunks(convolved[rows], steps[rows], own)
        return mixed


def _alone(step: StateStep, number: int) -> StateStep:
    """Return one sequence of a step."""
    own = slice(number, number + 1)
    return dataclasses.replace(
        step, reads=step.reads[own], writes=step.writes[own], lengths=step.lengths[own], device=None
    )
