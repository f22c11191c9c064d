"""Describe latent attention, whose keys and values are products of a narrow latent of the hidden states, as
config.json says, without torch."""

from __future__ import annotations

from typing import NamedTuple

from workers.model.config_values import ConfigValues
from workers.model.layer_shapes import head_dim_problem

# The memory of keys and values that are expanded at a time, in as far as one head leaves the choice.
MOST_EXPANDED_BYTES = 16 << 20


# The fewest tokens for which there is memory where keys and values are expanded.
_LEAST_CAPACITY = 256


def expanded_capacity(num_tokens: int) -> int:
    """Return for how many tokens there is memory where keys and values of `num_tokens` are expanded: lengths
    are rounded up to powers of two, so that kernels meet few of them."""
    return max(_LEAST_CAPACITY, 1 << (num_tokens - 1).bit_length())


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
        """The size of a head of queries or keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def parts(self) -> tuple[int, int]:
        """The columns of the two parts of a token's row in the KV: its normed latent, and the rotated part of
        keys that all heads share."""
        return self.kv_lora_rank, self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """The columns that the KV has for a token."""
        return sum(self.parts)

    def saving(self, num_heads: int) -> float:
        """Return how many times as much KV of a token would be with keys and values of each head."""
        return num_heads * (self.head_dim + self.v_head_dim) / self.width

    @property
    def expanded_dim(self) -> int:
        """The columns of a head that are expanded from the latent of keys and values."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def kept_expansion(self) -> float:
        """How often the weights of the expansion are kept: those of keys in two orders, of values in one."""
        return 1 + self.qk_nope_head_dim / self.expanded_dim

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

    @property
    def absorbed_pair_flops(self) -> int:
        """The operations of a head for a query and a token that it sees, where queries are multiplied with
        latents and probabilities mix latents."""
        return 2 * (self.width + self.kv_lora_rank)

    @property
    def expanded_pair_flops(self) -> int:
        """The same where the head's keys and values were expanded from the latents."""
        return 2 * (self.head_dim + self.v_head_dim)

    @property
    def expansion_flops(self) -> int:
        """The operations by which a head's key and value are expanded from a latent, and by which, absorbed,
        a query becomes one of latents and mixed latents become a value."""
        return 2 * self.kv_lora_rank * self.expanded_dim

    def is_expansion_cheaper(self, start: int, num_tokens: int) -> bool:
        """Whether `num_tokens` new tokens from position `start` on attend with fewer operations to keys and
        values that are expanded for all of the context.

        Absorbed, each new token has two products of its own. Expanded, each token of the context has them,
        but what follows takes fewer operations for each query and key."""
        num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        saved = num_pairs * (self.absorbed_pair_flops - self.expanded_pair_flops)
        return saved > start * self.expansion_flops

    def num_expanded_heads(self, num_heads: int, num_tokens: int, item_bytes: int) -> int:
        """Return how many of so many heads are expanded at a time for `num_tokens` tokens: as many as divide
        them and take no more than `MOST_EXPANDED_BYTES`, or one."""
        head_bytes = 2 * num_tokens * self.head_dim * item_bytes
        most = max(1, min(num_heads, MOST_EXPANDED_BYTES // head_bytes))
        return next(it for it in range(most, 0, -1) if num_heads % it == 0)

    def most_expanded_bytes(self, num_heads: int, max_context_tokens: int, item_bytes: int) -> int:
        """Return the memory that the latents of one sequence and what is expanded of them take at most."""
        latents = max_context_tokens * self.width * item_bytes
        head_bytes = 2 * expanded_capacity(max_context_tokens) * self.head_dim * item_bytes
        return latents + max(head_bytes, min(num_heads * head_bytes, MOST_EXPANDED_BYTES))

    def num_projected(self, num_heads: int) -> int:
        """Return the columns of a token that attention takes: the queries of so many heads, the normed latent
        and the part of keys that all heads share."""
        return num_heads * self.head_dim + self.width

    def num_scratch_columns(self, num_heads: int) -> int:
        """Return the columns that a layer holds for a token beside what attention takes: latents, and the
        normed ones of queries; their rotated parts; queries of latents, mixed latents, and mixed values."""
        of_head = self.qk_rope_head_dim + 2 * self.width + self.v_head_dim
        return self.num_latents + self.q_lora_rank + num_heads * of_head


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
        if problem := head_dim_problem(shape.width):
            self.refuse("kv_lora_rank", f"makes latents of {shape.width} columns, which {problem}")
        if shape.v_head_dim > shape.head_dim:
            self.refuse("v_head_dim", f"is more than the {shape.head_dim} dimensions of a head of keys")
        return shape

    def _pairs(self, key: str) -> int:
        """Return the even number of the key."""
        value = self.count(key)
        if value % 2:
            self.refuse(key, "is odd: rotary embedding needs pairs")
        return value
