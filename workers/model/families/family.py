"""Declare a family of models: what its config.json means, and how its tensors are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

# Which layers have a sliding window: none; all, where `sliding_window` is set; or those that
# `use_sliding_window` with `max_window_layers`, or `layer_types`, say.
Windows = Literal["none", "all", "switched"]


@dataclasses.dataclass(frozen=True, slots=True)
class Multipliers:
    """The keys of config.json that scale values; "": the family has none. The last one divides logits."""

    embeddings: str = ""
    residuals: str = ""
    attention_scores: str = ""
    logits: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A family of dense decoders: pre-norm layers of attention and gated feed-forward (SiLU).

    Whether there are biases is a constant of the family, or the name of the key that says so.
    """

    name: str
    # The models as people call them, for docs/models.md.
    models: str
    # In `architectures` of config.json; `name` is its `model_type`.
    architectures: tuple[str, ...]
    # Defaults of transformers for keys that config.json lacks, where they differ from the other families'.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Of queries, keys and values; of the attention's output; of the feed-forward.
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    # Whether each head's queries and keys are normalized.
    has_qk_norm: bool = False
    windows: Windows = "none"
    # Queries, keys and values are one tensor `qkv_proj`, gate and up one tensor `gate_up_proj`.
    is_fused: bool = False
    multipliers: Multipliers = Multipliers()
