"""Choose experts for tokens by the logits of a router, in plain torch: float32, and ties as transformers
breaks them, which chooses by the same function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.experts.router_rule import RouterRule


class Routing(NamedTuple):
    """The experts of tokens: int32 `experts` [num_tokens, num_chosen], and float32 `weights` of their
    results, of the same shape. An expert of -1 is none of this rank's."""

    experts: Tensor
    weights: Tensor


def choose_experts(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> Routing:
    """Choose experts by float32 `logits` [num_tokens, num_experts], and `bias` [num_experts] of the scores by
    which they are chosen, if there is one."""
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits, rule)
    if rule.scoring == "softmax_chosen":
        chosen, experts = logits.topk(rule.num_chosen, dim=-1)
        return _routing(experts, chosen.softmax(-1), rule)
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        ranked = _of_best_groups(ranked, rule)
    experts = ranked.topk(rule.num_chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.sum_offset).clamp_(min=rule.least_sum)
    return _routing(experts, weights, rule)


def _routing(experts: Tensor, weights: Tensor, rule: RouterRule) -> Routing:
    return Routing(experts.int(), weights * rule.scale if rule.scale != 1 else weights)


def _of_best_groups(ranked: Tensor, rule: RouterRule) -> Tensor:
    """Return the scores [num_tokens, num_experts] with those of all but the best groups replaced by minus
    infinity."""
    by_group = ranked.view(len(ranked), rule.num_groups, -1)
    num_best = 1 if rule.group_score == "best" else 2
    of_groups = by_group.topk(num_best, dim=-1).values.sum(-1)
    best = of_groups.topk(rule.num_chosen_groups, dim=-1).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, value=False)
    return by_group.masked_fill(is_out[..., None], float("-inf")).flatten(1)


def _sparsemixer(logits: Tensor, rule: RouterRule) -> Routing:
    """Choose two experts, one after another; the weight of each is its part of a softmax over the logits that
    are not far below it."""
    first, first_weight = _mixed(logits, logits, rule.jitter)
    left = logits.scatter(1, first, float("-inf"))
    second, second_weight = _mixed(left, logits, rule.jitter)
    weights = torch.cat((first_weight, second_weight), 1)
    return _routing(torch.cat((first, second), 1), weights, rule)


def _mixed(left: Tensor, logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return the best expert of those that are `left` [num_tokens, 1], and its weight."""
    largest, best = left.max(-1, keepdim=True)
    is_far = (largest - logits) / logits.abs().maximum(largest) > 2 * jitter
    return best, left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, best)
