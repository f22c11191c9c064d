"""What the codes of each group of weights mean, with a code for zero of its own where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.quantizer.target import QuantizationTarget

# By how many steps the values of a group may be apart: fewer than there are clip the ends.
_NUM_STEPS = (11.0, 12.0, 13.0, 13.5, 14.0, 14.5, 15.0, 15.5)
# Zero points that are tried, as distances from the one that fits the smallest value.
_SHIFTS = (0.0, -1.0, 1.0)


class CodeGrid(NamedTuple):
    """The meaning of the codes of each group, `(code - zero) * scale`: `scales` [num_outputs, num_groups] as
    they are stored, and `zeros` int8 of this shape; None: all are 0."""

    scales: Tensor
    zeros: Tensor | None

    def nearest(self, grouped: Tensor, target: QuantizationTarget) -> Tensor:
        """Return the codes, in float32, of `grouped` [num_outputs, num_groups, group]."""
        steps = grouped / self.scales.float()[..., None]
        return nearest_code(steps if self.zeros is None else steps.add_(self.zeros[..., None]), target)

    def values(self, codes: Tensor) -> Tensor:
        """Return what codes mean, float32 [num_outputs, num_groups, group]."""
        steps = codes if self.zeros is None else codes - self.zeros[..., None]
        return steps * self.scales.float()[..., None]


def nearest_code(steps: Tensor, target: QuantizationTarget) -> Tensor:
    """Round float32 numbers of steps, in place, to the nearest codes of the target."""
    if target.is_float:
        return steps.copy_(steps.clamp_(-target.largest, target.largest).to(torch.float8_e4m3fn))
    return steps.round_().clamp_(-target.largest - 1, target.largest)


def least_error_grid(
    grouped: Tensor,
    target: QuantizationTarget,
    stored: Callable[[Tensor], Tensor],
    importance: Tensor | None = None,
) -> CodeGrid:
    """Return the grid with zero points that has the least square error for float32 `grouped` [num_outputs,
    num_groups, group], each input counting by its `importance` [num_groups, group]; scales are as they are
    `stored`. A group always has zero in its range."""
    low, high, largest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0), target.largest
    least = torch.full_like(low, torch.inf)
    scales, zeros = stored(torch.empty_like(low)), torch.empty_like(low, dtype=torch.int8)
    for num_steps in _NUM_STEPS:
        found = stored((high - low) / num_steps)
        # The code of the smallest value is the smallest one.
        first = (-low / found.float()).round_() - largest - 1
        for shift in _SHIFTS:
            shifted = (first + shift).clamp_(-largest - 1, largest).to(torch.int8)
            grid = CodeGrid(found, shifted)
            squares = grid.values(grid.nearest(grouped, target)).sub_(grouped).square_()
            error = (squares if importance is None else squares.mul_(importance)).sum(-1)
            is_better = error < least
            least = torch.where(is_better, error, least)
            scales, zeros = torch.where(is_better, found, scales), torch.where(is_better, shifted, zeros)
    return CodeGrid(scales, zeros)
