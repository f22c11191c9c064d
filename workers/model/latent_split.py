"""The division of latents over the ranks of a stage by the tokens of each block. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.errors import CheckpointError
from workers.model.model_config import ModelConfig

Counts = NDArray[np.int64]
# The memory of what ranks exchange of queried rows at a time: a step of more rows takes turns.
MOST_EXCHANGED_BYTES = 32 << 20
_FLOAT_BYTES = 4


class LatentSplit(NamedTuple):
    """The division of each block's tokens over the ranks that share a stage's layers: rank `rank` of
    `num_ranks` holds the `rank`-th of as many equal parts, one token after another."""

    block_tokens: int
    num_ranks: int

    @property
    def part_tokens(self) -> int:
        """The tokens that a rank holds of a block."""
        return self.block_tokens // self.num_ranks

    def num_held(self, num_tokens: Counts, rank: int) -> Counts:
        """Return how many of the first `num_tokens` tokens of sequences a rank holds."""
        part = self.part_tokens
        return num_tokens // self.block_tokens * part + np.clip(
            num_tokens % self.block_tokens - rank * part, 0, part
        )

    def held_places(self, num_tokens: int, rank: int) -> Counts:
        """Return the positions of the tokens that a rank holds, of the first `num_tokens`, in their order."""
        positions = np.arange(num_tokens, dtype=np.int64)
        held: Counts = positions[self.owners(positions) == rank]
        return held

    def owners(self, positions: Counts) -> Counts:
        """Return the ranks that hold the tokens at these positions."""
        return positions % self.block_tokens // self.part_tokens


def queried_row_bytes(num_heads: int, width: int, kv_lora_rank: int, item_bytes: int) -> int:
    """Return the memory of a row while ranks exchange its queries and results, for `num_heads` heads of all
    ranks: queries as they are sent and put together; float32 results, whole rows, and their columns with the
    logarithm of the sum as they are computed, sent, received and put together."""
    queries = 2 * width * item_bytes
    return num_heads * (queries + _FLOAT_BYTES * (width + 4 * (kv_lora_rank + 1)))


def refuse_latent_split(
    config: ModelConfig,
    latent_kv: str,
    devices: Sequence[str],
    *,
    tp: int,
    block_tokens: int,
    kv_dtype: str,
    num_offload_tokens: int,
    is_deterministic: bool,
) -> None:
    """Raise CheckpointError, naming the setting and the remedy, where ranks cannot divide latents by their
    tokens."""
    if latent_kv == "replicated":
        return
    if config.latent is None:
        problem = "the model has keys and values of several heads, which ranks divide; set replicated"
    elif block_tokens % tp:
        problem = (
            f"tp {tp} does not divide block_tokens {block_tokens}; take a tp that is a power of two, or set"
            " replicated"
        )
    elif kv_dtype != "auto":
        problem = f"kv_dtype {kv_dtype} has scales behind all tokens of a block; set kv_dtype: auto"
    elif num_offload_tokens:
        problem = "blocks in host memory are not divided; set offload_tokens: 0, or replicated"
    elif is_deterministic:
        problem = (
            "results of several ranks are merged, and each rounds in its own way, so they are not"
            " deterministic; set replicated, or deterministic: false"
        )
    elif any(device.partition(":")[0] == "cuda" for device in devices):
        problem = "it is not yet validated on a card, and served on CPUs alone; set replicated"
    else:
        return
    raise CheckpointError(f"engine.latent_kv {latent_kv}: {problem}")
