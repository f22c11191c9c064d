"""Find the family of a checkpoint by its config.json."""

from __future__ import annotations

from workers.model.families import (
    apertus,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granitemoe,
    lfm2,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
)
from workers.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gemma4_unified.FAMILY,
    phi3.FAMILY,
    phimoe.FAMILY,
    granite.FAMILY,
    granitemoe.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    olmoe.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe_lite.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    exaone4.FAMILY,
    apertus.FAMILY,
    seed_oss.FAMILY,
    cohere.FAMILY,
    cohere2.FAMILY,
    stablelm.FAMILY,
    ernie4_5_moe.FAMILY,
    minimax_m2.FAMILY,
    gpt_oss.FAMILY,
    lfm2.FAMILY,
)
ARCHITECTURE_TO_FAMILY = {name: family for family in FAMILIES for name in family.architectures}
NAME_TO_FAMILY = {family.name: family for family in FAMILIES}
# Why models of these `architectures`, or `model_type`, are not supported.
_INDEXED = "its layers choose by an index which tokens they attend to"
UNSUPPORTED = {
    "DeepseekV32ForCausalLM": _INDEXED,
    "deepseek_v32": _INDEXED,
    "GlmMoeDsaForCausalLM": _INDEXED,
    "glm_moe_dsa": _INDEXED,
}
# Models of text and images or sound: their text model is described by `text_config`, and has a prefix.
WRAPPERS = (
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
