"""Verification: which pieces of a landing's blocks are announced, being checked, good or bad.

Each prompt block is written piece by piece, by several ranks into several ranks; `Lanes` are the pieces
that make up one block. A block is good when every rank has checked all of its pieces and found none bad.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvtransfer.messages import Shard
from kvtransfer.peer_messages import Manifest
from kvtransfer.transfer_orders import PieceCheck, VerifyOrder
from kvtransfer.transfer_reports import Verified


class ManifestError(Exception):
    """Raised when a manifest names a piece that does not belong to its landing; the text names it."""


class Lanes:
    """Represents all (target rank, piece) that one writer writes of every block."""

    def __init__(self, pieces: Iterable[tuple[int, Shard]]) -> None:
        self._bits = {piece: 1 << index for index, piece in enumerate(pieces)}
        self.all_bits = (1 << len(self._bits)) - 1

    def bit(self, rank: int, shard: Shard) -> int:
        """Return the lane's bit; 0 when there is no such lane."""
        return self._bits.get((rank, shard), 0)


class Verification:
    """Tracks the pieces of one open landing. `block_ids[i]` takes the prompt's block `first_block` + i."""

    def __init__(self, lanes: Lanes, first_block: int, block_ids: Sequence[int]) -> None:
        self._lanes = lanes
        self._first_block = first_block
        self._block_ids = block_ids
        self._announced = [0] * len(block_ids)
        self._good = [0] * len(block_ids)
        # For each rank: (index into `block_ids`, lane) of each piece of every order that it has not answered.
        self._pending: dict[int, deque[tuple[tuple[int, int], ...]]] = {}
        self.num_bad_pieces = 0

    def announce(self, manifest: Manifest) -> dict[int, VerifyOrder]:
        """Return one order for each rank that has to check some of the written pieces. `ManifestError` for
        a piece that is not awaited, or that was announced before."""
        checks: dict[int, list[PieceCheck]] = {}
        pending: dict[int, list[tuple[int, int]]] = {}
        for piece in manifest.pieces:
            index = piece.block_index - self._first_block
            if not 0 <= index < len(self._block_ids):
                raise ManifestError(f"the manifest names block {piece.block_index}")
            lane = self._lanes.bit(piece.rank, piece.shard)
            if not lane:
                raise ManifestError(
                    f"the manifest names {piece.shard} at rank {piece.rank}, which has no such lane"
                )
            if self._announced[index] & lane:
                named = f"block {piece.block_index}, {piece.shard} at rank {piece.rank}"
                raise ManifestError(f"the manifest names {named} a second time")
            self._announced[index] |= lane
            check = PieceCheck(self._block_ids[index], piece.block_index, piece.shard, piece.checksum)
            checks.setdefault(piece.rank, []).append(check)
            pending.setdefault(piece.rank, []).append((index, lane))
        for rank, pieces in pending.items():
            self._pending.setdefault(rank, deque()).append(tuple(pieces))
        return {rank: VerifyOrder(manifest.landing_id, tuple(pieces)) for rank, pieces in checks.items()}

    def answered(self, rank: int, report: Verified) -> None:
        """Take the answer of a rank to its oldest unanswered order."""
        bad = frozenset(report.bad_block_indices)
        for index, lane in self._pending[rank].popleft():
            if self._first_block + index in bad:
                self.num_bad_pieces += 1
            else:
                self._good[index] |= lane

    @property
    def is_pending(self) -> bool:
        """Whether a rank still has to answer."""
        return any(self._pending.values())

    def num_good_blocks(self) -> int:
        """Return how many blocks from the first one on are good without a gap."""
        bad = (index for index, lanes in enumerate(self._good) if lanes != self._lanes.all_bits)
        return next(bad, len(self._good))
