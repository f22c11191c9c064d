"""The choice of an implementation of experts."""

from __future__ import annotations

from workers.errors import WorkerError
from workers.model import native
from workers.model.experts.expert_products import Experts, ExpertWeights, TorchExperts
from workers.model.experts.packed_experts import PackedExperts
from workers.model.products import refuse_nondeterministic


def make_experts(weights: ExpertWeights, *, is_deterministic: bool = False) -> Experts:
    """Return the experts, packed if there are CPU kernels for them. `is_deterministic`: a token's result
    shall not depend on the other tokens; raise WorkerError where it may."""
    device, dtype = weights.gates[0].device, weights.gates[0].dtype
    if native.serves(device, dtype):
        kernels = native.load()
        assert kernels is not None
        return PackedExperts(kernels, weights)
    if is_deterministic:
        refuse_nondeterministic(device, dtype)
        raise WorkerError(
            f"deterministic: there are no such experts on {device.type}; set device: cpu, or set"
            " deterministic: false"
        )
    return TorchExperts(weights)
