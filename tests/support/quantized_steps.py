"""Steps of attention over KV of 8 bits, and the same computed plainly in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from attention_steps import capped, make_backend, softmax_with_sinks, unrotated
from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    HostReader,
    LayerAttention,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.quantized_kv import Quantized, quantized_parts
from workers.model.kv_form import SCALE_BYTES

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Bytes that no one has written: as elements the largest, as a scale NaN.
STALE = 0x7F


class Heads(NamedTuple):
    """The heads of a model, and the tokens of its blocks."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_tokens: int = 16

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


def stale_kv(kv_dtype: str, heads: Heads, num_blocks: int, num_layers: int = 1) -> Tensor:
    """Return KV that no one has written yet."""
    width = heads.head_dim + SCALE_BYTES
    shape = (num_blocks, num_layers, 2, heads.num_kv_heads, heads.block_tokens, width)
    return torch.full(shape, STALE, dtype=torch.uint8).view(KV_DTYPES[kv_dtype])


def backend_of(
    name: str,
    kv: Tensor,
    heads: Heads,
    dtype: torch.dtype,
    windows: tuple[int, ...] = (0,),
    softcap: float = 0.0,
    *,
    is_deterministic: bool = False,
) -> AttentionBackend:
    """Make the backend of that name for activations of `dtype`, whose rotary embedding changes nothing."""
    shape = unrotated(heads.num_heads, heads.head_dim, windows, softcap=softcap)
    return make_backend(name, dataclasses.replace(shape, dtype=dtype), kv, is_deterministic=is_deterministic)


def draw_qkv(heads: Heads, num_tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw queries, keys and values [num_tokens, (H + 2K) * D]; heads differ in size a thousandfold."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    drawn = torch.randn(shape, generator=generator)
    drawn[:, heads.num_heads :] *= torch.logspace(-2, 0.5, 2 * heads.num_kv_heads)[:, None]
    return drawn.to(dtype).flatten(1)


def run(
    backend: AttentionBackend,
    spans: Sequence[SequenceSpan],
    qkv: Tensor,
    host: HostReader | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run layer 0 of one step, and return its results [num_tokens, H * D]."""
    step = StepInput.of(spans, backend.kv.shape[4], host)
    layer = LayerAttention(0, backend.shape.windows[0], sinks=sinks)
    return backend.plan(step).run(layer, qkv.clone())


class Context(NamedTuple):
    """What one sequence has computed: queries, and keys and values as they are read, float64 [T, H, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(qkv: Tensor, heads: Heads, kv_dtype: str | None) -> Context:
        """Take a sequence's products; its keys and values are quantized unless `kv_dtype` is None."""
        by_head = qkv.view(len(qkv), -1, heads.head_dim)
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        queries, keys, values = torch.split(by_head, counts, 1)
        if kv_dtype is not None:
            keys, values = (Quantized.of(it, KV_DTYPES[kv_dtype]).floats() for it in (keys, values))
        group = heads.group
        return Context(queries.double(), *(it.double().repeat_interleave(group, 1) for it in (keys, values)))

    def attended(self, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        """Return causal attention of all tokens, float64 [T, H * D]."""
        scores = torch.einsum("qhd,khd->hqk", self.queries, self.keys) * self.queries.shape[2] ** -0.5
        scores = capped(scores, softcap)
        query, key = (torch.arange(len(self.keys)).view(shape) for shape in ((-1, 1), (1, -1)))
        hidden = (key > query) | ((key <= query - window) if window else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        given = None if sinks is None else sinks.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        return torch.einsum("hqk,khd->qhd", softmax_with_sinks(scores, given), self.values).flatten(1)


def written_bytes(kv: Tensor, table: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of the elements [2, K, T, D] and the bits of the scales [2, K, T] of a sequence's
    tokens in layer 0."""
    parts = quantized_parts(kv[list(table), 0])
    elements = parts.elements.view(torch.uint8).permute(1, 2, 0, 3, 4).flatten(2, 3)
    scales = parts.scales.view(torch.int32).permute(1, 2, 0, 3).flatten(2, 3)
    return elements[:, :, :num_tokens], scales[:, :, :num_tokens]


def error_of_norm(actual: Tensor, expected: Tensor) -> float:
    """Return the difference as a part of the whole, by root mean squares."""
    return float((actual.double() - expected).norm() / expected.norm())
