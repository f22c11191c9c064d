"""Find the family of a checkpoint by its config.json."""

from __future__ import annotations

from workers.model.families import granite, llama, mistral, phi3, qwen2, qwen3, seed_oss
from workers.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    granite.FAMILY,
    phi3.FAMILY,
    seed_oss.FAMILY,
)
ARCHITECTURE_TO_FAMILY = {name: family for family in FAMILIES for name in family.architectures}
NAME_TO_FAMILY = {family.name: family for family in FAMILIES}
