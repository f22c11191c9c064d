"""Read the rotary position embedding that a config.json describes, of all layers or by their kind."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, get_args

from workers.errors import CheckpointError
from workers.model.config_values import ConfigValues, is_positive, shown
from workers.model.families.family import Rotary

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]

# Positions travel as 32-bit numbers.
MAX_CONTEXT_TOKENS = (1 << 31) - 1
_ROPE_TYPES: dict[str, RopeType] = {name: name for name in get_args(RopeType)}
# Spellings of rope types: `dynamic` changes nothing within the context that the model was made for, which is
# all that is served.
_ROPE_ALIASES = {"su": "longrope", "dynamic": "default"}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `factor` and `original_max_positions` belong to all types but the default
    one, the frequency factors to llama3, and the betas to yarn. The proportional type rotates the first pairs
    of the whole head, at the frequencies that they have where all are rotated."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    # Dimensions that turn at least so often, and at most, within the original context.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Whether the bounds between these dimensions are whole numbers.
    is_truncated: bool = True
    # Queries and keys are multiplied by this as they are rotated.
    scale: float = 1.0
    # Of each head so many dimensions are rotated, the first; 0: all.
    num_rotated: int = 0
    # Pairs are neighbors, and not halves of what is rotated.
    is_interleaved: bool = False
    # Of longrope: the frequency of each pair is divided by its factor.
    pair_factors: tuple[float, ...] = ()


class RopeReader(ConfigValues):
    """Reads the rotary embedding of a family's model."""

    def __init__(self, file: Path, raw: dict[str, Any], rotary: Rotary) -> None:
        super().__init__(file, raw)
        self._rotary = rotary

    def _rope_keys(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Return the parameters of layers of this kind, in either spelling, and their key: `rope_theta` with
        `rope_scaling`, or `rope_parameters` of transformers 5, which may have one set for each kind."""
        key = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        scaling = self.raw.get(key) or {}
        has_sets = self._rotary.sliding_theta or self._rotary.is_by_kind
        if isinstance(scaling, dict) and has_sets:
            if self._rotary.is_by_kind and _has_sets(scaling) and not scaling.get(kind):
                self.refuse(key, f"has no set for {kind}")
            scaling = (scaling[kind] or {}) if kind in scaling else scaling
        if not isinstance(scaling, dict) or _has_sets(scaling):
            self.refuse(key, "is not one flat set of rope parameters")
        return key, scaling

    def of_layers(self, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig | None, ...]:
        """Return the rotary embedding of each layer; () if it is `rope` for all."""
        family = self._rotary
        sliding: RopeConfig | None = rope
        if family.sliding_theta or family.is_by_kind:
            num_rotated = 0 if rope.rope_type == "proportional" else rope.num_rotated
            sliding = RopeConfig("default", self._sliding_theta(), num_rotated=num_rotated)
        ropes: list[RopeConfig | None] = [sliding if window else rope for window in windows]
        if family.without == "listed":
            ropes = [
                it if rotated else None
                for it, rotated in zip(ropes, self._rotated_layers(len(ropes)), strict=True)
            ]
        elif family.without == "unless_sliding" and self.raw.get("sliding_window") is not None:
            ropes = [it if window else None for it, window in zip(ropes, windows, strict=True)]
        elif family.without == "all" or (family.without == "unless_rope" and not self._is_rope()):
            ropes = [None] * len(ropes)
        return () if all(it == rope for it in ropes) else tuple(ropes)

    def _is_rope(self) -> bool:
        key = "position_embedding_type"
        named = self.raw.get(key)
        if named not in (None, "nope", "rope"):
            self.refuse(key, "is not supported (supported: rope, nope)")
        return bool(named == "rope")

    def _sliding_theta(self) -> float:
        key, scaling = self._rope_keys("sliding_attention")
        has_set = "sliding_attention" in (self.raw.get(key) or {})
        if self._rotary.is_by_kind and not has_set:
            self.refuse(key, "has no set for sliding_attention")
        theta = 10000.0 if self._rotary.is_by_kind else self.number(self._rotary.sliding_theta, self.raw)
        if not has_set:
            return theta
        is_whole = self.number("partial_rotary_factor", scaling, 1.0) == 1
        if self._rope_type(key, scaling) != "default" or not is_whole:
            self.refuse(key, "changes the rotary embedding of layers with a window, which is not supported")
        return self.number("rope_theta", scaling, theta)

    def _rotated_layers(self, num_layers: int) -> list[bool]:
        """Return which layers are rotated where config.json lists them."""
        listed = self.raw.get("no_rope_layers")
        if listed is None:
            every = self.count("no_rope_layer_interval")
            return [bool((layer + 1) % every) for layer in range(num_layers)]
        if (
            not isinstance(listed, list)
            or len(listed) != num_layers
            or any(value not in (0, 1) for value in listed)
        ):
            self.refuse("no_rope_layers", f"is not a 0 or 1 for each of the {num_layers} layers")
        return [bool(value) for value in listed]

    def read(self, head_dim: int) -> RopeConfig:
        """Read the rotary embedding of layers that attend to all."""
        key, scaling = self._rope_keys("full_attention")
        family, rope_type = self._rotary, self._rope_type(key, scaling)
        if rope_type == "proportional":
            return self._proportional(key, scaling, head_dim)
        part = self.number(
            "partial_rotary_factor",
            scaling,
            self.number("partial_rotary_factor", self.raw, family.partial_factor or 1.0),
        )
        if family.partial_factor is None and part != 1:
            raise CheckpointError(
                f"{self.file}: partial_rotary_factor {part:g}, but heads of this family are rotated whole"
            )
        size_key = family.size_key if self.raw.get(family.size_key) is not None else ""
        if size_key:
            part = min(self.count(size_key), head_dim) / head_dim
        num_rotated = int(head_dim * part)
        if part > 1 or num_rotated < 2 or num_rotated % 2:
            self.refuse("partial_rotary_factor", f"does not make pairs of {head_dim} dimensions of a head")
        named = family.is_interleaved
        is_interleaved = bool(self.raw.get(named)) if isinstance(named, str) else named
        rope = dataclasses.replace(
            self._scaled_rope(key, scaling, rope_type, num_rotated), is_interleaved=is_interleaved
        )
        return rope if num_rotated == head_dim else dataclasses.replace(rope, num_rotated=num_rotated)

    def score_factor(self, rope: RopeConfig) -> float:
        """Return by how much latent attention scales its scores for a longer context."""
        _, scaling = self._rope_keys("full_attention")
        if rope.rope_type == "default" or not scaling.get("mscale_all_dim"):
            return 1.0
        return _mscale(rope.factor, self.number("mscale_all_dim", scaling)) ** 2

    def _proportional(self, key: str, scaling: dict[str, Any], head_dim: int) -> RopeConfig:
        part = self.number("partial_rotary_factor", scaling, 1.0)
        num_pairs = int(part * head_dim // 2)
        if self._rotary.partial_factor is not None or self._rotary.is_interleaved:
            self.refuse(key, "is proportional, which is not supported in this family")
        if not 1 <= num_pairs <= head_dim // 2:
            self.refuse(key, f"rotates {num_pairs} of {head_dim // 2} pairs")
        theta_of_all = None if self._rotary.is_by_kind else self.number("rope_theta", self.raw, 10000.0)
        theta, factor = self.number("rope_theta", scaling, theta_of_all), self.number("factor", scaling, 1.0)
        return RopeConfig("proportional", theta, factor, num_rotated=2 * num_pairs)

    def _rope_type(self, key: str, scaling: dict[str, Any]) -> RopeType:
        named = str(scaling.get("rope_type") or scaling.get("type") or "default")
        rope_type = _ROPE_TYPES.get(_ROPE_ALIASES.get(named, named))
        if rope_type is None:
            supported = ", ".join(_ROPE_TYPES)
            self.refuse(key, f"has an unsupported rope type {shown(named)} (supported: {supported})")
        return rope_type

    def _scaled_rope(
        self, key: str, scaling: dict[str, Any], rope_type: RopeType, num_rotated: int
    ) -> RopeConfig:
        theta = self.number("rope_theta", scaling, self.number("rope_theta", self.raw, 10000.0))
        if rope_type == "default":
            return RopeConfig("default", theta)
        if rope_type == "longrope":
            return self._longrope(key, scaling, theta, num_rotated)
        factor = self.number("factor", scaling)
        if rope_type == "linear":
            return RopeConfig("linear", theta, factor)
        original = self._original_positions(key, scaling)
        if rope_type == "yarn":
            return self._yarn(
                key, scaling, RopeConfig("yarn", theta, factor, original_max_positions=original)
            )
        low, high = (
            self.number("low_freq_factor", scaling),
            self.number("high_freq_factor", scaling),
        )
        if low >= high:
            self.refuse(key, "has a low_freq_factor that is not below its high_freq_factor")
        return RopeConfig("llama3", theta, factor, low, high, original)

    def _original_positions(self, key: str, scaling: dict[str, Any]) -> int:
        """Return the context that the model was made for before it was stretched."""
        name = "original_max_position_embeddings"
        all_positions = float(self.count("max_position_embeddings"))
        original = self.number(name, scaling, self.number(name, self.raw, all_positions))
        if original > MAX_CONTEXT_TOKENS:
            self.refuse(key, f"has more {name} than {MAX_CONTEXT_TOKENS}")
        return int(original)

    def _longrope(self, key: str, scaling: dict[str, Any], theta: float, num_rotated: int) -> RopeConfig:
        """Read longrope. A stretched model divides its frequencies by the long factors at every position: the
        KV of a token must not depend on how long its sequence becomes."""
        original, most = self._original_positions(key, scaling), self.count("max_position_embeddings")
        name = "long_factor" if most > original else "short_factor"
        factors = scaling.get(name)
        if (
            not isinstance(factors, list)
            or len(factors) != num_rotated // 2
            or not all(is_positive(factor) for factor in factors)
        ):
            self.refuse(key, f"has a {name} that is not {num_rotated // 2} positive numbers")
        factor = self.number("factor", scaling, most / original)
        is_stretched = factor > 1 and original > 1
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if is_stretched else 1.0
        name = "long_mscale" if most > original else "short_mscale"
        scale = self.number("attention_factor", scaling, self.number(name, scaling, stretch))
        pair_factors = tuple(map(float, factors))
        return RopeConfig(
            "longrope", theta, factor, original_max_positions=original, scale=scale, pair_factors=pair_factors
        )

    def _yarn(self, key: str, scaling: dict[str, Any], rope: RopeConfig) -> RopeConfig:
        """Read what yarn has beside its factor; its scale follows from the factor unless it is given."""
        fast, slow = (
            self.number("beta_fast", scaling, 32.0),
            self.number("beta_slow", scaling, 1.0),
        )
        if fast < slow:
            self.refuse(key, "has a beta_fast that is below its beta_slow")
        if scaling.get("attention_factor") is not None:
            scale = self.number("attention_factor", scaling)
        elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
            scale = _mscale(rope.factor, self.number("mscale", scaling)) / _mscale(
                rope.factor, self.number("mscale_all_dim", scaling)
            )
        else:
            scale = _mscale(rope.factor, 1.0)
        is_truncated = scaling.get("truncate", True) is not False
        return dataclasses.replace(
            rope, beta_fast=fast, beta_slow=slow, is_truncated=is_truncated, scale=scale
        )


def _has_sets(scaling: dict[str, Any]) -> bool:
    """Whether these rope parameters are several sets."""
    return any(isinstance(value, dict) for value in scaling.values())


def _mscale(factor: float, mscale: float) -> float:
    """Return by how much yarn scales queries and keys for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
