"""The decoder: one definition for every supported family, over a flattened batch and paged KV.

It contains no parallelism: a rank's decoder computes the layers and heads that it was loaded with, and
`workers.model.parallel` joins the parts of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from workers.model.attention import clear_partial_blocks
from workers.model.attention_batch import AttentionBatch
from workers.model.layers import (
    DecoderLayer,
    Embedding,
    Linear,
    Product,
    rms_norm,
    rope_frequencies,
    rope_table,
)
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.weights import LinearWeights, ShardSpec, WeightReader


def load_decoder(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    shard: ShardSpec | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> Decoder:
    """Load a Hugging Face checkpoint folder, or a rank's `shard` of it, to compute in `dtype`. `progress` is
    called after each layer.

    Raises CheckpointError, naming file and key or tensor, for what is unsupported, missing or mis-shaped.
    """
    config = read_model_config(model_dir)
    shard = shard or ShardSpec.whole(config)
    with WeightReader(model_dir, config, shard, dtype, device) as reader:
        decoder = Decoder(config, reader, shard, progress)
        reader.finish()
    return decoder


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
    ) -> None:
        self.config = config
        self.shard = shard
        self.embedding: Product | None = None
        self.head: Product | None = None
        is_first, is_last = shard.layer_start == 0, shard.layer_end == config.num_layers
        table: Tensor | None = None
        if is_first or (is_last and config.tie_word_embeddings):
            table = reader.embedding()
        if is_first and table is not None:
            self.embedding = Embedding(table)
        self.layers: list[DecoderLayer] = []
        for layer in range(shard.layer_start, shard.layer_end):
            loaded = DecoderLayer(
                reader.layer(layer),
                layer - shard.layer_start,
                config.head_dim,
                config.rms_norm_eps,
                config.sliding_windows[layer],
            )
            self.layers.append(loaded)
            num_layers = shard.layer_end - shard.layer_start
            progress(f"loading weights, {len(self.layers)} of {num_layers} layers")
        if is_last:
            self._norm = reader.final_norm()
            self.head = Linear(LinearWeights(reader.head(table), None))
        self._frequencies = rope_frequencies(config.rope, config.head_dim, reader.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        """Map token ids [num_tokens] to the last layer's output [num_tokens, hidden_size], before the final
        norm. Writes their keys and values to `kv`, contiguous [num_blocks, num_layers, 2, num_kv_heads,
        block_tokens, head_dim] of the weights' dtype."""
        return self.run_layers(self.embed(tokens), batch, kv)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [num_tokens] to [num_tokens, hidden_size], on the first stage."""
        assert self.embedding is not None, "this stage has no embedding"
        return self.embedding(tokens)

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        """Run this stage's layers over `hidden` [num_tokens, hidden_size], which is overwritten and
        returned."""
        clear_partial_blocks(kv, batch)
        cos, sin = rope_table(batch.positions, self._frequencies, hidden.dtype)
        for layer in self.layers:
            layer.forward(hidden, cos, sin, kv, batch)
            batch.marks.mark_layer()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head to rows [num_rows, hidden_size], on the last stage. Returns float32
        [num_rows, vocab_size]."""
        assert self.head is not None, "this stage has no head"
        return self.head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()
