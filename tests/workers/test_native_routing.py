"""The choice of experts by the CPU kernels against that of torch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from compiled_kernels import KERNELS, kernels_of
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from slow_cases import examples

from workers.model.experts.make_experts import choose
from workers.model.experts.native_routing import choose_by
from workers.model.experts.router_rule import GroupScore, RouterRule, Scoring
from workers.model.experts.routing import Routing, choose_experts

builds = pytest.mark.parametrize("build", KERNELS)
pytestmark = needs_compiler


def check(actual: Routing, expected: Routing) -> None:
    assert torch.equal(actual.experts, expected.experts)
    assert actual.experts.dtype == torch.int32
    torch.testing.assert_close(actual.weights, expected.weights, rtol=2e-6, atol=1e-7)


@st.composite
def rules(draw: st.DrawFn) -> RouterRule:
    num_groups = draw(st.sampled_from([1, 1, 2, 4, 8]))
    num_experts = num_groups * draw(st.sampled_from([2, 3, 8, 16, 17, 32, 64]))
    num_chosen_groups = draw(st.integers(1, num_groups))
    scoring = draw(st.sampled_from(get_args(Scoring)))
    most = num_experts // num_groups * num_chosen_groups
    return RouterRule(
        num_experts,
        2 if scoring == "sparsemixer" else draw(st.integers(1, min(most, 12))),
        scoring,
        draw(st.booleans()),
        sum_offset=draw(st.sampled_from([0.0, 1e-20, 0.5])),
        least_sum=draw(st.sampled_from([0.0, 0.75])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        group_score=draw(st.sampled_from(get_args(GroupScore))),
        jitter=draw(st.sampled_from([0.0, 0.01, 0.3])),
    )


@builds
@settings(max_examples=examples(200), deadline=None)
@given(
    rule=rules(),
    num_values=st.sampled_from([1, 2, 5, 12]),
    has_bias=st.booleans(),
    num_rows=st.sampled_from([1, 3, 60]),
    seed=st.integers(0, 1000),
)
def test_equal_scores_are_chosen_as_torch_chooses(
    build: str, rule: RouterRule, num_values: int, has_bias: bool, num_rows: int, seed: int
) -> None:
    """Logits of few values, each of which rounds alike wherever it is. None is negative: sigmoids of opposite
    numbers would make sums of groups that only rounding tells apart."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(num_values, (num_rows, rule.num_experts), generator=generator) / 2
    bias = torch.randint(3, (rule.num_experts,), generator=generator) / 4 if has_bias else None
    check(choose_by(kernels_of(build), logits, rule, bias), choose_experts(logits, rule, bias))


@builds
@pytest.mark.parametrize("scoring", get_args(Scoring))
@pytest.mark.parametrize("num_experts", [8, 60, 64, 128, 257])
def test_different_scores(build: str, scoring: Scoring, num_experts: int) -> None:
    logits = torch.randn(50, num_experts, generator=torch.Generator().manual_seed(num_experts)) * 3
    rule = RouterRule(num_experts, 2 if scoring == "sparsemixer" else 4, scoring, jitter=0.02)
    check(choose_by(kernels_of(build), logits, rule), choose_experts(logits, rule))
    columns = logits.t().contiguous().t()
    check(choose_by(kernels_of(build), columns, rule), choose_experts(logits, rule))


@builds
@pytest.mark.parametrize("scoring", get_args(Scoring))
def test_logits_at_their_ends(build: str, scoring: Scoring) -> None:
    """Scores that are almost 0 or 1, and logits that are no numbers: whatever is chosen exists."""
    rule = RouterRule(20, 2, scoring, is_normalized=True, jitter=0.02)
    logits = torch.zeros(4, 20)
    logits[0, 3], logits[0, 5], logits[1, 7] = 60, 59, -60
    logits[2, 4], logits[3] = float("nan"), float("nan")
    actual, expected = choose_by(kernels_of(build), logits, rule), choose_experts(logits, rule)
    check(Routing(*(tensor[:2] for tensor in actual)), Routing(*(tensor[:2] for tensor in expected)))
    assert bool(((actual.experts >= 0) & (actual.experts < 20)).all())
    assert bool(actual.weights[3].isnan().all())


def test_the_kernel_is_taken_where_it_serves() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    rule = RouterRule(8, 2)
    check(choose(logits, rule), choose_experts(logits, rule))
    wide = choose(logits.double(), rule)
    assert wide.weights.dtype == torch.float64
