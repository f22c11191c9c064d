"""Read a rank's slice of a checkpoint's tensors from its memory-mapped safetensors files, without copies
where they are packed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import CheckpointError
from workers.model.experts.mixture_weights import MixtureWeightReader, MixtureWeights
from workers.model.latent_weights import LatentWeightReader, LatentWeights
from workers.model.linear_weights import LinearWeights, as_parts
from workers.model.model_config import ModelConfig
from workers.model.norm import Norm
from workers.model.quantization.quantized_files import QuantizedTensorFiles
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.quantization.weight_parts import are_equal, rows_at
from workers.model.rope import rotary_order
from workers.model.sizes import kv_heads, layer_heads, part, refuse_split
from workers.model.split_products import ProductRows, SplitProducts, fused_rows
from workers.model.state.make_readers import state_reader
from workers.model.state.state_weights import StateWeightReader, StateWeights
from workers.model.tensor_files import FLOATS, TensorFiles, WeightSlice
from workers.model.tensor_names import OF_OWN_KV, TensorNames
from workers.model.xielu import Xielu

# Buffers that old checkpoints carry and the model computes by itself.
_NOT_NEEDED = "self_attn.rotary_emb.inv_freq"
# A tensor of an expert other than the first.
_OTHER_EXPERT = re.compile(r"experts\.[1-9]\d*\.")


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSpec:
    """The part of a model that one rank holds: layers [layer_start, layer_end), and of every layer, of the
    embedding and of the head the `tp_rank`-th of `tp_size` parts (`workers.model.sizes`). Only `tp_rank` 0
    holds the biases of row-split products. Experts are split into `ep_size` parts by their numbers, and each
    of them over the ranks that hold it."""

    layer_start: int
    layer_end: int
    tp_rank: int = 0
    tp_size: int = 1
    ep_size: int = 1

    @staticmethod
    def whole(config: ModelConfig) -> ShardSpec:
        """Return the shard that is the whole model."""
        return ShardSpec(0, config.num_layers)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockNorms:
    """The norms of what a layer's attention and feed-forward take from the hidden states, and of what they
    add to these, each of hidden_size; None where the family has none."""

    attention_input: Norm | None
    attention_output: Norm | None
    feed_forward_input: Norm | None
    feed_forward_output: Norm | None


@dataclasses.dataclass(frozen=True, slots=True)
class InputGateWeights:
    """The weights by which a layer adds its own input to the hidden states: the rows of the gate [input_size,
    hidden_size] and of the projection [hidden_size, input_size], and the norm of the result."""

    gate: LinearWeights
    projection: LinearWeights
    norm: Norm


@dataclasses.dataclass(frozen=True, slots=True)
class InputEmbeddingWeights:
    """The weights of the inputs of all layers: the rank's rows of the table [input_vocab_size, num_layers *
    input_size], the projection of the embedding [num_layers * input_size, hidden_size], and its norm, of
    input_size."""

    table: Tensor | QuantizedWeight
    projection: LinearWeights
    norm: Norm


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. `qkv` [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size] holds query,
    key and value rows, without values where these are the keys, and queries alone where the layer attends to
    another's keys and values; None where they are computed from a `latent`, or where the layer has a `state`.
    A layer that mixes no tokens has no `output` either. `gate_up` [2 *
    intermediate_size, hidden_size] holds gate and up rows, or up rows alone. A layer with a `mixture` of
    experts may have neither `gate_up` nor `down`.
    `q_norm` and `k_norm` are of each head, [head_dim], or of all that the rank holds in one row, or, with
    a row of weights for each head that it holds, [num_heads, head_dim]. `sinks` float32 [num_heads] are of
    its query heads, as in `LayerAttention`."""

    norms: BlockNorms
    qkv: LinearWeights | None
    q_norm: Norm | None
    k_norm: Norm | None
    output: LinearWeights | None
    gate_up: LinearWeights | None
    down: LinearWeights | None
    sinks: Tensor | None = None
    xielu: Xielu | None = None
    inputs: InputGateWeights | None = None
    # The hidden states are multiplied by this after the layer.
    scalar: float = 1.0
    mixture: MixtureWeights | None = None
    latent: LatentWeights | None = None
    state: StateWeights | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _HeadRows:
    """A rank's rows of a layer's products of queries, and of keys or values, its columns of what attention
    mixes of values, and how many there are; and whether the layer has keys and values of its own, and values
    that are not its keys."""

    head_dim: int
    queries: slice
    num_queries: int
    keys: slice
    num_keys: int
    mixed: slice
    num_mixed: int
    has_own_kv: bool
    has_own_values: bool

    @staticmethod
    def of(config: ModelConfig, shard: ShardSpec, layer: int) -> _HeadRows:
        num_kv_heads, head_dim = config.heads_of(layer)
        held = layer_heads(config, layer, shard.tp_rank, shard.tp_size)
        queries, keys = (slice(part.start * head_dim, part.stop * head_dim) for part in held)
        mixed_dim = head_dim if config.latent is None else config.latent.v_head_dim
        has_own_kv = config.has_own_kv(layer)
        has_own_values = has_own_kv and not config.has_key_values(layer)
        return _HeadRows(
            head_dim,
            queries,
            config.num_heads * head_dim,
            keys,
            num_kv_heads * head_dim,
            slice(held.queries.start * mixed_dim, held.queries.stop * mixed_dim),
            config.num_heads * mixed_dim,
            has_own_kv,
            has_own_values,
        )


class WeightReader:
    """Reads the tensors of one checkpoint for one shard, cast to `dtype` on `device`. A context manager;
    `finish` refuses names that the architecture does not have.

    Vectors are copies. Matrices may be views of the mapped files, as `LinearWeights` describes: a serving
    model must not change with its files."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        shard: ShardSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        expert_offload: int = 0,
        expert_copies: int = 0,
        form: WeightForm = AS_STORED,
    ) -> None:
        """`expert_offload`: so many experts of each layer are computed by the CPU. `expert_copies`: so many
        of each layer may be copied to this rank from others. `form` is that of the weights of products."""
        self._config = config
        self._shard = shard
        scheme = config.quantization
        self._files = (
            TensorFiles(model_dir, dtype, device, form)
            if scheme is None
            else QuantizedTensorFiles(model_dir, dtype, device, scheme, form)
        )
        self._tensor = self._files.tensor
        self._names = TensorNames.of((), config)
        self._products = SplitProducts(self._files, config, shard.tp_rank)
        self._states: StateWeightReader | None = None
        if (state := config.state) is not None:
            held = kv_heads(config.num_kv_heads, shard.tp_rank, shard.tp_size)
            self._states = state_reader(self._products, state, held, config)
        self._mixtures = MixtureWeightReader(
            self._files,
            config,
            shard.tp_rank,
            shard.tp_size,
            ep=shard.ep_size,
            num_in_host=expert_offload,
            num_copies=expert_copies,
        )
        self._latents: LatentWeightReader | None = None
        if (shape := config.latent) is not None:
            tp_rank, tp = shard.tp_rank, shard.tp_size
            self._latents = LatentWeightReader(self._files, config, shape, tp_rank, tp)
        order = rotary_order(config.rope, config.head_dim)
        # The order of the dimensions of a head's queries and keys; None: as they are stored.
        self._order = None if order is None else torch.tensor(order)
        _check_split(config, shard)

    def __enter__(self) -> WeightReader:
        self._files.__enter__()
        self._names = TensorNames.of(self._files.names, self._config)
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Read these, of the same shapes, in place of the tensors of their names."""
        self._files.replace(tensors)

    def omit_values(self) -> None:
        """Read every tensor as memory of its shape and dtype in which nothing was written."""
        self._files.omit_values()
        self._mixtures.omit_values()

    def stored_kinds(self) -> list[frozenset[tuple[str, Hashable]]]:
        """Return, for each layer, the names of its tensors there and how each is stored. Of experts beside
        each other the first stands for all."""
        kinds: list[set[tuple[str, Hashable]]] = [set() for _ in range(self._config.num_layers)]
        for name in self._files.stored_names:
            of_layer = self._names.layer_of(name)
            if of_layer is not None and of_layer[0] < len(kinds) and not _OTHER_EXPERT.search(of_layer[1]):
                kinds[of_layer[0]].add((of_layer[1], self._files.kind_of(name)))
        return list(map(frozenset, kinds))

    @property
    def dtype(self) -> torch.dtype:
        return self._files.dtype

    @property
    def device(self) -> torch.device:
        return self._files.device

    @property
    def num_bytes(self) -> int:
        """The bytes of the parts that were read, as they are stored."""
        return self._files.num_bytes

    def embedding(self) -> Tensor | QuantizedWeight:
        """Read the rank's rows of [vocab_size, hidden_size], as a map where they are kept as they are stored.
        A tied checkpoint may hold them under the head's name."""
        name = self._names.embedding
        if name not in self._files and self._config.tie_word_embeddings:
            name = self._names.head
        return self._vocabulary(name)

    def head(self, embedding: Tensor | QuantizedWeight | None) -> Tensor | QuantizedWeight:
        """Read the rank's rows of [vocab_size, hidden_size]; `embedding` itself if tied. A tied checkpoint
        that also holds a different head gets that head, as in transformers."""
        name = self._names.head
        if not self._config.tie_word_embeddings:
            return self._vocabulary(name)
        assert embedding is not None, "a tied head needs the embedding"
        if name not in self._files or name in self._files.read:
            return embedding
        head = self._vocabulary(name)
        return embedding if _are_same(head, embedding) else head

    def head_bias(self) -> Tensor | None:
        """Read the rank's part of the bias of logits, [vocab_size]; None where there is none."""
        if not self._config.head_bias:
            return None
        size = self._config.vocab_size
        return self._tensor(self._names.head_bias, (size,), self._part(size)).clone()

    def final_norm(self) -> Norm:
        """Read the final norm, of hidden_size, which divides logits where the family does."""
        norm = self._hidden_norm(self._names.norm, self._names.norm_bias)
        norm.weight.div_(self._config.logits_divisor)
        if norm.bias is not None:
            norm.bias.div_(self._config.logits_divisor)
        return norm

    def layer(self, layer: int) -> LayerWeights:
        """Read the rank's part of layer `layer` of the whole model."""
        config, prefix = self._config, f"{self._names.model}layers.{layer}."
        intermediate_size = config.intermediate_size_of(layer)
        feed_forward = f"{prefix}{config.traits.tensors.feed_forward}"
        weights = LayerWeights(
            norms=self._block_norms(prefix, layer),
            qkv=None,
            q_norm=None,
            k_norm=None,
            output=None,
            gate_up=self._gate_up(feed_forward, intermediate_size) if intermediate_size else None,
            down=self._down(feed_forward, intermediate_size) if intermediate_size else None,
            xielu=self._xielu(f"{feed_forward}act_fn.") if config.activation == "xielu" else None,
            inputs=self._input_gate(prefix) if config.layer_shapes.input_size else None,
            scalar=self._number(f"{prefix}layer_scalar", (1,), self.dtype)
            if config.traits.has_layer_shapes
            else 1.0,
            mixture=self._mixtures.layer(prefix) if config.has_experts(layer) else None,
        )
        if config.has_state(layer):
            return self._with_state(weights, prefix)
        return self._with_attention(weights, prefix, layer) if config.has_attention(layer) else weights

    def _with_state(self, weights: LayerWeights, prefix: str) -> LayerWeights:
        """Add the weights of a state to those of the rest of a layer."""
        assert self._states is not None
        assert self._config.traits.state is not None
        state = self._states.layer(f"{prefix}{self._config.traits.state.block}")
        return dataclasses.replace(weights, output=state.output, state=state)

    def _with_attention(self, weights: LayerWeights, prefix: str, layer: int) -> LayerWeights:
        """Add the weights of attention to those of the rest of a layer."""
        config, names = self._config, self._config.traits.tensors
        attention, heads = f"{prefix}{names.attention}", _HeadRows.of(config, self._shard, layer)
        q_norm, k_norm = self._qk_norms(attention, heads)
        output, has_bias = f"{attention}{names.output}", config.output_bias
        return dataclasses.replace(
            weights,
            qkv=self._qkv(attention, heads) if self._latents is None else None,
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._products.of_inputs(output, heads.num_mixed, heads.mixed, has_bias=has_bias),
            sinks=self._sinks(f"{attention}sinks", layer) if config.traits.has_sinks else None,
            latent=None if self._latents is None else self._latents.layer(attention),
        )

    def input_embedding(self) -> InputEmbeddingWeights | None:
        """Read the rank's part of what the inputs of layers are computed from; None where they have none."""
        config, names, shapes = self._config, self._names, self._config.layer_shapes
        if not shapes.input_size:
            return None
        size = config.num_layers * shapes.input_size
        table = self._input_table(shapes.input_vocab_size, size)
        projection = self._product(names.input_projection, (size, config.hidden_size))
        norm = self._norm(names.input_norm, shapes.input_size)
        return InputEmbeddingWeights(table, projection, norm)

    def _input_table(self, num_rows: int, size: int) -> Tensor | QuantizedWeight:
        """Read a table whose rows have the inputs of all layers. It is not rounded: one scale would not suit
        all of them."""
        name, shape, rows = self._names.input_embedding, (num_rows, size), self._part(num_rows)
        if not self._files.form.keeps_stored:
            return self._tensor(name, shape, rows)
        return self._files.product_parts([WeightSlice(name, shape, rows)], is_table=True)[0]

    def finish(self) -> None:
        """Refuse a checkpoint with tensors that this decoder would silently leave out."""
        names, config = self._names, self._config
        known = self._files.read | self._files.left | {names.embedding, names.norm, names.head}
        if config.layer_shapes.input_size:
            known |= {names.input_embedding, names.input_projection, names.input_norm}
        if config.traits.has_norm_bias:
            known.add(names.norm_bias)
        if config.head_bias:
            known.add(names.head_bias)
        for name in self._files.names - known:
            if config.is_wrapped and not names.is_of_text(name):
                continue
            layer, rest = names.layer_of(name) or (config.num_layers, "")
            is_held = self._shard.layer_start <= layer < self._shard.layer_end
            is_other_kv = rest.startswith(OF_OWN_KV) and not config.has_own_kv(layer)
            is_passed_over = rest == _NOT_NEEDED or is_other_kv
            if 0 <= layer - config.num_layers < config.num_extra_layers and rest:
                continue
            if name.startswith(config.traits.passed_over):
                continue
            if layer >= config.num_layers or (is_held and not is_passed_over):
                raise CheckpointError(f"{self._files.file_of(name)}: unexpected tensor {name}")

    def _vocabulary(self, name: str) -> Tensor | QuantizedWeight:
        size = self._config.vocab_size
        rows = WeightSlice(name, (size, self._config.hidden_size), self._part(size))
        return self._files.product_parts([rows], is_table=True)[0]

    def _part(self, size: int) -> slice:
        held = part(size, self._shard.tp_rank, self._shard.tp_size)
        return slice(held.start, held.stop)

    def _qkv(self, prefix: str, heads: _HeadRows) -> LinearWeights:
        config = self._config
        queries = ProductRows(f"{prefix}q_proj", heads.num_queries, heads.queries)
        parts, gates = [queries], list[ProductRows]()
        if config.traits.has_output_gate:
            parts, gates = _gated_queries(queries, heads.head_dim)
        if heads.has_own_kv:
            parts.append(ProductRows(f"{prefix}k_proj", heads.num_keys, heads.keys))
        num_rotated = len(parts)
        if heads.has_own_values:
            parts.append(ProductRows(f"{prefix}v_proj", heads.num_keys, heads.keys))
        parts += gates
        if config.traits.is_qkv_fused:
            parts = fused_rows(f"{prefix}qkv_proj", parts)
        weights = self._products.of_outputs(parts, has_bias=config.qkv_bias)
        return weights if self._order is None else self._in_rotary_order(weights, num_rotated)

    def _in_rotary_order(self, weights: LinearWeights, num_rotated: int) -> LinearWeights:
        """Reorder the first parts, which are rotated."""
        bias, size, parts = weights.bias, 0, list[Tensor | QuantizedWeight](weights.parts)
        for number, rows in enumerate(parts[:num_rotated]):
            size += rows.shape[0]
            if isinstance(rows, Tensor):
                parts[number] = self._reordered(rows)
            else:
                parts[number] = rows_at(rows, self._reordered(torch.arange(rows.num_outputs)))
        if bias is not None:
            bias = torch.cat((self._reordered(bias[:size]), bias[size:]))
        return LinearWeights(as_parts(parts), bias)

    def _reordered(self, rows: Tensor) -> Tensor:
        """Bring rows of heads [num_heads * head_dim, ...] into the order of `rotary_order`."""
        if self._order is None:
            return rows
        heads = rows.view(-1, self._config.head_dim, *rows.shape[1:])
        return heads.index_select(1, self._order.to(rows.device)).view(rows.shape)

    def _qk_norms(self, prefix: str, heads: _HeadRows) -> tuple[Norm | None, Norm | None]:
        config = self._config
        if config.qk_own_norms:
            return self._own_norms(prefix)
        if config.qk_norm:
            if not heads.has_own_kv:
                return self._norm(f"{prefix}{config.traits.qk_norm_names[0]}.weight", heads.head_dim), None
            sizes, rows = (heads.head_dim, heads.head_dim), (slice(None), slice(None))
        elif config.qk_row_norm:
            sizes, rows = (heads.num_queries, heads.num_keys), (heads.queries, heads.keys)
        else:
            return None, None
        norms = [
            self._norm(f"{prefix}{name}.weight", size, part)
            for name, size, part in zip(config.traits.qk_norm_names, sizes, rows, strict=True)
        ]
        queries, keys = (dataclasses.replace(it, weight=self._reordered(it.weight)) for it in norms)
        return queries, keys

    def _own_norms(self, prefix: str) -> tuple[Norm, Norm]:
        """Read the weights of the rank's heads that have their own, [num_heads, head_dim]."""
        config, shard = self._config, self._shard
        held, held_kv = layer_heads(config, 0, shard.tp_rank, shard.tp_size)
        q_name, k_name = config.traits.qk_norm_names
        return (
            self._own_norm(f"{prefix}{q_name}", config.num_heads, held),
            self._own_norm(f"{prefix}{k_name}", config.num_kv_heads, held_kv),
        )

    def _own_norm(self, name: str, num_heads: int, held: range) -> Norm:
        head_dim = self._config.head_dim
        if "{head}" in name:
            names = [f"{name.format(head=head)}.weight" for head in range(num_heads)]
            weights = torch.stack([self._tensor(it, (head_dim,), dtype=torch.float32) for it in names])
        else:
            weights = self._tensor(f"{name}.weight", (num_heads, head_dim), dtype=torch.float32)
        rows = weights[held.start : held.stop].flatten()
        return Norm(self._reordered(rows).view(-1, head_dim), self._config.rms_norm_eps, is_layer_norm=True)

    def _block_norms(self, prefix: str, layer: int) -> BlockNorms:
        def norm(name: str) -> Norm | None:
            return self._hidden_norm(f"{prefix}{name}.weight", f"{prefix}{name}.bias") if name else None

        return BlockNorms(*(norm(name) for name in dataclasses.astuple(self._config.norm_names(layer))))

    def _hidden_norm(self, weight: str, bias: str) -> Norm:
        """Read a norm of hidden states."""
        traits, size = self._config.traits, self._config.hidden_size
        norm = self._norm(weight, size)
        if not traits.is_layer_norm:
            return norm
        added = self._tensor(bias, (size,), dtype=torch.float32).clone() if traits.has_norm_bias else None
        return dataclasses.replace(norm, is_layer_norm=True, bias=added)

    def _norm(self, name: str, size: int, rows: slice = slice(None)) -> Norm:
        traits = self._config.traits
        weight = self._tensor(name, (size,), rows, dtype=torch.float32).clone()
        return Norm(weight.add_(traits.norm_offset), self._config.rms_norm_eps, traits.is_norm_rounded_first)

    def _sinks(self, name: str, layer: int) -> Tensor:
        held = layer_heads(self._config, layer, self._shard.tp_rank, self._shard.tp_size).queries
        rows = slice(held.start, held.stop)
        return self._tensor(name, (self._config.num_heads,), rows, dtype=torch.float32).clone()

    def _xielu(self, prefix: str) -> Xielu:
        names = ("alpha_p", "alpha_n", "beta", "eps")
        shapes: tuple[tuple[int, ...], ...] = ((1,), (1,), (), ())
        values = [
            self._number(f"{prefix}{name}", shape, torch.float32)
            for name, shape in zip(names, shapes, strict=True)
        ]
        return Xielu.of(*values)

    def _input_gate(self, prefix: str) -> InputGateWeights:
        hidden, size = self._config.hidden_size, self._config.layer_shapes.input_size
        gate = self._product(f"{prefix}per_layer_input_gate.weight", (size, hidden))
        projection = self._product(f"{prefix}per_layer_projection.weight", (hidden, size))
        norm = self._norm(f"{prefix}post_per_layer_input_norm.weight", hidden)
        return InputGateWeights(gate, projection, norm)

    def _product(self, name: str, shape: tuple[int, int]) -> LinearWeights:
        """Read all of a product without a bias."""
        return LinearWeights(self._files.product_parts([WeightSlice(name, shape)]), None)

    def _number(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
        """Read a number that the host computes with, rounded to a dtype."""
        return float(self._files.mapped(name, shape, (), FLOATS).to(dtype))

    def _gate_up(self, prefix: str, size: int) -> LinearWeights:
        rows = self._part(size)
        traits, names = self._config.traits, self._config.traits.tensors
        up = ProductRows(f"{prefix}{names.up}", size, rows)
        if not traits.is_gated:
            return self._products.of_outputs([up], has_bias=self._config.mlp_bias)
        parts = [ProductRows(f"{prefix}{names.gate}", size, rows), up]
        if traits.is_gate_up_fused:
            parts = fused_rows(f"{prefix}{names.gate_up}", parts)
        return self._products.of_outputs(parts, has_bias=self._config.mlp_bias)

    def _down(self, prefix: str, size: int) -> LinearWeights:
        name, has_bias = f"{prefix}{self._config.traits.tensors.down}", self._config.mlp_bias
        return self._products.of_inputs(name, size, self._part(size), has_bias=has_bias)


def _gated_queries(queries: ProductRows, head_dim: int) -> tuple[list[ProductRows], list[ProductRows]]:
    """Return the rows of the queries, and of the gates, of heads whose product has both in turn."""
    name, num_rows, rows = queries
    starts = [2 * first for first in range(rows.start, rows.stop, head_dim)]
    of_queries, of_gates = (
        [ProductRows(name, 2 * num_rows, slice(start + first, start + first + head_dim)) for start in starts]
        for first in (0, head_dim)
    )
    return of_queries, of_gates


def _are_same(one: Tensor | QuantizedWeight, other: Tensor | QuantizedWeight) -> bool:
    """Whether head and embedding are the same; they are taken for such where they have no memory."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.is_meta or torch.equal(one, other)
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight):
        return one.packed.is_meta or are_equal(one, other)
    return False


def _check_split(config: ModelConfig, shard: ShardSpec) -> None:
    assert 0 <= shard.tp_rank < shard.tp_size, shard
    assert 0 <= shard.layer_start < shard.layer_end <= config.num_layers, shard
    refuse_split(config, shard.tp_size, shard.ep_size)
