"""The choice of an implementation of experts, and of a router's choice."""

from __future__ import annotations

from torch import Tensor

from workers.model import cuda, native
from workers.model.experts.expert_products import Experts, ExpertWeights, TorchExperts
from workers.model.experts.native_routing import choose_by
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing, choose_experts
from workers.model.make_linear import refuse_nondeterministic


def make_experts(weights: ExpertWeights, *, is_deterministic: bool = False) -> Experts:
    """Return the experts, by kernels of the device if there are any. `is_deterministic`: a token's result
    shall not depend on the other tokens; raise WorkerError where it may."""
    device, dtype = weights.ups[0].device, weights.ups[0].dtype
    if native.serves(device, dtype):
        kernels = native.load()
        assert kernels is not None
        return PackedExperts(kernels, weights)
    if cuda.serves(device):
        from workers.model.experts.triton_experts import TritonExperts

        return TritonExperts(weights, is_deterministic=is_deterministic)
    if is_deterministic:
        refuse_nondeterministic(device, dtype)
    return TorchExperts(weights)


def choose(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> Routing:
    """Choose experts as `choose_experts` does, by a kernel of the device where there is one."""
    if native.serves(logits.device, logits.dtype):
        kernels = native.load()
        assert kernels is not None
        return choose_by(kernels, logits, rule, bias)
    if cuda.serves(logits.device):
        from workers.model.cuda.expert_choice import choose_in_one, serves_rule

        if serves_rule(rule):
            return choose_in_one(logits, rule, bias)
    return choose_experts(logits, rule, bias)
