"""Read a rank's part of the weights of latent attention."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from workers.model.latent_shape import LatentShape
from workers.model.linear_weights import LinearWeights
from workers.model.model_config import ModelConfig
from workers.model.norm import Norm
from workers.model.rope import rotary_order
from workers.model.sizes import layer_heads
from workers.model.tensor_files import TensorFiles

# What the norms of latents add to the mean square, whatever config.json says of other norms.
_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights from which queries, keys and values of latent attention are computed, as `LatentShape`
    describes. `latents` [num_latents, hidden_size] holds the rows of the latent of queries, if they have one,
    of that of keys and values, and of the part of keys that all heads share, the firsts of its pairs before
    the seconds.

    `queries` [num_heads * head_dim, q_lora_rank or hidden_size] has in each head the rows that are not
    rotated before those that are, in the order of that part; `expansion` [num_heads * expanded_dim,
    kv_lora_rank] those of keys, which are not rotated, before those of values."""

    latents: LinearWeights
    q_norm: Norm | None
    queries: LinearWeights
    kv_norm: Norm
    expansion: LinearWeights


def rotated_order(config: ModelConfig, shape: LatentShape) -> list[int]:
    """Return the order in which the rotated dimensions of a checkpoint's queries and keys are computed."""
    assert config.rope.num_rotated == shape.qk_rope_head_dim
    return rotary_order(config.rope, shape.qk_rope_head_dim) or list(range(shape.qk_rope_head_dim))


class LatentWeightReader:
    """Reads the latent attention of one checkpoint for one of `tp` ranks, which holds all of the latents, and
    its part of the heads."""

    def __init__(
        self, files: TensorFiles, config: ModelConfig, shape: LatentShape, tp_rank: int, tp: int
    ) -> None:
        self._files, self._shape = files, shape
        self._hidden_size, self._num_heads = config.hidden_size, config.num_heads
        self._held = layer_heads(config, 0, tp_rank, tp).queries
        self._has_bias = config.qkv_bias
        rotated = rotated_order(config, shape)

        def with_rotated(num_before: int) -> Tensor:
            return torch.tensor([*range(num_before), *(num_before + it for it in rotated)])

        # The rows of a head of queries, and of the latent of keys and values with the shared part of keys.
        self._order, self._kv_order = map(with_rotated, (shape.qk_nope_head_dim, shape.kv_lora_rank))

    def layer(self, prefix: str) -> LatentWeights:
        """Read the attention whose tensors begin with `prefix`."""
        shape = self._shape
        latents, q_norm = [self._shared_latents(f"{prefix}kv_a_proj_with_mqa")], None
        queries, num_inputs = f"{prefix}q_proj", self._hidden_size
        if shape.q_lora_rank:
            latents.insert(0, self._latents(f"{prefix}q_a_proj", shape.q_lora_rank))
            q_norm = self._norm(f"{prefix}q_a_layernorm", shape.q_lora_rank)
            queries, num_inputs = f"{prefix}q_b_proj", shape.q_lora_rank
        parts, biases = zip(*latents, strict=True)
        return LatentWeights(
            LinearWeights(parts, torch.cat(biases) if self._has_bias else None),
            q_norm,
            LinearWeights((self._queries(queries, num_inputs),), None),
            self._norm(f"{prefix}kv_a_layernorm", shape.kv_lora_rank),
            LinearWeights((self._heads(f"{prefix}kv_b_proj", shape.expanded_dim, shape.kv_lora_rank),), None),
        )

    def _latents(self, name: str, num_rows: int) -> tuple[Tensor, Tensor]:
        """Read a product of the hidden states, [num_rows, hidden_size], and its bias, [0] if it has none."""
        weight = self._files.tensor(f"{name}.weight", (num_rows, self._hidden_size))
        if not self._has_bias:
            return weight, weight.new_empty(0)
        return weight, self._files.tensor(f"{name}.bias", (num_rows,)).clone()

    def _shared_latents(self, name: str) -> tuple[Tensor, Tensor]:
        """Read the product of the latent of keys and values, and of the part of keys that heads share."""
        weight, bias = self._latents(name, len(self._kv_order))
        order = self._kv_order.to(weight.device)
        return weight.index_select(0, order), bias.index_select(0, order) if self._has_bias else bias

    def _heads(self, name: str, dim: int, num_inputs: int) -> Tensor:
        """Read the rows of the rank's heads of a product, [num_heads * dim, num_inputs]."""
        rows = slice(self._held.start * dim, self._held.stop * dim)
        return self._files.tensor(f"{name}.weight", (self._num_heads * dim, num_inputs), rows)

    def _queries(self, name: str, num_inputs: int) -> Tensor:
        rows = self._heads(name, self._shape.head_dim, num_inputs)
        by_head = rows.view(-1, self._shape.head_dim, num_inputs)
        return by_head.index_select(1, self._order.to(rows.device)).view(rows.shape)

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(self._files.tensor(f"{name}.weight", (size,), dtype=torch.float32).clone(), _NORM_EPS)
