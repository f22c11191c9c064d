"""Compiles the kernels of layers, deterministic products and sampling for Hopper and prints a JSON line about
each. It is a process of its own, because that of the tests may interpret them."""

from __future__ import annotations

import warnings

import torch
from hopper_compiler import compiled_for_hopper, print_kernels

from workers.model.cuda.invariant_product import multiply
from workers.model.cuda.layer_ops import add_normed, gate_mul, rms_norm, rotate_and_write
from workers.model.cuda.sampling import DeviceSlots, sample
from workers.model.kv_form import SCALE_BYTES
from workers.model.norm import Norm

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 32, 8, 128, 4096, 151_936
CPU = torch.device("cpu")


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ids(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def compile_layer() -> None:
    hidden = zeros(2, HIDDEN)
    for is_rounded_first in (True, False):
        norm = Norm(zeros(HIDDEN, dtype=torch.float32), 1e-6, is_rounded_first)
        rms_norm(hidden, norm)
        rms_norm(hidden, norm, torch.empty_like(hidden), hidden.clone())
        add_normed(hidden.clone(), hidden, norm)
    for activation in ("silu", "gelu_tanh"):
        gate_mul(zeros(2, 3 * HIDDEN), activation)
    qkv = zeros(2, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    kv = zeros(1, 1, 2, NUM_KV_HEADS, 16, HEAD_DIM)
    cos = zeros(2, 1, HEAD_DIM)
    rotate_and_write(qkv, kv[:, 0], ids(2, 4), ids(2), ids(2), cos, cos)
    for is_rounded_first in (True, False):
        norm = Norm(zeros(HEAD_DIM, dtype=torch.float32), 1e-6, is_rounded_first)
        rotate_and_write(qkv, kv[:, 0], ids(2, 4), ids(2), ids(2), cos, cos, q_norm=norm, k_norm=norm)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        kv = zeros(1, 1, 2, NUM_KV_HEADS, 16, HEAD_DIM + SCALE_BYTES, dtype=kv_dtype)
        rotate_and_write(qkv, kv[:, 0], ids(2, 4), ids(2), ids(2), cos, cos)


def compile_products() -> None:
    x, weight = zeros(2, 64), zeros(64, 64)
    multiply(x, weight, None, zeros(2, 64))
    multiply(x, weight, None, zeros(2, 64), is_added=True)
    multiply(x, weight, weight[0], zeros(2, 64, dtype=torch.float32))


def compile_sampling() -> None:
    slots = DeviceSlots(1, VOCAB, CPU)
    sample(zeros(1, VOCAB, dtype=torch.float32), slots, ids(1), ids(1, VOCAB // 32), ids(1))


if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for_hopper() as kernels:
        compile_layer()
        compile_products()
        compile_sampling()
    print_kernels(kernels)
