"""The choice of experts by the logits of a router, in one Triton kernel: a step of few tokens waits for each
of the launches that the operations of torch take, and a row's choice depends on nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing


def serves_rule(rule: RouterRule) -> bool:
    """Whether the kernel chooses by this rule: not from groups, nor by sparsemixer."""
    return rule.num_groups == 1 and rule.scoring != "sparsemixer"


def choose_in_one(logits: Tensor, rule: RouterRule, bias: Tensor | None) -> Routing:
    """Choose experts as `workers.model.experts.routing.choose_experts` does. Of equal scores that of the
    expert with the lower number is taken first, and one that is no number before all others."""
    num_tokens, num_experts = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert num_experts == rule.num_experts
    experts = logits.new_empty(num_tokens, rule.num_chosen, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, rule.num_chosen)
    if num_tokens:
        _choose_kernel[(num_tokens,)](
            logits, bias, experts, weights, logits.stride(0), rule.sum_offset, rule.least_sum, rule.scale,
            NUM_EXPERTS=num_experts, NUM_CHOSEN=rule.num_chosen, SCORING=rule.scoring,
            IS_NORMALIZED=rule.is_normalized, EXPERTS=triton.next_power_of_2(num_experts),
            CHOSEN=triton.next_power_of_2(rule.num_chosen), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return Routing(experts, weights)


@triton.jit
def _choose_kernel(
    logits, bias, experts, weights, logits_stride, sum_offset, least_sum, scale,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, SCORING: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token, which are one program."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, EXPERTS)
    is_left = numbers < NUM_EXPERTS
    scores = tl.load(logits + token * logits_stride + numbers, mask=is_left, other=float("-inf"))
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    elif SCORING == "softmax":
        grown = tl.exp(scores - tl.max(scores, 0))
        scores = grown / tl.sum(grown, 0)
    ranked = scores
    if bias is not None and SCORING != "softmax_chosen":
        ranked += tl.load(bias + numbers, mask=is_left, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, float("inf"))
    places = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), dtype=tl.int32)
    of_chosen = tl.full((CHOSEN,), float("-inf"), dtype=tl.float32)
    for place in range(NUM_CHOSEN):
        best = tl.max(tl.where(is_left, ranked, float("-inf")), 0)
        expert = tl.min(tl.where(is_left & (ranked == best), numbers, EXPERTS), 0)
        chosen = tl.where(places == place, expert, chosen)
        score = tl.sum(tl.where(numbers == expert, scores, 0.0), 0)
        of_chosen = tl.where(places == place, score, of_chosen)
        is_left = is_left & (numbers != expert)
    is_place = places < NUM_CHOSEN
    if SCORING == "softmax_chosen":
        grown = tl.exp(of_chosen - tl.max(of_chosen, 0))
        of_chosen = grown / tl.sum(grown, 0)
    elif IS_NORMALIZED:
        total = tl.sum(tl.where(is_place, of_chosen, 0.0), 0) + sum_offset
        of_chosen = of_chosen / tl.where(total < least_sum, least_sum, total)
    target = token * NUM_CHOSEN + places
    tl.store(experts + target, chosen, mask=is_place)
    tl.store(weights + target, of_chosen * scale, mask=is_place)
