"""The groups of a model's layers whose KV has blocks and tables apart, and how many blocks each gets. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtransfer.messages import STATE_WINDOW, KvGroup
from workers.model.model_config import ModelConfig


def kv_groups(config: ModelConfig) -> tuple[KvGroup, ...]:
    """Return the groups of the layers that have KV: those without a window, then those of each window, or
    those with a recurrent state. None where all layers are alike, or where no layer sees all tokens; a window
    that holds the whole context is none."""
    if (state := config.state) is not None:
        attending = tuple(layer for layer in range(config.num_layers) if config.has_attention(layer))
        size = state.part_size(config.num_kv_heads)
        return KvGroup(attending, 0), KvGroup(state.layers, STATE_WINDOW, size)
    own = config.sliding_windows[: config.kv_cells.num_layers]
    reaches = [window if window < config.max_context_tokens else 0 for window in own]
    if 0 not in reaches or not any(reaches):
        return ()
    return tuple(
        KvGroup(tuple(layer for layer, its in enumerate(reaches) if its == window), window)
        for window in sorted(set(reaches))
    )


class WindowCapacity(NamedTuple):
    """What decides how many blocks a group with a window gets: as many as `max_sequences` sequences need, and
    a part of as many again that are on their way here or away; the chunks that are computed at once, at each
    stage `max_batch_tokens`; but no more than layers without a window have."""

    block_tokens: int
    max_sequences: int
    max_batch_tokens: int
    num_stages: int = 1

    def most_blocks(self, window: int) -> int:
        """Return the most blocks that are of use."""
        # A window begins within a block and ends within one, and one more is written ahead.
        of_sequence = -(-window // self.block_tokens) + 2
        num_sequences = self.max_sequences + -(-self.max_sequences // 2)
        num_chunk_blocks = -(-self.max_batch_tokens // self.block_tokens)
        return num_sequences * of_sequence + self.num_stages * num_chunk_blocks


class GroupBytes(NamedTuple):
    """The bytes of a block of each group, the first without a window, and the most blocks that are of use in
    each of the others."""

    block_bytes: Sequence[int]
    most_blocks: Sequence[int] = ()

    @staticmethod
    def sum(parts: Sequence[GroupBytes]) -> GroupBytes:
        """Return the bytes of blocks that several ranks of a replica have together."""
        if not parts:
            return GroupBytes([0])
        of_groups = zip(*(part.block_bytes for part in parts), strict=True)
        return GroupBytes([sum(of_group) for of_group in of_groups], parts[0].most_blocks)

    def bytes_of(self, num_blocks: int) -> int:
        """Return the bytes of `num_blocks` blocks of layers without a window, and of the others beside
        them."""
        full, *windows = self.block_bytes
        beside = zip(windows, self.most_blocks, strict=True)
        return num_blocks * full + sum(min(num_blocks, most) * its for its, most in beside)

    def saved_bytes(self, num_blocks: int) -> int:
        """Return the bytes that windows save beside `num_blocks` blocks of layers without one."""
        return num_blocks * sum(self.block_bytes) - self.bytes_of(num_blocks)

    def fitting_blocks(self, num_bytes: int) -> int:
        """Return the most blocks of layers without a window that fit with the others into `num_bytes`."""
        least, most = 0, num_bytes // max(1, min(filter(None, self.block_bytes), default=1))
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.bytes_of(middle) <= num_bytes else (least, middle - 1)
        return least
