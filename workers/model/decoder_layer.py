"""Compute one layer of the decoder, and the embedding before the first."""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native
from workers.model.attention.interface import AttentionPlan, LayerAttention
from workers.model.layer_products import AddedProduct, Product
from workers.model.native_layers import PackedLayer
from workers.model.products import Linear, PackedLinear, Workspace, make_linear
from workers.model.weights import LayerWeights, LinearWeights


class Embedding:
    """Maps token ids [num_tokens] to rows [num_tokens, hidden_size] of `table`."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._table)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Add `residual` to `x` [num_rows, size], in place, where it is given. Scale to unit mean square in
    float32, round, then multiply by `weight`. The result is written to `out` where it is given."""
    if cuda.serves(x.device):
        from workers.model.cuda import layer_ops

        return layer_ops.rms_norm(x, weight, eps, out, residual)
    if residual is not None:
        x.add_(residual)
    if native.serves(x.device, x.dtype) and x.stride(-1) == 1:
        kernels = native.load()
        assert kernels is not None
        return kernels.rms_norm(x, weight, eps, out)
    return torch.mul(F.rms_norm(x, (x.shape[-1],), None, eps), weight, out=out)


class DecoderLayer:
    """One layer over a flattened batch. Its KV is layer `index` of the rank's KV. The layers of a decoder
    share a `workspace`."""

    def __init__(
        self,
        weights: LayerWeights,
        index: int,
        eps: float,
        window: int,
        workspace: Workspace,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self._eps = eps
        self._workspace = workspace
        self._attention = LayerAttention(index, window, weights.q_norm, weights.k_norm, eps)
        self._input_norm, self._post_norm = weights.input_norm, weights.post_norm

        def linear(part: LinearWeights, *, is_gated: bool = False) -> Linear:
            return make_linear(part.parts, part.bias, is_gated=is_gated, is_deterministic=is_deterministic)

        self._qkv = linear(weights.qkv)
        self._gate_up = linear(weights.gate_up, is_gated=True)
        # With a part of the heads and of the intermediate columns, these compute a part of the sum.
        self.output: AddedProduct = linear(weights.output)
        self.down: AddedProduct = linear(weights.down)

    def packed(self) -> PackedLayer | None:
        """Return what the CPU kernels take of the layer to run it in one call; None where they cannot."""
        qkv, output, gate_up, down = self._qkv, self.output, self._gate_up, self.down
        if not (_is_whole(qkv) and _is_whole(output) and _is_whole(gate_up) and _is_whole(down)):
            return None
        norms = self._input_norm, self._post_norm
        return PackedLayer(qkv, output, gate_up, down, *norms, self._attention, self._eps)

    def forward(self, hidden: Tensor, plan: AttentionPlan, residual: Tensor | None = None) -> Tensor | None:
        """Add the layer's attention and feed-forward to `hidden` [num_tokens, hidden_size], in place.

        `residual` is the product that the layer before left to be added by this layer's first norm. Returns
        the one that this layer leaves, or None.
        """
        take, eps = self._workspace.take, self._eps
        normed = take("normed", hidden, hidden.shape[1])
        normed = rms_norm(hidden, self._input_norm, eps, normed, residual)
        qkv = self._qkv(normed, take("qkv", hidden, self._qkv.num_outputs))
        plan.marks.mark()
        mixed = plan.run(self._attention, qkv)
        plan.marks.mark()
        residual = self.output.add_to(hidden, mixed)
        plan.marks.mark()
        normed = rms_norm(hidden, self._post_norm, eps, normed, residual)
        gated = self._gate_up.gated(normed, take("gated", hidden, self._gate_up.num_outputs // 2))
        plan.marks.mark()
        residual = self.down.add_to(hidden, gated)
        plan.marks.mark()
        return residual


def _is_whole(product: Product) -> TypeGuard[PackedLinear]:
    """Whether the kernels compute a product from its rows as they are; one that is joined from several ranks
    is no such."""
    return isinstance(product, PackedLinear) and not product.is_padded
