"""Compiles the kernels of experts with quantized weights for Hopper or another device, whose compute
capability is the argument, and prints a JSON line about each. It is a process of its own, because that of the
tests may interpret them. A second argument `all` adds what the test leaves out."""

from __future__ import annotations

import sys
import warnings

import torch
from hopper_compiler import compiled_for, print_kernels

from workers.model.cuda.experts import GateEpilogue, SortedRows
from workers.model.cuda.quantized_expert_product import multiply_down, multiply_gate_up
from workers.model.cuda.quantized_product import ProductTile, product_tile
from workers.model.experts.mixture_shape import DEFAULT_CLAMP, ExpertActivation
from workers.model.quantization.device_weight import DeviceWeight
from workers.model.quantization.quantized_weight import Codes

# The shape of Qwen3-30B-A3B.
HIDDEN, SIZE, NUM_CHOSEN = 2048, 768, 8
# The numbers of rows of an expert that have tiles of their own: few, many and some.
FEW, MANY, SOME = 16, 256, 64


def empty_stack(
    codes: Codes,
    group: int,
    num_outputs: int,
    num_inputs: int,
    scales: torch.dtype,
    *,
    has_offsets: bool = False,
    has_middle: bool = False,
) -> DeviceWeight:
    """Return the weights of one expert, for nothing runs. A `group` of 0 is a whole row."""
    packed = torch.empty(1, num_outputs, num_inputs * codes.num_bits // 8, dtype=torch.uint8)
    factors = torch.empty(1, num_outputs, num_inputs // (group or num_inputs), dtype=scales)
    offsets = factors.float() if has_offsets else None
    return DeviceWeight(codes, packed, factors, group or num_inputs, offsets, has_middle=has_middle)


def compile_products(
    codes: Codes,
    group: int,
    num_rows: int,
    scales: torch.dtype = torch.float16,
    *,
    activation: ExpertActivation = "silu",
    has_offsets: bool = False,
    has_middle: bool = False,
) -> None:
    gate_up, down = (
        empty_stack(codes, group, *shape, scales, has_offsets=has_offsets, has_middle=has_middle)
        for shape in ((2 * SIZE, HIDDEN), (HIDDEN, SIZE))
    )
    x = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
    of_pairs = torch.empty(NUM_CHOSEN, dtype=torch.int32)
    order = SortedRows(of_pairs, of_pairs, of_pairs, of_pairs.new_empty(NUM_CHOSEN, 3))
    bias = torch.empty(1, 2 * SIZE, dtype=torch.bfloat16) if activation == "clamped_swiglu" else None
    gate = GateEpilogue(activation, DEFAULT_CLAMP, bias)
    activated = multiply_gate_up(x, gate_up, gate, order, NUM_CHOSEN, tile_of(gate_up, num_rows))
    dtype = torch.float32 if num_rows == FEW else torch.bfloat16
    multiply_down(activated, down, order, tile_of(down, num_rows), dtype)


def tile_of(weight: DeviceWeight, num_rows: int) -> ProductTile:
    return product_tile(num_rows, torch.bfloat16, weight.group, is_fixed=False)


def compile_forms() -> None:
    """Compile AWQ and MXFP4 of gpt-oss, for few and for many rows."""
    for num_rows in (FEW, MANY):
        compile_main_forms(num_rows)


def compile_main_forms(num_rows: int) -> None:
    compile_products(Codes.UINT4, 128, num_rows, has_offsets=True)
    compile_products(Codes.E2M1, 32, num_rows, torch.bfloat16, activation="clamped_swiglu")


def compile_other_forms() -> None:
    """Compile the tile of some rows, and the other forms of published checkpoints: int4 without zero points,
    float8 of rows and by blocks, int8, and GGUF."""
    compile_main_forms(SOME)
    for num_rows in (FEW, MANY, SOME):
        compile_products(Codes.UINT4, 128, num_rows, has_middle=True)
        compile_products(Codes.E4M3, 0, num_rows, torch.float32)
        compile_products(Codes.E4M3, 128, num_rows, torch.float32)
        compile_products(Codes.INT8, 0, num_rows, torch.float32)
        compile_products(Codes.UINT4, 32, num_rows, torch.float32, has_offsets=True)
        compile_products(Codes.IQ4_NL, 32, num_rows, torch.float32)


if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for(int(sys.argv[1])) as kernels:
        compile_forms()
        if sys.argv[2:] == ["all"]:
            compile_other_forms()
    print_kernels(kernels)
