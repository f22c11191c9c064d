"""Round weights so that products of the inputs of a text change least, as GPTQ does: what rounding a column
changes is taken up by the columns that are not rounded yet."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from workers.quantizer.code_descent import descended
from workers.quantizer.code_grid import CodeGrid, nearest_code
from workers.quantizer.rounding import Rounded, best_grid, joined, stored_codes
from workers.quantizer.target import QuantizationTarget

# Columns whose changes reach the later ones together.
_BLOCK = 128
# Is added to the diagonal, as a part of its mean.
_DAMPING = 0.01
# Of one piece of the outputs, as 32-bit floats.
_PIECE_BYTES = 64 << 20
# Inputs whose rows of the sums are computed together: of those below the diagonal, which are the same as
# those above, few are.
_SUM_INPUTS = 256


class _Factors(NamedTuple):
    """The order in which columns are rounded, those of large inputs first, and the upper Cholesky factor of
    the inverse of x xT in this order."""

    order: Tensor
    upper: Tensor


class InputProducts:
    """Sums up x xT of the inputs x of a product, float32 [num_inputs, num_inputs]."""

    def __init__(self, num_inputs: int) -> None:
        self._upper = torch.zeros(num_inputs, num_inputs)

    def add(self, inputs: Tensor) -> None:
        """Add the inputs of some tokens, [num_tokens, num_inputs]."""
        wide = inputs.float()
        for begin in range(0, wide.shape[1], _SUM_INPUTS):
            block = wide[:, begin : begin + _SUM_INPUTS]
            self._upper[begin : begin + _SUM_INPUTS, begin:].addmm_(block.t(), wide[:, begin:])

    @functools.cached_property
    def total(self) -> Tensor:
        """The sums, to which nothing is added any more."""
        with torch.inference_mode():
            upper = self._upper.triu_()
            return upper.add_(upper.triu(1).t())

    @functools.cached_property
    def damped(self) -> Tensor:
        """The sums with something on the diagonal, so that inputs that are always zero have some, too."""
        damped, mean = self.total.clone(), float(self.total.diagonal().double().mean())
        damped.diagonal().add_(_DAMPING * mean or 1.0)
        return damped

    @functools.cached_property
    def factors(self) -> _Factors:
        """The factors of these sums: products with the same inputs share them."""
        order = self.total.diagonal().argsort(descending=True, stable=True)
        return _Factors(order, _upper_of_inverse(self.damped[order][:, order].double()).float())

    def solved(self, products: Tensor) -> Tensor:
        """Return the float32 matrix [num_rows, num_inputs] whose products with these sums are `products`."""
        order, upper = self.factors
        ordered = products[:, order] @ upper.t() @ upper
        return torch.empty_like(ordered).index_copy_(1, order, ordered)


def gptq_rounded(
    weight: Tensor, inputs: InputProducts, target: QuantizationTarget, dtype: torch.dtype
) -> Rounded:
    """Round a weight [num_outputs, num_inputs]. Scales are those of the groups before anything is rounded,
    where large inputs count more; those of 4 bits, and the codes of 4 bits and of FP8, are then chosen again.
    The squares that are returned are of the products with the inputs rather than of the weights."""
    pieces = torch.split(weight, max(1, _PIECE_BYTES // (4 * weight.shape[1])))
    return joined([_rounded(rows.float(), inputs, target, dtype) for rows in pieces])


def _rounded(
    weight: Tensor, inputs: InputProducts, target: QuantizationTarget, dtype: torch.dtype
) -> Rounded:
    (num_outputs, num_inputs), total = weight.shape, inputs.total
    num_groups = target.num_groups(num_inputs)
    importance = total.diagonal().view(num_groups, -1)
    grid = best_grid(weight.view(num_outputs, num_groups, -1), target, dtype, importance)
    codes = _gptq_codes(weight, grid, inputs, target)
    if target.num_bits == 4 or target.is_float:
        codes, grid = descended(weight, codes, grid, inputs.damped, target)
    error = grid.values(codes.view(num_outputs, num_groups, -1)).view(num_outputs, -1).sub_(weight)
    errors = _of_products(error, total), _of_products(weight, total)
    return Rounded(stored_codes(codes, target), grid.scales, *errors, grid.zeros)


def _gptq_codes(weight: Tensor, grid: CodeGrid, inputs: InputProducts, target: QuantizationTarget) -> Tensor:
    """Return the codes, float32 [num_outputs, num_inputs]."""
    order, upper = inputs.factors
    num_inputs, num_groups = weight.shape[1], grid.scales.shape[1]
    # Columns as rows, whose values lie one after another.
    left = weight.t()[order].contiguous()
    codes, columns = torch.empty_like(left), _Columns.of(grid, order, num_inputs // num_groups)
    for begin in range(0, num_inputs, _BLOCK):
        held = slice(begin, min(begin + _BLOCK, num_inputs))
        changes = _round_block(left[held], upper[held, held], columns.part(held), codes[held], target)
        left[held.stop :].addmm_(upper[held, held.stop :].t(), changes, alpha=-1)
    return torch.empty_like(codes).index_copy_(0, order, codes).t().contiguous()


class _Columns(NamedTuple):
    """The grid of each column, in some order: scales and zero points, float32 [num_columns, num_outputs]."""

    steps: Tensor
    zeros: Tensor

    @staticmethod
    def of(grid: CodeGrid, order: Tensor, group: int) -> _Columns:
        steps = grid.scales.float().t()
        zeros = torch.zeros_like(steps) if grid.zeros is None else grid.zeros.float().t()
        groups = order // group
        return _Columns(steps[groups], zeros[groups])

    def part(self, held: slice) -> _Columns:
        return _Columns(self.steps[held], self.zeros[held])


def _round_block(
    left: Tensor, upper: Tensor, columns: _Columns, codes: Tensor, target: QuantizationTarget
) -> Tensor:
    """Round the columns `left` [num_columns, num_outputs] of a block, in place, into `codes`; return what
    they change of the later ones, in units of the rows of `upper`."""
    changes = torch.empty_like(left)
    for column, values in enumerate(left):
        step, zero = columns.steps[column], columns.zeros[column]
        code = nearest_code((values / step).add_(zero), target)
        codes[column] = code
        change = (values - (code - zero) * step) / upper[column, column]
        left[column:].addr_(upper[column, column:], change, alpha=-1)
        changes[column] = change
    return changes


def _upper_of_inverse(matrix: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a positive definite matrix. It is the inverse of the
    factor U of U UT, and this is the usual one with rows and columns in the opposite order."""
    lower = torch.linalg.cholesky(matrix.flip(0, 1))
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.flip(0, 1)


def _of_products(weight: Tensor, total: Tensor) -> float:
    """Return the sum of the squares of the products of a weight with all inputs."""
    return float(((weight @ total) * weight).double().sum())
