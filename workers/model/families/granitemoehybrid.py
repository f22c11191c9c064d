"""Granite 4: few layers of attention among those of Mamba-2, with experts beside a shared feed-forward, or
with this alone."""

from __future__ import annotations

import dataclasses

from workers.model.families import granite
from workers.model.families.expert_traits import ExpertNames, ExpertTraits
from workers.model.families.family import Rotary, TensorTraits
from workers.model.state.mamba2_shape import Mamba2Traits

FAMILY = dataclasses.replace(
    granite.FAMILY,
    name="granitemoehybrid",
    models="Granite 4.0",
    architectures=("GraniteMoeHybridForCausalLM",),
    defaults={
        **granite.FAMILY.defaults,
        "hidden_act": "silu",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    mlp_bias=False,
    rotary=Rotary(without="unless_rope"),
    tensors=TensorTraits(feed_forward="shared_mlp.", gate_up="input_linear", down="output_linear"),
    is_gate_up_fused=True,
    feed_forward_key="shared_intermediate_size",
    state=Mamba2Traits(
        "mamba.",
        heads_key="mamba_n_heads",
        head_dim_key="mamba_d_head",
        state_size_key="mamba_d_state",
        groups_key="mamba_n_groups",
        kernel_key="mamba_d_conv",
        conv_bias_key="mamba_conv_bias",
        bias_key="mamba_proj_bias",
        activation_key="hidden_act",
        expand_key="mamba_expand",
    ),
    experts=ExpertTraits(
        "softmax_chosen",
        ExpertNames(
            block="",
            router="block_sparse_moe.router.layer.weight",
            gate_up="block_sparse_moe.input_linear.weight",
            down="block_sparse_moe.output_linear.weight",
            shared="shared_mlp.",
            shared_gate_up="input_linear",
            shared_down="output_linear",
        ),
        layers="if_any",
        size_key="intermediate_size",
        shared_size_key="shared_intermediate_size",
    ),
)
