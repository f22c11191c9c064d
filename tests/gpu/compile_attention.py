"""Compiles the kernels of attention for Hopper and prints a JSON line about each. It is a process of its own,
because that of the tests may interpret them."""

from __future__ import annotations

import warnings

import torch
from hopper_compiler import compiled_for_hopper, print_kernels

from workers.model.cuda.attention import (
    LayerKv,
    PagedSequences,
    Partials,
    Scoring,
    attend_chunks,
    attend_decodes,
)
from workers.model.kv_form import SCALE_BYTES


def compile_step(
    head_dim: int,
    group: int,
    block_tokens: int,
    window: int,
    has_host: bool,
    softcap: float = 0.0,
    has_sinks: bool = False,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compile what a mixed step of 8 key-value heads in bfloat16 launches."""

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    width = head_dim if kv_dtype == torch.bfloat16 else head_dim + SCALE_BYTES
    blocks = torch.zeros(1, 2, 8, block_tokens, width, dtype=kv_dtype)
    kv = LayerKv.of(blocks, head_dim, blocks if has_host else None, 1)
    queries = torch.zeros(2, 8 * group, head_dim, dtype=torch.bfloat16)
    sequences = PagedSequences(ids(2, 4), ids(2), ids(2), ids(2))
    partials = Partials.allocate(2, 8 * group, head_dim, 8192, queries.device)
    scoring = Scoring(head_dim**-0.5, softcap, torch.zeros(8 * group) if has_sinks else None)
    attend_decodes(queries, kv, sequences, None, window, scoring, partials, torch.empty_like(queries))
    attend_chunks(queries, kv, sequences, ids(2, 3), window, scoring, torch.empty_like(queries))


if __name__ == "__main__":
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for_hopper() as kernels:
        compile_step(head_dim=128, group=4, block_tokens=64, window=0, has_host=False)
        compile_step(head_dim=128, group=2, block_tokens=64, window=0, has_host=False, softcap=50.0)
        compile_step(head_dim=128, group=8, block_tokens=64, window=128, has_host=False, has_sinks=True)
        compile_step(head_dim=80, group=5, block_tokens=16, window=4096, has_host=True)
        compile_step(head_dim=512, group=8, block_tokens=16, window=0, has_host=False)
        for kv_dtype in (torch.int8, torch.float8_e4m3fn):
            compile_step(head_dim=128, group=4, block_tokens=64, window=0, has_host=False, kv_dtype=kv_dtype)
    print_kernels(kernels)
