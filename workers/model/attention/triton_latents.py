"""Attention over latents by Triton kernels on CUDA, whose rows are keys and values at once.

Kernels and tiles are described in `workers.model.cuda.latent_attention`."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from workers.model.attention.interface import AttentionBackend, AttentionShape, LayerAttention, StepInput
from workers.model.attention.triton_backend import TritonAttention, TritonPlan
from workers.model.cuda.latent_attention import chunk_latents, decode_latents, latent_tile


class TritonLatents(TritonAttention):
    """Attention over latents by Triton kernels, deterministic as `TritonAttention` is."""

    def __init__(self, shape: AttentionShape, kv: Tensor, *, is_deterministic: bool = False) -> None:
        assert shape.value_dim, "rows of the KV are values as well"
        super().__init__(shape, kv, is_deterministic=is_deterministic)

    @cached_property
    def pieced(self) -> None:
        """Latents are not computed by pieces."""
        return None

    @property
    def mixed_dim(self) -> int:
        return self.shape.value_dim

    @property
    def chunk_rows(self) -> int:
        return latent_tile(self.dtype, 64).rows

    def plan(self, step: StepInput) -> TritonLatentPlan:
        return TritonLatentPlan(self, step)


class TritonLatentPlan(TritonPlan):
    """The attention of one step over latents by Triton kernels."""

    def _attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        kv, sequences = self._seen(layer)
        scoring, shape = self._backend.scoring, self._backend.shape
        out = queries.new_empty(len(queries), shape.num_heads, shape.value_dim)
        if self._partials is not None:
            decode_latents(queries, kv, sequences, self._decodes, scoring, self._partials, out)
        if self._chunks is not None and len(self._chunks):
            chunk_latents(queries, kv, sequences, self._chunks, scoring, out)
        self._done(layer)
        return out.flatten(1)


def make_triton(shape: AttentionShape, kv: Tensor, *, is_deterministic: bool = False) -> AttentionBackend:
    """Return attention by Triton kernels over one kind of heads, or over latents."""
    kind = TritonLatents if shape.value_dim else TritonAttention
    return kind(shape, kv, is_deterministic=is_deterministic)
