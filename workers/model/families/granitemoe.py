"""Granite 3 with experts: Granite's scaled values, and all experts of a layer in one tensor."""

from __future__ import annotations

import dataclasses

from workers.model.families import granite
from workers.model.families.expert_traits import ExpertNames, ExpertTraits

FAMILY = dataclasses.replace(
    granite.FAMILY,
    name="granitemoe",
    models="Granite 3 with experts: 1B-A400M, 3B-A800M",
    architectures=("GraniteMoeForCausalLM",),
    defaults={**granite.FAMILY.defaults, "num_experts_per_tok": 2},
    mlp_bias=False,
    experts=ExpertTraits(
        "softmax_chosen",
        ExpertNames(
            block="block_sparse_moe.",
            router="router.layer.weight",
            gate_up="input_linear.weight",
            down="output_linear.weight",
        ),
        num_experts=8,
        size_key="intermediate_size",
    ),
)
