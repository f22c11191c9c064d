"""Choose codes and scales again, one after another with all others as they are, so that products of the
inputs of a text change less. GPTQ, where they come from, chooses each code once, before it knows the later
ones."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.quantizer.code_grid import CodeGrid, nearest_code
from workers.quantizer.rounding import stored_scale
from workers.quantizer.target import QuantizationTarget

_NUM_SWEEPS = 3
# Columns of a group that are changed before the later ones see it.
_BLOCK = 128
# A scale becomes so much smaller in one step at most.
_LEAST_RATIO = 0.5


def descended(
    weight: Tensor, codes: Tensor, grid: CodeGrid, total: Tensor, target: QuantizationTarget
) -> tuple[Tensor, CodeGrid]:
    """Return better codes and grid for a float32 weight [num_outputs, num_inputs] than `codes`, float32 of
    this shape. `total` [num_inputs, num_inputs] is the sum of x xT over the inputs x, with what is added to
    its diagonal. Scales change only where a group is within a block of columns."""
    found = _Descent(weight, codes, grid, total, target)
    for _ in range(_NUM_SWEEPS):
        found.sweep()
    return found.codes.t().contiguous(), found.grid


class _Descent:
    """The state of a search. Columns of the weight are rows here, whose values lie one after another."""

    def __init__(
        self, weight: Tensor, codes: Tensor, grid: CodeGrid, total: Tensor, target: QuantizationTarget
    ) -> None:
        self._weight, self.codes = weight.t().contiguous(), codes.t().contiguous()
        self._total, self._target, self._dtype = total, target, grid.scales.dtype
        self._steps = grid.scales.float().t().contiguous()
        self._zeros = grid.zeros
        self._group = len(self._weight) // len(self._steps)

    @property
    def grid(self) -> CodeGrid:
        """What the codes mean."""
        return CodeGrid(self._steps.t().contiguous().to(self._dtype), self._zeros)

    def sweep(self) -> None:
        """Go over all columns, and over the scales of their groups."""
        num_groups, group_size = len(self._steps), self._group
        values = torch.cat([self._values_of(group) for group in range(num_groups)])
        gradient = self._total @ (values - self._weight)
        for group in range(num_groups):
            first, last = group * group_size, (group + 1) * group_size
            for begin in range(first, last, _BLOCK):
                held = slice(begin, min(begin + _BLOCK, last))
                before, local = values[held].clone(), gradient[held].clone()
                self._choose_codes(held, group, values[held], local)
                if held == slice(first, last):
                    self._choose_scale(held, group, values[held], local)
                gradient.addmm_(self._total[:, held], values[held] - before)

    def _choose_codes(self, held: slice, group: int, values: Tensor, gradient: Tensor) -> None:
        """Choose the codes of the columns `held`, whose `values` and `gradient` [num_columns, num_outputs]
        are kept up to date."""
        total, step, zero = self._total[held, held], self._steps[group], self._zero_of(group)
        for column, now in enumerate(values):
            wanted = (now - gradient[column] / total[column, column]).div_(step).add_(zero)
            code = nearest_code(wanted, self._target)
            change = ((code - zero) * step).sub_(now)
            self.codes[held.start + column] = code
            now.add_(change)
            gradient.addr_(total[:, column], change)

    def _choose_scale(self, held: slice, group: int, values: Tensor, gradient: Tensor) -> None:
        """Choose the scale of a group, whose codes stay: that at which the gradient along it is zero."""
        codes, step = self.codes[held] - self._zero_of(group), self._steps[group]
        of_group = (codes * (self._total[held, held] @ codes)).sum(0)
        change = (codes * gradient).sum(0).div_(of_group).nan_to_num_(0.0, 0.0, 0.0)
        found = stored_scale(step - change, self._dtype).float()
        is_near = found / step > _LEAST_RATIO
        self._steps[group] = torch.where(is_near, found, step)
        values.copy_(codes * self._steps[group])

    def _values_of(self, group: int) -> Tensor:
        codes = self.codes[group * self._group : (group + 1) * self._group]
        return (codes - self._zero_of(group)) * self._steps[group]

    def _zero_of(self, group: int) -> Tensor | float:
        return 0.0 if self._zeros is None else self._zeros[:, group].float()
