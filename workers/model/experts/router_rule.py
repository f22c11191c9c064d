"""Describe the arithmetic by which a router chooses experts and weighs their results. Nothing here imports
torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

# How the logits of a token become scores, and those the weights of the chosen experts:
# - softmax: over all experts;
# - softmax_chosen: over those that were chosen by their logits;
# - sigmoid: of each logit by itself;
# - sparsemixer: of two experts, each by a softmax over the logits that are nearly as large (Phi-3.5-MoE).
Scoring = Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"]
# The score of a group of experts: that of its best, or the sum of its best two.
GroupScore = Literal["best", "best_two"]


class RouterRule(NamedTuple):
    """The choice of `num_chosen` of `num_experts`, by the largest scores.

    A bias for each expert, if there is one, is added to the scores by which experts are chosen, and to
    nothing else. With groups, experts are chosen from the `num_chosen_groups` best of `num_groups` equal
    groups alone. The weights of the chosen experts are their scores, divided by the sum of these if they are
    normalized (plus `sum_offset`, and by no less than `least_sum`), times `scale`."""

    num_experts: int
    num_chosen: int
    scoring: Scoring = "softmax"
    is_normalized: bool = False
    sum_offset: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: GroupScore = "best_two"
    # Of sparsemixer: logits further than twice this part below the largest one have no weight.
    jitter: float = 0.0
