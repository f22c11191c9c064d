"""Compiles some of the kernels that a rank's rehearsal finds, for Hopper, and prints the report in JSON.

    python tests/gpu/compile_rank_kernels.py MODEL_DIR NUM_VARIANTS

One more variant cannot be compiled. It is a process of its own, because that of the tests may interpret."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rank_specs import cuda_spec
from triton.errors import TritonError

from workers.rank.kernel_compiler import compile_variants
from workers.rank.kernel_rehearsal import KernelVariant, rehearse


def fail() -> None:
    raise TritonError("at 3:4\nno such tile")


if __name__ == "__main__":
    variants = rehearse(cuda_spec(Path(sys.argv[1]), dtype="bf16"), 90)
    some = sorted(variants, key=lambda it: it.name != "_rms_norm_kernel")[: int(sys.argv[2])]
    report = compile_variants([*some, KernelVariant("_broken_kernel", fail)], num_processes=2)
    print(msgspec.json.encode({"report": report, "num_found": len(variants)}).decode())
