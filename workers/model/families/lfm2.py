"""LFM2: layers of attention, and more of a short convolution of gated channels."""

from __future__ import annotations

from workers.model.families.family import Family, NormNames, TensorTraits
from workers.model.state.short_conv_shape import ShortConvTraits

FAMILY = Family(
    "lfm2",
    "LFM2 350M, 700M, 1.2B and 2.6B",
    ("Lfm2ForCausalLM",),
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    key_aliases={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    tensors=TensorTraits(
        final_norm="embedding_norm",
        output="out_proj",
        feed_forward="feed_forward.",
        gate="w1",
        up="w3",
        down="w2",
    ),
    qk_norm="head",
    qk_norm_names=("q_layernorm", "k_layernorm"),
    norms=NormNames("operator_norm", "", "ffn_norm", ""),
    norm_eps="norm_eps",
    state=ShortConvTraits("conv."),
)
