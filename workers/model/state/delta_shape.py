"""Describe layers of the gated delta rule, whose state is a matrix for each value head and the last inputs of
a convolution, as config.json says. No torch."""

from __future__ import annotations

import dataclasses

from workers.model.config_values import ConfigValues
from workers.model.families.state_traits import StateTraits
from workers.model.latent_shape import ProductShape
from workers.model.state.layer_kinds import LayerKind, layers_of, named_kinds
from workers.model.state.state_shape import StateShape

# The float32 copies of a layer's channels that torch holds at a time: the inputs of the convolution, with
# those before them, its products and its results.
_CHANNEL_COPIES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of the gated delta rule: all of a model, or those of a rank. Each key head has a query and a key
    of `key_dim`, and serves as many consecutive value heads, of `value_dim`, as there are for each."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_key(self) -> int:
        """The value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels_per_key(self) -> int:
        """The channels of a key head: its query, its key, and the values of its value heads."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def num_channels(self) -> int:
        """The channels of all key heads, one head after another."""
        return self.num_key_heads * self.channels_per_key

    @property
    def num_values(self) -> int:
        """The columns of all value heads."""
        return self.num_value_heads * self.value_dim

    def of_parts(self, num_held: int, num_parts: int) -> DeltaHeads:
        """Return the heads of `num_held` of `num_parts` equal parts, each of whole key heads.

        Raises ValueError where they do not divide."""
        if self.num_key_heads % num_parts:
            raise ValueError(f"{self.num_key_heads} key heads do not divide into {num_parts} equal parts")
        num_key_heads = self.num_key_heads // num_parts * num_held
        num_value_heads = num_key_heads * self.values_per_key
        return dataclasses.replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaShape(StateShape):
    """Represents layers of the gated delta rule, whose channels are convolved over `kernel_size` tokens
    first. A part of the state has the last inputs of its channels, [kernel_size - 1, num_channels_of_part],
    and then the states of its value heads, [num_value_heads_of_part, key_dim, value_dim].

    `is_fused`: the products of channels and gates are stored as one, and so are those of betas and decays,
    key head after key head; else each kind is stored by itself."""

    heads: DeltaHeads
    kernel_size: int
    norm_eps: float
    is_fused: bool

    def part_size(self, num_parts: int) -> int:
        part = self.heads.of_parts(1, num_parts)
        states = part.num_value_heads * part.key_dim * part.value_dim
        return (self.kernel_size - 1) * part.num_channels + states

    def products(self, hidden_size: int) -> list[ProductShape]:
        heads = self.heads
        num_projected = heads.num_channels + heads.num_values + 2 * heads.num_value_heads
        return [ProductShape(num_projected, hidden_size), ProductShape(hidden_size, heads.num_values)]

    def num_scratch(self, held: range, num_parts: int) -> int:
        heads = self.heads.of_parts(len(held), num_parts)
        return _CHANNEL_COPIES * heads.num_channels

    def kept_share(self, name: str, held: range, num_parts: int) -> float:
        return 1.0 if name.startswith("norm.") else len(held) / num_parts


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaTraits(StateTraits):
    """Represents the layers that `layer_types` calls "linear_attention", or all but every so many-th, as
    `full_attention_interval` says."""

    is_fused: bool = False

    def read(self, values: ConfigValues, num_layers: int) -> DeltaShape:
        kinds = named_kinds(values, "layer_types", num_layers, {"linear_attention": "state"})
        if kinds is None:
            kinds = _kinds_by_interval(values, num_layers)
        kernel_size = values.count("linear_conv_kernel_dim")
        if kernel_size < 2:
            values.refuse("linear_conv_kernel_dim", "is a convolution without a state")
        return DeltaShape(
            layers_of(kinds, "state"),
            layers_of(kinds, "attention"),
            _heads(values),
            kernel_size,
            values.number("rms_norm_eps", values.raw, 1e-6),
            self.is_fused,
        )


def _heads(values: ConfigValues) -> DeltaHeads:
    heads = DeltaHeads(
        values.count("linear_num_key_heads"),
        values.count("linear_num_value_heads"),
        values.count("linear_key_head_dim"),
        values.count("linear_value_head_dim"),
    )
    if heads.num_value_heads % heads.num_key_heads:
        values.refuse("linear_num_value_heads", f"is no multiple of the {heads.num_key_heads} key heads")
    return heads


def _kinds_by_interval(values: ConfigValues, num_layers: int) -> list[LayerKind]:
    every = values.count("full_attention_interval")
    return ["state" if (layer + 1) % every else "attention" for layer in range(num_layers)]
