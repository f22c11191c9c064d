"""Sizes that follow from a model's shape: the part of every layer that a rank holds, and the work of a step.

Plain arithmetic, without torch. Parts differ by one at most where a size cannot be divided.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvtransfer.messages import STATE_ITEM_BYTES
from workers.errors import CheckpointError
from workers.model.experts.mixture_shape import MixtureShape
from workers.model.kv_form import KvForm
from workers.model.latent_shape import ProductShape
from workers.model.model_config import ModelConfig
from workers.model.weight_bytes import WeightBytes

# On a CPU a chunk's attention is computed in pieces of about this many operations at most, half a second of
# one core: smaller pieces read keys and values too often.
ATTENTION_PIECE_FLOPS = 2e10


def part(size: int, index: int, num_parts: int) -> range:
    """Return the `index`-th of `num_parts` nearly equal, contiguous parts of range(size)."""
    return range(index * size // num_parts, (index + 1) * size // num_parts)


def kv_heads(num_kv_heads: int, tp_rank: int, tp: int) -> range:
    """Return the key-value heads of a rank. With more ranks than heads, several ranks hold a copy of one."""
    if tp <= num_kv_heads:
        return part(num_kv_heads, tp_rank, tp)
    head = tp_rank * num_kv_heads // tp
    return range(head, head + 1)


def query_heads(num_heads: int, num_kv_heads: int, tp_rank: int, tp: int) -> range:
    """Return the query heads of a rank: all of its key-value heads, or its part of those of a shared one. In
    rank order they follow one another and make range(num_heads)."""
    group = num_heads // num_kv_heads
    held = kv_heads(num_kv_heads, tp_rank, tp)
    if tp <= num_kv_heads:
        return range(held.start * group, held.stop * group)
    head = held.start
    # The first rank that holds a head is the smallest r with r * num_kv_heads // tp == head.
    first, after = -(-head * tp // num_kv_heads), -(-(head + 1) * tp // num_kv_heads)
    own = part(group, tp_rank - first, after - first)
    return range(head * group + own.start, head * group + own.stop)


class LayerHeads(NamedTuple):
    """The heads of a layer that a rank holds."""

    queries: range
    keys: range


def layer_heads(config: ModelConfig, layer: int, tp_rank: int, tp: int) -> LayerHeads:
    """Return the rank's heads of a layer. Key-value heads are split by cells, which hold several where
    layers have heads of several sizes."""
    num_cells = config.kv_cells.num_cells
    cells = kv_heads(num_cells, tp_rank, tp)
    of_cell = config.heads_of(layer).num_kv_heads // num_cells
    keys = range(cells.start * of_cell, cells.stop * of_cell)
    return LayerHeads(query_heads(config.num_heads, num_cells, tp_rank, tp), keys)


class HeldExperts(NamedTuple):
    """The experts of a layer that a rank holds, and the columns of each between its products."""

    experts: range
    columns: range


def held_experts(shape: MixtureShape, tp_rank: int, tp: int, ep: int) -> HeldExperts:
    """Return the rank's part of experts that are split into `ep` parts by their numbers, each over `tp / ep`
    ranks."""
    num_sharing = tp // ep
    experts = part(shape.rule.num_experts, tp_rank // num_sharing, ep)
    return HeldExperts(experts, part(shape.size, tp_rank % num_sharing, num_sharing))


def sends_rows(shape: MixtureShape, tp: int, ep: int) -> bool:
    """Whether rows are sent to the ranks of their experts, in steps of many rows, and not added up over all
    ranks. Every row would go to every rank where each holds a slice of all experts, or of shared ones; and
    between two ranks, too few rows stay where they are."""
    return ep > 1 and tp > 2 and not shape.shared_size and not shape.has_dense_branch


def refuse_split(config: ModelConfig, tp: int, ep: int = 1) -> None:
    """Raise CheckpointError if the layers cannot be split over so many ranks: some rank would hold nothing of
    a layer, or a part of its key-value heads that is none of its cells."""
    sizes = {"num_attention_heads": config.num_heads, "vocab_size": config.vocab_size}
    if any(map(config.intermediate_size_of, range(config.num_layers))):
        sizes["intermediate_size"] = config.intermediate_size
    if config.mixture is not None and config.mixture.shared_size:
        sizes["the size of shared experts"] = config.mixture.shared_size
    for name, size in sizes.items():
        if tp > size:
            raise CheckpointError(f"tp {tp} is more than {name} {size}: a rank would hold nothing")
    _refuse_expert_split(config.mixture, tp, ep)
    if config.state is not None and tp > config.num_kv_heads:
        raise CheckpointError(
            f"tp {tp} is more than num_key_value_heads {config.num_kv_heads}, by which the states of layers "
            f"are divided too; take tp {config.num_kv_heads} and a pp above 1"
        )
    num_cells = config.kv_cells.num_cells
    most = max(config.heads_of(layer).num_kv_heads for layer in range(config.num_layers))
    if tp > num_cells and most > num_cells:
        raise CheckpointError(
            f"tp {tp} is more than {num_cells}: layers have key-value heads of several sizes, which are "
            f"split over at most {num_cells} ranks; take tp {num_cells} and a pp above 1"
        )


def _refuse_expert_split(shape: MixtureShape | None, tp: int, ep: int) -> None:
    if tp % ep:
        raise CheckpointError(f"ep {ep} does not divide tp {tp}")
    if shape is None:
        if ep > 1:
            raise CheckpointError(f"ep {ep}: the model has no experts to divide; leave ep out")
        return
    if ep > shape.rule.num_experts:
        raise CheckpointError(
            f"ep {ep} is more than the {shape.rule.num_experts} experts of a layer: a rank would hold none"
        )
    if (num_sharing := tp // ep) > shape.size:
        raise CheckpointError(
            f"tp {tp} with ep {ep} divides each expert over {num_sharing} ranks, and its size is "
            f"{shape.size}: a rank would hold nothing"
        )


def refuse_expert_offload(
    config: ModelConfig, num_in_host: int, devices: Sequence[str], *, tp: int, is_deterministic: bool
) -> None:
    """Raise CheckpointError, naming the setting and the remedy, where so many experts of each layer cannot be
    computed by the CPU beside these devices."""
    if not num_in_host:
        return
    most = 0 if config.mixture is None else config.mixture.rule.num_experts
    if not most:
        problem = "the model has no experts; set 0"
    elif num_in_host > most:
        problem = f"a layer has {most} experts; set at most {most}, which leaves all in host memory"
    elif any(device.partition(":")[0] == "cpu" for device in devices):
        problem = "on device cpu all experts are in host memory already; set 0"
    elif tp > 1:
        problem = f"ranks that share layers cannot leave experts to the CPU, and tp is {tp}; set 0, or tp: 1"
    elif is_deterministic:
        problem = (
            "experts move between device and host by use, and each rounds in its own way, so results are not"
            " deterministic; set 0, or deterministic: false"
        )
    else:
        return
    raise CheckpointError(f"engine.expert_offload {num_in_host}: {problem}")


def refuse_expert_copies(
    config: ModelConfig, num_slots: int, *, ep: int, has_offload: bool, is_deterministic: bool
) -> None:
    """Raise CheckpointError, naming the setting and the remedy, where ranks cannot have so many copies of
    experts of each layer."""
    if not num_slots:
        return
    num_experts = 0 if config.mixture is None else config.mixture.rule.num_experts
    most = num_experts - num_experts // ep
    if not num_experts:
        problem = "the model has no experts; set 0"
    elif ep == 1:
        problem = "with ep 1 every rank has a part of every expert; set 0, or an ep above 1"
    elif num_slots > most:
        problem = f"at most {most} of a layer's {num_experts} experts are at other ranks; set at most {most}"
    elif has_offload:
        problem = "experts that the CPU computes are not copied; set 0, or expert_offload: 0"
    elif is_deterministic:
        problem = (
            "copies change by use, and with them the order in which results are added, so these are not"
            " deterministic; set 0, or deterministic: false"
        )
    else:
        return
    raise CheckpointError(f"engine.expert_copies {num_slots}: {problem}")


def last_stage_limit(config: ModelConfig) -> int:
    """Return the greatest layer at which the last stage can begin: layers that attend to the keys and values
    of an earlier one are on its stage."""
    shared = config.kv_sources[config.num_layers - config.layer_shapes.num_shared :]
    return min((*shared, config.num_layers - 1))


def refuse_stages(config: ModelConfig, pp: int, layers: Sequence[int] = ()) -> None:
    """Raise CheckpointError if there are not layers for so many stages, or some of those that are on the last
    stage in any case would not be with these `layers` of each stage."""
    if pp > config.num_layers:
        raise CheckpointError(
            f"pp {pp} is more than num_hidden_layers {config.num_layers}: a stage would be empty"
        )
    limit = last_stage_limit(config)
    shared = f"the layers from {limit} on share keys and values, and so are all on the last stage"
    if pp > limit + 1:
        raise CheckpointError(f"pp {pp} is more than {limit + 1}: {shared}")
    if layers and config.num_layers - layers[-1] > limit:
        raise CheckpointError(f"layers {list(layers)}: {shared}")


def equal_stages(config: ModelConfig, pp: int) -> list[int]:
    """Return the number of layers of each of `pp` stages where nothing is known of their costs: nearly equal,
    as far as layers share no keys and values."""
    limit = last_stage_limit(config)
    starts = [min(stage * config.num_layers // pp, limit - (pp - 1 - stage)) for stage in range(1, pp)]
    return [end - start for start, end in itertools.pairwise([0, *starts, config.num_layers])]


class StepWork(NamedTuple):
    """The work of a step: floating point operations, and bytes read from device memory."""

    flops: float
    read_bytes: float


def attention_products(config: ModelConfig, layer: int) -> list[ProductShape]:
    """Return the products of a layer's attention, or of its state, of all ranks together."""
    if config.state is not None and not config.has_attention(layer):
        return config.state.products(config.hidden_size) if config.has_state(layer) else []
    if config.latent is not None:
        return config.latent.products(config.hidden_size, config.num_heads)
    num_kv_heads, head_dim = config.heads_of(layer)
    num_kv_parts = config.has_own_kv(layer) * (2 - config.has_key_values(layer))
    num_queries, hidden = config.num_heads * head_dim, config.hidden_size
    num_gates = num_queries * config.traits.has_output_gate
    num_projected = num_queries + num_gates + num_kv_parts * num_kv_heads * head_dim
    return [ProductShape(num_projected, hidden), ProductShape(hidden, num_queries)]


def feed_forward_weights(config: ModelConfig, layer: int) -> int:
    """Return the weights of a layer's feed-forward that a token is multiplied by, with those of its chosen
    experts."""
    num_products = 3 if config.traits.is_gated else 2
    num_weights = num_products * config.hidden_size * config.intermediate_size_of(layer)
    if config.mixture is None or not config.has_experts(layer):
        return num_weights
    of_experts = config.mixture.rule.num_chosen * config.mixture.weights_of_expert(config.hidden_size)
    return num_weights + config.mixture.weights_beside(config.hidden_size) + of_experts


def mean_layer_share(config: ModelConfig, attention: int, feed_forward: int) -> float:
    """Return the weights of a layer that a token is multiplied by, on the mean of all layers, as a share of
    those of the attention and the feed-forward of these two."""

    def num_projected(layer: int) -> int:
        return sum(outputs * inputs for outputs, inputs in attention_products(config, layer))

    layers = range(config.num_layers)
    everything = sum(num_projected(layer) + feed_forward_weights(config, layer) for layer in layers)
    return (
        everything
        / config.num_layers
        / (num_projected(attention) + feed_forward_weights(config, feed_forward))
    )


class _AttentionWork(NamedTuple):
    """The attention of a layer: its window (0: none), and the operations of a token with one that it sees,
    and the bytes of a token's keys and values, or of its latent.

    Where keys and values can be expanded from latents, a token with one that it sees then takes
    `expanded_flops`, and each token before those that are computed `expansion_flops`."""

    window: int
    flops: int
    kv_bytes: int
    expanded_flops: int = 0
    expansion_flops: int = 0

    @staticmethod
    def of(config: ModelConfig, layer: int, form: KvForm) -> _AttentionWork:
        if not config.has_attention(layer):
            return _AttentionWork(0, 0, 0)
        num_kv_heads, head_dim = config.heads_of(layer)
        window, num_heads, latent = config.sliding_windows[layer], config.num_heads, config.latent
        if latent is None:
            kv_bytes = 2 * num_kv_heads * form.head_bytes(head_dim)
            return _AttentionWork(window, 4 * num_heads * head_dim, kv_bytes)
        each = latent.absorbed_pair_flops, latent.expanded_pair_flops, latent.expansion_flops
        absorbed, expanded, expansion = (num_heads * it for it in each)
        return _AttentionWork(window, absorbed, form.head_bytes(latent.width), expanded, expansion)

    def span_flops(self, start: float, num_tokens: int) -> float:
        """Return the least operations of `num_tokens` tokens after `start` others."""
        num_pairs = _num_attended(start, num_tokens, self.window)
        flops = self.flops * num_pairs
        if not self.expanded_flops:
            return flops
        return min(flops, self.expanded_flops * num_pairs + self.expansion_flops * start)


class _LayerWork(NamedTuple):
    """A layer: its weights that every token is multiplied by, those of its widest product, and its attention;
    and whether it has experts."""

    weights: int
    widest_weights: int
    attention: _AttentionWork
    has_experts: bool

    @staticmethod
    def of(config: ModelConfig, layer: int, form: KvForm) -> _LayerWork:
        shapes = config.layer_shapes
        projections = sum(outputs * inputs for outputs, inputs in attention_products(config, layer))
        num_inner = 2 if config.traits.is_gated else 1  # products of the hidden states in a feed-forward
        inner = num_inner * config.intermediate_size_of(layer)
        down = config.intermediate_size_of(layer)
        hidden = config.hidden_size
        beside, of_experts = 0, 0
        if config.mixture is not None and config.has_experts(layer):
            beside = config.mixture.weights_beside(hidden)
            of_experts = config.mixture.rule.num_chosen * config.mixture.weights_of_expert(hidden)
        return _LayerWork(
            projections + hidden * (inner + down + 2 * shapes.input_size) + beside,
            max(projections, hidden * inner, beside + of_experts),
            _AttentionWork.of(config, layer, form),
            config.has_experts(layer),
        )


class _ExpertWork(NamedTuple):
    """The experts of all layers: `num_layers` have them, each of `weights`."""

    shape: MixtureShape
    num_layers: int
    weights: int

    def multiplied(self) -> int:
        """Return the weights of experts that a token is multiplied by."""
        return self.num_layers * self.shape.rule.num_chosen * self.weights

    def touched(self, num_tokens: float) -> float:
        """Return the weights of the experts that so many tokens are expected to choose."""
        return self.num_layers * self.shape.num_touched(num_tokens) * self.weights


class ModelWork:
    """The least work in which a model's step can be done, all ranks together.

    Every product of a token with a weight counts as two operations, and so does every product of attention.
    All weights are read once a step, but for experts that no token chooses, and so is the KV that each
    sequence attends to. Its recurrent state is read and written. Other writes are not counted, nor are
    activations, which stay in caches."""

    def __init__(
        self,
        config: ModelConfig,
        item_bytes: int,
        kv_dtype: str = "auto",
        weights: WeightBytes | None = None,
    ) -> None:
        """`item_bytes` is the size of one KV value unless `kv_dtype` has another, and of one weight unless
        the form of `weights` is given."""
        form = KvForm.of(kv_dtype, item_bytes, len(config.kv_cells.parts))
        of_weight = weights or WeightBytes.of_floats(item_bytes)
        layers = [_LayerWork.of(config, layer, form) for layer in range(config.num_layers)]
        inputs = config.num_layers * config.layer_shapes.input_size
        self._layer_weights = sum(layer.weights for layer in layers) + config.hidden_size * inputs
        self._head_weights = config.vocab_size * config.hidden_size
        self._widest_weights = max(layer.widest_weights for layer in layers)
        self._widest_weights = max(self._widest_weights, config.hidden_size * inputs)
        self._attention_flops = max(layer.attention.flops for layer in layers)
        self._attention_to_num_layers = Counter(layer.attention for layer in layers)
        # What a sequence's states cost a step, which reads and writes them; 0: there are none.
        self.state_bytes = 2 * STATE_ITEM_BYTES * _num_state_items(config)
        self._experts: _ExpertWork | None = None
        self._read_bytes = self._layer_weights * of_weight.layers + self._head_weights * of_weight.head
        self._expert_item_bytes = of_weight.experts
        num_bytes = self._read_bytes
        if (shape := config.mixture) is not None:
            num_layers = sum(layer.has_experts for layer in layers)
            self._experts = _ExpertWork(shape, num_layers, shape.weights_of_expert(config.hidden_size))
            self._layer_weights += self._experts.multiplied()
            num_weights = num_layers * shape.rule.num_experts * self._experts.weights
            num_bytes += num_weights * of_weight.experts
        self.weight_bytes = round(num_bytes)

    def read_weight_bytes(self, num_tokens: float) -> float:
        """Return the bytes of the weights that a step of so many tokens reads."""
        touched = 0.0 if self._experts is None else self._experts.touched(num_tokens)
        return self._read_bytes + touched * self._expert_item_bytes

    def largest_piece_flops(self, num_rows: int, num_sampled: int, num_context: int, tp: int) -> float:
        """Return the most operations that one of `tp` ranks computes between two marks of progress, in steps
        of up to `num_rows` tokens of which `num_sampled` sample, in contexts of up to `num_context`
        tokens."""
        layer = num_rows * self._widest_weights
        attention = min(float(self._attention_flops) * num_rows * num_context, ATTENTION_PIECE_FLOPS)
        return max(2.0 * layer / tp, 2.0 * num_sampled * self._head_weights / tp, attention)

    def of(
        self, spans: Collection[tuple[float, int]], num_sampled: int, decode_starts: Collection[int] = ()
    ) -> StepWork:
        """Count a step over `spans` (tokens before, tokens computed) of sequences, and over single tokens at
        `decode_starts` of others. `num_sampled` rows go through the head."""
        flops = 2.0 * self._head_weights * num_sampled
        num_tokens = sum(count for _, count in spans) + len(decode_starts)
        read_bytes = self.read_weight_bytes(num_tokens)
        read_bytes += self.state_bytes * (len(spans) + len(decode_starts))
        for start, num_tokens in spans:
            flops += 2.0 * self._layer_weights * num_tokens
            for attention, num_layers in self._attention_to_num_layers.items():
                window = attention.window
                flops += num_layers * attention.span_flops(start, num_tokens)
                num_read = start + num_tokens if window == 0 else min(start, window - 1) + num_tokens
                read_bytes += attention.kv_bytes * num_layers * num_read
        flops += 2.0 * self._layer_weights * len(decode_starts)
        kinds = self._attention_to_num_layers.items() if decode_starts else ()
        for attention, num_layers in kinds:
            window = attention.window
            num_read = len(decode_starts) + (
                sum(decode_starts) if window == 0 else sum(min(start, window - 1) for start in decode_starts)
            )
            flops += attention.flops * num_layers * num_read
            read_bytes += attention.kv_bytes * num_layers * num_read
        return StepWork(flops, read_bytes)


def _num_state_items(config: ModelConfig) -> int:
    """Return the elements of the states of all layers that a sequence has."""
    if (state := config.state) is None:
        return 0
    return len(state.layers) * config.num_kv_heads * state.part_size(config.num_kv_heads)


def _num_attended(start: float, num_tokens: int, window: int) -> float:
    """Count the pairs of a token of the span and a token that it sees: itself and those before it, at most
    `window` (0: all)."""
    end = start + num_tokens
    num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
    if window == 0 or end <= window:
        return num_pairs
    first, last = max(start + 1 - window, 1), end - window
    return num_pairs - (first + last) * (last - first + 1) / 2
