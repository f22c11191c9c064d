"""Compiles the kernels of layers with a recurrent state for Hopper and prints a JSON line about each. It is a
process of its own, because that of the tests may interpret them."""

from __future__ import annotations

import warnings

import torch
from hopper_compiler import compiled_for_hopper, print_kernels

from workers.model.cuda.gated_delta import (
    DeltaChunks,
    DeltaSequences,
    gated_norm,
    run_chunks,
    run_tokens,
)
from workers.model.norm import Norm
from workers.model.state.delta_rule import DeltaRows, DeltaWeights
from workers.model.state.delta_shape import DeltaHeads

# Those of Qwen3-Next, with two parts.
HEADS, NUM_PARTS, NUM_TOKENS = DeltaHeads(16, 32, 128, 128), 2, 64


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ids(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def compile_delta_rule(dtype: torch.dtype) -> None:
    num_values = HEADS.num_value_heads
    weights = DeltaWeights(zeros(num_values), zeros(num_values), Norm(zeros(128), 1e-6))
    widths = (HEADS.num_channels, HEADS.num_values, num_values, num_values)
    rows = DeltaRows(*(zeros(NUM_TOKENS, width, dtype=dtype) for width in widths))
    # The states of a block begin with those of a convolution.
    size = 3 * HEADS.num_channels // NUM_PARTS + num_values // NUM_PARTS * 128 * 128
    blocks = zeros(2, NUM_PARTS, size)[:, :, -(num_values // NUM_PARTS) * 128 * 128 :]
    states = blocks.view(2, NUM_PARTS, num_values // NUM_PARTS, 128, 128)
    mixed = zeros(NUM_TOKENS, num_values, 128)
    run_tokens(HEADS, weights, rows, states, DeltaSequences(ids(2), ids(2)), mixed)
    sequences = DeltaSequences(ids(2), ids(2), ids(2), ids(2))
    run_tokens(HEADS, weights, rows, states, sequences, mixed)
    run_chunks(HEADS, weights, rows, states, sequences, DeltaChunks(ids(2), ids(2), ids(2)), mixed)
    gated_norm(mixed, rows.gates, weights.norm)


if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for_hopper() as kernels:
        compile_delta_rule(torch.bfloat16)
        compile_delta_rule(torch.float32)
    print_kernels(kernels)
