"""Compiles the kernels of experts and prints a JSON line about each: for Hopper, or for the compute
capability that is the argument, 80 for Ampere. It is a process of its own, because that of the tests may
interpret them."""

from __future__ import annotations

import sys
import warnings

import torch
from hopper_compiler import HOPPER, compiled_for, print_kernels

from workers.model.cuda.expert_choice import choose_in_one
from workers.model.cuda.experts import (
    ExpertTile,
    GateEpilogue,
    SortedRows,
    activate,
    add_results,
    few_rows_tile,
    many_rows_tile,
    multiply_down,
    multiply_gate_up,
    sort_rows,
)
from workers.model.experts.mixture_shape import DEFAULT_CLAMP, ExpertActivation
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing

# The shape of Qwen3-30B-A3B.
HIDDEN, SIZE, NUM_EXPERTS, NUM_CHOSEN = 2048, 768, 128, 8


def compile_experts(
    dtype: torch.dtype, tile: ExpertTile, activation: ExpertActivation = "silu", *, has_bias: bool = False
) -> None:
    """Compile what a step launches; tensors of weights have one expert, for nothing runs."""
    result_dtype = torch.float32 if tile == few_rows_tile(dtype) else dtype
    experts = torch.zeros(1, NUM_CHOSEN, dtype=torch.int32)
    x, gate_up = torch.zeros(1, HIDDEN, dtype=dtype), torch.zeros(1, 2 * SIZE, HIDDEN, dtype=dtype)
    gate = GateEpilogue(activation, DEFAULT_CLAMP, gate_up[:, :, 0].contiguous() if has_bias else None)
    sort_rows(experts, torch.zeros(NUM_EXPERTS, dtype=torch.int64), tile.rows, tile.chunk)
    pairs, rows, ends = (experts[0].clone() for _ in range(3))
    order = SortedRows(pairs, rows, ends, experts.new_zeros(8, 3))
    activated = multiply_gate_up(x, gate_up, gate, order, NUM_CHOSEN, tile)
    results = multiply_down(activated, torch.zeros(1, HIDDEN, SIZE, dtype=dtype), order, tile, result_dtype)
    routing = Routing(experts, torch.zeros(1, NUM_CHOSEN))
    add_results(results, order, routing, x if has_bias else None, x, is_added=not has_bias)


def compile_grouped() -> None:
    """Compile what stands between grouped products."""
    rows = torch.zeros(NUM_CHOSEN, 2 * SIZE, dtype=torch.bfloat16)
    experts = torch.zeros(1, NUM_CHOSEN, dtype=torch.int32)
    order = SortedRows(*(experts[0].clone() for _ in range(4)))
    activate(rows, GateEpilogue("silu", DEFAULT_CLAMP, None), order, experts)


if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for(int(sys.argv[1]) if len(sys.argv) > 1 else HOPPER) as kernels:
        for tile_of in (few_rows_tile, many_rows_tile):
            compile_experts(torch.bfloat16, tile_of(torch.bfloat16))
        compile_experts(torch.bfloat16, few_rows_tile(torch.bfloat16), "clamped_swiglu", has_bias=True)
        compile_experts(torch.float32, many_rows_tile(torch.float32), "gelu_tanh")
        compile_grouped()
        choose_in_one(torch.zeros(1, NUM_EXPERTS), RouterRule(NUM_EXPERTS, NUM_CHOSEN), None)
        grouped = RouterRule(256, NUM_CHOSEN, "sigmoid", num_groups=8, num_chosen_groups=4)
        choose_in_one(torch.zeros(1, 256), grouped, torch.zeros(256))
    print_kernels(kernels)
