"""Small checkpoints of every family some of whose layers keep a recurrent state: four layers, of which the
second has no attention before it, and three heads of keys and values, which two ranks do not share evenly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from family_checkpoints import write_family_checkpoint

_LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
    "layer_types": _LAYER_TYPES,
}
STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA
    | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 30,
    },
    "granitemoehybrid": {
        "layer_types": _LAYER_TYPES,
        "mamba_n_heads": 12,
        "mamba_d_state": 18,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 51,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 11,
        "ssm_state_size": 18,
        "n_groups": 3,
        # In prompts, and not in what follows, transformers takes no smaller time steps than this.
        "time_step_min": 1e-30,
    },
}
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 251,
}


def write_state_checkpoint(folder: Path, family: str, **keys: Any) -> None:
    """Write a checkpoint of random weights, with `keys` of its config.json."""
    write_family_checkpoint(folder, family, seed=7, **(_SIZES | STATE_FAMILIES[family] | keys))
