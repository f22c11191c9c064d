"""Read a rank's part of the weights of latent attention."""

from __future__ import annotations

import dataclasses
from typing import overload

import torch
from torch import Tensor

from workers.model.latent_shape import LatentShape
from workers.model.linear_weights import LinearWeights, as_parts
from workers.model.model_config import ModelConfig
from workers.model.norm import Norm
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.weight_parts import rows_at
from workers.model.rope import rotary_order
from workers.model.sizes import layer_heads
from workers.model.tensor_files import TensorFiles, WeightSlice

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
        names, q_norm = [f"{prefix}kv_a_proj_with_mqa"], None
        queries, num_inputs = f"{prefix}q_proj", self._hidden_size
        if shape.q_lora_rank:
            names.insert(0, f"{prefix}q_a_proj")
            q_norm = self._norm(f"{prefix}q_a_layernorm", shape.q_lora_rank)
            queries, num_inputs = f"{prefix}q_b_proj", shape.q_lora_rank
        return LatentWeights(
            self._latents(names),
            q_norm,
            self._queries(queries, num_inputs),
            self._norm(f"{prefix}kv_a_layernorm", shape.kv_lora_rank),
            self._expansion(f"{prefix}kv_b_proj"),
        )

    def _latents(self, names: list[str]) -> LinearWeights:
        """Read the products of the hidden states, of which the last has the part of keys that heads share."""
        sizes = [self._shape.q_lora_rank, len(self._kv_order)][-len(names) :]
        slices = [
            WeightSlice(f"{name}.weight", (size, self._hidden_size))
            for name, size in zip(names, sizes, strict=True)
        ]
        parts = list[Tensor | QuantizedWeight](self._files.product_parts(slices))
        parts[-1] = _rows_at(parts[-1], self._kv_order)
        if not self._has_bias:
            return LinearWeights(as_parts(parts), None)
        biases = [
            self._files.tensor(f"{name}.bias", (size,)) for name, size in zip(names, sizes, strict=True)
        ]
        biases[-1] = _rows_at(biases[-1], self._kv_order)
        return LinearWeights(as_parts(parts), torch.cat(biases))

    def _held_rows(self, dim: int) -> slice:
        """Return the rows of the rank's heads of a product with `dim` rows a head."""
        return slice(self._held.start * dim, self._held.stop * dim)

    def _queries(self, name: str, num_inputs: int) -> LinearWeights:
        dim = self._shape.head_dim
        shape = (self._num_heads * dim, num_inputs)
        (rows,) = self._files.product_parts([WeightSlice(f"{name}.weight", shape, self._held_rows(dim))])
        order = torch.arange(rows.shape[0]).view(-1, dim)[:, self._order].flatten()
        return LinearWeights(as_parts([_rows_at(rows, order)]), None)

    def _expansion(self, name: str) -> LinearWeights:
        """Read the rank's heads of keys and values, as a tensor, which is computed with in other ways."""
        dim = self._shape.expanded_dim
        shape = (self._num_heads * dim, self._shape.kv_lora_rank)
        return LinearWeights((self._files.tensor(f"{name}.weight", shape, self._held_rows(dim)),), None)

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(self._files.tensor(f"{name}.weight", (size,), dtype=torch.float32).clone(), _NORM_EPS)


@overload
def _rows_at(part: Tensor, rows: Tensor) -> Tensor: ...


@overload
def _rows_at(part: Tensor | QuantizedWeight, rows: Tensor) -> Tensor | QuantizedWeight: ...


def _rows_at(part: Tensor | QuantizedWeight, rows: Tensor) -> Tensor | QuantizedWeight:
    if isinstance(part, Tensor):
        return part.index_select(0, rows.to(part.device))
    return rows_at(part, rows)
