"""Draw the experts of a layer of a random checkpoint, by the names that its family has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.model.experts.mixture_shape import MixtureShape
from workers.model.families.expert_traits import ExpertNames
from workers.model.model_config import ModelConfig

# Draws a matrix of so many rows and columns, times a gain; and a vector of a size, a mean and a spread.
Matrix = Callable[[int, int, float], Tensor]
Vector = Callable[[int, float, float], Tensor]


def expert_tensors(
    config: ModelConfig, prefix: str, depth_gain: float, matrix: Matrix, vector: Vector
) -> dict[str, Tensor]:
    """Draw the router and the experts of the layer whose tensors begin with `prefix`; what they add to the
    hidden states is scaled by `depth_gain`."""
    shape, traits = config.mixture, config.traits.experts
    assert shape is not None
    assert traits is not None
    names, hidden, num_experts = traits.names, config.hidden_size, shape.rule.num_experts
    block = f"{prefix}{names.block}"
    tensors = {f"{block}{names.router}": matrix(num_experts, hidden, 1.5)}
    if names.router_bias:
        tensors[f"{block}{names.router_bias}"] = vector(num_experts, 0.0, 0.3)
    if names.correction:
        tensors[f"{block}{names.correction}"] = vector(num_experts, 0.0, 0.1).float()
    if names.router_norm:
        tensors[f"{block}{names.router_norm}"] = vector(hidden, hidden**0.5, 0.1)
    if names.expert_scale:
        tensors[f"{block}{names.expert_scale}"] = vector(num_experts, 1.0, 0.1)
    if traits.branch_norms is not None:
        norms = traits.branch_norms
        for name in (norms.dense_output, norms.experts_input, norms.experts_output):
            tensors[f"{prefix}{name}.weight"] = vector(hidden, 1.0 - config.traits.norm_offset, 0.1)
    # The weights of chosen experts are near 1 together.
    tensors |= _products(names, block, shape, hidden, depth_gain, matrix)
    for name, size in ((names.gate_up_bias, 2 * shape.size), (names.down_bias, hidden)):
        if name:
            rows = vector(num_experts * size, 0.0, 0.1)
            tensors[f"{block}{name}"] = rows.view(num_experts, size)
    if shape.shared_size:
        shared = f"{block}{names.shared}"
        tensors[f"{shared}gate_proj.weight"] = matrix(shape.shared_size, hidden, 1.0)
        tensors[f"{shared}up_proj.weight"] = matrix(shape.shared_size, hidden, 1.0)
        tensors[f"{shared}down_proj.weight"] = matrix(hidden, shape.shared_size, depth_gain)
        if names.shared_gate:
            tensors[f"{block}{names.shared_gate}"] = matrix(1, hidden, 1.0)
    return tensors


def _products(
    names: ExpertNames, block: str, shape: MixtureShape, hidden: int, depth_gain: float, matrix: Matrix
) -> dict[str, Tensor]:
    """Draw the products of experts, a tensor each, or transposed in one tensor where the family has it so."""
    experts = range(shape.rule.num_experts)
    if names.is_transposed:
        gate_up = [matrix(2 * shape.size, hidden, 1.0).t() for _ in experts]
        down = [matrix(hidden, shape.size, depth_gain).t() for _ in experts]
        return {
            f"{block}{names.gate_up}": torch.stack(gate_up),
            f"{block}{names.down}": torch.stack(down),
        }
    tensors = {}
    for expert in experts:
        tensors[f"{block}{names.each_gate.format(expert=expert)}"] = matrix(shape.size, hidden, 1.0)
        tensors[f"{block}{names.each_up.format(expert=expert)}"] = matrix(shape.size, hidden, 1.0)
        tensors[f"{block}{names.each_down.format(expert=expert)}"] = matrix(hidden, shape.size, depth_gain)
    return tensors
