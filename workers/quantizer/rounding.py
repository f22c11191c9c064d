"""Round weights to codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.model.quantization.nearest_codes import away_from_zero, least_error_scales
from workers.quantizer.code_grid import CodeGrid, least_error_grid
from workers.quantizer.target import QuantizationTarget

# By what the value of the largest magnitude in a group of codes of 4 bits may be divided for a scale. Mostly
# it becomes the code -8, of which there is no opposite.
_DIVISORS = (-7.5, -7.75, -8.0, -8.25, -8.5, -9.0, -9.5, -10.0, 7.0, 7.25, 7.5, 8.0)
_LEAST_SCALE = 1e-8
# Of one piece, as 32-bit floats.
_PIECE_BYTES = 64 << 20


class Rounded(NamedTuple):
    """A weight as `codes`, int8 or float8_e4m3fn [num_outputs, num_inputs], by the `scales` [num_outputs,
    num_groups] of its groups, and the sums of the squares of what rounding changed and of the weight. `zeros`
    int8 [num_outputs, num_groups] are the codes that mean zero; None: 0 does."""

    codes: Tensor
    scales: Tensor
    squared_error: float
    squared_weight: float
    zeros: Tensor | None = None

    def values(self) -> Tensor:
        """Return what the codes mean, float32 [num_outputs, num_inputs]."""
        grouped = self.codes.float().view(*self.scales.shape, -1)
        return CodeGrid(self.scales, self.zeros).values(grouped).view(self.codes.shape)


class Rounder(Protocol):
    """Rounds the weights of one layer after another."""

    def begin_layer(self, layer: int) -> None:
        """Prepare for the weights of a layer; layers are in order, but some may be left out."""

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        """Round a weight [num_outputs, num_inputs], the tensor `name` of the layer, with scales in
        `dtype`."""

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        """Return what is stored for a tensor of the layer that is not rounded, of its shape and dtype."""

    def follow(self, layer: int, values: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take over a layer that an earlier run has rounded, in place of `begin_layer`. `values` reads the
        values of its tensors, by their names in the model."""


class NearestRounder:
    """Rounds each weight to the nearest code."""

    def __init__(self, target: QuantizationTarget) -> None:
        self._target = target

    def begin_layer(self, layer: int) -> None:
        pass

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        step = max(1, _PIECE_BYTES // (4 * weight.shape[1]))
        pieces = [_nearest(rows.float(), self._target, dtype) for rows in torch.split(weight, step)]
        return joined(pieces)

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def follow(self, layer: int, values: Callable[[], Mapping[str, Tensor]]) -> None:
        pass


def joined(pieces: list[Rounded]) -> Rounded:
    """Return the weight whose outputs are those of the pieces, one after another."""
    zeros = [it.zeros for it in pieces if it.zeros is not None]
    return Rounded(
        torch.cat([it.codes for it in pieces]),
        torch.cat([it.scales for it in pieces]),
        sum(it.squared_error for it in pieces),
        sum(it.squared_weight for it in pieces),
        torch.cat(zeros) if zeros else None,
    )


def best_grid(
    grouped: Tensor, target: QuantizationTarget, dtype: torch.dtype, importance: Tensor | None = None
) -> CodeGrid:
    """Return the codes for each group of `grouped` float32 [num_outputs, num_groups, group], with scales in
    `dtype`: of 8 bits those that reach the largest magnitude, of 4 bits those with the least square error,
    each input counting by its `importance` [num_groups, group]."""
    if target.num_bits == 8:
        return CodeGrid(stored_scale(grouped.abs().amax(-1) / target.largest, dtype), None)

    def stored(scales: Tensor) -> Tensor:
        return stored_scale(scales, dtype)

    if target.is_asymmetric:
        return least_error_grid(grouped, target, stored, importance)
    scales = least_error_scales(grouped, target.largest, _DIVISORS, stored, importance)
    return CodeGrid(scales.to(dtype), None)


def _nearest(weight: Tensor, target: QuantizationTarget, dtype: torch.dtype) -> Rounded:
    num_outputs, num_inputs = weight.shape
    grouped = weight.view(num_outputs, target.num_groups(num_inputs), -1)
    grid = best_grid(grouped, target, dtype)
    codes = grid.nearest(grouped, target)
    error = grid.values(codes) - grouped
    found = stored_codes(codes.view(num_outputs, num_inputs), target)
    return Rounded(found, grid.scales, squared(error), squared(weight), grid.zeros)


def squared(values: Tensor) -> float:
    """Return the sum of the squares."""
    return float(values.double().square().sum())


def stored_codes(codes: Tensor, target: QuantizationTarget) -> Tensor:
    """Return codes in the dtype in which they are stored."""
    return codes.to(torch.float8_e4m3fn if target.is_float else torch.int8)


def stored_scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to the dtype in which they are stored, before codes are taken by them. They are never
    zero: float16 has numbers below the smallest normal one for them."""
    limits = torch.finfo(dtype)
    return away_from_zero(values, max(_LEAST_SCALE, limits.tiny * limits.eps)).to(dtype)
