"""A layer's latent attention on several ranks: latents divided by tokens, beside copies on all ranks.

A JSON line for each number of ranks and each step: sequences that decode behind a context, and a chunk of
one. `copies_ms` and `split_ms` are the medians of rounds in which both ways take turns; `copies_cpu_ms` and
`split_cpu_ms` those of the first rank's processor, which neither waits nor other processes lengthen.
Planning, once for all layers of a step, is not in them. `bytes` is what all ranks together have sent, as
counted by their collectives, and `formula_bytes` what docs/architecture.md says. `kv_bytes` is what a rank
keeps of the latents, by copies and divided.

The layer has the shape of DeepSeek V2-Lite, or with `--heads 128` of V3. A rank computes with one thread.
With fewer cores than ranks the times say little, and the bytes are the same.

    python -m benchmarks.split_latents [--ranks 2,4] [--heads 16] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.rank_parts import answer, joined_groups, rank_parts
from benchmarks.replica import CLOCK
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.split_latents import SplitLatentAttention
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape
from workers.model.latent_split import LatentSplit
from workers.model.sizes import part
from workers.rank.collectives import RankGroups

LATENT = LatentShape(0, 512, 128, 64, 128)
BLOCK_TOKENS = 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MeasuredStep(NamedTuple):
    """Sequences with so many new tokens each behind a context."""

    num_sequences: int
    num_context: int
    num_new: int


STEPS = (
    MeasuredStep(1, 1024, 1),
    MeasuredStep(1, 16384, 1),
    MeasuredStep(16, 1024, 1),
    MeasuredStep(16, 4096, 1),
    MeasuredStep(1, 4096, 64),
    MeasuredStep(1, 4096, 512),
    MeasuredStep(1, 0, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--links", default="memory", choices=("memory", "gloo"))
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        play(json.loads(args.part))
        return
    for num_ranks in map(int, args.ranks.split(",")):
        order = {"num_ranks": num_ranks, **{name: vars(args)[name] for name in ("heads", "dtype", "links")}}
        measure({**order, "repeat": args.repeat})


def measure(order: dict[str, Any]) -> None:
    """Print the lines of one number of ranks."""
    with rank_parts("benchmarks.split_latents", order) as ranks:
        for _ in STEPS:
            answers = [answer(rank) for rank in ranks]
            answers[0]["bytes"] = sum(it["bytes"] for it in answers)
            print(json.dumps(answers[0]), flush=True)


def play(order: dict[str, Any]) -> None:
    """Attend as one rank, in each of the steps."""
    groups = joined_groups(order)
    for step in STEPS:
        layer = AttendingLayer(step, groups, order["heads"], DTYPES[order["dtype"]])
        figures = layer.measure(order["repeat"])
        named = {"ranks": groups.tp, **step._asdict(), "heads": order["heads"], "dtype": order["dtype"]}
        print(json.dumps({**named, "links": order["links"], **figures}), flush=True)
    groups.smallest(0)
    groups.close()


class AttendingLayer:
    """The attention of a layer at one rank, over all latents and over its part of them."""

    def __init__(self, step: MeasuredStep, groups: RankGroups, num_heads: int, dtype: torch.dtype) -> None:
        self._step, self._groups, self._num_heads, self._dtype = step, groups, num_heads, dtype
        generator = torch.Generator().manual_seed(17)
        num_blocks = -(-(step.num_context + step.num_new) // BLOCK_TOKENS)
        size = num_blocks * step.num_sequences, 1, 1, 1, BLOCK_TOKENS, LATENT.width
        kv = torch.randn(size, generator=generator).to(dtype)
        rank, num_ranks = groups.tp_rank, groups.tp
        heads = [part(num_heads, it, num_ranks) for it in range(num_ranks)]
        own = heads[rank]
        rows = num_heads * LATENT.expanded_dim, LATENT.kv_lora_rank
        expansion = torch.randn(rows, generator=generator).mul_(LATENT.kv_lora_rank**-0.5).to(dtype)
        expansion = expansion.view(num_heads, LATENT.expanded_dim, -1)[own.start : own.stop].flatten(0, 1)
        self._layer = LayerAttention(0, 0, latent=LatentHeads(expansion, LATENT))
        count = step.num_sequences * step.num_new
        queries = torch.randn(count, num_heads, LATENT.head_dim, generator=generator)
        latents = torch.randn(count, LATENT.width, generator=generator)
        self._qkv = torch.cat((queries[:, own.start : own.stop].flatten(1), latents), 1).to(dtype)
        still = Rotation(torch.zeros(LATENT.qk_rope_head_dim // 2))
        shape = AttentionShape(len(own), (0,), (still,), LATENT.head_dim**-0.5, latent=LATENT)
        split = LatentSplit(BLOCK_TOKENS, num_ranks)
        tokens = slice(rank * split.part_tokens, (rank + 1) * split.part_tokens)
        of_rank = kv[..., tokens, :].contiguous()
        self._ways: dict[str, AttentionBackend] = {
            "copies": choose_attention(shape, kv),
            "split": SplitLatentAttention(
                shape, of_rank, choose_attention, split, list(map(len, heads)), groups
            ),
        }

    def _planned(self, way: str) -> AttentionPlan:
        step = self._step
        num_blocks = -(-(step.num_context + step.num_new) // BLOCK_TOKENS)
        spans = [
            SequenceSpan(step.num_context, step.num_new, range(it * num_blocks, (it + 1) * num_blocks))
            for it in range(step.num_sequences)
        ]
        return self._ways[way].plan(StepInput.of(spans, BLOCK_TOKENS))

    @torch.inference_mode()
    def measure(self, repeat: int) -> dict[str, Any]:
        """Time both ways in turns, and count the bytes of one."""
        times: dict[str, list[float]] = {way: [] for way in self._ways}
        cpu_times: dict[str, list[float]] = {way: [] for way in self._ways}
        results: dict[str, Tensor] = {}
        plans = {way: self._planned(way) for way in self._ways}
        for _ in range(repeat + 1):
            for way, plan in plans.items():
                qkv = self._qkv.clone()
                self._groups.agree(True)
                began_at, cpu_began_at = CLOCK.now(), time.thread_time()
                results[way] = plan.run(self._layer, qkv)
                cpu_times[way].append(1e3 * (time.thread_time() - cpu_began_at))
                times[way].append(1e3 * (CLOCK.now() - began_at))
        copies, split = results["copies"].float(), results["split"].float()
        error = float((copies - split).abs().max() / copies.abs().max())
        assert error < 0.03, f"the two ways differ by {error}"
        before = self._groups.num_exchanged_bytes
        plans["split"].run(self._layer, self._qkv.clone())
        wall, cpu = (
            {way: round(median(it[1:]), 3) for way, it in both.items()} for both in (times, cpu_times)
        )
        return {
            **{f"{way}_ms": value for way, value in wall.items()},
            **{f"{way}_cpu_ms": value for way, value in cpu.items()},
            "cpu_ratio": round(cpu["copies"] / cpu["split"], 2),
            "kv_bytes": [backend.kv.nbytes for backend in self._ways.values()],
            "error": round(error, 6),
            "bytes": self._groups.num_exchanged_bytes - before,
            "formula_bytes": self._formula_bytes(),
        }

    def _formula_bytes(self) -> int:
        """Return what all ranks together send."""
        step, num_others = self._step, self._groups.tp - 1
        row_bytes = LATENT.width * self._dtype.itemsize
        if step.num_new > 1 and LATENT.is_expansion_cheaper(step.num_context, step.num_new):
            return num_others * step.num_sequences * step.num_context * row_bytes
        num_rows = step.num_sequences * step.num_new
        return num_others * num_rows * self._num_heads * (row_bytes + 4 * (LATENT.kv_lora_rank + 1))


if __name__ == "__main__":
    main()
