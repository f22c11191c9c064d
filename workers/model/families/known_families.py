"""Find the family of a checkpoint by its config.json."""

from __future__ import annotations

from workers.model.families import (
    apertus,
    cohere,
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    glm,
    glm4,
    granite,
    llama,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
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
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gemma4_unified.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    exaone4.FAMILY,
    apertus.FAMILY,
    seed_oss.FAMILY,
    cohere.FAMILY,
    cohere2.FAMILY,
    stablelm.FAMILY,
)
ARCHITECTURE_TO_FAMILY = {name: family for family in FAMILIES for name in family.architectures}
NAME_TO_FAMILY = {family.name: family for family in FAMILIES}
# Models of text and images or sound: their text model is described by `text_config`, and has a prefix.
WRAPPERS = (
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
