"""What a config.json leaves out means to every family what `transformers` takes it for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from workers.model.families.known_families import FAMILIES, NAME_TO_FAMILY
from workers.model.model_config import ModelConfig, read_model_config

SPARSE = {
    "hidden_size": 4096,
    "intermediate_size": 160,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "vocab_size": 260000,
}
# Keys without which `transformers` makes no model of a family.
NEEDED: dict[str, dict[str, object]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 15},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 15},
    "nemotron_h": {"hybrid_override_pattern": "M*-ME" * 6},
}


def check_ropes(config: ModelConfig, ropes: dict[str, Any], head_dim: int) -> None:
    """Compare the rotary embedding with that of `transformers`, of heads of this size unless they differ."""
    full, sliding = ropes.get("full_attention", ropes), ropes.get("sliding_attention", ropes)
    assert config.rope.rope_type == full["rope_type"]
    assert config.rope.theta == full["rope_theta"]
    part = full.get("partial_rotary_factor", 1.0)
    rotated_dim = head_dim if config.latent else config.heads_of(config.num_layers - 1).head_dim
    assert (config.rope.num_rotated or rotated_dim) == int(part * rotated_dim)
    thetas = {rope.theta for rope in config.ropes if rope is not None}
    assert thetas <= {full["rope_theta"], sliding["rope_theta"]}


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_silent_keys_mean_what_transformers_takes_them_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": name, **SPARSE, **NEEDED.get(name, {})}), encoding="utf-8"
    )
    config, family = read_model_config(tmp_path), NAME_TO_FAMILY[name]
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    expected.allow_global_per_layer_attribute_access = True
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    if config.layer_shapes.full_heads is not None:
        full_heads = expected.per_layer_config["full_attention"]
        assert config.layer_shapes.full_heads == (full_heads.num_key_value_heads, full_heads.head_dim)
        assert config.layer_shapes.input_size == getattr(expected, "hidden_size_per_layer_input", 0)
        assert not config.layer_shapes.num_shared
    if (latent := config.latent) is not None:
        assert latent.head_dim == expected.qk_head_dim
        head_dim = expected.kv_lora_rank + expected.qk_rope_head_dim
        assert latent == tuple(getattr(expected, key) for key in latent._fields)
    # The heads of queries share a latent.
    assert config.num_kv_heads == (expected.num_key_value_heads if latent is None else 1)
    assert config.head_dim == head_dim
    assert config.max_context_tokens == expected.max_position_embeddings
    assert config.rms_norm_eps == getattr(expected, family.norm_eps)
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    if (ropes := getattr(expected, "rope_parameters", None)) is None:
        assert set(config.ropes) == {None}
    else:
        check_ropes(config, ropes, head_dim if latent is None else expected.head_dim)
    kinds = getattr(expected, "layer_types", None)
    if kinds is not None:
        window = getattr(expected, "sliding_window", None) or 0
        assert config.sliding_windows == tuple(window * (kind == "sliding_attention") for kind in kinds)
    multipliers = family.multipliers
    if multipliers.logits or multipliers.logits_scale:
        divided = getattr(expected, multipliers.logits, 1.0)
        multiplied = getattr(expected, multipliers.logits_scale, 1.0)
        assert config.logits_divisor == divided / multiplied
    for has, key in ((config.qkv_bias, family.qkv_bias), (config.output_bias, family.output_bias)):
        assert has == (getattr(expected, key) if isinstance(key, str) else key)
