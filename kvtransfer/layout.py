"""Where a block's KV lies: byte runs of any (layer range, head range), and runs between two ranks' shards.

A block is one contiguous range `[layer][k|v][kv_head][token][head_dim]` of its rank's layers and heads. KV is
addressed by layer, head and token, never by rank pairs, so another shape can assemble it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtransfer.errors import IncompatibleError
from kvtransfer.messages import Shard


class Run(NamedTuple):
    """Bytes [src_offset, +num_bytes) of the source block go to [dst_offset, +num_bytes) of the target's."""

    src_offset: int
    dst_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One rank's blocks: the shard it holds, in units of `item_bytes` per element."""

    shard: Shard
    head_dim: int
    block_tokens: int
    item_bytes: int

    @property
    def head_bytes(self) -> int:
        """K or V of one head of one layer for all tokens of the block."""
        return self.block_tokens * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return 2 * self._num_layers * self._num_heads * self.head_bytes

    def offset(self, layer: int, kind: int, head: int) -> int:
        """Byte offset in the block of K (`kind` 0) or V (1) of a head, both in the model's numbering."""
        row = (layer - self.shard.layer_start) * 2 + kind
        return (row * self._num_heads + head - self.shard.head_start) * self.head_bytes

    @property
    def _num_layers(self) -> int:
        return self.shard.layer_end - self.shard.layer_start

    @property
    def _num_heads(self) -> int:
        return self.shard.head_end - self.shard.head_start


def intersect(first: Shard, second: Shard) -> Shard | None:
    """What both shards hold; None when nothing."""
    both = Shard(
        max(first.layer_start, second.layer_start),
        min(first.layer_end, second.layer_end),
        max(first.head_start, second.head_start),
        min(first.head_end, second.head_end),
    )
    return both if both.layer_start < both.layer_end and both.head_start < both.head_end else None


def plan_runs(src: BlockLayout, dst: BlockLayout) -> list[Run]:
    """The copies that move what both layouts hold, in ascending order, as few and as long as possible.

    Equal layouts are one run; disjoint ones none. `IncompatibleError` when the blocks' shapes differ.
    """
    for field in ("head_dim", "block_tokens", "item_bytes"):
        if getattr(src, field) != getattr(dst, field):
            raise IncompatibleError(
                f"{field}: {getattr(src, field)} at the source, {getattr(dst, field)} there"
            )
    both = intersect(src.shard, dst.shard)
    if both is None:
        return []
    num_bytes = (both.head_end - both.head_start) * src.head_bytes
    runs: list[Run] = []
    for layer in range(both.layer_start, both.layer_end):
        for kind in (0, 1):
            src_offset = src.offset(layer, kind, both.head_start)
            _append(runs, Run(src_offset, dst.offset(layer, kind, both.head_start), num_bytes))
    return runs


def piece_runs(layout: BlockLayout, shard: Shard) -> list[Run]:
    """Where the piece `shard` lies in a block: `src_offset` in the block, `dst_offset` in the piece's own
    bytes (the concatenation over which its checksum runs). `ValueError` when the block does not hold it."""
    if intersect(layout.shard, shard) != shard:
        raise ValueError(f"{shard} is not part of {layout.shard}")
    return plan_runs(layout, replace(layout, shard=shard))


def split_runs(runs: list[Run], num_bytes: int) -> tuple[list[Run], list[Run]]:
    """The same copies in two parts, the first of `num_bytes` in all."""
    first: list[Run] = []
    second: list[Run] = []
    for run in runs:
        count = min(num_bytes, run.num_bytes)
        num_bytes -= count
        if count:
            first.append(Run(run.src_offset, run.dst_offset, count))
        if count < run.num_bytes:
            second.append(Run(run.src_offset + count, run.dst_offset + count, run.num_bytes - count))
    return first, second


def _append(runs: list[Run], run: Run) -> None:
    if runs:
        last = runs[-1]
        if last.src_offset + last.num_bytes == run.src_offset and (
            last.dst_offset + last.num_bytes == run.dst_offset
        ):
            runs[-1] = Run(last.src_offset, last.dst_offset, last.num_bytes + run.num_bytes)
            return
    runs.append(run)
