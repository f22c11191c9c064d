"""Experts with quantized weights, each of which is two products like those of other feed-forwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.experts.expert_products import Experts, gated
from workers.model.experts.mixture_shape import DEFAULT_CLAMP, Clamp, ExpertActivation
from workers.model.experts.routing import Routing
from workers.model.make_linear import make_linear
from workers.model.products import Linear
from workers.model.quantization.quantized_weight import QuantizedWeight


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedExpertWeights:
    """`ExpertWeights` whose products are quantized, all in one form. Rows are of `dtype`."""

    gates: Sequence[QuantizedWeight]
    ups: Sequence[QuantizedWeight]
    downs: Sequence[QuantizedWeight]
    activation: ExpertActivation = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: Clamp = DEFAULT_CLAMP
    dtype: torch.dtype = torch.float32


class QuantizedExperts(Experts):
    """Experts whose products are computed one after another, each for the tokens that chose it."""

    def __init__(self, weights: QuantizedExpertWeights, *, is_deterministic: bool = False) -> None:
        """Pack the weights of one expert after another."""
        self._activation, self._clamp = weights.activation, weights.clamp
        activation = weights.activation
        self._gate = None if activation == "clamped_swiglu" or activation == "relu2" else activation
        self._products: list[tuple[Linear, Linear]] = []
        for expert in range(len(weights.ups)):
            biases = (None if it is None else it[expert] for it in (weights.gate_up_bias, weights.down_bias))
            gate_up_bias, down_bias = biases
            gate_up = make_linear(
                (*weights.gates[expert : expert + 1], weights.ups[expert]),
                gate_up_bias,
                gate=self._gate,
                is_deterministic=is_deterministic,
            )
            down = make_linear(weights.downs[expert], down_bias, is_deterministic=is_deterministic)
            self._products.append((gate_up, down))
        self.num_experts, self.hidden_size = len(self._products), self._products[0][1].num_outputs

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        sums = x.new_zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(routing.experts.flatten().tolist()) - {-1}):
            tokens, places = torch.where(routing.experts == expert)
            result = self._result(expert, x[tokens])
            sums.index_add_(0, tokens, result.mul_(routing.weights[tokens, places, None]))
        return sums.to(x.dtype)

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        hidden.add_(self(x, routing))

    def _result(self, expert: int, x: Tensor) -> Tensor:
        """Compute the result of one expert for x [num_rows, hidden_size], in float32."""
        gate_up, down = self._products[expert]
        if self._gate is not None:
            return down.floats(gate_up.gated(x))
        return down.floats(gated(gate_up(x), self._activation, self._clamp))
