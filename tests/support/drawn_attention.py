"""Steps of attention over drawn keys and values, for tests of its kernels on CUDA."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionShape,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
    kv_shape,
)
from workers.model.attention.torch_backend import TorchAttention
from workers.model.attention.triton_backend import TritonAttention
from workers.model.norm import Norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NUM_BLOCKS = 40


@dataclasses.dataclass
class DrawnStep:
    """A step over two layers, and `kv` with what was before it. What no token may read is NaN there."""

    shape: AttentionShape
    kv: Tensor
    spans: list[SequenceSpan]
    qkv: list[Tensor]
    layers: list[LayerAttention]

    def step(self) -> StepInput:
        return StepInput.of(self.spans, kv_shape(self.kv).block_tokens)

    def run(self, backend: AttentionBackend, step: StepInput | None = None) -> list[Tensor]:
        plan = backend.plan(step or self.step())
        return [plan.run(layer, qkv.clone()) for layer, qkv in zip(self.layers, self.qkv, strict=True)]

    def triton(self, **options: bool) -> TritonAttention:
        return TritonAttention(self.shape, self.kv.clone(), **options)

    def expected(self) -> list[Tensor]:
        return self.run(TorchAttention(self.shape, self.kv.nan_to_num(0)))

    def only(self, kept: list[int]) -> DrawnStep:
        """The step of some of the sequences."""
        sizes = [span.num_tokens for span in self.spans]
        rows = torch.split(torch.arange(sum(sizes)), sizes)
        chosen = torch.cat([rows[index] for index in kept]).to(self.kv.device)
        spans = [self.spans[index] for index in kept]
        return dataclasses.replace(self, spans=spans, qkv=[qkv[chosen] for qkv in self.qkv])


def make_step(
    device: torch.device,
    work: list[tuple[int, int]],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    num_kv_heads: int = 1,
    group: int = 2,
    windows: tuple[int, int] = (0, 0),
    block_tokens: int = 16,
    has_norm: bool = False,
    is_rounded_first: bool = True,
    score_scale: float | None = None,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> DrawnStep:
    """Sequences with (tokens before, new tokens), in blocks of a drawn order. Each layer has its own
    rotary embedding; that of the first one lengthens what it rotates."""
    draw = torch.Generator().manual_seed(seed)
    num_heads = num_kv_heads * group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    num_blocks = sum(-(-sum(tokens) // block_tokens) for tokens in work)
    kv = torch.full(
        (max(NUM_BLOCKS, num_blocks + 2), 2, 2, num_kv_heads, block_tokens, head_dim), torch.nan, dtype=dtype
    )
    free = torch.randperm(len(kv), generator=draw).tolist()
    spans = []
    for start, count in work:
        table = [free.pop() for _ in range(-(-(start + count) // block_tokens))]
        for layer, window in enumerate(windows):
            for position in range(max(0, start - window + 1) if window else 0, start):
                place = kv[table[position // block_tokens], layer, :, :, position % block_tokens]
                place.copy_(normal(2, num_kv_heads, head_dim))
        # Blocks before every window may be others' by now, and entries after the last are ignored.
        first = max(0, start - max(windows) + 1) // block_tokens if all(windows) else 0
        spans.append(SequenceSpan(start, count, (*free[:1] * first, *table[first:], free[0])))
    num_tokens = sum(count for _, count in work)
    weights = [normal(head_dim).float().to(device) for _ in range(2)]
    q_norm, k_norm = (Norm(it, 1e-6, is_rounded_first) if has_norm else None for it in weights)
    rotations = tuple(
        Rotation((torch.rand(head_dim // 2, generator=draw) / 10).to(device), scale) for scale in (1.1, 1.0)
    )
    sinks = [(torch.randn(num_heads, generator=draw) * 2).to(device) if has_sinks else None for _ in windows]
    return DrawnStep(
        AttentionShape(num_heads, windows, rotations, score_scale, softcap),
        kv.to(device),
        spans,
        [normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(device) for _ in windows],
        [
            LayerAttention(layer, window, q_norm, k_norm, sinks[layer], rotation=layer)
            for layer, window in enumerate(windows)
        ],
    )


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for result, right in zip(actual, expected, strict=True):
        assert result.dtype == right.dtype
        torch.testing.assert_close(result, right, rtol=0, atol=TOLERANCE[result.dtype])
