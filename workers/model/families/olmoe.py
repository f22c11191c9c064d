"""OLMoE: norms of all queries and keys of a token, and experts in every layer."""

from __future__ import annotations

from workers.model.families.expert_traits import ExpertTraits
from workers.model.families.family import Family

FAMILY = Family(
    "olmoe",
    "OLMoE",
    ("OlmoeForCausalLM",),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="row",
    experts=ExpertTraits(
        "softmax", num_experts=64, size_key="intermediate_size", is_normalized="norm_topk_prob"
    ),
)
