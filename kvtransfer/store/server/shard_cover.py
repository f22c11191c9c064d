"""Find which records of a block together hold a shard, for readers of another shape than the writers'."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from kvtransfer.blocks.layout import intersect, shard_size, without
from kvtransfer.messages import Shard

# The attempts to find fewer records, after which the best cover so far is used.
MAX_STEPS = 256


def cover(needed: Shard, held: Iterable[Shard]) -> list[tuple[Shard, Shard]] | None:
    """Return what to read from which record, as (the record's shard, a piece of it and of `needed`): the
    pieces are disjoint and make up `needed`. None when `held` leaves a gap.

    Uses the exact record if there is one, otherwise as few records as are found in `MAX_STEPS` attempts, and
    among equals the smaller ones. A record is named once for each piece that is read from it. The result
    depends on the set of `held` alone.
    """
    if not isinstance(held, frozenset | set | dict):
        held = set(held)
    if needed in held:
        return [(needed, needed)]
    pieces = _assemble(needed, frozenset(held))
    return None if pieces is None else list(pieces)


@lru_cache(maxsize=1024)  # the blocks of a chain are held alike
def _assemble(needed: Shard, held: frozenset[Shard]) -> tuple[tuple[Shard, Shard], ...] | None:
    useful = {shard: both for shard in held if (both := intersect(needed, shard))}
    order = {shard: (-shard_size(both), shard_size(shard), _corner(shard)) for shard, both in useful.items()}
    ordered = sorted(useful, key=order.__getitem__)
    chosen = _Search(needed, ordered).best
    if chosen is None:
        return None
    pieces: list[tuple[Shard, Shard]] = []
    for shard in chosen:
        taken = [piece for _, piece in pieces]
        pieces += [(shard, piece) for piece in without(useful[shard], taken)]
    return tuple(sorted(pieces, key=lambda pair: _corner(pair[1])))


class _Search:
    """Depth first: the first cell that is not covered must be covered by some record; the one with most of
    the shard is tried first. Any choice can be completed, so the first descent finds a cover or a gap."""

    def __init__(self, needed: Shard, ordered: list[Shard]) -> None:
        self.best: list[Shard] | None = None
        self._needed = needed
        self._ordered = ordered
        self._num_steps = 0
        self._descend([])

    def _descend(self, chosen: list[Shard]) -> None:
        gap = min(without(self._needed, chosen), key=_corner, default=None)
        if gap is None:
            self.best = chosen
            return
        corner = Shard(gap.layer_start, gap.layer_start + 1, gap.head_start, gap.head_start + 1)
        for shard in self._ordered:
            if self.best is not None and len(chosen) + 1 >= len(self.best):
                return
            if intersect(corner, shard) is None:
                continue
            if self.best is not None:
                self._num_steps += 1
                if self._num_steps > MAX_STEPS:
                    return
            self._descend([*chosen, shard])


def _corner(shard: Shard) -> tuple[int, int, int, int]:
    return shard.layer_start, shard.head_start, shard.layer_end, shard.head_end
