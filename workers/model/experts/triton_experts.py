"""A layer's experts on CUDA: by Triton, and of many rows by grouped products of torch."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.cuda import experts as kernels
from workers.model.experts.expert_products import (
    CopyableExperts,
    CountingExperts,
    ExpertRows,
    ExpertWeights,
    ReadableExperts,
    ReplaceableExperts,
)
from workers.model.experts.routing import Routing

# The most rows that an expert has on average where the tile of few rows is taken, and the fewest where
# grouped products are: arithmetic limits them, rather than reading weights, from about 300 rows on.
_FEW_ROWS, _GROUPED_ROWS = 16, 128
# What grouped products ask for where they take their end of rows from the device: bytes by which rows are
# aligned, the most experts, and the major versions of devices' capabilities.
_ALIGNMENT, _MOST_GROUPS, _CAPABILITIES = 16, 1024, (9, 10)


class SortedExperts(CountingExperts):
    """Experts that compute rows which are sorted by expert on the device. Nothing of a step is left to the
    host."""

    _down_bias: Tensor | None

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        out = torch.empty_like(x)
        self._compute(x, routing, out, is_added=False)
        return out

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        self._compute(x, routing, hidden, is_added=True)

    def _compute(self, x: Tensor, routing: Routing, out: Tensor, *, is_added: bool) -> None:
        if not routing.experts.numel():
            return
        routing = Routing(*(it.contiguous() for it in routing))
        order, results = self._results(x, routing)
        kernels.add_results(results, order, routing, self._down_bias, out, is_added=is_added)

    @abstractmethod
    def _results(self, x: Tensor, routing: Routing) -> tuple[kernels.SortedRows, Tensor]:
        """Sort the rows, and return their order and their results [num_pairs, hidden_size], without weights
        of the router and biases of downs."""


class TritonExperts(SortedExperts, ReadableExperts, ReplaceableExperts, CopyableExperts):
    """Experts whose weights lie on the device in two tensors, [num_experts, 2 * size, hidden_size], or
    [num_experts, size, hidden_size] without gates, and [num_experts, hidden_size, size]."""

    def __init__(self, weights: ExpertWeights, *, is_deterministic: bool = False) -> None:
        """Copy the weights. `is_deterministic`: use one tile for every number of rows, and nothing else."""
        self._gate_up, self._down = _stacked(weights)
        dtype = self._down.dtype
        self.num_experts, self.hidden_size, _ = self._down.shape
        bias, self._down_bias = (
            None if it is None else it.contiguous() for it in (weights.gate_up_bias, weights.down_bias)
        )
        self._gate = kernels.GateEpilogue(weights.activation, weights.clamp, bias)
        self._many_tile = kernels.many_rows_tile(dtype)
        self._few_tile = self._many_tile if is_deterministic else kernels.few_rows_tile(dtype)
        self._has_grouped = not is_deterministic and _serves_grouped(self._gate_up, self._down.shape[2])
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=self._down.device)
        self._compile_tiles()
        self.counts.zero_()

    def rows(self, expert: int) -> ExpertRows:
        biases = (self._gate.bias, self._down_bias)
        return ExpertRows(
            self._gate_up[expert], self._down[expert], *(None if it is None else it[expert] for it in biases)
        )

    def replace(self, expert: int, rows: ExpertRows) -> None:
        for own, new in zip(self.rows(expert), rows, strict=True):
            if own is not None:
                assert new is not None
                own.copy_(new, non_blocking=True)

    def memory(self, expert: int) -> list[Tensor]:
        return [it for it in self.rows(expert) if it is not None]

    def _results(self, x: Tensor, routing: Routing) -> tuple[kernels.SortedRows, Tensor]:
        num_pairs = routing.experts.numel()
        tile = self._few_tile if num_pairs <= _FEW_ROWS * self.num_experts else self._many_tile
        order = kernels.sort_rows(routing.experts, self.counts, tile.rows, tile.chunk)
        if self._has_grouped and num_pairs >= _GROUPED_ROWS * self.num_experts:
            return order, self._grouped(x, routing, order)
        return order, self._tiled(x, routing, order, tile)

    def _tiled(
        self, x: Tensor, routing: Routing, order: kernels.SortedRows, tile: kernels.ExpertTile
    ) -> Tensor:
        """Return the results of the rows [num_pairs, hidden_size] by the kernels; those of many rows, which
        would need as much memory again, in the dtype of x."""
        num_chosen = routing.experts.shape[1]
        dtype = x.dtype if tile == self._many_tile else torch.float32
        activated = kernels.multiply_gate_up(x, self._gate_up, self._gate, order, num_chosen, tile)
        return kernels.multiply_down(activated, self._down, order, tile, dtype)

    def _grouped(self, x: Tensor, routing: Routing, order: kernels.SortedRows) -> Tensor:
        """Return the results of the rows [num_pairs, hidden_size] by grouped products, in the dtype of x."""
        rows = x.index_select(0, order.pairs // routing.experts.shape[1])
        gate_up = F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=order.ends)
        del rows  # is as large as what follows
        activated = kernels.activate(gate_up, self._gate, order, routing.experts)
        del gate_up
        return F.grouped_mm(activated, self._down.transpose(1, 2), offs=order.ends)

    def _compile_tiles(self) -> None:
        """Compile the kernels of both tiles for one token: a chunk of another length than those of the
        warm-up shall find them compiled."""
        x = self._down.new_zeros(1, self.hidden_size)
        routing = Routing(x.new_zeros(1, 1, dtype=torch.int32), x.new_ones(1, 1, dtype=torch.float32))
        for tile in {self._few_tile, self._many_tile}:
            order = kernels.sort_rows(routing.experts, self.counts, tile.rows, tile.chunk)
            self._tiled(x, routing, order, tile)
        if self._has_grouped:
            self._grouped(x, routing, order)


def _stacked(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Copy the weights of gates and ups, and of downs, one expert at a time: they may be read only then."""
    first, num_experts = weights.ups[0], len(weights.ups)
    size, hidden_size = first.shape
    num_gates = size if weights.gates else 0
    gate_up = first.new_empty(num_experts, num_gates + size, hidden_size)
    down = first.new_empty(num_experts, hidden_size, size)
    for expert in range(num_experts):
        if weights.gates:
            gate_up[expert, :size] = weights.gates[expert]
        gate_up[expert, num_gates:] = weights.ups[expert]
        down[expert] = weights.downs[expert]
    return gate_up, down


def _serves_grouped(gate_up: Tensor, size: int) -> bool:
    """Whether grouped products multiply these weights without a look at the ends of rows from the host."""
    num_experts, _, hidden_size = gate_up.shape
    is_aligned = all(columns * gate_up.itemsize % _ALIGNMENT == 0 for columns in (hidden_size, size))
    if not is_aligned or num_experts > _MOST_GROUPS or gate_up.dtype != torch.bfloat16:
        return False
    return not gate_up.is_cuda or torch.cuda.get_device_capability(gate_up.device)[0] in _CAPABILITIES
