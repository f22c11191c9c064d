"""Choose experts by the CPU kernel of `native/router.h`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model import native
from workers.model.experts.router_rule import RouterRule, Scoring
from workers.model.experts.routing import Routing

_SCORINGS: dict[Scoring, int] = {"softmax": 0, "softmax_chosen": 1, "sigmoid": 2, "sparsemixer": 3}


class RuleArguments(ctypes.Structure):
    """`RouterRule` of `native/router.h`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_experts",
                "num_chosen",
                "scoring",
                "is_normalized",
                "num_groups",
                "num_chosen_groups",
                "num_best_of_group",
            )
        ),
        *((name, ctypes.c_float) for name in ("sum_offset", "least_sum", "scale", "jitter")),
    )

    @staticmethod
    def of(rule: RouterRule) -> RuleArguments:
        """Describe a rule."""
        return RuleArguments(
            rule.num_experts, rule.num_chosen, _SCORINGS[rule.scoring], rule.is_normalized, rule.num_groups,
            rule.num_chosen_groups, 1 if rule.group_score == "best" else 2,
            rule.sum_offset, rule.least_sum, rule.scale, rule.jitter,
        )  # fmt: skip


def choose_by(
    kernels: native.Kernels, logits: Tensor, rule: RouterRule, bias: Tensor | None = None
) -> Routing:
    """Choose experts by these kernels: the same as those of `routing.choose_experts` but for the rounding of
    scores, and those that it takes of equal scores."""
    assert logits.dtype == torch.float32
    assert logits.shape == (len(logits), rule.num_experts)
    logits = logits.contiguous()
    if bias is not None:
        assert bias.dtype == torch.float32
        bias = bias.contiguous()
    experts = torch.empty((len(logits), rule.num_chosen), dtype=torch.int32)
    weights = torch.empty(experts.shape, dtype=torch.float32)
    kernels.library.tandem_choose_experts(
        ctypes.byref(RuleArguments.of(rule)),
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_int64(len(logits)),
        ctypes.c_void_p(experts.data_ptr()),
        ctypes.c_void_p(weights.data_ptr()),
    )
    return Routing(experts, weights)
