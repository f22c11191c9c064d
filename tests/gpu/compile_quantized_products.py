"""Compiles the kernels of products with quantized weights for Hopper or another device, whose compute
capability is the argument, and prints a JSON line about each. It is a process of its own, because that of the
tests may interpret them."""

from __future__ import annotations

import sys
import warnings

import torch
from hopper_compiler import compiled_for, print_kernels

from workers.model.cuda.quantized_product import look_up, multiply, round_rows
from workers.model.finish import Finish
from workers.model.quantization.device_weight import DeviceWeight
from workers.model.quantization.quantized_weight import Codes

NUM_OUTPUTS, NUM_INPUTS = 4096, 4096
# The numbers of rows that have tiles of their own.
NUM_ROWS = (16, 64, 256)


def empty_weight(
    codes: Codes, group: int, *, has_offsets: bool = False, quantizes_inputs: bool = False
) -> DeviceWeight:
    packed = torch.empty(NUM_OUTPUTS, NUM_INPUTS * codes.num_bits // 8, dtype=torch.uint8)
    scales = torch.empty(NUM_OUTPUTS, NUM_INPUTS // group)
    offsets = scales if has_offsets else None
    return DeviceWeight(codes, packed, scales, group, offsets, quantizes_inputs=quantizes_inputs)


def compile_product(
    weight: DeviceWeight, num_rows: int, dtype: torch.dtype = torch.bfloat16, finish: Finish = "store"
) -> None:
    x = torch.empty(num_rows, NUM_INPUTS, dtype=dtype)
    is_gated = finish in ("silu", "gelu_tanh")
    out = torch.empty(num_rows, NUM_OUTPUTS // 2 if is_gated else NUM_OUTPUTS, dtype=torch.bfloat16)
    multiply(x, weight, None, out, finish=finish)


# The forms of published checkpoints: AWQ and GPTQ, GGUF, NVFP4, MXFP4, and float8 by blocks.
FORMS = (
    (Codes.UINT4, 128, True),
    (Codes.UINT4, 32, True),
    (Codes.IQ4_NL, 32, False),
    (Codes.E2M1, 16, False),
    (Codes.E4M3, 128, False),
)


def compile_forms() -> None:
    for codes, group, has_offsets in FORMS:
        weight = empty_weight(codes, group, has_offsets=has_offsets)
        for num_rows in NUM_ROWS:
            compile_product(weight, num_rows)


def compile_rest() -> None:
    """Compile products of integers, the tile of deterministic mode, and the smaller kernels."""
    integers = empty_weight(Codes.INT8, NUM_INPUTS, quantizes_inputs=True)
    for num_rows in NUM_ROWS:
        compile_product(integers, num_rows, torch.int8)
    weight = empty_weight(Codes.UINT4, 128)
    x = torch.empty(256, NUM_INPUTS, dtype=torch.bfloat16)
    multiply(x, weight, None, torch.empty(256, NUM_OUTPUTS), is_fixed=True)
    compile_product(weight, 1, finish="silu")
    for codes in (Codes.INT8, Codes.E4M3):
        round_rows(x, codes, torch.bfloat16)
    look_up(weight, torch.zeros(2, dtype=torch.int64))


if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for(int(sys.argv[1])) as kernels:
        compile_forms()
        compile_rest()
    print_kernels(kernels)
