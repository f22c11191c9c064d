"""The decoder: one definition for every supported family, over a flattened batch and paged KV.

It contains no parallelism: a rank's decoder computes the layers and heads that it was loaded with, and
`workers.model.parallel` joins the parts of several ranks.

Arithmetic follows transformers: norms and rotary angles in float32, everything else in the weights' dtype,
but for logits, which are float32. Products are those of `workers.model.products`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    StepInput,
)
from workers.model.model_config import ModelConfig, RopeConfig, read_model_config
from workers.model.native_layers import NativeLayers, PackedLayer
from workers.model.products import Linear, PackedLinear, Workspace, make_linear
from workers.model.sizes import query_heads
from workers.model.weights import LayerWeights, LinearWeights, ShardSpec, WeightReader

# Maps token ids to rows of the embedding, or hidden states to logits. `workers.model.parallel` replaces both
# by ones that join the parts of several ranks.
Product = Callable[[Tensor], Tensor]


class AddedProduct(Protocol):
    """A product whose result is added to the hidden states: of one rank, or joined by
    `workers.model.parallel`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product of x [num_tokens, num_inputs], [num_tokens, hidden_size]."""

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        """Add the product of x to `hidden` [num_tokens, hidden_size] and return None; or return the product,
        for the norm that follows to add, where that takes fewer kernels."""


def load_decoder(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    shard: ShardSpec | None = None,
    progress: Callable[[str], None] = lambda phase: None,
    *,
    is_deterministic: bool = False,
) -> Decoder:
    """Load a Hugging Face checkpoint folder, or a rank's `shard` of it, to compute in `dtype`. `progress` is
    called after each layer. `is_deterministic`: products of a row shall not depend on the rows beside it.

    Raises CheckpointError, naming file and key or tensor, for what is unsupported, missing or mis-shaped.
    """
    config = read_model_config(model_dir)
    shard = shard or ShardSpec.whole(config)
    with WeightReader(model_dir, config, shard, dtype, device) as reader:
        decoder = Decoder(config, reader, shard, progress, is_deterministic=is_deterministic)
        reader.finish()
    return decoder


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.{1 if num_bytes >= 1e9 else 3}f} GB"


class Decoder:
    """A rank's part of the model. The first stage has the embedding, the last stage the final norm and the
    head. `workers.model.parallel` replaces products in `layers`, `embedding` and `head` by ones that join the
    ranks."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        shard: ShardSpec,
        progress: Callable[[str], None] = lambda phase: None,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self.config = config
        self.shard = shard
        self.embedding: Product | None = None
        self.head: Product | None = None
        self._workspace = Workspace()
        is_first, is_last = shard.layer_start == 0, shard.layer_end == config.num_layers
        table: Tensor | None = None
        if is_first or (is_last and config.tie_word_embeddings):
            table = reader.embedding()
        if is_last:
            self._norm = reader.final_norm()
            weight = reader.head(table)
            head = make_linear((weight,), is_deterministic=is_deterministic)
            self.head = head.floats
            if is_first and weight is table:
                self.embedding = head.lookup
        if is_first and table is not None and self.embedding is None:
            self.embedding = Embedding(table.clone())
        del table
        self.layers: list[DecoderLayer] = []
        num_bytes_outside = reader.num_bytes
        for layer in range(shard.layer_start, shard.layer_end):
            loaded = DecoderLayer(
                reader.layer(layer),
                layer - shard.layer_start,
                config.rms_norm_eps,
                config.sliding_windows[layer],
                self._workspace,
                is_deterministic=is_deterministic,
            )
            self.layers.append(loaded)
            num_layers = shard.layer_end - shard.layer_start
            in_layers = (reader.num_bytes - num_bytes_outside) * num_layers // len(self.layers)
            of_all = f"{_gb(reader.num_bytes)} of {_gb(num_bytes_outside + in_layers)}"
            progress(f"loading weights, {len(self.layers)} of {num_layers} layers, {of_all}")
        self.attention_shape = AttentionShape(
            len(query_heads(config.num_heads, config.num_kv_heads, shard.tp_rank, shard.tp_size)),
            config.sliding_windows[shard.layer_start : shard.layer_end],
            rope_frequencies(config.rope, config.head_dim, reader.device),
        )

    @torch.inference_mode()
    def forward(self, tokens: Tensor, step: StepInput, attention: AttentionBackend) -> Tensor:
        """Map token ids [num_tokens] to the last layer's output [num_tokens, hidden_size], before the final
        norm. Their keys and values are written to the KV of `attention`."""
        return self.run_layers(self.embed(tokens), attention.plan(step))

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [num_tokens] to [num_tokens, hidden_size], on the first stage."""
        assert self.embedding is not None, "this stage has no embedding"
        return self.embedding(tokens)

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, plan: AttentionPlan, most_layers: int | None = None) -> Tensor:
        """Run this stage's layers, or the first `most_layers`, over `hidden` [num_tokens, hidden_size], which
        is overwritten and returned."""
        if (whole := self._native_layers) is not None and whole.serves(plan):
            whole.run(hidden, plan, len(self.layers) if most_layers is None else most_layers)
            return hidden
        residual: Tensor | None = None
        for layer in self.layers[:most_layers]:
            residual = layer.forward(hidden, plan, residual)
            plan.marks.mark_layer()
        return hidden if residual is None else hidden.add_(residual)

    @functools.cached_property
    def _native_layers(self) -> NativeLayers | None:
        """The layers in one call each, where all are packed and, once `parallelize` was called, whole."""
        packed = [packed for layer in self.layers if (packed := layer.packed()) is not None]
        return NativeLayers(packed, self._workspace) if packed and len(packed) == len(self.layers) else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head to rows [num_rows, hidden_size], on the last stage. Returns float32
        [num_rows, vocab_size]."""
        assert self.head is not None, "this stage has no head"
        return self.head(self.final_norm(hidden))

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the last layer to rows [num_rows, hidden_size], on the last stage."""
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def separate_workspace(self) -> AbstractContextManager[None]:
        """Compute in other scratch memory meanwhile, as `Workspace.separate` describes."""
        return self._workspace.separate()


# -------------------------------------------------------------------------- parts of a decoder layer


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


def rope_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Return the rotation in radians a token, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.rope_type == "linear":
        return slowed
    # llama3: fast dimensions stay, slow ones are slowed down, those between are blended.
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * slowed + blend * frequencies


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
