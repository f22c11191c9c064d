"""The decoder: one definition for every supported family, over a flattened batch and paged KV.

It contains no parallelism: a rank's decoder computes the layers and heads that it was loaded with, and
`workers.model.parallel` joins the parts of several ranks.

Arithmetic follows transformers: norms and rotary angles in float32, everything else in the weights' dtype,
but for logits, which are float32. Products are those of `workers.model.products`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from workers.model.apply_norm import apply_norm
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    StepInput,
)
from workers.model.decoder_layer import DecoderLayer, Embedding
from workers.model.layer_products import Product
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.native_layers import NativeLayers
from workers.model.products import Workspace, make_linear
from workers.model.rope import rotation_of
from workers.model.sizes import query_heads
from workers.model.weights import ShardSpec, WeightReader


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
        # Rounded as transformers rounds it.
        multiplier = config.embedding_multiplier
        if config.traits.is_embedding_scaled:
            multiplier = float(torch.tensor(multiplier, dtype=reader.dtype))
        self._multiplier = multiplier
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
        held = range(shard.layer_start, shard.layer_end)
        rotations = list(dict.fromkeys(config.ropes[layer] for layer in held))
        self.layers: list[DecoderLayer] = []
        num_bytes_outside = reader.num_bytes
        for layer in held:
            attention = LayerAttention(
                layer - shard.layer_start,
                config.sliding_windows[layer],
                rotation=rotations.index(config.ropes[layer]),
            )
            loaded = DecoderLayer(
                reader.layer(layer), config, attention, self._workspace, is_deterministic=is_deterministic
            )
            self.layers.append(loaded)
            num_layers = shard.layer_end - shard.layer_start
            in_layers = (reader.num_bytes - num_bytes_outside) * num_layers // len(self.layers)
            of_all = f"{_gb(reader.num_bytes)} of {_gb(num_bytes_outside + in_layers)}"
            progress(f"loading weights, {len(self.layers)} of {num_layers} layers, {of_all}")
        self.attention_shape = AttentionShape(
            len(query_heads(config.num_heads, config.num_kv_heads, shard.tp_rank, shard.tp_size)),
            config.sliding_windows[shard.layer_start : shard.layer_end],
            tuple(rotation_of(rope, config.head_dim, reader.device) for rope in rotations),
            config.attention_scale or None,
            config.attention_softcap,
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
        hidden = self.embedding(tokens)
        return hidden if self._multiplier == 1 else hidden.mul_(self._multiplier)

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
        logits = self.head(self.final_norm(hidden))
        softcap = self.config.logits_softcap
        return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the last layer to rows [num_rows, hidden_size], on the last stage."""
        return apply_norm(hidden, self._norm)

    def separate_workspace(self) -> AbstractContextManager[None]:
        """Compute in other scratch memory meanwhile, as `Workspace.separate` describes."""
        return self._workspace.separate()
