"""Draw a layer of the gated delta rule of a random checkpoint."""

from __future__ import annotations

from torch import Tensor

from benchmarks.random_experts import Matrix, Vector
from workers.model.state.delta_shape import DeltaShape


def delta_tensors(
    shape: DeltaShape, hidden: int, prefix: str, depth_gain: float, matrix: Matrix, vector: Vector
) -> dict[str, Tensor]:
    """Draw the tensors, whose names begin with `prefix`; what they add to the hidden states is scaled by
    `depth_gain`. Most states keep what they have over tens of tokens."""
    heads = shape.heads
    if shape.is_fused:
        num_many, num_few = heads.num_channels + heads.num_values, 2 * heads.num_value_heads
        products = {"in_proj_qkvz": num_many, "in_proj_ba": num_few}
    else:
        products = {"in_proj_qkv": heads.num_channels, "in_proj_z": heads.num_values}
        products |= {"in_proj_b": heads.num_value_heads, "in_proj_a": heads.num_value_heads}
    tensors = {f"{prefix}{name}.weight": matrix(rows, hidden, 1.0) for name, rows in products.items()}
    kernel = matrix(heads.num_channels, shape.kernel_size, 2.0)
    return tensors | {
        f"{prefix}conv1d.weight": kernel.unsqueeze(1),
        f"{prefix}A_log": vector(heads.num_value_heads, 0.0, 1.0),
        f"{prefix}dt_bias": vector(heads.num_value_heads, -3.0, 1.0),
        f"{prefix}norm.weight": vector(heads.value_dim, 1.0, 0.1),
        f"{prefix}out_proj.weight": matrix(hidden, heads.num_values, depth_gain),
    }
