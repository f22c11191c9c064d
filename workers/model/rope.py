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
    # llama3: fast dimensions stay, slow ones are slowed down, those between are blended.
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * slowed + blend * frequencies
