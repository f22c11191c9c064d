"""The memory of a rank: weights, activations of the largest step, process, and KV for each token.

Plain arithmetic over the shape of the model and the headers of the checkpoint, without torch. The replica's
start, the preflight checks and the ranks themselves all use it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workers.model.experts.mixture_shape import MixtureShape
from workers.model.families.family import TensorTraits
from workers.model.latent_shape import LatentShape
from workers.model.latent_split import MOST_EXCHANGED_BYTES, queried_row_bytes
from workers.model.model_config import ModelConfig, read_header, read_model_config, weight_files
from workers.model.quantization.stored_format import (
    MXFP4,
    QuantizationScheme,
    StoredFormat,
    num_weights,
    plain_name,
    product_of,
)
from workers.model.quantization.weight_form import DEQUANTIZED, WeightForm
from workers.model.sizes import held_experts, kv_heads, layer_heads, part, sends_rows
from workers.model.tensor_names import OF_OWN_KV, TensorNames
from workers.model.weight_bytes import WeightBytes

# The memory of a rank's process that is not counted below: the interpreter, torch, kernels and their threads.
PROCESS_BYTES = 350_000_000
# The memory of the context that CUDA makes in a process, with its kernels.
CUDA_CONTEXT_BYTES = 600_000_000
# The memory of NCCL in a rank that has groups with others: an allowance, not yet measured.
GROUP_BYTES = 512 << 20
# The memory of the driver for one layer in one graph: an allowance. All 35 graphs of 32 layers took 21 to 94
# MB on an H100, with what torch has of them.
GRAPH_LAYER_BYTES = 128 << 10
# The rows of decode steps that have a graph: few, and multiples.
_FIRST_GRAPH_ROWS, _GRAPH_ROWS_STEP = (1, 2, 4), 8
# The number of float32 copies of the sampled rows' logits that sampling may hold at a time: the logits
# themselves, their log-probabilities, and the values that the filters of top-p and top-k sort.
_LOGIT_COPIES = 4
# The bytes of the logits of a prompt's positions that are computed at a time, where their log-probabilities
# are asked for; these take as much again.
LOGITS_PIECE_BYTES = 16 << 20
# The hidden states that a layer holds at a time: its input, the normed one, and a product's output; and one
# more in float32, in which norms are computed.
_HIDDEN_COPIES, _HIDDEN_FLOATS = 3, 1
# The float32 copies of queries and keys that norms of heads with weights of their own hold at a time.
_OWN_NORM_FLOATS = 3
# The float32 copies of values that norms of them hold at a time.
_VALUE_NORM_FLOATS = 2
# The float32 copies of a feed-forward's columns that the activation xIELU holds at a time.
_XIELU_FLOATS = 4
# The copies of an expert's columns that torch holds at a time, if all tokens choose the same one; the float32
# copies of hidden states in which results of experts are added up; and those of the router's logits.
_EXPERT_COPIES = 3
_EXPERT_FLOATS = 2
_ROUTER_FLOATS = 3
# The bytes of a token and one of its experts by which their rows are sorted on CUDA.
_PAIR_BYTES = 16
# The hidden states that are held at a time where rows are sent to the ranks of their experts, if all rows are
# sent to one: what it receives, also side by side, the results, and what it returns. An allowance, not yet
# measured.
_SENT_COPIES = 4
_FLOAT_BYTES = 4
# What stands before the name of a tensor within its layer.
_LAYER_PREFIX = re.compile(r"^.*?layers\.\d+\.")
# The bits of the elements, by their names in safetensors, that codes of quantized weights lie in.
_CODE_BITS = {"I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8}
_KEPT_EXPERT = re.compile(r"\.(((gate|up|down)_proj|w[123])\.weight|gate_up_proj|down_proj)$")
# How the plain names of products end whose weights may be quantized.
_KEPT_PRODUCT = re.compile(
    r"\.(q|k|v|o|qkv|q_a|q_b|gate|up|down|gate_up)_proj\.weight$|\.kv_a_proj_with_mqa\.weight$"
    r"|\.per_layer_(input_gate|projection)\.weight$"
)
# What stands before the names of tensors of layers with a state where their shares are computed.
_OF_STATES = "state:"
# The products of such layers, by their names within the layer's block.
_KEPT_IN_STATE = re.compile(r"in_proj(_(qkvz|ba|qkv|z|b|a))?\.weight|out_proj\.weight")
# How the plain names of products end whose inputs are split over the ranks.
_OF_INPUTS = (".o_proj.weight", ".down_proj.weight", f"{_OF_STATES}out_proj.weight")
# `auto` gives no less than this to a replica, or what the model's context takes: with less there is no use
# in starting.
LEAST_KV_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class RankShape:
    """The part of a model that one rank holds: layers [first_layer, end_layer), and the `tp_rank`-th of `tp`
    parts of each, of the embedding and of the head; experts are split into `ep` parts by their numbers. The
    CPU computes `expert_offload` experts of each layer, and the rank has slots for copies of `expert_copies`
    more. With `splits_latents` it keeps its part of the tokens of each block of latents, in place of all."""

    model: ModelConfig
    first_layer: int
    end_layer: int
    tp_rank: int = 0
    tp: int = 1
    ep: int = 1
    expert_offload: int = 0
    expert_copies: int = 0
    splits_latents: bool = False

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def is_first_stage(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last_stage(self) -> bool:
        return self.end_layer == self.model.num_layers

    @property
    def num_kv_layers(self) -> int:
        """How many of the layers have keys and values of their own."""
        return min(self.end_layer, self.model.kv_cells.num_layers) - self.first_layer

    @property
    def num_kv_cells(self) -> int:
        return len(kv_heads(self.model.kv_cells.num_cells, self.tp_rank, self.tp))

    @property
    def num_heads(self) -> int:
        return len(layer_heads(self.model, self.first_layer, self.tp_rank, self.tp).queries)

    def kv_token_bytes(self, item_bytes: int) -> int:
        """Return the size of one token's keys and values, or latents of both, which is the mean of all tokens
        where ranks divide these."""
        cells, layers = self.model.kv_cells, range(self.first_layer, self.first_layer + self.num_kv_layers)
        num_layers = sum(map(self.model.has_attention, layers))
        num_items = cells.num_kinds * num_layers * self.num_kv_cells * cells.width
        return num_items * item_bytes // (self.tp if self.splits_latents else 1)


class _TensorSize(NamedTuple):
    """What a rank keeps of a tensor. The `part` is that of `WeightBytes`, or `beside` them."""

    part: str
    num_items: float
    bytes_each: float


class Checkpoint(NamedTuple):
    """The number of elements of each tensor of a checkpoint, from the headers of its files, and of quantized
    weights the formats; these are named as if they were not quantized."""

    name_to_size: dict[str, int]
    name_to_format: dict[str, StoredFormat] = {}

    def _names(self, model: ModelConfig) -> TensorNames:
        return TensorNames.of(self.name_to_size, model)

    @classmethod
    def read(cls, model_dir: Path) -> Checkpoint:
        """Read the headers. Raises `CheckpointError`, naming the file, for one that cannot be read."""
        sizes: dict[str, int] = {}
        dtypes: dict[str, str] = {}
        for file in weight_files(model_dir):
            _, header = read_header(file)
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            sizes |= {name: math.prod(entry["shape"]) for name, entry in entries.items()}
            dtypes |= {name: entry["dtype"] for name, entry in entries.items()}
        if not any(dtype in _CODE_BITS for dtype in dtypes.values()):
            return cls(sizes)
        scheme = read_model_config(model_dir).quantization
        return cls(sizes) if scheme is None else cls._quantized(sizes, dtypes, scheme)

    @classmethod
    def _quantized(
        cls, name_to_size: dict[str, int], name_to_dtype: dict[str, str], scheme: QuantizationScheme
    ) -> Checkpoint:
        sizes: dict[str, int] = {}
        formats: dict[str, StoredFormat] = {}
        for name, size in name_to_size.items():
            plain, num_bits = plain_name(name), _CODE_BITS.get(name_to_dtype[name], 0)
            if not plain:
                continue
            sizes[plain] = sizes.get(plain, 0) + num_weights(name, size, num_bits, scheme)
            stored = scheme.format_of(product_of(plain))
            if num_bits and stored is not None:
                formats[plain] = stored
        return cls(sizes, formats)

    def weight_bytes(self, rank: RankShape, item_bytes: int, form: WeightForm = DEQUANTIZED) -> int:
        """Return the size of the weights that the rank keeps on its device, each once: a tied embedding is
        the head too. Products, embedding and head have weights of this form, and all others floats of
        `item_bytes`; the table of the layers' own inputs is not rounded."""
        return round(sum(it.num_items * it.bytes_each for it in self._in_memory(rank, item_bytes, form)))

    def mean_bytes(self, rank: RankShape, item_bytes: int, form: WeightForm = DEQUANTIZED) -> WeightBytes:
        """Return the mean bytes of the weights that the rank keeps, where products have this form."""
        part_to_sizes: dict[str, list[_TensorSize]] = {}
        for tensor in self._in_memory(rank, item_bytes, form):
            part_to_sizes.setdefault(tensor.part, []).append(tensor)
        of_parts = (part_to_sizes.get(part, ()) for part in WeightBytes._fields)
        return WeightBytes(*(_mean_bytes(of_part, item_bytes) for of_part in of_parts))

    def _in_memory(self, rank: RankShape, item_bytes: int, form: WeightForm) -> Iterator[_TensorSize]:
        """Yield what the rank keeps of each tensor."""
        known = self._names(rank.model)
        heads = {known.head, known.embedding} if rank.model.tie_word_embeddings else {known.head}
        for name, size in self._kept(rank):
            layer, inner = known.layer_of(name) or (0, "")
            plain, each = _plain_name(name, layer, rank.model), float(item_bytes)
            if inner:
                each = self._bytes_each(name, plain, layer, rank, item_bytes, form)
            elif name in (known.embedding, known.head):
                each = form.bytes_each(self.name_to_format.get(name), item_bytes, is_table=True)
            elif name == known.input_projection or (name == known.input_embedding and form.keeps_stored):
                each = form.bytes_each(self.name_to_format.get(name), item_bytes)
            part = "experts" if ".experts." in plain else "layers" if inner else "beside"
            yield _TensorSize("head" if name in heads else part, size * self._share(plain, layer, rank), each)

    def _bytes_each(
        self, name: str, plain: str, layer: int, rank: RankShape, item_bytes: int, form: WeightForm
    ) -> float:
        """Return the bytes of an element of the tensor of these names, in this layer."""
        stored, are_experts = self.name_to_format.get(name), ".experts." in plain
        if are_experts and (rank.expert_offload or rank.expert_copies):
            return item_bytes
        if are_experts and name.endswith("_blocks"):
            return form.bytes_each(MXFP4, item_bytes) if form.keeps_stored else item_bytes
        # Inputs in an order of their own are not divided, and no expert has them.
        may_be_in_order = are_experts or (rank.tp > 1 and plain.endswith(_OF_INPUTS))
        if stored is not None and stored.has_order and may_be_in_order:
            return item_bytes
        is_kept = _is_kept_quantized(plain)
        return form.bytes_each(stored, item_bytes) if is_kept else item_bytes

    def host_expert_bytes(self, rank: RankShape, item_bytes: int) -> int:
        """Return the size of the weights of experts in host memory: of all where the CPU computes some."""
        shape = rank.model.mixture
        if shape is None or not rank.expert_offload:
            return 0
        none, of_all = (dataclasses.replace(rank, expert_offload=it) for it in (0, shape.rule.num_experts))
        return self.weight_bytes(none, item_bytes) - self.weight_bytes(of_all, item_bytes)

    def _is_kept(self, layer: int, name: str, rank: RankShape) -> bool:
        """Whether the rank keeps the tensor of this name in the layer."""
        if not rank.first_layer <= layer < rank.end_layer:
            return False
        return rank.model.has_own_kv(layer) or not name.startswith(OF_OWN_KV)

    def _kept(self, rank: RankShape) -> list[tuple[str, int]]:
        known = self._names(rank.model)
        kept = {
            name: size
            for name, size in self.name_to_size.items()
            if (found := known.layer_of(name)) and self._is_kept(*found, rank)
        }
        embedding, head, norm = known.embedding, known.head, known.norm
        if rank.model.tie_word_embeddings:
            table = embedding if embedding in self.name_to_size else head
            names = {table} if rank.is_first_stage or rank.is_last_stage else set()
        else:
            names = {embedding} if rank.is_first_stage else set()
            names |= {head} if rank.is_last_stage else set()
        if rank.is_last_stage:
            names |= {norm, known.norm_bias, known.head_bias}
        if rank.is_first_stage and rank.model.layer_shapes.input_size:
            names |= {known.input_embedding, known.input_projection, known.input_norm}
        return [*kept.items(), *((name, self.name_to_size.get(name, 0)) for name in names)]

    @staticmethod
    def _share(name: str, layer: int, rank: RankShape) -> float:
        """Return the part of a tensor, which may be in this layer, that the rank keeps."""
        model = rank.model
        if name.endswith((".o_proj.bias", ".down_proj.bias")):
            return float(rank.tp_rank == 0)
        if name.startswith(_OF_STATES):
            assert model.state is not None
            parts = kv_heads(model.num_kv_heads, rank.tp_rank, rank.tp)
            return model.state.kept_share(name.removeprefix(_OF_STATES), parts, model.num_kv_heads)
        if ".act_fn." in name or name.endswith(".layer_scalar"):  # becomes numbers
            return 0.0
        if ".k_proj." in name or ".v_proj." in name:
            return rank.num_kv_cells / model.kv_cells.num_cells
        if model.qk_row_norm or model.qk_own_norms:
            q_norm, k_norm = (f".self_attn.{it.partition('.')[0]}." for it in model.traits.qk_norm_names)
            if q_norm in name:
                return rank.num_heads / model.num_heads
            if k_norm in name:
                return rank.num_kv_cells / model.kv_cells.num_cells
        if ".kv_b_proj." in name and model.latent is not None:
            return model.latent.kept_expansion * rank.num_heads / model.num_heads
        split_by_heads = (".q_proj.", ".q_b_proj.", ".o_proj.", ".self_attn.sinks")
        if any(it in name for it in split_by_heads):
            return rank.num_heads / model.num_heads
        if ".qkv_proj." in name:
            held = rank.num_heads + 2 * rank.num_kv_cells
            return held / (model.num_heads + 2 * model.num_kv_heads)
        if model.mixture is not None and model.has_experts(layer):
            share = _expert_share(name, model.mixture, rank)
            if share is not None:
                return share
        if ".mlp." in name:
            num_columns = model.intermediate_size_of(layer)
            return len(part(num_columns, rank.tp_rank, rank.tp)) / num_columns
        if "embed_tokens_per_layer" in name:
            num_rows = model.layer_shapes.input_vocab_size
            return len(part(num_rows, rank.tp_rank, rank.tp)) / num_rows
        if "embed_tokens" in name or "lm_head" in name:
            return len(part(model.vocab_size, rank.tp_rank, rank.tp)) / model.vocab_size
        return 1.0


def _mean_bytes(sizes: Sequence[_TensorSize], item_bytes: int) -> float:
    """Return the mean bytes of an element; `item_bytes` where there is none."""
    num_items = sum(it.num_items for it in sizes)
    return sum(it.num_items * it.bytes_each for it in sizes) / num_items if num_items else item_bytes


def _is_kept_quantized(plain: str) -> bool:
    """Whether the tensor of this plain name is the weight of a product that may have a quantized one: not
    what latents are expanded by."""
    if ".experts." in plain:
        return _KEPT_EXPERT.search(plain) is not None
    if plain.startswith(_OF_STATES):
        return _KEPT_IN_STATE.fullmatch(plain.removeprefix(_OF_STATES)) is not None
    return _KEPT_PRODUCT.search(plain) is not None


def _plain_name(name: str, layer: int, model: ModelConfig) -> str:
    """Return the name of a tensor, which may be in this layer, as most families name it; that of one of a
    layer with a state, within the layer's block, behind `_OF_STATES`."""
    traits = model.traits
    names, plain = traits.tensors, TensorTraits()
    if name.endswith(f".{names.embedding}.weight"):
        return f".{plain.embedding}.weight"
    if traits.state is not None and model.has_state(layer):
        _, block, inner = name.partition(f".{traits.state.block}")
        if block and inner == "out_proj.bias":
            return f".{plain.output}.bias"
        if block:
            return f"{_OF_STATES}{inner}"
    if model.has_attention(layer) and f".{names.attention}" in name:
        name = name.replace(f".{names.attention}", f".{plain.attention}")
        return name.replace(f".{names.output}.", f".{plain.output}.")
    if names == plain or not model.intermediate_size_of(layer) or f".{names.feed_forward}" not in name:
        return name
    name = name.replace(f".{names.feed_forward}", f".{plain.feed_forward}")
    products = (names.gate, plain.gate), (names.up, plain.up), (names.down, plain.down)
    for own, its in (*products, (names.gate_up, plain.gate_up)):
        name = name.replace(f".{own}.", f".{its}.")
    return name


def _expert_share(name: str, shape: MixtureShape, rank: RankShape) -> float | None:
    """Return the part of a tensor, named with its layer, of a layer with experts that the rank keeps; None if
    it is none of its experts'."""
    traits = rank.model.traits.experts
    assert traits is not None
    inner = _LAYER_PREFIX.sub("", name)
    if not inner.startswith(traits.names.block):
        return None
    inner = inner.removeprefix(traits.names.block)
    held = held_experts(shape, rank.tp_rank, rank.tp, rank.ep)
    on_device = held.experts[: max(len(held.experts) - rank.expert_offload, 0)]
    columns = len(held.columns) / shape.size
    number = inner.removeprefix("experts.").partition(".")[0]
    if inner.startswith("experts.") and number.isdecimal():
        of_slots = rank.expert_copies / shape.rule.num_experts  # of any expert
        return columns * ((int(number) in on_device) + of_slots)
    of_experts = (len(on_device) + rank.expert_copies) / shape.rule.num_experts
    for product in (traits.names.gate_up, traits.names.down):
        if inner.startswith(product):
            # A byte of blocks holds two weights; their scales are not kept.
            of_form = {"": 1.0, "_blocks": 2.0, "_scales": 0.0}.get(inner.removeprefix(product))
            if of_form is not None:
                return of_form * columns * of_experts
    if inner == traits.names.gate_up_bias:
        return columns * of_experts
    if inner == traits.names.down_bias:
        return of_experts
    if traits.names.shared and inner.startswith(traits.names.shared):
        return len(part(shape.shared_size, rank.tp_rank, rank.tp)) / shape.shared_size
    return 1.0 if traits.names.block else None


def activation_bytes(
    rank: RankShape,
    item_bytes: int,
    max_batch_tokens: int,
    max_sequences: int,
    *,
    is_on_cuda: bool = False,
) -> int:
    """Return the most that the activations of one step take: `max_batch_tokens` rows through a layer, and
    `max_sequences` sampled rows, or a piece of a prompt whose log-probabilities are asked for, through the
    head."""
    model = rank.model
    held = range(rank.first_layer, rank.end_layer)
    widest = max(map(model.intermediate_size_of, held))
    intermediate = len(part(widest, rank.tp_rank, rank.tp))
    of_kinds = {model.heads_of(layer): layer for layer in held}.values()
    attention = max(_attention_columns(rank, layer) for layer in of_kinds)
    state_columns, state_floats = _state_columns(rank)
    attention = max(attention, state_columns)
    # A parallel layer holds two products' outputs; torch computes a LayerNorm with one more float32 copy.
    hidden_copies = _HIDDEN_COPIES + model.is_parallel
    hidden_floats = _HIDDEN_FLOATS + model.traits.is_layer_norm
    row = item_bytes * (hidden_copies * model.hidden_size + attention + 3 * intermediate)
    row += _FLOAT_BYTES * (hidden_floats * model.hidden_size + state_floats)
    if model.qk_own_norms:
        row += _FLOAT_BYTES * _OWN_NORM_FLOATS * (rank.num_heads + rank.num_kv_cells) * model.head_dim
    # Inputs of layers that follow the hidden states, in two copies; their parts at the first stage.
    inputs = (model.num_layers - rank.first_layer) * model.layer_shapes.input_size
    row += item_bytes * (2 + rank.is_first_stage) * inputs
    if model.traits.has_value_norm:
        row += _FLOAT_BYTES * _VALUE_NORM_FLOATS * max(_key_columns(rank, layer) for layer in of_kinds)
    if model.activation == "xielu":
        row += _FLOAT_BYTES * _XIELU_FLOATS * intermediate
    if model.mixture is not None:
        row += _mixture_row_bytes(rank, model.mixture, item_bytes, is_on_cuda=is_on_cuda)
    rows = max_batch_tokens * row
    if model.latent is not None:
        rows += model.latent.most_expanded_bytes(rank.num_heads, model.max_context_tokens, item_bytes)
        if rank.splits_latents and rank.tp > 1:
            rows += _exchanged_bytes(model, model.latent, item_bytes, max_batch_tokens)
    if not rank.is_last_stage:
        return rows
    num_sampled = min(max_sequences, max_batch_tokens)
    logits = model.vocab_size * (item_bytes + _LOGIT_COPIES * _FLOAT_BYTES)
    num_read = min(max_batch_tokens, max(1, LOGITS_PIECE_BYTES // (_FLOAT_BYTES * model.vocab_size)))
    read = model.vocab_size * (item_bytes + 2 * _FLOAT_BYTES)
    return rows + max(num_sampled * logits, num_read * read)


def _exchanged_bytes(model: ModelConfig, latent: LatentShape, item_bytes: int, max_batch_tokens: int) -> int:
    """Return what ranks that divide latents hold of others' at a time: queries and results of some rows, or
    the latents of a context."""
    sizes = latent.width, latent.kv_lora_rank, item_bytes
    row = queried_row_bytes(model.num_heads, *sizes)
    queried = min(max_batch_tokens * row, max(MOST_EXCHANGED_BYTES, row))
    return max(queried, model.max_context_tokens * latent.width * item_bytes)


def _mixture_row_bytes(rank: RankShape, shape: MixtureShape, item_bytes: int, *, is_on_cuda: bool) -> int:
    """Return what a token takes in a layer with experts beside its hidden states: its logits and choice, what
    its experts compute, and their sum."""
    held, rule = held_experts(shape, rank.tp_rank, rank.tp, rank.ep), shape.rule
    most_chosen = min(rule.num_chosen, len(held.experts) + rank.expert_copies)
    hidden_size = rank.model.hidden_size
    inner = (most_chosen + _EXPERT_COPIES) * len(held.columns)
    if is_on_cuda:
        # Experts compute together: of each pair of a token and an expert, wherever that is held, there are
        # gate and up, with the hidden states or with their activation.
        columns = 2 * len(held.columns) + max(hidden_size, len(held.columns))
        inner = rule.num_chosen * (columns + _PAIR_BYTES // item_bytes)
    shared = 3 * len(part(shape.shared_size, rank.tp_rank, rank.tp)) + hidden_size if shape.shared_size else 0
    sums = (2 if rank.expert_offload == 0 else 3) * hidden_size  # with an offload, also those of the CPU
    floats = _ROUTER_FLOATS * (rule.num_experts + 2 * rule.num_chosen) + _EXPERT_FLOATS * hidden_size
    num_sent = _SENT_COPIES if sends_rows(shape, rank.tp, rank.ep) else 0
    floats += 2 * num_sent * rule.num_chosen
    sums += num_sent * hidden_size
    return item_bytes * (inner + shared + sums) + _FLOAT_BYTES * floats


def _state_columns(rank: RankShape) -> tuple[int, int]:
    """Return the columns that a layer with a state takes and gives for a token, and the float32 elements that
    it holds meanwhile; 0 where there is no such layer."""
    model, shape = rank.model, rank.model.state
    if shape is None:
        return 0, 0
    held = kv_heads(model.num_kv_heads, rank.tp_rank, rank.tp)
    projected, mixed = shape.products(model.hidden_size)
    columns = (projected.num_outputs + mixed.num_inputs) * len(held) / model.num_kv_heads
    return math.ceil(columns), shape.num_scratch(held, model.num_kv_heads)


def _attention_columns(rank: RankShape, layer: int) -> int:
    """Return the columns that the attention of a layer holds for a token: queries, keys and values; queries
    with their rotation and gates, and the result."""
    latent = rank.model.latent
    if latent is not None:
        return latent.num_projected(rank.num_heads) + latent.num_scratch_columns(rank.num_heads)
    held = layer_heads(rank.model, layer, rank.tp_rank, rank.tp)
    num_copies = 3 + rank.model.traits.has_output_gate
    num_queries = len(held.queries) * rank.model.heads_of(layer).head_dim
    return num_copies * num_queries + 2 * _key_columns(rank, layer)


def _key_columns(rank: RankShape, layer: int) -> int:
    """Return the columns of the keys of a layer."""
    keys = layer_heads(rank.model, layer, rank.tp_rank, rank.tp).keys
    return len(keys) * rank.model.heads_of(layer).head_dim


def graph_sizes(most_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to record for steps of up to `most_rows` sequences."""
    most = -(-most_rows // _GRAPH_ROWS_STEP) * _GRAPH_ROWS_STEP
    return (*_FIRST_GRAPH_ROWS, *range(_GRAPH_ROWS_STEP, most + 1, _GRAPH_ROWS_STEP))


def most_useful_kv_tokens(model: ModelConfig, max_sequences: int) -> int:
    """Return how much KV `max_sequences` sequences at the model's context hold: more is of no use."""
    return max_sequences * model.max_context_tokens


def least_kv_tokens(model: ModelConfig, block_tokens: int) -> int:
    """Return the least capacity with which a replica starts where it is decided by memory."""
    return whole_blocks(min(model.max_context_tokens, LEAST_KV_TOKENS) + block_tokens - 1, block_tokens)


def whole_blocks(num_tokens: int, block_tokens: int) -> int:
    """Return the tokens of the whole blocks that `num_tokens` fill."""
    return num_tokens // block_tokens * block_tokens
