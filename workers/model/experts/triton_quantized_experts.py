"""A layer's experts with quantized weights on CUDA, by Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.cuda import experts as kernels
from workers.model.cuda import quantized_expert_product as products
from workers.model.cuda.quantized_product import ProductTile, product_tile
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.routing import Routing
from workers.model.experts.stack_weights import stack_weights
from workers.model.experts.triton_experts import SortedExperts
from workers.model.quantization.device_weight import DeviceWeight

# Rows of an expert for each of which there is a tile: few, some and many.
_ROWS_OF_TILES = (1, 64, 128)
# The most rows of a tile of few rows; those of few rows are sorted by programs that read less at a time.
_FEW_ROWS, _FEW_CHUNK, _MANY_CHUNK = 16, 512, 2048


class TritonQuantizedExperts(SortedExperts):
    """Experts whose codes lie on the device in two stacks, of [num_experts, 2 * size, hidden_size], or half
    as many outputs without gates, and of [num_experts, hidden_size, size] weights. No input is rounded,
    whatever the checkpoint says."""

    def __init__(
        self,
        gate_up: DeviceWeight,
        down: DeviceWeight,
        weights: QuantizedExpertWeights,
        *,
        is_deterministic: bool = False,
    ) -> None:
        """Take the stacks of `weights`. `is_deterministic`: use one tile for every number of rows."""
        self._gate_up, self._down, self._is_fixed = gate_up, down, is_deterministic
        self.num_experts, self.hidden_size = len(down.packed), down.num_outputs
        bias, self._down_bias = (
            None if it is None else it.contiguous() for it in (weights.gate_up_bias, weights.down_bias)
        )
        self._gate = kernels.GateEpilogue(weights.activation, weights.clamp, bias)
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=down.packed.device)
        self._compile_tiles(weights.dtype)
        self.counts.zero_()

    def _results(self, x: Tensor, routing: Routing) -> tuple[kernels.SortedRows, Tensor]:
        return self._tiled(x, routing, -(-routing.experts.numel() // self.num_experts))

    def _tiled(self, x: Tensor, routing: Routing, num_rows: int) -> tuple[kernels.SortedRows, Tensor]:
        """Compute the results by the tile for so many rows of an expert on average; those of many rows, which
        would need as much memory again, in the dtype of x."""
        of_gate_up, of_down = (self._tile(x.dtype, it, num_rows) for it in (self._gate_up, self._down))
        is_few = of_down.rows <= _FEW_ROWS
        chunk = _FEW_CHUNK if is_few else _MANY_CHUNK
        order = kernels.sort_rows(routing.experts, self.counts, of_down.rows, chunk)
        num_chosen = routing.experts.shape[1]
        activated = products.multiply_gate_up(x, self._gate_up, self._gate, order, num_chosen, of_gate_up)
        dtype = torch.float32 if is_few else x.dtype
        return order, products.multiply_down(activated, self._down, order, of_down, dtype)

    def _tile(self, dtype: torch.dtype, weight: DeviceWeight, num_rows: int) -> ProductTile:
        return product_tile(num_rows, dtype, weight.group, is_fixed=self._is_fixed)

    def _compile_tiles(self, dtype: torch.dtype) -> None:
        """Compile the kernels of all tiles for one token: a chunk of another length than those of the warm-up
        shall find them compiled."""
        x = self.counts.new_zeros(1, self.hidden_size, dtype=dtype)
        routing = Routing(x.new_zeros(1, 1, dtype=torch.int32), x.new_ones(1, 1, dtype=torch.float32))
        tiles = {self._tile(dtype, self._down, num_rows): num_rows for num_rows in _ROWS_OF_TILES}
        for num_rows in tiles.values():
            self._tiled(x, routing, num_rows)


def triton_quantized_experts(
    weights: QuantizedExpertWeights, *, is_deterministic: bool = False
) -> TritonQuantizedExperts | None:
    """Return the experts by the kernels; None where those of a layer have several forms."""
    gate_up = stack_weights([part for part in (weights.gates, weights.ups) if part])
    down = None if gate_up is None else stack_weights((weights.downs,))
    if gate_up is None or down is None:
        return None
    return TritonQuantizedExperts(gate_up, down, weights, is_deterministic=is_deterministic)
