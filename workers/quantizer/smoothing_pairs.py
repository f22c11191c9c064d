"""Find where the inputs of a layer's products can be divided by factors without a change of the model: what
computes these inputs is divided, and the products' weights are multiplied."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import NamedTuple

from workers.model.model_config import ModelConfig
from workers.model.tensor_names import TensorNames


class DividedRows(NamedTuple):
    """A tensor that is divided in its `rows`, after `offset` has been added to what it stores."""

    name: str
    rows: slice = slice(None)
    offset: float = 0.0


class SharingHeads(NamedTuple):
    """The heads of values, each mixed by `num_sharing` heads of queries one after another."""

    num_kv_heads: int
    num_sharing: int
    head_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class SmoothingPair:
    """Products of the same inputs, the names of their `weights`, and what is divided. `product` is the one
    whose inputs are watched, as `DecoderLayer.replace_products` names it. With `heads`, inputs that come from
    the same value have the same factor."""

    product: str
    weights: tuple[str, ...]
    divided: tuple[DividedRows, ...]
    heads: SharingHeads | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPairs:
    """Finds the pairs of one layer, whose tensors are among the `known` names.

    There are none of inputs that are no norm of a layer's own, as of OLMo 2, and of latents. Experts and
    their router share a norm, which stays. A norm of values, or an activation without a gate, does not pass
    factors on."""

    config: ModelConfig
    names: TensorNames
    layer: int
    known: Collection[str]

    def all(self) -> list[SmoothingPair]:
        """Return the pairs, those behind norms first."""
        return [*self._of_norms(), *self._of_values(), *self._of_activated()]

    def _of_norms(self) -> Iterator[SmoothingPair]:
        config, norms = self.config, self.config.norm_names(self.layer)
        attends = config.latent is None and config.has_attention(self.layer)
        of_attention = self._weights(self._attention, "q_proj", "k_proj", "v_proj", "qkv_proj")
        of_feed_forward = self._feed_forward_weights()
        if config.is_parallel:
            if attends and of_feed_forward:
                yield self._of_norm(norms.attention_input, "projection", of_attention + of_feed_forward)
            return
        if norms.attention_input and attends:
            yield self._of_norm(norms.attention_input, "projection", of_attention)
        if norms.feed_forward_input and of_feed_forward:
            yield self._of_norm(norms.feed_forward_input, "gate_up", of_feed_forward)

    def _of_norm(self, norm: str, product: str, weights: tuple[str, ...]) -> SmoothingPair:
        name, traits = f"{self._prefix}{norm}", self.config.traits
        divided = [DividedRows(f"{name}.weight", offset=traits.norm_offset)]
        if f"{name}.bias" in self.known:
            divided.append(DividedRows(f"{name}.bias"))
        return SmoothingPair(product, weights, tuple(divided))

    def _of_values(self) -> Iterator[SmoothingPair]:
        config, traits = self.config, self.config.traits
        is_left = traits.has_value_norm or config.layer_shapes.num_shared or config.has_key_values(self.layer)
        if is_left or config.latent is not None or not config.has_attention(self.layer):
            return
        num_kv_heads, head_dim = config.heads_of(self.layer)
        num_rows = num_kv_heads * head_dim
        divided = self._rows(f"{self._attention}v_proj", slice(0, num_rows))
        if traits.is_qkv_fused:
            first = config.num_heads * head_dim + num_rows
            divided = self._rows(f"{self._attention}qkv_proj", slice(first, first + num_rows))
        heads = SharingHeads(num_kv_heads, config.num_heads // num_kv_heads, head_dim)
        yield SmoothingPair("output", (f"{self._attention}{traits.tensors.output}.weight",), divided, heads)

    def _of_activated(self) -> Iterator[SmoothingPair]:
        traits, names = self.config.traits, self.config.traits.tensors
        if not traits.is_gated or not self._feed_forward_weights():
            return
        size = self.config.intermediate_size_of(self.layer)
        divided = self._rows(f"{self._feed_forward}{names.up}", slice(0, size))
        if traits.is_gate_up_fused:
            divided = self._rows(f"{self._feed_forward}{names.gate_up}", slice(size, 2 * size))
        yield SmoothingPair("down", (f"{self._feed_forward}{names.down}.weight",), divided)

    def _feed_forward_weights(self) -> tuple[str, ...]:
        """Return the weights that take the norm before the feed-forward; none where experts do, too."""
        names = self.config.traits.tensors
        if self.config.has_experts(self.layer) or not self.config.intermediate_size_of(self.layer):
            return ()
        return self._weights(self._feed_forward, names.gate, names.up, names.gate_up)

    def _weights(self, prefix: str, *products: str) -> tuple[str, ...]:
        return tuple(name for it in products if (name := f"{prefix}{it}.weight") in self.known)

    def _rows(self, product: str, rows: slice) -> tuple[DividedRows, ...]:
        names = (f"{product}.weight", f"{product}.bias")
        return tuple(DividedRows(name, rows) for name in names if name in self.known)

    @property
    def _prefix(self) -> str:
        return f"{self.names.model}layers.{self.layer}."

    @property
    def _attention(self) -> str:
        return f"{self._prefix}{self.config.traits.tensors.attention}"

    @property
    def _feed_forward(self) -> str:
        return f"{self._prefix}{self.config.traits.tensors.feed_forward}"
