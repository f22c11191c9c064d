"""Verification: which pieces of a landing's blocks are announced, being checked, good or bad.

Each prompt block is written piece by piece, by several ranks into several ranks; `Lanes` are the pieces
that make up one block. A block is good when every rank has checked all of its pieces and found none bad.
Blocks of each group of layers, and their lanes, are apart; ranks answer orders of all groups in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtransfer.messages import Shard
from kvtransfer.peer_messages import Manifest, PieceSum
from kvtransfer.transfer_orders import PieceCheck, VerifyOrder
from kvtransfer.transfer_reports import Verified


class ManifestError(Exception):
    """Raised when a manifest names a piece that does not belong to its landing; the text names it."""


class Lanes:
    """Represents all (target rank, piece) that one writer writes of every block of one group of layers."""

    def __init__(self, pieces: Iterable[tuple[int, Shard]]) -> None:
        self._bits = {piece: 1 << index for index, piece in enumerate(pieces)}
        self.all_bits = (1 << len(self._bits)) - 1

    def bit(self, rank: int, shard: Shard) -> int:
        """Return the lane's bit; 0 when there is no such lane."""
        return self._bits.get((rank, shard), 0)


class AwaitedBlocks(NamedTuple):
    """The blocks of a landing that are to be written in one group of layers: `block_ids[i]` takes the
    sequence's block `first` + i."""

    lanes: Lanes
    first: int
    block_ids: Sequence[int]


class Verification:
    """Tracks the pieces of one open landing."""

    def __init__(self, groups: Sequence[AwaitedBlocks]) -> None:
        """`groups` are the blocks that are to be written in each group of layers."""
        self._groups = [_GroupMarks(blocks) for blocks in groups]
        # For each rank: the pieces of every order that it has not answered.
        self._pending: dict[int, deque[_CheckedPieces]] = {}

    def announce(self, manifest: Manifest) -> dict[int, VerifyOrder]:
        """Return one order for each rank that has to check some of the written pieces. `ManifestError` for
        a piece that is not awaited, or that was announced before."""
        if not 0 <= manifest.group < len(self._groups):
            raise ManifestError(f"the manifest names group {manifest.group}")
        marks = self._groups[manifest.group]
        checks: dict[int, list[PieceCheck]] = {}
        pending: dict[int, list[tuple[int, int]]] = {}
        for piece in manifest.pieces:
            index, lane = marks.announce(piece)
            block_id = marks.awaited.block_ids[index]
            check = PieceCheck(block_id, piece.block_index, piece.shard, piece.checksum)
            checks.setdefault(piece.rank, []).append(check)
            pending.setdefault(piece.rank, []).append((index, lane))
        for rank, pieces in pending.items():
            self._pending.setdefault(rank, deque()).append(_CheckedPieces(marks, tuple(pieces)))
        landing_id, group = manifest.landing_id, manifest.group
        return {rank: VerifyOrder(landing_id, tuple(pieces), group) for rank, pieces in checks.items()}

    def answered(self, rank: int, report: Verified) -> None:
        """Take the answer of a rank to its oldest unanswered order."""
        checked = self._pending[rank].popleft()
        checked.marks.answered(checked.pieces, report)

    @property
    def is_pending(self) -> bool:
        """Whether a rank still has to answer."""
        return any(self._pending.values())

    def num_bad_pieces(self, firsts: Sequence[int]) -> int:
        """Return how many pieces are bad of each group's blocks from its first one on."""
        return sum(marks.num_bad_pieces(first) for marks, first in zip(self._groups, firsts, strict=True))

    def is_good(self, group: int, block: int) -> bool:
        """Whether a block that is to be written in the group is good."""
        return self._groups[group].is_good(block)

    def num_good_blocks(self) -> int:
        """Return how many blocks of the first group from the first one on are good without a gap."""
        return self._groups[0].num_good_blocks()


class _CheckedPieces(NamedTuple):
    """The pieces of one order: (index of the block, lane) of each."""

    marks: _GroupMarks
    pieces: tuple[tuple[int, int], ...]


class _GroupMarks:
    """The lanes of each block of one group of layers that are announced, good or bad. Indices are of
    `awaited.block_ids`."""

    def __init__(self, awaited: AwaitedBlocks) -> None:
        self.awaited = awaited
        self._announced = [0] * len(awaited.block_ids)
        self._good = [0] * len(awaited.block_ids)
        # The index of each bad piece.
        self._bad: list[int] = []

    def announce(self, piece: PieceSum) -> tuple[int, int]:
        """Mark the piece as announced; return its index and lane."""
        index = piece.block_index - self.awaited.first
        if not 0 <= index < len(self.awaited.block_ids):
            raise ManifestError(f"the manifest names block {piece.block_index}")
        lane = self.awaited.lanes.bit(piece.rank, piece.shard)
        if not lane:
            raise ManifestError(
                f"the manifest names {piece.shard} at rank {piece.rank}, which has no such lane"
            )
        if self._announced[index] & lane:
            named = f"block {piece.block_index}, {piece.shard} at rank {piece.rank}"
            raise ManifestError(f"the manifest names {named} a second time")
        self._announced[index] |= lane
        return index, lane

    def answered(self, pieces: Sequence[tuple[int, int]], report: Verified) -> None:
        """Mark the pieces of one order as good or bad."""
        bad = frozenset(report.bad_block_indices)
        for index, lane in pieces:
            if self.awaited.first + index in bad:
                self._bad.append(index)
            else:
                self._good[index] |= lane

    def is_good(self, block: int) -> bool:
        """Whether the sequence's block, which is awaited, is good."""
        return self._good[block - self.awaited.first] == self.awaited.lanes.all_bits

    def num_good_blocks(self) -> int:
        """Return how many blocks from the first one on are good without a gap."""
        all_bits = self.awaited.lanes.all_bits
        bad = (index for index, lanes in enumerate(self._good) if lanes != all_bits)
        return next(bad, len(self._good))

    def num_bad_pieces(self, first: int) -> int:
        """Return how many pieces are bad of the blocks from the sequence's block `first` on."""
        return sum(self.awaited.first + index >= first for index in self._bad)
