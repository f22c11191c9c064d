"""Compiles the one-shot exchange for Hopper and prints a JSON line about each of its kinds: sums over 2
and 8 ranks in bf16 and in float32, and parts side by side. It is a process of its own, because that of the
tests may interpret it."""

from __future__ import annotations

import warnings

import torch
from hopper_compiler import compiled_for_hopper, print_kernels

from workers.model.cuda.one_shot_sums import NUM_CONTROLS, exchange

if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    control = torch.zeros(NUM_CONTROLS, dtype=torch.int32)
    with compiled_for_hopper() as kernels:
        for tp, dtype in ((2, torch.bfloat16), (8, torch.bfloat16), (2, torch.float32)):
            own, bases = torch.zeros(64, dtype=dtype), torch.zeros(tp, dtype=torch.int64)
            exchange(own, own, bases, 0, control, 1 << 20, gathers=False)
        exchange(own, own.new_zeros(2, 64), bases, 1, control, 1 << 20, gathers=True)
    print_kernels(kernels)
