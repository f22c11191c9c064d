"""The layout of a block's KV: byte runs of any (layer range, head range), and who sends what between two
shapes.

A block is one contiguous range `[layer][k|v][kv_head][token][head_dim]` of its rank's layers and heads. If a
model's layers have heads of several sizes, a head here is a cell with one or more of them, and `head_dim` is
the cell's width. Where a head's elements have scales, those of its tokens follow them: `[token][head_dim]`
and then `[token]`. Where keys and values are products of one latent, that is the only kind there is, and its
tokens, one after another, are divided into parts that take the place of heads. KV is addressed by layer, head
and token, so any (TP, PP, head replication, division of tokens) can assemble what any other computed.

Where the layers of a model form groups (`KvGroup`), the blocks of each are apart: a block has the layers of
its group alone, which keep the numbers that they have among all layers. A block of recurrent states,
`[layer][kv_head][state_size]` in float32, is laid out as latents of a single token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from kvtransfer.errors import IncompatibleError
from kvtransfer.messages import STATE_ITEM_BYTES, CompatibilityRecord, KvGroup, Shard

_RANK = itemgetter(0)


class Run(NamedTuple):
    """A copy of `num_bytes` from `src_offset` of the source block to `dst_offset` of the target block."""

    src_offset: int
    dst_offset: int
    num_bytes: int


class Grid(NamedTuple):
    """A copy of `num_rows` rows of `row_bytes`, whose starts are `src_pitch` and `dst_pitch` apart."""

    src_offset: int
    src_pitch: int
    dst_offset: int
    dst_pitch: int
    row_bytes: int
    num_rows: int


class PlannedPiece(NamedTuple):
    """A piece of every block that rank `source_rank` sends to rank `target_rank`; both hold it."""

    source_rank: int
    target_rank: int
    piece: Shard


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of one rank's blocks: the shard that it holds, in elements of `item_bytes`, with
    `scale_bytes` of scales for a token of a head's K or V. A head has `block_tokens`: all of a block, or
    those of one of the parts in which a block of latents is addressed. `num_kinds` is 2, keys and values, or
    1, latents of both. `group` are the layers of the model that its blocks have, ascending; None: all of
    them. With `is_state` these have recurrent states in place of keys and values."""

    shard: Shard
    head_dim: int
    block_tokens: int
    item_bytes: int
    scale_bytes: int = 0
    num_kinds: int = 2
    group: tuple[int, ...] | None = None
    is_state: bool = False

    @staticmethod
    def of(compatibility: CompatibilityRecord, shard: Shard, group: int = 0) -> BlockLayout:
        """Return the layout of a group's blocks that hold `shard`. Its `block_bytes` are 0 for elements that
        are not known here."""
        fields, item_bytes = compatibility, compatibility.kv_item_bytes
        scale_bytes = fields.scale_bytes if item_bytes else 0
        num_tokens = fields.block_tokens // fields.token_parts
        sizes = fields.head_dim, num_tokens, item_bytes, scale_bytes, fields.num_kinds
        whole = BlockLayout(shard, *sizes)
        return whole.of_group(fields.groups[group]) if fields.groups else whole

    def of_group(self, group: KvGroup) -> BlockLayout:
        """Return the layout of a group's blocks, where this is that of a block of all layers with KV."""
        if not group.state_size:
            return replace(self, group=group.layers)
        return BlockLayout(self.shard, group.state_size, 1, STATE_ITEM_BYTES, 0, 1, group.layers, True)

    def layers_of(self, piece: Shard) -> Sequence[int]:
        """Return the layers of a piece that its blocks have."""
        if self.group is None:
            return range(piece.layer_start, piece.layer_end)
        first, end = bisect_left(self.group, piece.layer_start), bisect_left(self.group, piece.layer_end)
        return self.group[first:end]

    def num_layers(self, piece: Shard) -> int:
        """Return how many layers of a piece its blocks have."""
        return len(self.layers_of(piece))

    def part(self, piece: Shard) -> tuple[slice, slice]:
        """Return where a piece lies: its layers among those of a block, and its heads among those of a
        layer."""
        first = self.num_layers(Shard(self.shard.layer_start, piece.layer_start, 0, 0))
        before = self.shard.head_start
        heads = slice(piece.head_start - before, piece.head_end - before)
        return slice(first, first + self.num_layers(piece)), heads

    @property
    def head_bytes(self) -> int:
        """Size of K or V of one head of one layer, for all tokens of the block."""
        return self.block_tokens * (self.head_dim * self.item_bytes + self.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return self.num_kinds * self.num_layers(self.shard) * self.shard.num_heads * self.head_bytes

    def offset(self, layer: int, kind: int, head: int) -> int:
        """Return the byte offset in the block of K (`kind` 0) or V (1) of a layer, which is of the group, and
        head, in the model's numbering."""
        before = Shard(self.shard.layer_start, layer, 0, 0)
        row = self.num_layers(before) * self.num_kinds + kind
        return (row * self.shard.num_heads + head - self.shard.head_start) * self.head_bytes


def intersect(first: Shard, second: Shard) -> Shard | None:
    """Return the part that both shards hold, None if there is none."""
    both = Shard(
        max(first.layer_start, second.layer_start),
        min(first.layer_end, second.layer_end),
        max(first.head_start, second.head_start),
        min(first.head_end, second.head_end),
    )
    return both if both.layer_start < both.layer_end and both.head_start < both.head_end else None


def plan_pieces(
    sources: Sequence[tuple[int, Shard]], targets: Sequence[tuple[int, Shard]]
) -> tuple[PlannedPiece, ...]:
    """Plan who sends what, from (rank, shard) of a writing replica to (rank, shard) of a reading one.

    Each target's shard is covered exactly once, by at most one piece from each source. Sources with the same
    shard share what all targets need of it: each takes a contiguous part, cut between layers, so that equal
    shapes are paired one to one. Both sides of a Peer link compute the same plan. `IncompatibleError` names
    what no source holds, or what two sources hold without being copies of each other."""
    copies: dict[Shard, list[int]] = {}
    for rank, shard in sorted(sources, key=_RANK):
        copies.setdefault(shard, []).append(rank)
    _check_disjoint(list(copies))
    pieces: list[PlannedPiece] = []
    for shard, ranks in copies.items():
        needed = [
            (rank, both) for rank, want in sorted(targets, key=_RANK) if (both := intersect(shard, want))
        ]
        pieces += _shared(ranks, needed)
    for rank, shard in targets:
        sent = [piece for _, target_rank, piece in pieces if target_rank == rank]
        missing = next(without(shard, sent), None)
        if missing is not None:
            raise IncompatibleError(f"no rank of the writer holds {_named(missing)}, which rank {rank} needs")
    return tuple(sorted(pieces, key=itemgetter(0, 1)))


def landing_shards(holders: Sequence[tuple[int, Shard]]) -> list[tuple[int, Shard]]:
    """Divide what ranks hold copies of among them: return (rank, shard) of the layers that each receives from
    other replicas, and then gives to its copies. A rank for which no layer is left receives nothing."""
    copies: dict[Shard, list[int]] = {}
    for rank, shard in sorted(holders, key=_RANK):
        copies.setdefault(shard, []).append(rank)
    landing: list[tuple[int, Shard]] = []
    for shard, ranks in copies.items():
        for index, rank in enumerate(ranks):
            part = layers_of_copy(shard.num_layers, index, len(ranks))
            layers = shard.layer_start + part.start, shard.layer_start + part.stop
            if part:
                landing.append((rank, Shard(*layers, shard.head_start, shard.head_end)))
    return sorted(landing, key=_RANK)


def layers_of_copy(num_layers: int, index: int, num_copies: int) -> range:
    """Return the layers that the `index`-th of `num_copies` ranks receives of a shard, counted from its
    first."""
    return range(index * num_layers // num_copies, (index + 1) * num_layers // num_copies)


def plan_runs(src: BlockLayout, dst: BlockLayout, piece: Shard) -> list[Run]:
    """Plan the copies that move `piece`, in ascending order, as few and as long as possible: a single one
    between equal layouts. Between a block of all layers and one of a group, the layers of the group move.
    Raises `IncompatibleError` if the blocks' shapes differ, `ValueError` if a block does not hold the
    piece."""
    for field in ("head_dim", "block_tokens", "item_bytes", "scale_bytes", "num_kinds"):
        if getattr(src, field) != getattr(dst, field):
            raise IncompatibleError(
                f"{field}: {getattr(src, field)} at the source, {getattr(dst, field)} there"
            )
    if None not in (src.group, dst.group) and src.group != dst.group:
        raise IncompatibleError(f"layers {src.group} at the source, {dst.group} there")
    for shard in (src.shard, dst.shard):
        if intersect(shard, piece) != piece:
            raise ValueError(f"{piece} is not part of {shard}")
    num_bytes = piece.num_heads * src.head_bytes
    runs: list[Run] = []
    for layer in (dst if src.group is None else src).layers_of(piece):
        for kind in range(src.num_kinds):
            src_offset = src.offset(layer, kind, piece.head_start)
            _append(runs, Run(src_offset, dst.offset(layer, kind, piece.head_start), num_bytes))
    return runs


def piece_grid(src: BlockLayout, dst: BlockLayout, piece: Shard) -> Grid:
    """Return the one copy that moves `piece` from a block of `src` to one of `dst`. Both hold it, and have
    some of its layers. A row is K or V of the piece's heads in one layer; all rows are one where they follow
    one another in both blocks."""
    row_bytes = piece.num_heads * src.head_bytes
    layers = src.layers_of(piece)
    num_rows = src.num_kinds * len(layers)
    pitches = [layout.shard.num_heads * layout.head_bytes for layout in (src, dst)]
    if pitches == [row_bytes, row_bytes]:
        row_bytes, num_rows, pitches = row_bytes * num_rows, 1, [row_bytes * num_rows] * 2
    first = layers[0], 0, piece.head_start
    return Grid(src.offset(*first), pitches[0], dst.offset(*first), pitches[1], row_bytes, num_rows)


def piece_runs(layout: BlockLayout, shard: Shard) -> list[Run]:
    """Locate the piece `shard` in a block: `src_offset` is in the block, `dst_offset` in the packed piece
    (the bytes that its checksum covers). Raises `ValueError` if the block does not hold it."""
    return plan_runs(layout, replace(layout, shard=shard), shard)


def split_runs(runs: list[Run], num_bytes: int) -> tuple[list[Run], list[Run]]:
    """Split copies into two parts, the first of `num_bytes` in all."""
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


def _shared(ranks: Sequence[int], needed: Sequence[tuple[int, Shard]]) -> Iterator[PlannedPiece]:
    """Deal the pieces that targets need of one shard to the ranks that hold it, laid end to end by size: the
    i-th of n takes the part between i/n and (i+1)/n of the whole, to the nearest layer."""
    total = sum(shard_size(piece) for _, piece in needed)
    begin = 0
    for target_rank, piece in needed:
        for index, rank in enumerate(ranks):
            first, last = (
                min(
                    max(_nearest(total * border - begin * len(ranks), piece.num_heads * len(ranks)), 0),
                    piece.num_layers,
                )
                for border in (index, index + 1)
            )
            if first < last:
                layers = piece.layer_start + first, piece.layer_start + last
                yield PlannedPiece(rank, target_rank, Shard(*layers, piece.head_start, piece.head_end))
        begin += shard_size(piece)


def _nearest(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def shard_size(shard: Shard) -> int:
    """Count the KV heads of all layers."""
    return shard.num_layers * shard.num_heads


def _check_disjoint(shards: Sequence[Shard]) -> None:
    for index, shard in enumerate(shards):
        for other in shards[:index]:
            both = intersect(shard, other)
            if both is not None:
                raise IncompatibleError(f"the writer's ranks overlap in {_named(both)} but are no copies")


def without(shard: Shard, taken: Sequence[Shard]) -> Iterator[Shard]:
    """Yield the rectangles of `shard` that none of `taken` covers."""
    both = None
    rest = taken
    while rest and both is None:
        both, rest = intersect(shard, rest[0]), rest[1:]
    if both is None:
        yield shard
        return
    above = Shard(shard.layer_start, both.layer_start, shard.head_start, shard.head_end)
    below = Shard(both.layer_end, shard.layer_end, shard.head_start, shard.head_end)
    left = Shard(both.layer_start, both.layer_end, shard.head_start, both.head_start)
    right = Shard(both.layer_start, both.layer_end, both.head_end, shard.head_end)
    for part in (above, below, left, right):
        if shard_size(part):
            yield from without(part, rest)


def _named(shard: Shard) -> str:
    layers = f"layers {shard.layer_start} to {shard.layer_end - 1}"
    return f"{layers} of KV heads {shard.head_start} to {shard.head_end - 1}"
