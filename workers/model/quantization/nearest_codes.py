"""Round groups of weights to the nearest codes, by scales that lose the least."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def nearest_codes(grouped: Tensor, scales: Tensor, largest: int) -> Tensor:
    """Return the codes, in float32, of `grouped` [..., group] by float32 `scales` [...]: the smallest is
    `-largest - 1`."""
    return (grouped / scales[..., None]).round_().clamp_(-largest - 1, largest)


def least_error_scales(
    grouped: Tensor,
    largest: int,
    divisors: Iterable[float],
    stored: Callable[[Tensor], Tensor],
    importance: Tensor | None = None,
) -> Tensor:
    """Return a float32 scale for each group of `grouped` float32 [num_outputs, num_groups, group]: of those
    that divide the value of the largest magnitude by one of the `divisors`, as they are `stored`, the one
    with the least square error, each input counting by its `importance` [num_groups, group]. A smaller scale
    is finer for the others, and clips the largest. Divisors below zero bring the largest to the codes below
    zero, of which there is one more: such a scale has the opposite sign."""
    extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)).squeeze(-1)
    found, least = torch.empty_like(extreme), torch.full_like(extreme, torch.inf)
    for divisor in divisors:
        scales = stored(extreme / divisor).float()
        squares = (nearest_codes(grouped, scales, largest) * scales[..., None]).sub_(grouped).square_()
        error = (squares if importance is None else squares.mul_(importance)).sum(-1)
        is_better = error < least
        found, least = torch.where(is_better, scales, found), torch.where(is_better, error, least)
    return found


def away_from_zero(values: Tensor, least: float) -> Tensor:
    """Return the values, whose magnitudes are `least` at the least."""
    return torch.where(values < 0, values.clamp(max=-least), values.clamp(min=least))
