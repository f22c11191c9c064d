"""Describe layers of Mamba-2: a convolution, and a state of each head that decays from token to token, as
config.json says. No torch."""

from __future__ import annotations

import dataclasses
import math

from workers.model.config_values import ConfigValues
from workers.model.families.state_traits import StateTraits
from workers.model.latent_shape import ProductShape
from workers.model.state.layer_kinds import LayerKind, layers_of, named_kinds
from workers.model.state.state_shape import StateShape

# The float32 copies of the convolved channels that are held at a time, and those of what heads give.
_CHANNEL_COPIES, _INNER_COPIES = 4, 4
_NO_LIMITS = (0.0, math.inf)
_INFINITE = {"__float__": "Infinity"}
# The letters of a pattern of layers.
_LETTERS: dict[str, LayerKind] = {"M": "state", "*": "attention", "-": "feed_forward", "E": "experts"}
_NAMES: dict[str, LayerKind] = {
    "mamba": "state",
    "linear_attention": "state",
    "mlp": "feed_forward",
    "moe": "experts",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Mamba2Shape(StateShape):
    """Represents layers of Mamba-2. Each of `num_heads` heads has a state [state_size, head_dim]. Heads form
    `num_groups` groups, of which each shares its inputs and outputs of the state, [state_size] each. The
    channels of heads and groups are convolved over `kernel_size` tokens before. Time steps are within
    `step_limits`.

    A part of the state has the last inputs of the convolution of its heads and groups, [kernel_size - 1,
    num_channels], and then the states of its heads. Parts that share a group have a copy of its channels."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int
    has_conv_bias: bool
    has_bias: bool
    step_limits: tuple[float, float]

    @property
    def inner_size(self) -> int:
        """The columns of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """The convolved channels of all heads and groups."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def part_heads(self, num_parts: int) -> int:
        """Return the heads of each part. Raises ValueError where there are no equal parts, or parts that have
        some heads of one group and some of another."""
        if self.num_heads % num_parts:
            raise ValueError(f"{self.num_heads} heads do not divide into {num_parts} parts")
        if self.num_groups % num_parts and num_parts % self.num_groups:
            raise ValueError(f"{self.num_groups} groups of heads neither divide {num_parts} nor are divided")
        return self.num_heads // num_parts

    def groups_of(self, parts: range, num_parts: int) -> range:
        """Return the groups that have heads in these of `num_parts` parts."""
        start = parts.start * self.num_groups // num_parts
        return range(start, -(-parts.stop * self.num_groups // num_parts))

    def part_channels(self, num_parts: int) -> int:
        """Return the convolved channels of each part."""
        num_groups = len(self.groups_of(range(1), num_parts))
        return self.part_heads(num_parts) * self.head_dim + 2 * num_groups * self.state_size

    def part_size(self, num_parts: int) -> int:
        conv = (self.kernel_size - 1) * self.part_channels(num_parts)
        return conv + self.part_heads(num_parts) * self.head_dim * self.state_size

    def held_channels(self, held: range, num_parts: int) -> int:
        """Return the convolved channels of a rank that holds these parts."""
        num_inner = len(held) * self.part_heads(num_parts) * self.head_dim
        return num_inner + 2 * len(self.groups_of(held, num_parts)) * self.state_size

    def products(self, hidden_size: int) -> list[ProductShape]:
        num_projected = self.inner_size + self.num_channels + self.num_heads
        return [ProductShape(num_projected, hidden_size), ProductShape(hidden_size, self.inner_size)]

    def num_scratch(self, held: range, num_parts: int) -> int:
        inner = len(held) * self.part_heads(num_parts) * self.head_dim
        return _CHANNEL_COPIES * self.held_channels(held, num_parts) + _INNER_COPIES * inner

    def kept_share(self, name: str, held: range, num_parts: int) -> float:
        share = len(held) / num_parts
        channels = self.held_channels(held, num_parts)
        if name.startswith("conv1d."):
            return channels / self.num_channels
        if name.startswith("in_proj."):
            num_rows = channels + share * (self.inner_size + self.num_heads)
            return num_rows / self.products(1)[0].num_outputs
        return share


@dataclasses.dataclass(frozen=True, slots=True)
class Mamba2Traits(StateTraits):
    """Represents the keys of layers of Mamba-2. Which layers these are says the list `layers_key`, or the
    letters of `pattern_key`, or `default_kinds`, which repeat."""

    heads_key: str
    head_dim_key: str
    state_size_key: str
    groups_key: str
    kernel_key: str
    conv_bias_key: str
    bias_key: str
    activation_key: str
    layers_key: str = "layer_types"
    pattern_key: str = ""
    limits_key: str = "time_step_limit"
    # The inner size is this many times `hidden_size`; "": no key says so.
    expand_key: str = ""

    def num_layers(self, values: ConfigValues) -> int | None:
        pattern = values.raw.get(self.pattern_key) if self.pattern_key else None
        listed = values.raw.get(self.layers_key)
        given = listed if isinstance(listed, list) else pattern
        return len(given) if isinstance(given, list | str) and self.pattern_key else None

    def expert_layers(self, values: ConfigValues, num_layers: int) -> tuple[int, ...]:
        return layers_of(self._kinds(values, num_layers), "experts")

    def read(self, values: ConfigValues, num_layers: int) -> Mamba2Shape | None:
        kinds = self._kinds(values, num_layers)
        if "experts" in kinds and not self.pattern_key:
            values.refuse(self.layers_key, "has layers of experts alone, which this family has not")
        if "state" not in kinds:
            return None
        if values.raw.get(self.activation_key) not in ("silu", "swish"):
            values.refuse(self.activation_key, "is not silu, the only activation that is supported here")
        num_heads, num_groups = values.count(self.heads_key), values.count(self.groups_key)
        if num_heads % num_groups:
            values.refuse(self.groups_key, f"does not divide the {num_heads} heads")
        kernel_size = values.count(self.kernel_key)
        if kernel_size < 2:
            values.refuse(self.kernel_key, "is a convolution without a state")
        return Mamba2Shape(
            layers_of(kinds, "state"),
            layers_of(kinds, "attention"),
            num_heads,
            self._head_dim(values, num_heads),
            values.count(self.state_size_key),
            num_groups,
            kernel_size,
            bool(values.raw.get(self.conv_bias_key)),
            bool(values.raw.get(self.bias_key)),
            self._limits(values),
        )

    def _kinds(self, values: ConfigValues, num_layers: int) -> list[LayerKind]:
        if (kinds := named_kinds(values, self.layers_key, num_layers, _NAMES)) is not None:
            return kinds
        pattern = values.raw.get(self.pattern_key) if self.pattern_key else None
        if pattern is None:
            return ["state"] * num_layers
        if not isinstance(pattern, str) or len(pattern) != num_layers or set(pattern) - _LETTERS.keys():
            letters = ", ".join(_LETTERS)
            values.refuse(self.pattern_key, f"is not one of the letters {letters} for each of the layers")
        return [_LETTERS[letter] for letter in pattern]

    def _head_dim(self, values: ConfigValues, num_heads: int) -> int:
        if not self.expand_key:
            return values.count(self.head_dim_key)
        inner_size = values.count(self.expand_key) * values.count("hidden_size")
        given = values.raw.get(self.head_dim_key)
        head_dim = inner_size // num_heads if given in (None, "auto") else values.count(self.head_dim_key)
        if head_dim * num_heads != inner_size:
            values.refuse(self.head_dim_key, f"times {num_heads} heads is not {inner_size}")
        return head_dim

    def _limits(self, values: ConfigValues) -> tuple[float, float]:
        given = values.raw.get(self.limits_key)
        if given is None:
            return _NO_LIMITS
        limits = [_limit(value) for value in given] if isinstance(given, list) else []
        if len(limits) != 2 or None in limits:
            values.refuse(self.limits_key, "is not a pair of numbers")
        least, most = (math.nan if it is None else it for it in limits)
        if not 0 <= least < most:
            values.refuse(self.limits_key, "is not an interval of positive numbers")
        return least, most


def _limit(value: object) -> float | None:
    """Return the number, which transformers 5 writes as {"__float__": "Infinity"} where it is infinite; None
    if it is none."""
    if value == _INFINITE:
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
