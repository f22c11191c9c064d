"""Decide which parts of a stage's ranks hold copies of a layer's experts, from the loads of the experts.

An expert stays where its owner is, and each part has slots for copies of others. The tokens of an expert are
divided evenly among its holders, so that a copy takes load off all of them. The ranks of a stage wait for the
busiest part in every layer: its load is what copies lower.

In arrays, num_parts counts the parts of the ranks, each of which owns other experts. `is_held` [num_experts,
num_parts] says which part holds an expert, by itself or as a copy."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Differences below this share of the load of the mean part are rounding.
_ROUNDING = 1e-9
# What the last copies must bring together, as a share of the gain for which copies change.
_NEARLY = 0.2


class CopyRules(NamedTuple):
    """Configures when copies change: where that lowers the load of a layer's busiest part by `margin` times
    the load of its mean part, and by more than `num_deviations` standard deviations of what chance makes of
    it.

    A change copies the weights of an expert while all ranks of a stage wait, so at most `bytes_per_s` are
    copied, and after a pause at once those of `burst_s`, or of one expert."""

    margin: float = 0.1
    num_deviations: float = 3.0
    bytes_per_s: float = 64e6
    burst_s: float = 0.25


def part_loads(loads: NDArray[np.float64], is_held: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the load of each part, [num_parts], where experts have `loads` [num_experts]."""
    shares: NDArray[np.float64] = (loads / is_held.sum(1)) @ is_held
    return shares


def place_copies(
    loads: NDArray[np.float64],
    is_owned: NDArray[np.bool_],
    is_held: NDArray[np.bool_],
    num_slots: int,
    rules: CopyRules,
) -> NDArray[np.bool_]:
    """Return who shall hold each expert in place of `is_held`, in which each part has at most `num_slots`
    copies beside the experts that it owns.

    The busiest part never has more load than without copies. Loads that stay as they are change nothing after
    the first time: copies are added to those that are there, or all placed anew, only where that is worth
    it."""
    mean = loads.sum() / is_owned.shape[1]
    least_gain = rules.margin * mean + rules.num_deviations * math.sqrt(mean)
    extended = _improved(loads, is_owned, is_held, num_slots, least_gain)
    most = _most(loads, extended)
    is_harmful = most > _most(loads, is_owned)
    if most < mean + least_gain and not is_harmful:
        return extended
    renewed = _improved(loads, is_owned, is_owned, num_slots, least_gain)
    is_worth = is_harmful or _most(loads, renewed) <= most - least_gain
    return renewed if is_worth else extended


def _most(loads: NDArray[np.float64], is_held: NDArray[np.bool_]) -> float:
    return float(part_loads(loads, is_held).max())


def _improved(
    loads: NDArray[np.float64],
    is_owned: NDArray[np.bool_],
    is_held: NDArray[np.bool_],
    num_slots: int,
    least_gain: float,
) -> NDArray[np.bool_]:
    """Add copies one by one. Return the placement of the fewest copies whose busiest part has nearly as
    little load as can be had in this way, or `is_held` if none is better by `least_gain`."""
    most = [_most(loads, is_held)]
    if most[0] < loads.sum() / is_owned.shape[1] + least_gain:
        return is_held  # as most layers do: not even equal loads would be worth it
    placements = [is_held]
    added = is_held.copy()
    while _add_copy(loads, added, (added & ~is_owned).sum(0) < num_slots):
        most.append(_most(loads, added))
        placements.append(added.copy())
    if min(most) > most[0] - least_gain:
        return is_held
    enough = min(most[0] - least_gain, min(most) + _NEARLY * least_gain)
    return next(it for it, of_it in zip(placements, most, strict=True) if of_it <= enough)


def _add_copy(loads: NDArray[np.float64], is_held: NDArray[np.bool_], has_slot: NDArray[np.bool_]) -> bool:
    """Add, in place, the copy of an expert of the busiest part that leaves the larger of two loads, of this
    part and of the one that gets the copy, as low as can be. Returns whether that lowers it."""
    of_parts = part_loads(loads, is_held)
    busiest = int(of_parts.argmax())
    num_holders = is_held.sum(1)
    shares = loads / (num_holders + 1)
    # [num_experts, num_parts]: the load of the part that gets the copy, and of the busiest one.
    target = of_parts + shares[:, None]
    left = of_parts[busiest] - loads / num_holders + shares
    after = np.maximum(target, left[:, None])
    after[~(is_held[:, busiest, None] & ~is_held & has_slot)] = np.inf
    expert, part = np.unravel_index(int(after.argmin()), after.shape)
    if not after[expert, part] < of_parts[busiest] - _ROUNDING * of_parts.mean():
        return False
    is_held[expert, part] = True
    return True
