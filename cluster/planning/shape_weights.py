"""Count the weights of a model that there is only a config.json of, as `workers.model.rank_memory.Checkpoint`
counts those of a checkpoint's files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from workers.model.model_config import ModelConfig
from workers.model.quantization.stored_format import StoredFormat
from workers.model.quantization.weight_form import WeightForm
from workers.model.rank_memory import RankShape
from workers.model.sizes import attention_products, held_experts, layer_heads, part
from workers.model.weight_bytes import WeightBytes


class _Weights(NamedTuple):
    """Weights of a rank: their part as `WeightBytes` names it, or `beside`; what they are stored in, None: as
    floats, and whether they may be rounded: products and tables are, norms and routers are not."""

    part: str
    num_items: float
    stored: StoredFormat | None = None
    is_product: bool = False
    is_table: bool = False

    def bytes_each(self, item_bytes: int, form: WeightForm) -> float:
        if not (self.is_product or self.is_table):
            return item_bytes
        return form.bytes_each(self.stored, item_bytes, is_table=self.is_table)


class ShapeWeights:
    """The weights of a model by its shape: products, tables and norms. Biases, sinks and what else takes less
    than a thousandth is not counted."""

    def __init__(self, model: ModelConfig, experts: StoredFormat | None = None) -> None:
        """`experts` is the format of experts where it is one of their own."""
        self._model = model
        scheme = model.quantization
        self._products = None if scheme is None else scheme.formats[0].format
        self._experts = experts or self._products
        # A layer of each kind.
        self._kind_to_layer = {self._kind(layer): layer for layer in reversed(range(model.num_layers))}

    def num_weights(self) -> float:
        """Return the number of all weights."""
        everything = RankShape(self._model, 0, self._model.num_layers)
        return sum(it.num_items for it in self._of(everything))

    def weight_bytes(self, rank: RankShape, item_bytes: int, form: WeightForm) -> int:
        """Return the size of the weights that the rank keeps on its device."""
        return round(sum(it.num_items * it.bytes_each(item_bytes, form) for it in self._of(rank)))

    def host_expert_bytes(self, rank: RankShape, item_bytes: int) -> int:
        """Return the size of weights of experts in host memory: of all where the CPU computes some."""
        if not rank.expert_offload:
            return 0
        alone = dataclasses.replace(rank, expert_offload=0)
        num_items = sum(it.num_items for it in self._of(alone) if it.part == "experts")
        return round(num_items * item_bytes)

    def mean_bytes(self, rank: RankShape, item_bytes: int, form: WeightForm) -> WeightBytes:
        """Return the mean bytes of the weights that the rank keeps."""
        means = []
        for name in WeightBytes._fields:
            of_part = [it for it in self._of(rank) if it.part == name]
            num_items = sum(it.num_items for it in of_part)
            num_bytes = sum(it.num_items * it.bytes_each(item_bytes, form) for it in of_part)
            means.append(num_bytes / num_items if num_items else float(item_bytes))
        return WeightBytes(*means)

    def _of(self, rank: RankShape) -> Iterator[_Weights]:
        """Yield what the rank keeps."""
        model, hidden = self._model, self._model.hidden_size
        kinds = Counter(map(self._kind, range(rank.first_layer, rank.end_layer)))
        for kind, num_layers in kinds.items():
            layer = self._kind_to_layer[kind]
            for weights in (*self._of_attention(rank, layer), *self._of_feed_forward(rank, layer)):
                yield weights._replace(num_items=num_layers * weights.num_items)
            yield _Weights("layers", 2 * hidden * num_layers)  # norms
            if size := model.layer_shapes.input_size:
                yield _Weights("layers", 2 * hidden * size * num_layers, self._products, is_product=True)
        table = len(part(model.vocab_size, rank.tp_rank, rank.tp)) * hidden
        ends = rank.is_first_stage, rank.is_last_stage
        if rank.is_last_stage or (model.tie_word_embeddings and any(ends)):
            yield _Weights("head", table, is_table=True)
        if rank.is_first_stage and not model.tie_word_embeddings:
            yield _Weights("beside", table, is_table=True)
        if rank.is_first_stage and model.layer_shapes.input_size:
            rows = len(part(model.layer_shapes.input_vocab_size, rank.tp_rank, rank.tp))
            columns = model.num_layers * model.layer_shapes.input_size
            yield _Weights("beside", rows * columns)
            yield _Weights("beside", hidden * columns, self._products, is_product=True)

    def _kind(self, layer: int) -> tuple[object, ...]:
        """Return all that the weights of a layer depend on."""
        model = self._model
        attention = model.has_attention(layer), model.has_own_kv(layer), model.has_key_values(layer)
        return *attention, model.heads_of(layer), model.has_experts(layer), model.intermediate_size_of(layer)

    def _of_attention(self, rank: RankShape, layer: int) -> Iterator[_Weights]:
        """Yield the products of a layer's attention, or of its state."""
        model = self._model
        of_rank = rank.num_heads / model.num_heads
        sizes = [outputs * inputs for outputs, inputs in attention_products(model, layer)]
        if model.latent is not None:
            latents, queries, expansion, output = sizes
            num_items = queries * of_rank + output * of_rank + latents
            yield _Weights("layers", num_items, self._products, is_product=True)
            yield _Weights("layers", expansion * of_rank * model.latent.kept_expansion)
        elif not model.has_attention(layer):
            yield _Weights("layers", sum(sizes) / rank.tp, self._products, is_product=True)
        else:
            held, heads = layer_heads(model, layer, rank.tp_rank, rank.tp), model.heads_of(layer)
            num_kv_parts = model.has_own_kv(layer) * (2 - model.has_key_values(layer))
            of_kv = num_kv_parts * heads.num_kv_heads * heads.head_dim * model.hidden_size
            kv_items = of_kv * len(held.keys) / heads.num_kv_heads
            num_items = (sum(sizes) - of_kv) * of_rank + kv_items
            yield _Weights("layers", num_items, self._products, is_product=True)

    def _of_feed_forward(self, rank: RankShape, layer: int) -> Iterator[_Weights]:
        """Yield the products of a layer's feed-forward, and its experts."""
        model, hidden = self._model, self._model.hidden_size
        num_columns = len(part(model.intermediate_size_of(layer), rank.tp_rank, rank.tp))
        num_products = 3 if model.traits.is_gated else 2
        yield _Weights("layers", num_products * hidden * num_columns, self._products, is_product=True)
        shape = model.mixture
        if shape is None or not model.has_experts(layer):
            return
        yield _Weights("layers", shape.rule.num_experts * hidden)  # the router
        if shape.shared_size:
            shared = shape.num_products * hidden * len(part(shape.shared_size, rank.tp_rank, rank.tp))
            yield _Weights("layers", shared, self._products, is_product=True)
        held = held_experts(shape, rank.tp_rank, rank.tp, rank.ep)
        num_experts = max(len(held.experts) - rank.expert_offload, 0)
        of_experts = shape.num_products * hidden * len(held.columns) * num_experts
        # Experts that may change places are not rounded.
        yield _Weights("experts", of_experts, self._experts, is_product=not rank.expert_offload)
