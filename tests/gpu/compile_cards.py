"""Compiles the kernels that are chosen by card for a compute capability and prints a JSON line about each.

    python tests/gpu/compile_cards.py CAPABILITY [PART,... [DTYPE [few]]]

A part is `products`, `latents`, or attention with a size of heads; without, products and heads of 128 are
compiled. All is in this dtype (bfloat16). With `few`, weights are in two segments and heads have no window.
It is a process of its own, because that of the tests may interpret them. `card_table.py` runs it for all
cards."""

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
from workers.model.cuda.latent_attention import chunk_latents, decode_latents
from workers.model.cuda.pieced_attention import allocate_partials, attend_split, attend_whole, pieced_tiles
from workers.model.cuda.segmented_product import multiply, row_tiles
from workers.model.cuda.thin_product import NORM_DTYPES, ThinShape, allocate_arrivals, thin_plan
from workers.model.cuda.thin_product import multiply as multiply_few
from workers.model.finish import Finish
from workers.model.norm import Norm

# Weights in one and in two segments.
NUM_OUTPUTS, NUM_INPUTS = (6144, 4096), 4096
# Products of few rows of Llama 3 8B, the first two in one segment, the third in several on most cards.
FEW_ROWS: tuple[tuple[ThinShape, Finish], ...] = (
    (ThinShape(14_336, 4096, 2), "silu"), (ThinShape(6144, 4096), "store"), (ThinShape(4096, 14_336), "add"),
)  # fmt: skip
NUM_MULTIPROCESSORS = 132
# The heads and the sizes of latents of DeepSeek-V2-Lite and of DeepSeek-V3.
LATENTS, RANK, ROPE = (16, 128), 512, 64
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


def compile_few_rows(capability: int, dtype: torch.dtype, *, has_few: bool) -> None:
    """Compile products with a norm where the dtype has one, and with an addition."""
    for shape, finish in FEW_ROWS[::2] if has_few else FEW_ROWS:
        x = torch.empty(1, shape.num_inputs, dtype=dtype)
        weight = torch.empty(shape.num_outputs * shape.num_parts, shape.num_inputs, dtype=dtype)
        out = torch.empty(1, shape.num_outputs, dtype=dtype)
        has_norm = finish != "add" and dtype in NORM_DTYPES
        norm = Norm(torch.empty(shape.num_inputs), 1e-6) if has_norm else None
        plan = thin_plan(shape, Card(capability), NUM_MULTIPROCESSORS)
        arrivals = allocate_arrivals(shape.num_outputs, x.device)
        multiply_few(x, weight, None, out, arrivals, plan, norm=norm, finish=finish)


def compile_latents(dtype: torch.dtype) -> None:
    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    for num_heads in LATENTS:
        kv = LayerKv(torch.zeros(1, 1, 1, 64, RANK + ROPE, dtype=dtype))
        queries = torch.zeros(2, num_heads, RANK + ROPE, dtype=dtype)
        sequences = PagedSequences(ids(2, 4), ids(2), ids(2), ids(2))
        partials = Partials.allocate(2, num_heads, RANK, 8192, queries.device)
        out = torch.zeros(2, num_heads, RANK, dtype=dtype)
        scoring = Scoring(RANK**-0.5)
        decode_latents(queries, kv, sequences, None, scoring, partials, out)
        chunk_latents(queries, kv, sequences, ids(2, 3), scoring, out)


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


def main(capability: int, parts: str = "products,128", name: str = "bfloat16", *kinds: str) -> None:
    # Triton 3.9 warns of a default that changes.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    dtype, has_few = getattr(torch, name), bool(kinds)
    with compiled_for(capability) as kernels:
        for part in parts.split(","):
            if part == "products":
                compile_products(capability, dtype, NUM_OUTPUTS[1:] if has_few else NUM_OUTPUTS)
                compile_few_rows(capability, dtype, has_few=has_few)
            elif part == "latents":
                compile_latents(dtype)
            else:
                compile_attention(capability, int(part), dtype, KINDS[:1] if has_few else KINDS)
    print_kernels(kernels)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
