"""Normalize what the heads of a layer give, group by group, after a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native
from workers.model.sizes import kv_heads
from workers.model.state.native_mamba2 import GroupNormArguments, gate_and_square, scale_groups


class NormGroups(NamedTuple):
    """The groups of columns that are normalized together, `num_groups` of `size` columns each, and where each
    of them that a rank has columns of ends there; `first` is the number of the first."""

    num_groups: int
    size: int
    first: int
    widths: tuple[int, ...]
    num_parts: int

    @staticmethod
    def of(num_columns: int, num_groups: int, held: range, num_parts: int) -> NormGroups:
        """Return the groups of the columns of these of `num_parts` parts."""
        size, part = num_columns // num_groups, num_columns // num_parts
        start, stop = held.start * part, held.stop * part
        groups = range(start // size, -(-stop // size))
        widths = tuple(min(stop, (it + 1) * size) - max(start, it * size) for it in groups)
        return NormGroups(num_groups, size, groups.start, widths, num_parts)

    def are_cut_by(self, tp: int) -> bool:
        """Whether some of so many ranks have a part of a group."""
        starts = (kv_heads(self.num_parts, rank, tp).start for rank in range(tp))
        return any(start * self.num_groups % self.num_parts for start in starts)


class GatedNorm:
    """An RMS norm of each group of columns of x * silu(gate), in float32, times a weight."""

    def __init__(self, weight: Tensor, eps: float, groups: NormGroups) -> None:
        """`weight` float32 [num_columns] of the rank."""
        self._weight, self._eps, self._groups = weight, eps, groups
        self._widths = torch.tensor(groups.widths)
        starts = self._widths.cumsum(0) - self._widths
        # The first column of each group and its width, on the device.
        self._places = starts.int().to(weight.device), self._widths.int().to(weight.device)
        self._all_reduce: Callable[[Tensor], None] | None = None

    @property
    def num_summed(self) -> int:
        """The columns of what ranks add up for each token; 0: nothing."""
        return 0 if self._all_reduce is None else self._groups.num_groups

    def join(self, all_reduce: Callable[[Tensor], None], tp: int) -> None:
        """Add up squares over `tp` ranks, where some of these have a part of a group."""
        if self._groups.are_cut_by(tp):
            self._all_reduce = all_reduce

    def packed(self) -> GroupNormArguments | None:
        """Return what the CPU kernels take of the norm, which hold while this object lives; None where ranks
        compute it together."""
        if self._all_reduce is not None:
            return None
        return GroupNormArguments.of(self._weight, self._widths, self._groups.size, self._eps)

    def normalize(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize float32 x [num_tokens, num_columns], which is overwritten. Returns the result in the
        dtype of `gate`, of the same shape."""
        if cuda.serves(x.device):
            return self._by_triton(x, gate)
        kernels = native.load() if native.serves(gate.device, gate.dtype) else None
        if kernels is not None:
            squares = self._summed(gate_and_square(kernels, x, gate, self._widths))
            sizes = self._groups.size, self._eps
            return scale_groups(kernels, x, self._weight, squares, sizes, self._widths, gate.dtype)
        x = x.mul_(F.silu(gate.float()))
        parts = torch.split(x, list(self._groups.widths), 1)
        squares = self._summed(torch.stack([part.square().sum(1) for part in parts], 1))
        factors = torch.rsqrt(squares / self._groups.size + self._eps)
        for part, factor in zip(parts, factors.unbind(1), strict=True):
            part *= factor[:, None]
        return x.mul_(self._weight).to(gate.dtype)

    def _by_triton(self, x: Tensor, gate: Tensor) -> Tensor:
        from workers.model.cuda import mamba2_scan_kernels as kernels

        most, (starts, widths) = max(self._groups.widths), self._places
        squares = self._summed(kernels.gate_and_square(x, gate, starts, widths, most))
        out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
        sizes = most, self._groups.size, self._eps
        return kernels.scale_groups(x, self._weight, squares, starts, widths, sizes, out)

    def _summed(self, own: Tensor) -> Tensor:
        """Add up the sums of squares of each of the rank's groups, [num_tokens, num_own_groups], with those
        of other ranks that have columns of the groups."""
        if self._all_reduce is None:
            return own
        held = slice(self._groups.first, self._groups.first + own.shape[1])
        of_all = own.new_zeros(len(own), self._groups.num_groups)
        of_all[:, held] = own
        self._all_reduce(of_all)
        return of_all[:, held].contiguous()
