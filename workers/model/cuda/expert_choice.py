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
    """Whether the kernel chooses by this rule: by all but sparsemixer."""
    return rule.scoring != "sparsemixer"


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
            IS_NORMALIZED=rule.is_normalized, NUM_GROUPS=rule.num_groups,
            NUM_CHOSEN_GROUPS=rule.num_chosen_groups, HAS_TWO_BEST=rule.group_score == "best_two",
            GROUPS=triton.next_power_of_2(rule.num_groups), EXPERTS=triton.next_power_of_2(num_experts),
            CHOSEN=triton.next_power_of_2(rule.num_chosen), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return Routing(experts, weights)


@triton.jit
def _best(values, is_left, numbers, NONE: tl.constexpr):
    """Return the largest of the values that are left, and the lowest of the numbers that have it."""
    best = tl.max(tl.where(is_left, values, float("-inf")), 0)
    return best, tl.min(tl.where(is_left & (values == best), numbers, NONE), 0)


@triton.jit
def _of_best_groups(
    ranked, groups, numbers, EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr, HAS_TWO_BEST: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the scores of experts with minus infinity for those of all but the best groups."""
    all_groups = tl.arange(0, GROUPS)
    of_groups = tl.full((GROUPS,), float("-inf"), dtype=tl.float32)
    for group in range(NUM_GROUPS):
        is_in = groups == group
        score, first = _best(ranked, is_in, numbers, EXPERTS)
        if HAS_TWO_BEST:
            second, _ = _best(ranked, is_in & (numbers != first), numbers, EXPERTS)
            score += second
        of_groups = tl.where(all_groups == group, score, of_groups)
    is_left = all_groups < NUM_GROUPS
    is_chosen = groups < 0
    for _ in range(NUM_CHOSEN_GROUPS):
        _, group = _best(of_groups, is_left, all_groups, GROUPS)
        is_chosen = is_chosen | (groups == group)
        is_left = is_left & (all_groups != group)
    return tl.where(is_chosen, ranked, float("-inf"))


@triton.jit
def _choose_kernel(
    logits, bias, experts, weights, logits_stride, sum_offset, least_sum, scale,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, SCORING: tl.constexpr,
    IS_NORMALIZED: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    HAS_TWO_BEST: tl.constexpr, GROUPS: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
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
    if NUM_GROUPS > 1:
        ranked = _of_best_groups(
            ranked, numbers // (NUM_EXPERTS // NUM_GROUPS), numbers, EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS,
            HAS_TWO_BEST, GROUPS,
        )  # fmt: skip
    places = tl.arange(0, CHOSEN)
    chosen = tl.zeros((CHOSEN,), dtype=tl.int32)
    of_chosen = tl.full((CHOSEN,), float("-inf"), dtype=tl.float32)
    for place in range(NUM_CHOSEN):
        _, expert = _best(ranked, is_left, numbers, EXPERTS)
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
