"""Attention over latents against heads that are expanded and attended to one by one, in float64; and the
products of heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from attention_steps import make_backend
from compiled_kernels import BACKENDS, TILED_KERNELS, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.model.attention.interface import (
    AttentionShape,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.latent_backend import LatentAttention
from workers.model.attention.quantized_kv import Quantized, widened
from workers.model.head_products import HeadProducts, PackedHeads, TorchHeads, make_head_products
from workers.model.host_kv import MODES, HostKv, OffloadMode
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape

BLOCK = 16
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


class DrawnWork(NamedTuple):
    """Sequences (tokens before, new ones), and the heads that they attend with."""

    latent: LatentShape
    num_heads: int
    work: list[tuple[int, int]]
    seed: int


LATENTS = st.builds(
    LatentShape,
    st.just(0),
    st.integers(1, 40).map(lambda it: 2 * it),
    st.integers(1, 12).map(lambda it: 2 * it),
    st.integers(1, 12).map(lambda it: 2 * it),
    st.integers(1, 24),
).filter(lambda it: it.v_head_dim <= it.head_dim)
# Widths that the kernels serve, with heads that they serve or do not.
ALIGNED = st.builds(
    LatentShape,
    st.just(0),
    st.sampled_from([14, 30, 46, 62]),
    st.sampled_from([6, 14, 30]),
    st.sampled_from([2, 18]),
    st.integers(1, 8),
)
CASES = st.builds(
    DrawnWork,
    st.one_of(LATENTS, ALIGNED),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(0, 1000),
)


class Drawn:
    """The latents and queries of a case. Blocks lie in random places, and what no token wrote is NaN."""

    def __init__(self, case: DrawnWork, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        """With a `kv_dtype` the KV has 8 bits, and `latents` are as it keeps them."""
        self.case, self.dtype, self.kv_dtype = case, dtype, kv_dtype
        latent, num_heads = case.latent, case.num_heads
        self.generator = generator = torch.Generator().manual_seed(case.seed)
        num_blocks = sum(-(-(start + count) // BLOCK) for start, count in case.work)
        free = torch.randperm(num_blocks + 1, generator=generator).tolist()
        shape = num_blocks + 1, 2, 1, 1, BLOCK
        if kv_dtype is None:
            self.kv = torch.full((*shape, latent.width), float("nan"), dtype=dtype)
        else:
            self.kv = torch.full((*shape, latent.width + 8), 0x7F, dtype=torch.uint8).view(kv_dtype)
        rows = num_heads * latent.expanded_dim, latent.kv_lora_rank
        self.expansion = (torch.randn(rows, generator=generator) * latent.kv_lora_rank**-0.5).to(dtype)
        self.spans, self.latents, self.qkv = [], [], []
        for start, count in case.work:
            table = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
            latents = self._random(start + count, latent.width)
            if kv_dtype is not None:
                latents[:, latent.kv_lora_rank :] *= 3
            for position in range(start):
                self._keep(table[position // BLOCK], position % BLOCK, latents[position])
            self._clear(table, start)
            queries = self._random(count, num_heads * latent.head_dim)
            self.qkv.append(torch.cat((queries, latents[start:]), 1))
            self.latents.append(self._as_kept(latents))
            self.spans.append(SequenceSpan(start, count, table))

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator).to(self.dtype)

    def _parts(self, latents: Tensor) -> list[Quantized]:
        assert self.kv_dtype is not None
        parts = torch.split(latents, list(self.case.latent.parts), -1)
        return [Quantized.of(part, self.kv_dtype) for part in parts]

    def _keep(self, block: int, offset: int, row: Tensor) -> None:
        """Put what an earlier step has written."""
        head = self.kv[block, 1, 0, 0]
        if self.kv_dtype is None:
            head[offset] = row
            return
        latents, rotated = self._parts(row)
        data, width = head.flatten().view(torch.uint8), self.case.latent.width
        elements = torch.cat((latents.elements.view(torch.uint8), rotated.elements.view(torch.uint8)))
        data[offset * width : (offset + 1) * width] = elements
        scales = data[BLOCK * width :].view(torch.float32)
        scales[offset], scales[BLOCK + offset] = latents.scales, rotated.scales

    def _as_kept(self, latents: Tensor) -> Tensor:
        if self.kv_dtype is None:
            return latents
        return torch.cat([part.floats() for part in self._parts(latents)], -1)

    def _clear(self, table: list[int], start: int) -> None:
        """Leave zeros behind the tokens of a block that was begun, as earlier steps do."""
        if start % BLOCK:
            head = self.kv[table[start // BLOCK], 1, 0, 0]
            if self.kv_dtype is None:
                head[start % BLOCK :] = 0
            else:
                data, width = head.flatten().view(torch.uint8), self.case.latent.width
                data[start % BLOCK * width : BLOCK * width] = 0
                data[BLOCK * width :].view(torch.float32).view(2, BLOCK)[:, start % BLOCK :] = 0

    def attend(self, name: str, host: HostKv | None = None, *, is_deterministic: bool = False) -> Tensor:
        """Attend by the backend of this name, where it serves rows of this width."""
        latent, num_heads = self.case.latent, self.case.num_heads
        still = Rotation(torch.zeros(latent.qk_rope_head_dim // 2))
        scale = latent.head_dim**-0.5
        shape = AttentionShape(num_heads, (0, 0), (still,), scale, latent=latent, dtype=self.dtype)
        known = name if latent.width % 16 == 0 or name == "torch" else "torch"

        def make(shape: AttentionShape, kv: Tensor) -> object:
            return make_backend(known, shape, kv, is_deterministic=is_deterministic)

        backend = LatentAttention(shape, self.kv, make)  # type: ignore[arg-type]
        layer = LayerAttention(1, 0, latent=LatentHeads(self.expansion, latent))
        step = StepInput.of(self.spans, BLOCK, None if host is None else host.reader)
        return backend.plan(step).run(layer, torch.cat(self.qkv))

    def expected(self) -> Tensor:
        """Attend to heads of keys and values one by one."""
        latent, num_heads, results = self.case.latent, self.case.num_heads, []
        by_head = self.expansion.double().view(num_heads, latent.expanded_dim, latent.kv_lora_rank)
        for span, latents, qkv in zip(self.spans, self.latents, self.qkv, strict=True):
            normed, shared = torch.split(latents.double(), [latent.kv_lora_rank, latent.qk_rope_head_dim], 1)
            queries = qkv[:, : num_heads * latent.head_dim].double().view(len(qkv), num_heads, -1)
            heads = []
            for head in range(num_heads):
                keys, values = torch.split(
                    normed @ by_head[head].T, [latent.qk_nope_head_dim, latent.v_head_dim], 1
                )
                scores = queries[:, head] @ torch.cat((keys, shared), 1).T / math.sqrt(latent.head_dim)
                hidden = torch.ones_like(scores, dtype=torch.bool).tril_(span.start).logical_not_()
                heads.append(scores.masked_fill_(hidden, float("-inf")).softmax(1) @ values)
            results.append(torch.cat(heads, 1))
        return torch.cat(results)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) <= ERRORS[found.dtype]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25)
@given(case=CASES)
def test_it_equals_a_loop_over_heads(name: str, dtype: torch.dtype, case: DrawnWork) -> None:
    """Chunks in the form that they take, and all in the one that is the same bits in any chunks."""
    drawn = Drawn(case, dtype)
    before, expected = drawn.kv.clone(), drawn.expected()
    check(drawn.attend(name), expected)
    drawn.kv.copy_(before)
    check(drawn.attend(name, is_deterministic=True), expected)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=15)
@given(case=CASES)
def test_latents_of_8_bits_are_read_as_they_were_rounded(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype, case: DrawnWork
) -> None:
    """In all forms; and what a step has written is read by the next as what it was rounded to."""
    drawn = Drawn(case, dtype, kv_dtype)
    before, expected = drawn.kv.clone(), drawn.expected()
    check(drawn.attend(name), expected)
    written = drawn.kv.clone()
    drawn.kv.copy_(before)
    check(drawn.attend(name, is_deterministic=True), expected)
    for table, latents in (
        (span.block_ids, its) for span, its in zip(drawn.spans, drawn.latents, strict=True)
    ):
        for block, rows in zip(table, torch.split(latents, BLOCK), strict=True):
            head = widened(written[block, 1, 0, 0], case.latent.parts)
            torch.testing.assert_close(head[: len(rows)], rows, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_latent_of_zeros_hides_no_rotated_part(name: str, dtype: torch.dtype) -> None:
    case = DrawnWork(LatentShape(0, 48, 14, 16, 8), 2, [(20, 1)], 5)
    drawn = Drawn(case, dtype, torch.int8)
    drawn.qkv[0][:, -64:-16] = 0
    drawn.latents[0][-1, :48] = 0
    check(drawn.attend(name), drawn.expected())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_blocks_in_host_memory_are_read(name: str, mode: OffloadMode) -> None:
    if mode == "stream" and name != "torch":
        pytest.skip("the kernels read blocks where they lie")
    case = DrawnWork(LatentShape(0, 26, 10, 6, 9), 3, [(40, 1), (70, 20), (0, 30)], 5)
    drawn = Drawn(case, torch.float32)
    expected, host = drawn.expected(), HostKv(drawn.kv, 8)
    host.use(mode)
    moved = {block: host.first_id + place for place, block in enumerate(drawn.spans[1].block_ids[:3])}
    for block, place in moved.items():
        host.kv[place - host.first_id] = drawn.kv[block]
        drawn.kv[block] = float("nan")
    drawn.spans[1] = drawn.spans[1]._replace(block_ids=[moved.get(it, it) for it in drawn.spans[1].block_ids])
    check(drawn.attend(name, host), expected)
    host.close()


def test_weights_of_one_head_may_be_a_view() -> None:
    """As those of queries of latents are, of a rank with one head."""
    weights = torch.randn(1, 6, 32).transpose(1, 2)
    x = torch.randn(3, 1, 6)
    made = make_head_products(weights)(x, torch.empty(3, 1, 32))
    check(made, torch.einsum("thi,hoi->tho", x.double(), weights.double()))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", TILED_KERNELS)
@settings(max_examples=25)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 40).map(lambda it: 2 * it)),
    num_tokens=st.one_of(st.integers(1, 20), st.integers(230, 500)),
    part=st.tuples(st.integers(0, 4), st.integers(1, 5)),
    is_shared=st.booleans(),
)
def test_products_of_heads_equal_torch(
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    num_tokens: int,
    part: tuple[int, int],
    is_shared: bool,
) -> None:
    """Of all or some heads, of inputs that heads share or have beside other columns; a row is the same bits
    alone."""
    num_heads, num_outputs, num_inputs = sizes
    first = part[0] % num_heads
    count = min(part[1], num_heads - first)
    generator = torch.Generator().manual_seed(num_tokens)
    weights = torch.randn(sizes, generator=generator).to(dtype)
    wide = torch.randn(num_tokens, count, num_inputs + 3, generator=generator).to(dtype)
    x = wide[:, :1, 2:-1].expand(-1, count, -1) if is_shared else wide[..., 2:-1]
    packed = PackedHeads(kernels_of(name), weights)

    def product(by: HeadProducts, x: Tensor) -> Tensor:
        return by(x, x.new_full((len(x), count, num_outputs + 5), 7.0)[..., 1:-4], first)

    found = product(packed, x)
    exact = torch.einsum("thi,hoi->tho", x.double(), weights[first : first + count].double())
    check(found, exact)
    check(product(TorchHeads(weights), x), exact)
    assert torch.equal(product(packed, x[-1:]), found[-1:])
