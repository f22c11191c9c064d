"""OLMo 2: norms of what layers add, and of all queries and keys of a token."""

from __future__ import annotations

from workers.model.families.family import Family, NormNames

OUTPUT_NORMS = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")

FAMILY = Family(
    "olmo2",
    "OLMo 2",
    ("Olmo2ForCausalLM",),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="row",
    norms=OUTPUT_NORMS,
    is_norm_rounded_first=False,
)
