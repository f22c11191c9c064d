"""Find the keys of config.json that this decoder ignores though they change what other programs compute.

Transformers ignores most of them as well, for these families. `read_model_config` refuses unsupported keys
without which the result would be plainly wrong.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from workers.model.families.family import Family
from workers.model.model_config import family_of

# Values with which a key changes nothing; 1 is that of factors.
_OFF = (None, False, 0, 1, (), "")
_WHY = {
    "attention_chunk_size": "attention is not cut into chunks",
    "attn_temperature_tuning": "attention is not scaled by position",
    "attn_logit_softcapping": "attention scores are not capped",
    "final_logit_softcapping": "logits are not capped",
    "logit_scale": "logits are not scaled",
    "logits_scaling": "logits are not scaled",
    "attention_multiplier": "attention scores are scaled by the square root of head_dim",
    "query_pre_attn_scalar": "attention scores are not scaled by it",
    "embedding_multiplier": "embeddings are not scaled",
    "residual_multiplier": "residuals are not scaled",
    "scale_emb": "embeddings are not scaled",
    "scale_depth": "residuals are not scaled",
    "clip_qkv": "queries, keys and values are not clipped",
    "use_qk_norm": "queries and keys are not normalized",
    "qk_norm": "queries and keys are not normalized",
    "qk_layernorm": "queries and keys are not normalized",
    "no_rope_layers": "every layer has rotary embedding",
    "no_rope_layer_interval": "every layer has rotary embedding",
    "rope_local_base_freq": "every layer has the same rotary embedding",
    "alibi": "positions are those of rotary embedding",
    "norm_topk_prob": "the weights of the chosen experts are not divided by their sum",
    "use_logn_attn": "attention is not scaled by length",
    "use_dynamic_ntk": "rotary frequencies do not depend on length",
}
_ROPE_KEYS = {
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


# Of longrope alone, by both of its names.
_LONGROPE_TYPES = ("longrope", "su")
_LONGROPE_KEYS = {"long_factor", "short_factor"}
# Of positions in time, height and width.
_SECTION_KEYS = {"mrope_section", "mrope_interleaved"}
# Keys that families use by what is declared of them, beside those that their declarations name.
_LOGITS_SOFTCAP_KEY = "final_logit_softcapping"
_SOFTCAP_KEYS = {"attn_logit_softcapping", _LOGITS_SOFTCAP_KEY}
_QK_NORM_KEYS = {"use_qk_norm", "qk_norm", "qk_layernorm"}
_NO_ROPE_KEYS = {"no_rope_layers", "no_rope_layer_interval"}


def ignored_keys(model_dir: Path) -> dict[str, str]:
    """Return, by ignored key, what is computed instead, for a folder that `read_model_config` accepts."""
    raw, family = family_of(model_dir / "config.json")
    used = _used_keys(family)
    found = {key: why for key, why in _WHY.items() if key not in used and not _is_off(raw.get(key))}
    has_windows = not _is_off(raw.get("sliding_window")) and raw.get("use_sliding_window") is not False
    if family.windows == "none" and has_windows:
        found["sliding_window"] = f"{family.name} models attend to the whole context"
    for outer in ("rope_scaling", "rope_parameters"):
        for name, inner in _rope_sets(outer, raw.get(outer)):
            is_longrope = (inner.get("rope_type") or inner.get("type")) in _LONGROPE_TYPES
            known = _ROPE_KEYS | _LONGROPE_KEYS if is_longrope else _ROPE_KEYS
            known = known | _SECTION_KEYS if family.rotary.has_sections else known
            unknown = sorted(key for key in inner.keys() - known if not _is_off(inner[key]))
            found |= {f"{name}.{key}": "rotary embedding is computed without it" for key in unknown}
    return found


def _used_keys(family: Family) -> set[str]:
    """Return the keys of `_WHY` that models of the family are computed by."""
    used = {*dataclasses.astuple(family.multipliers), family.query_scalar, family.rotary.sliding_theta}
    used |= _SOFTCAP_KEYS if family.has_softcaps else set()
    used |= {_LOGITS_SOFTCAP_KEY} if family.has_logits_softcap else set()
    used |= {family.has_qk_norm} if isinstance(family.has_qk_norm, str) else set()
    used |= _QK_NORM_KEYS if family.qk_norm not in ("none", "own") else set()
    has_sums = family.experts is None or family.experts.is_normalized
    used |= {"norm_topk_prob"} if has_sums else set()
    used |= _NO_ROPE_KEYS if family.rotary.without == "listed" else set()
    return used


def _rope_sets(name: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the sets of rope parameters in the value of the key `name`, and what each is called: one for all
    layers, or one for each kind of layers."""
    if not isinstance(value, dict):
        return []
    nested = [(f"{name}.{kind}", inner) for kind, inner in value.items() if isinstance(inner, dict)]
    return nested or [(name, value)]


def _is_off(value: Any) -> bool:
    if isinstance(value, list | dict):
        return not value
    return value is not True and value in _OFF
