"""Describe layers that mix by a short convolution, whose state is the last inputs of each channel, as
config.json says. No torch."""

from __future__ import annotations

import dataclasses

from workers.model.config_values import ConfigValues
from workers.model.families.state_traits import StateTraits
from workers.model.latent_shape import ProductShape
from workers.model.state.layer_kinds import LayerKind, layers_of, named_kinds
from workers.model.state.state_shape import StateShape

# The float32 copies of a layer's channels that are held at a time: the inputs of the convolution, with those
# before them, its products and its results.
_CHANNEL_COPIES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ShortConvShape(StateShape):
    """Represents layers that convolve gated channels over `kernel_size` tokens. A part of the state has the
    last inputs of its channels, [kernel_size - 1, num_channels / num_parts]. With `has_bias`, the convolution
    and both products have one."""

    num_channels: int
    kernel_size: int
    has_bias: bool

    def part_size(self, num_parts: int) -> int:
        return (self.kernel_size - 1) * self.part_channels(num_parts)

    def part_channels(self, num_parts: int) -> int:
        """Return the channels of each part. Raises ValueError where there are no equal parts."""
        if self.num_channels % num_parts:
            raise ValueError(f"{self.num_channels} channels do not divide into {num_parts} parts")
        return self.num_channels // num_parts

    def products(self, hidden_size: int) -> list[ProductShape]:
        return [
            ProductShape(3 * self.num_channels, hidden_size),
            ProductShape(hidden_size, self.num_channels),
        ]

    def num_scratch(self, held: range, num_parts: int) -> int:
        return _CHANNEL_COPIES * len(held) * self.part_channels(num_parts)


@dataclasses.dataclass(frozen=True, slots=True)
class ShortConvTraits(StateTraits):
    """Represents the layers that `layer_types` calls "conv", or that are not in `full_attn_idxs`, with the
    keys of their kernel and bias."""

    kernel_key: str = "conv_L_cache"
    bias_key: str = "conv_bias"

    def read(self, values: ConfigValues, num_layers: int) -> ShortConvShape | None:
        kinds = named_kinds(values, "layer_types", num_layers, {"conv": "state"})
        if kinds is None:
            kinds = _numbered_kinds(values, num_layers)
        if "state" not in kinds:
            return None
        kernel_size = values.count(self.kernel_key)
        if kernel_size < 2:
            values.refuse(self.kernel_key, "is a convolution without a state")
        return ShortConvShape(
            layers_of(kinds, "state"),
            layers_of(kinds, "attention"),
            values.count("hidden_size"),
            kernel_size,
            bool(values.raw.get(self.bias_key)),
        )


def _numbered_kinds(values: ConfigValues, num_layers: int) -> list[LayerKind]:
    """Return the kinds of layers by the numbers of those that attend; all do where none are given."""
    key = "full_attn_idxs"
    given = values.raw.get(key)
    if given is None:
        return ["attention"] * num_layers
    if not isinstance(given, list) or any(type(it) is not int or not 0 <= it < num_layers for it in given):
        values.refuse(key, f"is not a list of some of the {num_layers} layers")
    return ["attention" if layer in given else "state" for layer in range(num_layers)]
