"""Describe latent attention, whose keys and values are expanded from a narrow product of the hidden states,
as config.json says, without torch."""

from __future__ import annotations

from typing import NamedTuple

from workers.model.config_values import ConfigValues
from workers.model.layer_shapes import head_dim_problem


class ProductShape(NamedTuple):
    """The outputs and inputs of a product."""

    num_outputs: int
    num_inputs: int


class LatentShape(NamedTuple):
    """The sizes of latent attention.

    Keys and values of all heads are products of a normed latent of the hidden states, of `kv_lora_rank`.
    Queries are products of another one, of `q_lora_rank`, or of the hidden states themselves, where that is
    0. A head of queries or keys has `qk_nope_head_dim` dimensions that are not rotated, and
    `qk_rope_head_dim` that are, which in keys all heads share; one of values has `v_head_dim`."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """The size of a head of queries or keys. Values are padded to it in the KV."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expanded_dim(self) -> int:
        """The columns of a head that are expanded from the latent of keys and values."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def num_latents(self) -> int:
        """The columns of both latents and of the part of keys that all heads share."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim

    def products(self, hidden_size: int, num_heads: int) -> list[ProductShape]:
        """Return the products of a layer's attention at a rank with so many heads: those of latents, of
        queries, of keys and values, and of what attention mixes."""
        return [
            ProductShape(self.num_latents, hidden_size),
            ProductShape(num_heads * self.head_dim, self.q_lora_rank or hidden_size),
            ProductShape(num_heads * self.expanded_dim, self.kv_lora_rank),
            ProductShape(hidden_size, num_heads * self.v_head_dim),
        ]

    def num_scratch_columns(self, num_heads: int) -> int:
        """Return the columns that a layer holds for a token beside queries, keys and values: latents, normed
        ones, what is expanded, and the mixed values without padding."""
        normed = self.q_lora_rank + self.kv_lora_rank
        return self.num_latents + normed + num_heads * (self.expanded_dim + self.v_head_dim)


class LatentReader(ConfigValues):
    """Reads the keys of config.json about latent attention."""

    def read(self) -> LatentShape:
        """Read them. Raises `CheckpointError`, naming the key, for what is not supported."""
        if self.raw.get("index_topk") is not None:
            self.refuse(
                "index_topk", "says that layers choose by an index which tokens they attend to: not supported"
            )
        q_lora_rank = self.count("q_lora_rank") if self.raw.get("q_lora_rank") is not None else 0
        shape = LatentShape(
            q_lora_rank,
            self.count("kv_lora_rank"),
            self._pairs("qk_nope_head_dim"),
            self._pairs("qk_rope_head_dim"),
            self.count("v_head_dim"),
        )
        if problem := head_dim_problem(shape.head_dim):
            self.refuse("qk_nope_head_dim", f"makes a head of {shape.head_dim} dimensions, which {problem}")
        if shape.v_head_dim > shape.head_dim:
            self.refuse("v_head_dim", f"is more than the {shape.head_dim} dimensions of a head of keys")
        return shape

    def _pairs(self, key: str) -> int:
        """Return the even number of the key."""
        value = self.count(key)
        if value % 2:
            self.refuse(key, "is odd: rotary embedding needs pairs")
        return value
