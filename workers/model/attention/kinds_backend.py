"""Attention of models whose layers have heads of several sizes: a backend for each kind of heads, over views
of the same KV.

The heads of a kind lie in the cells of the KV (`workers.model.layer_shapes`) at equal distances, and each is
contiguous: all but the distances is as in the KV of any other model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    HeadKind,
    HostReader,
    LayerAttention,
    LayerRead,
    MakeBackend,
    StepInput,
)
from workers.model.attention.latent_backend import LatentAttention
from workers.model.attention.quantized_kv import is_quantized


def backend_of_kinds(shape: AttentionShape, kv: Tensor, make: MakeBackend) -> AttentionBackend:
    """Return the backend that `make` makes, or one that has such a backend for each kind of heads, or for
    latents."""
    if shape.latent is not None:
        return LatentAttention(shape, kv, make)
    return KindsAttention(shape, kv, make) if shape.kinds else make(shape, kv)


class KindsAttention(AttentionBackend):
    """Attention by one backend for each of the `kinds` of a shape."""

    def __init__(self, shape: AttentionShape, kv: Tensor, make: MakeBackend) -> None:
        """`make` makes the backend of one kind over its view of `kv`."""
        super().__init__(shape, kv)
        assert not is_quantized(kv), "scales lie behind the heads of a cell"
        self.backends = [
            make(
                dataclasses.replace(
                    shape, windows=kind.windows, rotations=kind.rotations, kinds=(), reads=()
                ),
                heads_of_kind(kv, kind),
            )
            for kind in shape.kinds
        ]
        self.name = ", ".join(dict.fromkeys(backend.name for backend in self.backends))
        self.can_stage = all(backend.can_stage for backend in self.backends)
        self.is_deterministic = all(backend.is_deterministic for backend in self.backends)
        self.can_capture = all(backend.can_capture for backend in self.backends)

    @property
    def split_tokens(self) -> int:
        return max(backend.split_tokens for backend in self.backends)

    def plan(self, step: StepInput) -> KindsPlan:
        return KindsPlan(self, step)

    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        return self.backends[0].over(shape, kv)


class KindsPlan(AttentionPlan):
    """The attention of one step: a plan for each kind of heads."""

    def __init__(self, backend: KindsAttention, step: StepInput) -> None:
        super().__init__(step)
        shape, host = backend.shape, step.host
        readers = [None if host is None else _KindReader(host, kind) for kind in shape.kinds]
        self._plans = [
            kind.plan(dataclasses.replace(step, host=reader))
            for kind, reader in zip(backend.backends, readers, strict=True)
        ]
        if host is not None:
            seen = {read.layer: read for reader in readers if reader is not None for read in reader.reads}
            host.begin([seen[layer] for layer in shape.reads if layer in seen])

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        return self._plans[layer.kind].run(layer, qkv)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        return self._plans[layer.kind].attend(layer, queries)


class _KindReader(HostReader):
    """Reads the blocks in host memory as those of one kind of heads. What is read in a step is collected in
    `reads`, for all kinds to begin together."""

    def __init__(self, host: HostReader, kind: HeadKind) -> None:
        super().__init__(host.first_id)
        self.is_staged = host.is_staged
        self._host, self._kind = host, kind
        self.reads: list[LayerRead] = []

    def begin(self, reads: Sequence[LayerRead]) -> None:
        self.reads = [LayerRead(self._kind.layers[layer], ids) for layer, ids in reads]

    def layer(self, layer: int) -> Tensor:
        return heads_of_kind(self._host.layer(layer), self._kind)

    def in_place(self) -> Tensor:
        return heads_of_kind(self._host.in_place(), self._kind)

    def done(self, layer: int) -> None:
        self._host.done(layer)

    def close(self) -> None:
        """Do nothing: the reader of all kinds is closed by its owner."""


def heads_of_kind(kv: Tensor, kind: HeadKind) -> Tensor:
    """Return the view [..., num_kv_heads, block_tokens, head_dim] of `kv` [..., num_cells, block_tokens,
    width] that has the heads of one kind."""
    *outer, _, block_tokens, _ = kv.shape
    return kv.view(*outer, kind.num_kv_heads, -1, block_tokens, kind.head_dim).select(-3, 0)
