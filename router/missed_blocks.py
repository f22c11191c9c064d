"""Say of each block of a prompt that had to be computed why it was not cached where the prompt went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from router.block_history import BlockHistory, RemovalCause
from router.messages import BlockPlace, MissedBlocks
from router.radix import PrefixTree

# Blocks of a prompt that are looked up; those behind have the fate of the last.
MAX_LOOKED_UP = 2048
# Runs of blocks that are told apart; those behind go into the last.
MAX_RUNS = 32
# Places that are named for a block.
MAX_PLACES = 4
# Behind so many blocks that nobody remembers no other is looked up: a block is stored after those before it.
_ENOUGH_UNSEEN = 8


class Misses(NamedTuple):
    """The missed blocks of a prompt, in order, and how many of its leading blocks anybody ever had."""

    runs: tuple[MissedBlocks, ...]
    num_achievable: int


def find_misses(
    tree: PrefixTree,
    history: BlockHistory,
    compute_id: str,
    keys: Sequence[bytes],
    num_cached: int,
    now: float,
) -> Misses:
    """Find the fates of the prompt's blocks behind the first `num_cached`, which the replica that computes
    the prompt has. Blocks that are only expected there, because this prompt was placed, do not count."""
    runs: list[MissedBlocks] = []
    fate: _Fate | None = None
    first, num_achievable, num_unseen = num_cached, num_cached, 0
    least_age_s, most_age_s = math.inf, 0.0
    fates = _Fates(tree, history, compute_id)
    for index in range(num_cached, min(len(keys), num_cached + MAX_LOOKED_UP)):
        found, removed_at = fates.of(keys[index])
        num_unseen = num_unseen + 1 if found is _NEW else 0
        if not num_unseen:
            num_achievable = index + 1
        if found is not fate:
            if fate is not None and len(runs) + 1 < MAX_RUNS:
                runs.append(fate.run(first, index, least_age_s, most_age_s))
                fate, first = found, index
                least_age_s, most_age_s = math.inf, 0.0
            fate = fate or found
        if removed_at:
            age_s = max(0.0, now - removed_at)
            least_age_s, most_age_s = min(least_age_s, age_s), max(most_age_s, age_s)
        if num_unseen == _ENOUGH_UNSEEN:
            break
    if fate is not None:
        runs.append(fate.run(first, len(keys), least_age_s, most_age_s))
    return Misses(tuple(runs), num_achievable)


class _Fate(NamedTuple):
    """What blocks of one run have in common."""

    fate: str
    places: tuple[BlockPlace, ...] = ()
    reason: str = ""

    def run(self, first: int, end: int, least_age_s: float, most_age_s: float) -> MissedBlocks:
        """Return the blocks from `first` up to `end`."""
        least_age_s = 0.0 if math.isinf(least_age_s) else least_age_s
        return MissedBlocks(first, end - first, *self, least_age_s, most_age_s)


_NEW, _FORGOTTEN, _UNUSABLE = _Fate("new"), _Fate("forgotten"), _Fate("unusable")


class _Fates:
    """The fates of blocks, as of now. Equal fates are one object, made when it is first needed: most blocks
    have that of the block before."""

    def __init__(self, tree: PrefixTree, history: BlockHistory, compute_id: str) -> None:
        self._tree = tree
        self._history = history
        self._compute_id = compute_id
        self._by_places: dict[tuple[int, int], _Fate] = {}
        self._by_cause: dict[RemovalCause, _Fate] = {}

    def of(self, key: bytes) -> tuple[_Fate, float]:
        """Return the fate of a block, and when it was removed; 0: it was not."""
        if self._tree.reports(self._compute_id, key):
            return _UNUSABLE, 0.0
        state = self._tree.places_state(key, self._compute_id)
        if state[0]:
            if state not in self._by_places:
                self._by_places[state] = _by_place(self._tree.places(key, self._compute_id))
            return self._by_places[state], 0.0
        found, left = self._history.last_removal(key), self._tree.left_with(key)
        if found is None or (left is not None and left.at >= found.at):
            found = left
        if found is None:
            return (_FORGOTTEN if self._history.was_seen(key) else _NEW), 0.0
        if found.cause not in self._by_cause:
            replica_id, tier, reason = found.cause
            self._by_cause[found.cause] = _Fate("removed", (BlockPlace(replica_id, tier),), reason)
        return self._by_cause[found.cause], found.at


def _by_place(places: Sequence[BlockPlace]) -> _Fate:
    is_expected = all(it.is_expected for it in places)
    return _Fate("expected" if is_expected else "elsewhere", tuple(places[:MAX_PLACES]))
