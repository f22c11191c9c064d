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

import torch
from torch import Tensor

from workers.model.apply_norm import apply_norm
from workers.model.attention.interface import AttentionBackend, AttentionPlan, StepInput
from workers.model.decoder_layer import DecoderLayer
from workers.model.embedding import ProductRowsLookup, make_embedding
from workers.model.experts.host_experts import SplitExperts
from workers.model.experts.mixture import Mixture
from workers.model.layer_inputs import InputEmbedding
from workers.model.layer_products import Product
from workers.model.linear_weights import as_parts
from workers.model.make_linear import make_linear
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.native_layers import NativeLayers
from workers.model.products import Workspace
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.rank_attention import attention_shape, layer_attention, value_norm
from workers.model.weights import ShardSpec, WeightReader


def load_decoder(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    shard: ShardSpec | None = None,
    progress: Callable[[str], None] = lambda phase: None,
    *,
    is_deterministic: bool = False,
    expert_offload: int = 0,
    expert_copies: int = 0,
    form: WeightForm = AS_STORED,
) -> Decoder:
    """Load a Hugging Face checkpoint folder, or a rank's `shard` of it, to compute in `dtype`. `progress` is
    called after each layer. `is_deterministic`: products of a row shall not depend on the rows beside it.
    `expert_offload`: so many experts of each layer are computed by the CPU. `expert_copies`: so many of each
    layer may be copied to this rank from others. `form` is that of the weights of products.

    Raises CheckpointError, naming file and key or tensor, for what is unsupported, missing or mis-shaped.
    """
    config = read_model_config(model_dir)
    shard = shard or ShardSpec.whole(config)
    in_experts = {"expert_offload": expert_offload, "expert_copies": expert_copies}
    with WeightReader(model_dir, config, shard, dtype, device, **in_experts, form=form) as reader:
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
        self.device = reader.device
        self.embedding: Product | None = None
        self.head: Product | None = None
        # Rounded as transformers rounds it.
        multiplier = config.embedding_multiplier
        if config.traits.is_embedding_scaled:
            multiplier = float(torch.tensor(multiplier, dtype=reader.dtype))
        self._multiplier = multiplier
        self._workspace = Workspace()
        is_first, is_last = shard.layer_start == 0, shard.layer_end == config.num_layers
        table: Tensor | QuantizedWeight | None = None
        if is_first or (is_last and config.tie_word_embeddings):
            table = reader.embedding()
        if is_last:
            self._norm = reader.final_norm()
            weight = reader.head(table)
            head = make_linear(as_parts((weight,)), reader.head_bias(), is_deterministic=is_deterministic)
            self.head = head.floats
            if is_first and weight is table:
                self.embedding = ProductRowsLookup(head, reader.dtype)
        if is_first and table is not None and self.embedding is None:
            self.embedding = make_embedding(table, reader.dtype)
        del table
        self.inputs = self._input_embedding(reader, is_deterministic) if is_first else None
        held = range(shard.layer_start, shard.layer_end)
        self.attention_shape = attention_shape(config, shard, reader.device, reader.dtype)
        self.layers: list[DecoderLayer] = []
        num_bytes_outside = reader.num_bytes
        for layer in held:
            loaded = DecoderLayer(
                reader.layer(layer),
                config,
                layer_attention(config, shard, layer),
                self._workspace,
                value_norm(config, shard, layer),
                is_deterministic=is_deterministic,
                is_split=shard.tp_size > 1,
            )
            self.layers.append(loaded)
            num_layers = shard.layer_end - shard.layer_start
            in_layers = (reader.num_bytes - num_bytes_outside) * num_layers // len(self.layers)
            of_all = f"{_gb(reader.num_bytes)} of {_gb(num_bytes_outside + in_layers)}"
            progress(f"loading weights, {len(self.layers)} of {num_layers} layers, {of_all}")

    def _input_embedding(self, reader: WeightReader, is_deterministic: bool) -> InputEmbedding | None:
        """Load what the layers' own inputs are computed from; None where they have none."""
        weights, config = reader.input_embedding(), self.config
        if weights is None:
            return None
        size = config.layer_shapes.input_size
        return InputEmbedding(
            make_embedding(weights.table, reader.dtype),
            float(torch.tensor(math.sqrt(size), dtype=reader.dtype)),
            make_linear(weights.projection.parts, is_deterministic=is_deterministic),
            config.hidden_size**-0.5,
            weights.norm,
        )

    @functools.cached_property
    def mixtures(self) -> dict[int, Mixture]:
        """This rank's experts by the number, in the model, of their layer."""
        numbered = enumerate(self.layers, self.shard.layer_start)
        return {number: layer.own_mixture for number, layer in numbered if layer.own_mixture is not None}

    @functools.cached_property
    def split_experts(self) -> list[SplitExperts]:
        """The experts of each layer of which the CPU computes some."""
        splits = [mixture.split for mixture in self.mixtures.values()]
        return [split for split in splits if split is not None]

    @property
    def num_inputs(self) -> int:
        """The columns of what this stage's layers take: hidden states, and the inputs of all later layers."""
        num_left = self.config.num_layers - self.shard.layer_start
        return self.config.hidden_size + num_left * self.config.layer_shapes.input_size

    @torch.inference_mode()
    def forward(self, tokens: Tensor, step: StepInput, attention: AttentionBackend) -> Tensor:
        """Map token ids [num_tokens] to the last layer's output [num_tokens, hidden_size], before the final
        norm. Their keys and values are written to the KV of `attention`."""
        return self.run_layers(self.embed(tokens), attention.plan(step))

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Map token ids [num_tokens] to [num_tokens, num_inputs], on the first stage."""
        assert self.embedding is not None, "this stage has no embedding"
        hidden = self.embedding(tokens)
        if self._multiplier != 1:
            hidden.mul_(self._multiplier)
        if self.inputs is None:
            return hidden
        return torch.cat((hidden, self.inputs(tokens, hidden)), 1)

    @torch.inference_mode()
    def run_layers(self, hidden: Tensor, plan: AttentionPlan, most_layers: int | None = None) -> Tensor:
        """Run this stage's layers, or the first `most_layers`, over `hidden` [num_tokens, num_inputs], which
        is overwritten. Returns what the next stage takes, or the hidden states after the last layer."""
        hidden, inputs = self._parted(hidden)
        in_one_call = None if (native := self._native_layers) is None else native.begin(hidden, plan)
        residual: Tensor | None = None
        for number, layer in enumerate(self.layers[:most_layers]):
            if in_one_call is not None and in_one_call.has(number):
                if residual is not None:
                    hidden.add_(residual)
                in_one_call.run(number)
                residual = None
            else:
                own_inputs = None if inputs is None else inputs[:, number]
                residual = layer.forward(hidden, plan, residual, own_inputs)
            plan.marks.mark_layer()
        if residual is not None:
            hidden.add_(residual)
        if inputs is None or inputs.shape[1] == len(self.layers):
            return hidden
        return torch.cat((hidden, inputs[:, len(self.layers) :].flatten(1)), 1)

    def _parted(self, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states in `wide` [num_tokens, num_inputs], and the inputs of this and later
        stages' layers, [num_tokens, num_layers, input_size], if they have any."""
        hidden_size, size = self.config.hidden_size, self.config.layer_shapes.input_size
        if not size:
            return wide, None
        inputs = wide[:, hidden_size:].view(len(wide), -1, size)
        return wide[:, :hidden_size].contiguous(), inputs

    @functools.cached_property
    def _native_layers(self) -> NativeLayers | None:
        """The layers that are packed and, once `parallelize` was called, whole: each is run in one call."""
        packed = [layer.packed() for layer in self.layers]
        return NativeLayers(packed, self._workspace) if any(packed) else None

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers, in the model, of this stage's layers with experts."""
        return tuple(self.mixtures)

    def expert_counts(self) -> Tensor:
        """Copy to the host how many tokens each expert that this rank owns, and each slot for copies, has had
        in each of `expert_layers` since the start: int64 [num_expert_layers, num_owned + num_slots]."""
        counts = [mixture.counts for mixture in self.mixtures.values()]
        return torch.stack(counts).cpu() if counts else torch.empty((0, 0), dtype=torch.int64)

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
