"""Compiles the kernels that are chosen by card for a compute capability and prints a JSON line about each.

    python tests/gpu/compile_cards.py CAPABILITY [HEAD_DIM,... [DTYPE [few]]]

Attention has these sizes of heads (128), and all is in this dtype (bfloat16). With `few`, weights are in two
segments and heads have no window. It is a process of its own,
because that of the tests may interpret them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from hopper_compiler import compiled_for, print_kernels

from workers.model.cuda.attention import (
    LayerKv,
    PagedSequences,
    Partials,
    Scoring,
    attend_chunks,
    attend_decodes,
)
from workers.model.cuda.card import Card
from workers.model.cuda.pieced_attention import allocate_partials, attend_split, attend_whole, pieced_tiles
from workers.model.cuda.segmented_product import multiply, row_tiles

# Weights in one and in two segments.
NUM_OUTPUTS, NUM_INPUTS = (6144, 4096), 4096
# The query heads of a key-value head, and the window and sinks beside it.
KINDS = ((4, 0), (8, 128))


def compile_products(capability: int, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    for num_outputs in sizes:
        weight = torch.empty(num_outputs, NUM_INPUTS, dtype=dtype)
        for tile in row_tiles(capability):
            for num_rows in (tile.rows, 4096) if tile.rows >= 128 else (tile.rows,):
                x = torch.empty(num_rows, NUM_INPUTS, dtype=dtype)
                out = torch.empty(num_rows, num_outputs, dtype=dtype)
                multiply(x, weight, None, out, tiles=(tile,), is_added=num_rows == 4096)


def compile_attention(
    capability: int, head_dim: int, dtype: torch.dtype, kinds: Sequence[tuple[int, int]]
) -> None:
    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    for group, window in kinds:
        kv = LayerKv.of(torch.zeros(1, 2, 8, 64, head_dim, dtype=dtype), head_dim)
        queries = torch.zeros(2, 8 * group, head_dim, dtype=dtype)
        sequences = PagedSequences(ids(2, 4), ids(2), ids(2), ids(2))
        scoring = Scoring(head_dim**-0.5, sinks=torch.zeros(8 * group) if window else None)
        of_rows = (queries, kv, sequences)
        partials = Partials.allocate(2, 8 * group, head_dim, 8192, queries.device)
        out = torch.empty_like(queries)
        attend_decodes(*of_rows, None, window, scoring, partials, out)
        attend_chunks(*of_rows, ids(2, 3), window, scoring, out)
        tiles = pieced_tiles(dtype, head_dim, Card(capability))
        if tiles is not None:
            split, whole = tiles
            for tasks, rows in ((None, group), (ids(2, 3), split.rows)):
                partials = allocate_partials(2, rows, 8, head_dim, 8192, queries.device)
                attend_split(*of_rows, tasks, window, scoring, split, partials, out)
            attend_whole(*of_rows, ids(2, 3), window, scoring, whole, out)


def main(capability: int, head_dims: str = "128", dtype: str = "bfloat16", *kinds: str) -> None:
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    with compiled_for(capability) as kernels:
        compile_products(capability, getattr(torch, dtype), NUM_OUTPUTS[1:] if kinds else NUM_OUTPUTS)
        for head_dim in head_dims.split(","):
            compile_attention(capability, int(head_dim), getattr(torch, dtype), KINDS[:1] if kinds else KINDS)
    print_kernels(kernels)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
