"""Keys of config.json that change what other programs compute, and that this decoder leaves out.

Unsupported keys without which the result would be plainly wrong are refused (`workers.model.config`). Those
here are accepted: transformers leaves most of them out as well, for these families. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.model.config import read_json

_OFF = (None, False, 0, 1, (), "")
"""Values with which a key changes nothing; 1 is that of factors."""
_WHY = {
    "dual_chunk_attention_config": "attention is plain: quality suffers beyond the length of a chunk",
    "attention_chunk_size": "attention is not cut into chunks",
    "attn_temperature_tuning": "attention is not scaled by position",
    "attn_logit_softcapping": "attention scores are not capped",
    "final_logit_softcapping": "logits are not capped",
    "logit_scale": "logits are not scaled",
    "logits_scaling": "logits are not scaled",
    "attention_multiplier": "attention scores are scaled by the square root of head_dim",
    "query_pre_attn_scalar": "attention scores are scaled by the square root of head_dim",
    "embedding_multiplier": "embeddings are not scaled",
    "residual_multiplier": "residuals are not scaled",
    "scale_emb": "embeddings are not scaled",
    "scale_depth": "residuals are not scaled",
    "clip_qkv": "queries, keys and values are not clipped",
    "use_qk_norm": "queries and keys are normalized in qwen3 models only",
    "qk_layernorm": "queries and keys are normalized in qwen3 models only",
    "no_rope_layers": "every layer has rotary embedding",
    "no_rope_layer_interval": "every layer has rotary embedding",
    "rope_local_base_freq": "every layer has the same rotary embedding",
    "alibi": "positions are those of rotary embedding",
    "use_logn_attn": "attention is not scaled by length",
    "use_dynamic_ntk": "rotary frequencies do not depend on length",
}
_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


def ignored_keys(model_dir: Path) -> dict[str, str]:
    """By key, what is computed instead; for a folder that `read_model_config` accepts."""
    raw = read_json(model_dir / "config.json")
    found = {key: why for key, why in _WHY.items() if not _is_off(raw.get(key))}
    if _family(raw) == "llama" and not _is_off(raw.get("sliding_window")):
        found["sliding_window"] = "llama models attend to the whole context"
    for outer in ("rope_scaling", "rope_parameters"):
        inner = raw.get(outer)
        if isinstance(inner, dict):
            unknown = sorted(key for key in inner.keys() - _ROPE_KEYS if not _is_off(inner[key]))
            found |= {f"{outer}.{key}": "rotary embedding is computed without it" for key in unknown}
    return found


def _family(raw: dict[str, Any]) -> str:
    return str((raw.get("architectures") or [raw.get("model_type")])[0]).lower().removesuffix("forcausallm")


def _is_off(value: Any) -> bool:
    if isinstance(value, list | dict):
        return not value
    return value is not True and value in _OFF
