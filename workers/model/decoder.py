"""The decoder: one definition for every supported family, over a flattened batch and paged KV.

It contains no parallelism: a rank's decoder computes the layers and heads that it was loaded with, and
`workers.model.parallel` joins the parts of several ranks.

Arithmetic follows transformers: norms and rotary angles in float32, everything else in the weights' dtype. On
a CPU, products use weights in oneDNN's packed order, by private functions of torch that are tried before use.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import native
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    StepInput,
)
from workers.model.model_config import ModelConfig, RopeConfig, read_model_config
from workers.model.sizes import query_heads
from workers.model.weights import LayerWeights, LinearWeights, ShardSpec, WeightReader

_log = logging.getLogger("tandem.rank")

# oneDNN packs a weight for an expected number of rows; this one serves one row and hundreds alike.
# It also compiles and keeps code for every number of rows (some 0.4 MB each): larger numbers are padded to a
# multiple of this one, so that a rank uses few.
_PACK_ROWS = 16
_OPS = torch.ops.mkldnn
_TRIED_SHAPE = (24, 32)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

# `workers.model.parallel` replaces products by ones that join the parts of several ranks.
Product = Callable[[Tensor], Tensor]


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
                config.rms_norm_eps,
                config.sliding_windows[layer],
            )
            self.layers.append(loaded)
            num_layers = shard.layer_end - shard.layer_start
            progress(f"loading weights, {len(self.layers)} of {num_layers} layers")
        if is_last:
            self._norm = reader.final_norm()
            self.head = Linear(LinearWeights(reader.head(table), None))
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
    def run_layers(self, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        """Run this stage's layers over `hidden` [num_tokens, hidden_size], which is overwritten and
        returned."""
        for layer in self.layers:
            layer.forward(hidden, plan)
            plan.marks.mark_layer()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head to rows [num_rows, hidden_size], on the last stage. Returns float32
        [num_rows, vocab_size]."""
        assert self.head is not None, "this stage has no head"
        return self.head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()


# -------------------------------------------------------------------------- parts of a decoder layer


class Embedding:
    """Maps token ids [num_tokens] to rows [num_tokens, hidden_size] of `table`."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._table)


class Linear:
    """Maps [num_tokens, num_inputs] to [num_tokens, num_outputs].

    Where oneDNN serves the dtype well, the weight is kept only in oneDNN's own packed order. It is then read
    up to 1.9 times as fast for few tokens, and (measured on AMX and AVX-512) a row's result does not depend
    on the number of tokens, except for a single token in wide float32 products."""

    def __init__(self, weights: LinearWeights) -> None:
        self._bias = weights.bias
        self._is_packed = can_pack(weights.weight.device, weights.weight.dtype)
        self._weight = pack(weights.weight) if self._is_packed else weights.weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            return packed_product(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension to unit mean square in float32, round, then multiply by `weight`."""
    if native.serves(x.device, x.dtype) and x.stride(-1) == 1:
        kernels = native.load()
        assert kernels is not None
        return kernels.rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)


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
    """One layer over a flattened batch. Its KV is layer `index` of the rank's KV."""

    def __init__(self, weights: LayerWeights, index: int, eps: float, window: int) -> None:
        self._eps = eps
        self._attention = LayerAttention(index, window, weights.q_norm, weights.k_norm, eps)
        self._input_norm, self._post_norm = weights.input_norm, weights.post_norm
        self._qkv, self._gate_up = Linear(weights.qkv), Linear(weights.gate_up)
        # With a part of the heads and of the intermediate columns, these compute a part of the sum.
        self.output: Product = Linear(weights.output)
        self.down: Product = Linear(weights.down)

    def forward(self, hidden: Tensor, plan: AttentionPlan) -> None:
        """Add the layer's attention and feed-forward to `hidden` [num_tokens, hidden_size], in place."""
        qkv = self._qkv(rms_norm(hidden, self._input_norm, self._eps))
        plan.marks.mark()
        mixed = plan.run(self._attention, qkv)
        plan.marks.mark()
        hidden.add_(self.output(mixed))
        plan.marks.mark()
        normed = rms_norm(hidden, self._post_norm, self._eps)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        plan.marks.mark()
        hidden.add_(self.down(F.silu(gate).mul_(up)))
        plan.marks.mark()


# ------------------------------------------------------------------------------------- packed products


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this kind are faster with packed weights, and torch has them. float16 gained
    nothing where it was measured."""
    return (
        device.type == "cpu"
        and dtype in _TOLERANCES
        and bool(torch.backends.mkldnn.enabled)
        and _works(dtype)
    )


def pack(weight: Tensor) -> Tensor:
    """Return the weight [num_outputs, num_inputs] in packed order."""
    packed: Tensor = _OPS._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [num_tokens, num_inputs] with a packed weight, to [num_tokens, num_outputs]."""
    num_rows = x.shape[0]
    if num_rows > _PACK_ROWS and num_rows % _PACK_ROWS:
        x = F.pad(x, (0, 0, 0, -num_rows % _PACK_ROWS))
    result: Tensor = _OPS._linear_pointwise(x, packed, bias, "none", [], "")
    return result[:num_rows]


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Try packed products once: another version of torch may lack these functions or define them
    differently."""
    try:
        if dtype == torch.bfloat16 and not _OPS._is_mkldnn_bf16_supported():
            return False
        problem = _try(dtype)
    except (AttributeError, RuntimeError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    if problem:
        _log.warning(
            "torch %s has no packed products of %s (%s): plain ones are used, which read weights more slowly",
            torch.__version__,
            dtype,
            problem,
        )
    return not problem


@torch.inference_mode()
def _try(dtype: torch.dtype) -> str:
    """Return what is wrong with a packed product, "" if it is right."""
    num_outputs, num_inputs = _TRIED_SHAPE
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    packed = pack(weight)
    for num_rows in (1, _PACK_ROWS + 1):
        x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
        expected = F.linear(x, weight, bias).float()
        actual = packed_product(x, packed, bias).float()
        if actual.shape != expected.shape:
            return f"shape {list(actual.shape)} in place of {list(expected.shape)}"
        error = float((actual - expected).abs().max() / expected.abs().max())
        if not error <= _TOLERANCES[dtype]:
            return f"results are off by {error:.1e}"
    return ""
