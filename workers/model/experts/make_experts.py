"""Choose the kernels for experts of a device and dtype."""

from __future__ import annotations

from torch import Tensor

from workers.model import cuda
from workers.model.experts.expert_products import Experts, ExpertWeights, TorchExperts
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing, choose_experts


def make_experts(weights: ExpertWeights, *, is_deterministic: bool = False) -> Experts:
    """Return the products of experts with these weights, which are copied. `is_deterministic` as in
    `workers.model.products.make_linear`."""
    if cuda.serves(weights.gates[0].device):
        from workers.model.experts.triton_experts import TritonExperts

        return TritonExperts(weights, is_deterministic=is_deterministic)
    return TorchExperts(weights)


def choose(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> Routing:
    """Choose experts as `choose_experts` does."""
    if cuda.serves(logits.device):
        from workers.model.cuda.expert_choice import choose_in_one, serves_rule

        if serves_rule(rule):
            return choose_in_one(logits, rule, bias)
    return choose_experts(logits, rule, bias)
