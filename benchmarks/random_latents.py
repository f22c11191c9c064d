"""Name the tensors of latent attention of a random checkpoint, with their shapes."""

from __future__ import annotations

from typing import NamedTuple

from workers.model.latent_shape import LatentShape
from workers.model.model_config import ModelConfig


class RandomMatrix(NamedTuple):
    """A matrix to be drawn, by its rows and columns, times a gain, and whether its product has a bias."""

    num_rows: int
    num_columns: int
    gain: float
    has_bias: bool


def latent_matrices(config: ModelConfig, shape: LatentShape, depth_gain: float) -> dict[str, RandomMatrix]:
    """Return the matrices of a layer's attention; what it adds to the hidden states is scaled by
    `depth_gain`."""
    hidden, num_heads, has_bias = config.hidden_size, config.num_heads, config.qkv_bias
    num_queries, num_shared = num_heads * shape.head_dim, shape.kv_lora_rank + shape.qk_rope_head_dim
    matrices = {}
    if shape.q_lora_rank:
        matrices["self_attn.q_a_proj"] = RandomMatrix(shape.q_lora_rank, hidden, 1.0, has_bias)
        matrices["self_attn.q_b_proj"] = RandomMatrix(num_queries, shape.q_lora_rank, 1.5, False)
    else:
        matrices["self_attn.q_proj"] = RandomMatrix(num_queries, hidden, 1.5, False)
    num_expanded, num_mixed = num_heads * shape.expanded_dim, num_heads * shape.v_head_dim
    return matrices | {
        "self_attn.kv_a_proj_with_mqa": RandomMatrix(num_shared, hidden, 1.0, has_bias),
        "self_attn.kv_b_proj": RandomMatrix(num_expanded, shape.kv_lora_rank, 1.0, False),
        "self_attn.o_proj": RandomMatrix(hidden, num_mixed, depth_gain, config.output_bias),
    }


def latent_norms(shape: LatentShape) -> dict[str, int]:
    """Return the norms of a layer's attention, and their sizes."""
    of_queries = {"self_attn.q_a_layernorm": shape.q_lora_rank} if shape.q_lora_rank else {}
    return of_queries | {"self_attn.kv_a_layernorm": shape.kv_lora_rank}
