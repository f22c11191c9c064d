"""Compute the frequencies of rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.model.model_config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Return the rotation in radians a token, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    slowed = frequencies / rope.factor
    if rope.rope_type == "linear":
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
