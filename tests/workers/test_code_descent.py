"""Codes and scales that are chosen again: every sweep changes the products of the inputs less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.quantizer import code_descent
from workers.quantizer.code_descent import descended
from workers.quantizer.code_grid import CodeGrid
from workers.quantizer.rounding import best_grid
from workers.quantizer.target import QuantizationTarget

TARGETS = [
    QuantizationTarget.of("int4", 16),
    QuantizationTarget.of("int4", 16, is_asymmetric=True),
    QuantizationTarget.of("int4", 192),  # of more columns than a block
    QuantizationTarget.of("fp8"),
]


def _drawn(seed: int, num_outputs: int = 12, num_inputs: int = 192) -> tuple[Tensor, Tensor]:
    """Draw a weight, and the sums of x xT of inputs that depend on each other."""
    drawn = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=drawn) + 0.3
    mixed = torch.randn(num_inputs, num_inputs, generator=drawn)
    inputs = torch.randn(400, num_inputs, generator=drawn) @ mixed
    return weight, inputs.t() @ inputs


def _values(codes: Tensor, grid: CodeGrid) -> Tensor:
    """Return the values by arithmetic of each element, in float64."""
    group = codes.shape[1] // grid.scales.shape[1]
    zeros = torch.zeros_like(grid.scales) if grid.zeros is None else grid.zeros
    of_columns = (it.double().repeat_interleave(group, 1) for it in (grid.scales, zeros))
    scales, offsets = of_columns
    return (codes.double() - offsets) * scales


def _error(weight: Tensor, codes: Tensor, grid: CodeGrid, total: Tensor) -> float:
    error = _values(codes, grid) - weight.double()
    return float(((error @ total.double()) * error).sum())


@pytest.mark.parametrize("target", TARGETS, ids=lambda it: f"{it.name} {it.group} {it.is_asymmetric}")
def test_each_sweep_loses_less(target: QuantizationTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, total = _drawn(1)
    grouped = weight.view(len(weight), target.num_groups(weight.shape[1]), -1)
    grid = best_grid(grouped, target, torch.bfloat16)
    codes = grid.nearest(grouped, target).view(weight.shape)
    errors = [_error(weight, codes, grid, total)]
    for num_sweeps in (1, 2, 4):
        monkeypatch.setattr(code_descent, "_NUM_SWEEPS", num_sweeps)
        found, new = descended(weight, codes, grid, total, target)
        errors.append(_error(weight, found, new, total))
        assert new.scales.dtype == torch.bfloat16
        assert float(found.abs().max()) <= target.largest + 1
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < errors[1]
    assert errors[3] <= errors[2] * 1.001  # scales are rounded to bfloat16


def test_no_single_code_can_be_chosen_better() -> None:
    """At the end, with scales that stay."""
    weight, total = _drawn(2, 3, 64)
    target = QuantizationTarget.of("int8")  # one scale for more than a block stays as it is
    grid = CodeGrid(torch.full((3, 1), 0.4), None)
    codes = grid.nearest(weight.view(3, 1, -1), target).view(weight.shape)
    for _ in range(10):
        codes, _ = descended(weight, codes, CodeGrid(grid.scales, None), total, target)
    least = _error(weight, codes, grid, total)
    for column in range(64):
        for change in (-1, 1):
            other = codes.clone()
            other[:, column] += change
            assert _error(weight, other, grid, total) >= least * (1 - 1e-5)
