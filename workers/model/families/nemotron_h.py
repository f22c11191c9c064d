"""Nemotron-H and Nemotron 3: layers of one block each, of Mamba-2, of attention without rotary embedding, a
feed-forward without a gate, or experts without gates."""

from __future__ import annotations

import dataclasses

from workers.model.families.deepseek_v3 import CORRECTED
from workers.model.families.expert_traits import ExpertNames
from workers.model.families.family import Family, NormNames, Rotary, TensorTraits
from workers.model.state.mamba2_shape import Mamba2Traits

FAMILY = Family(
    "nemotron_h",
    "Nemotron-H 8B, 47B and 56B, Nemotron Nano 2 9B and 12B, Nemotron 3 Nano 30B-A3B",
    ("NemotronHForCausalLM",),
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    key_aliases={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
    },
    tensors=TensorTraits(
        embedding="embeddings", final_norm="norm_f", attention="mixer.", feed_forward="mixer."
    ),
    mlp_bias="mlp_bias",
    rotary=Rotary(without="all"),
    norms=NormNames("norm", "", "", ""),
    norm_eps="layer_norm_epsilon",
    is_norm_rounded_first=False,
    activation="mlp_hidden_act",
    is_gated=False,
    has_single_blocks=True,
    experts=dataclasses.replace(
        CORRECTED,
        names=ExpertNames(
            block="mixer.",
            correction="gate.e_score_correction_bias",
            each_gate="",
            gate_up="",
            down="",
            shared="shared_experts.",
        ),
        num_experts=8,
        layers="by_kind",
        shared_size_key="moe_shared_expert_intermediate_size",
        num_shared_key="",
    ),
    state=Mamba2Traits(
        "mixer.",
        heads_key="mamba_num_heads",
        head_dim_key="mamba_head_dim",
        state_size_key="ssm_state_size",
        groups_key="n_groups",
        kernel_key="conv_kernel",
        conv_bias_key="use_conv_bias",
        bias_key="use_bias",
        activation_key="mamba_hidden_act",
        layers_key="layers_block_type",
        pattern_key="hybrid_override_pattern",
    ),
)
