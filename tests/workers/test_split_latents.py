"""Attention of ranks that divide latents by tokens, each in a thread, against heads that are expanded and
attended to one by one, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from attention_steps import make_backend
from compiled_kernels import BACKENDS
from hypothesis import given, settings
from hypothesis import strategies as st
from met_collectives import MetCollectives, together
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionShape,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.split_latents import SplitLatentAttention
from workers.model.exchange_sizes import ExchangeSizes
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape
from workers.model.latent_split import LatentSplit
from workers.model.sizes import part

BLOCK = 64
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# The kernels serve rows of 32 columns.
LATENT = LatentShape(0, 26, 10, 6, 9)


class DividedWork(NamedTuple):
    """Sequences (tokens before, new ones), the heads of all ranks, and how many rows are queried at a
    time, and how many tokens are at most in a tile."""

    num_ranks: int
    num_heads: int
    work: list[tuple[int, int]]
    most_rows: int
    most_tile: int
    seed: int


CASES = st.builds(
    DividedWork,
    st.sampled_from([1, 2, 4]),
    st.integers(4, 7),
    st.lists(
        st.tuples(st.one_of(st.integers(0, 200), st.sampled_from([0, 63, 64])), st.integers(1, 70)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 1000),
)


class DividedStep:
    """The step of a case: latents and queries, and blocks that lie in random places."""

    def __init__(self, case: DividedWork, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self._generator = generator = torch.Generator().manual_seed(case.seed)
        num_blocks = sum(-(-(start + count) // BLOCK) for start, count in case.work)
        free = torch.randperm(num_blocks + 1, generator=generator).tolist()
        self.num_blocks = num_blocks + 1
        rows = case.num_heads * LATENT.expanded_dim, LATENT.kv_lora_rank
        self.expansion = (torch.randn(rows, generator=generator) * LATENT.kv_lora_rank**-0.5).to(dtype)
        self.spans = [
            SequenceSpan(start, count, [free.pop() for _ in range(-(-(start + count) // BLOCK))])
            for start, count in case.work
        ]
        self.latents = [self._random(start + count, LATENT.width) for start, count in case.work]
        self.queries = [self._random(count, case.num_heads, LATENT.head_dim) for _, count in case.work]

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator).to(self.dtype)

    def held(self, rank: int) -> Tensor:
        """Return the KV of a rank, in which what no token wrote is NaN, but for blocks that were begun."""
        tokens = BLOCK // self.case.num_ranks
        kv = torch.full((self.num_blocks, 2, 1, 1, tokens, LATENT.width), float("nan"), dtype=self.dtype)
        for span, latents in zip(self.spans, self.latents, strict=True):
            for position in range(span.start):
                owner, place = divmod(position % BLOCK, tokens)
                if owner == rank:
                    block = kv[span.block_ids[position // BLOCK], 1, 0, 0]
                    block[place] = latents[position]
                    block[place + 1 :] = 0  # as earlier steps leave what they begin
        return kv

    def heads(self, rank: int) -> range:
        return part(self.case.num_heads, rank, self.case.num_ranks)

    def backend(self, name: str, ranks: MetCollectives, kv: Tensor) -> SplitLatentAttention:
        """Return the backend of a rank over its KV."""
        case = self.case
        heads = [self.heads(rank) for rank in range(case.num_ranks)]
        own = heads[ranks.tp_rank]
        still = Rotation(torch.zeros(LATENT.qk_rope_head_dim // 2))
        shape = AttentionShape(len(own), (0, 0), (still,), LATENT.head_dim**-0.5, latent=LATENT)

        def make(shape: AttentionShape, kv: Tensor) -> AttentionBackend:
            return make_backend(name if kv.shape[4] % 16 == 0 else "torch", shape, kv)

        split = LatentSplit(BLOCK, case.num_ranks)
        backend = SplitLatentAttention(shape, kv, make, split, list(map(len, heads)), ranks)
        assert backend.block_tokens == BLOCK
        backend.most_rows, backend.tiled.most_tokens = case.most_rows, case.most_tile
        return backend

    def layer(self, rank: int) -> LayerAttention:
        """Return the layer with the heads of a rank."""
        own = self.heads(rank)
        rows = self.expansion.view(self.case.num_heads, LATENT.expanded_dim, -1)[own.start : own.stop]
        return LayerAttention(1, 0, latent=LatentHeads(rows.flatten(0, 1).to(self.dtype), LATENT))

    def attend(self, name: str, ranks: MetCollectives) -> tuple[Tensor, list[ExchangeSizes]]:
        """Return the results of a rank's heads, and what it says that it exchanges."""
        own, kv = self.heads(ranks.tp_rank), self.held(ranks.tp_rank)
        backend, layer = self.backend(name, ranks, kv), self.layer(ranks.tp_rank)
        qkv = [
            torch.cat((queries[:, own.start : own.stop].flatten(1), latents[span.start :]), 1)
            for span, queries, latents in zip(self.spans, self.queries, self.latents, strict=True)
        ]
        step = StepInput.of(self.spans, BLOCK)
        found = backend.plan(step).run(layer, torch.cat(qkv))
        self._check_written(kv, ranks.tp_rank)
        return found.view(len(found), len(own), -1), backend.exchanges(step.starts, step.lengths)

    def _check_written(self, kv: Tensor, rank: int) -> None:
        tokens = BLOCK // self.case.num_ranks
        for span, latents in zip(self.spans, self.latents, strict=True):
            for position in range(span.start, span.start + span.num_tokens):
                owner, place = divmod(position % BLOCK, tokens)
                if owner == rank:
                    held = kv[span.block_ids[position // BLOCK], 1, 0, 0, place]
                    assert torch.equal(held, latents[position])

    def expected(self) -> Tensor:
        """Attend to heads of keys and values one by one: [num_tokens, num_heads, v_head_dim]."""
        by_head = self.expansion.double().view(self.case.num_heads, LATENT.expanded_dim, -1)
        results = []
        for span, latents, queries in zip(self.spans, self.latents, self.queries, strict=True):
            normed, shared = torch.split(latents.double(), [LATENT.kv_lora_rank, LATENT.qk_rope_head_dim], 1)
            heads = []
            for head, expansion in enumerate(by_head):
                keys, values = torch.split(
                    normed @ expansion.T, [LATENT.qk_nope_head_dim, LATENT.v_head_dim], 1
                )
                scores = queries[:, head].double() @ torch.cat((keys, shared), 1).T
                hidden = torch.ones_like(scores, dtype=torch.bool).tril_(span.start).logical_not_()
                scores = (scores / math.sqrt(LATENT.head_dim)).masked_fill_(hidden, float("-inf"))
                heads.append(scores.softmax(1) @ values)
            results.append(torch.stack(heads, 1))
        return torch.cat(results)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=20)
@given(case=CASES)
def test_any_division_equals_a_loop_over_heads(name: str, dtype: torch.dtype, case: DividedWork) -> None:
    """Results, what each rank has written, and the bytes that cross."""
    step = DividedStep(case, dtype)
    sent: dict[int, list[int]] = {}

    def run(ranks: MetCollectives) -> tuple[Tensor, list[ExchangeSizes]]:
        found = step.attend(name, ranks)
        sent[ranks.tp_rank] = ranks.sent
        return found

    results = together(case.num_ranks, run)
    found, expected = torch.cat([it for it, _ in results], 1), step.expected()
    assert float((found - expected).abs().max() / expected.abs().max()) <= ERRORS[dtype]
    for rank, (_, exchanges) in enumerate(results):
        others = [it for it in range(case.num_ranks) if it != rank]
        sizes = [
            sum(it.sent[other] for other in others) * it.num_columns * (it.dtype or dtype).itemsize
            for it in exchanges
        ]
        assert sent[rank] == sizes


def test_few_tokens_are_seen_by_the_ranks_that_hold_them() -> None:
    """Contexts that end in the first rank's part, at its end, and behind it; none is exchanged at the start
    of a prompt."""
    case = DividedWork(2, 4, [(0, 1), (10, 1), (31, 1), (32, 1), (64, 1), (95, 1)], 4, 2, 3)
    step = DividedStep(case, torch.float32)
    found = torch.cat([it for it, _ in together(2, lambda ranks: step.attend("torch", ranks))], 1)
    assert float((found - step.expected()).abs().max()) <= 1e-5
    chunk = DividedStep(DividedWork(2, 4, [(0, 50)], 4, 2, 3), torch.float32)
    for _, exchanges in together(2, lambda ranks: chunk.attend("torch", ranks)):
        assert exchanges == []


@pytest.mark.parametrize("num_chunk", [40, 70, 100])
def test_what_no_token_has_written_is_not_mixed_in_later_steps(num_chunk: int) -> None:
    """A chunk leaves blocks that it begins without NaN, wherever it ends; torch would multiply them with
    zero."""
    step = DividedStep(DividedWork(4, 4, [(num_chunk, 1)], 4, 2, 3), torch.float32)
    (span,), (latents,), (queries,) = step.spans, step.latents, step.queries

    def run(ranks: MetCollectives) -> Tensor:
        own, layer = step.heads(ranks.tp_rank), step.layer(ranks.tp_rank)
        kv = torch.full((step.num_blocks, 2, 1, 1, BLOCK // 4, LATENT.width), float("nan"))
        backend = step.backend("torch", ranks, kv)
        chunk = torch.cat((torch.randn(num_chunk, len(own) * LATENT.head_dim), latents[:num_chunk]), 1)
        assert LATENT.is_expansion_cheaper(0, num_chunk)
        backend.plan(StepInput.of([SequenceSpan(0, num_chunk, span.block_ids)], BLOCK)).run(layer, chunk)
        qkv = torch.cat((queries[:, own.start : own.stop].flatten(1), latents[num_chunk:]), 1)
        return backend.plan(StepInput.of([span], BLOCK)).run(layer, qkv).view(1, len(own), -1)

    found = torch.cat(together(4, run), 1)
    assert float((found - step.expected()).abs().max()) <= 1e-5
