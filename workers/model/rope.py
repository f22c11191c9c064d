"""Compute the frequencies of rotary position embedding, and the order of what it rotates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.model.attention.interface import Rotation
from workers.model.rope_config import RopeConfig


def rotation_of(rope: RopeConfig | None, head_dim: int, device: torch.device) -> Rotation:
    """Return the rotation of layers with this rotary embedding; None: they have none. Heads are in the order
    of `rotary_order`."""
    frequencies = torch.zeros(head_dim // 2, dtype=torch.float32, device=device)
    if rope is None:
        return Rotation(frequencies)
    num_rotated = rope.num_rotated or head_dim
    if rope.rope_type == "proportional":
        of_head = rope_frequencies(rope, head_dim, device)
        frequencies[: num_rotated // 2] = of_head[: num_rotated // 2]
    else:
        frequencies[: num_rotated // 2] = rope_frequencies(rope, num_rotated, device)
    return Rotation(frequencies, rope.scale)


def rotary_order(rope: RopeConfig, head_dim: int) -> list[int] | None:
    """Return the order in which the dimensions of a checkpoint's queries and keys are computed: the pairs
    that are rotated together come to lie half a head apart. Scores do not depend on it. None: as they are."""
    if rope.rope_type == "proportional":
        return None
    num_pairs = (rope.num_rotated or head_dim) // 2
    if rope.is_interleaved:
        firsts, seconds = range(0, 2 * num_pairs, 2), range(1, 2 * num_pairs, 2)
    else:
        firsts, seconds = range(num_pairs), range(num_pairs, 2 * num_pairs)
    num_left = head_dim // 2 - num_pairs
    rest = range(2 * num_pairs, head_dim)
    order = [*firsts, *rest[:num_left], *seconds, *rest[num_left:]]
    return None if order == list(range(head_dim)) else order


def rope_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Return the rotation in radians a token, float32 [head_dim / 2], of heads that are rotated whole."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.pair_factors, dtype=torch.float32, device=device)
        return 1.0 / (factors * rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.rope_type in ("linear", "proportional"):
        return slowed
    if rope.rope_type == "yarn":
        fast = _yarn_fast_parts(rope, head_dim, device)
        return (1 - fast) * slowed + fast * frequencies
    # llama3: fast dimensions stay, slow ones are slowed down, those between are blended.
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * slowed + blend * frequencies


def _yarn_fast_parts(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Return the part of each frequency that stays as it is, [head_dim / 2]: fast dimensions stay, slow ones
    are slowed down, those between are blended by their number."""

    def dimension_of(turns: float) -> float:
        """Return the dimension that turns so often within the original context."""
        turn_tokens = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(turn_tokens) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    numbers = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((numbers - low) / width).clamp(0.0, 1.0)
