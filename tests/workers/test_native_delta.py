"""The CPU kernels of the gated delta rule against transformers' functions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from compiled_kernels import KERNELS, kernels_of
from delta_reference import expected_of
from delta_steps import DeltaCase
from optional_programs import needs_compiler
from torch import Tensor

from workers.model.state.delta_rule import run_delta_rule
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.native_delta import NativeDeltaRule

builds = pytest.mark.parametrize("build", KERNELS)
pytestmark = needs_compiler
MIXED = [1, 130, 64, 1, 7, 65]


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def make(build: str, case: DeltaCase, *, is_deterministic: bool = False) -> NativeDeltaRule:
    dtype = case.rows.channels.dtype
    return NativeDeltaRule(
        kernels_of(build), case.heads, case.weights, dtype, is_deterministic=is_deterministic
    )


def check(build: str, case: DeltaCase, *, is_deterministic: bool = False) -> None:
    outputs, states = expected_of(case)
    found = make(build, case, is_deterministic=is_deterministic)(case.rows, case.states, case.step)
    check_close(found, outputs)
    check_close(case.states_in(case.step.writes), states)


@builds
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("lengths", [MIXED, [1, 1, 1], [2, 3, 5, 6]], ids=str)
def test_sequences_equal_transformers(
    build: str, lengths: list[int], is_started: bool, is_deterministic: bool
) -> None:
    heads = DeltaHeads(2, 4, 20, 32)
    check(
        build,
        DeltaCase.draw(heads, lengths, is_started=is_started, num_parts=2),
        is_deterministic=is_deterministic,
    )


@builds
@pytest.mark.parametrize("value_dim", [32, 64, 96, 128, 256])
def test_widths_of_states(build: str, value_dim: int) -> None:
    check(build, DeltaCase.draw(DeltaHeads(1, 3, 128, value_dim), [1, 9]))


@builds
def test_other_blocks_stay_as_they_are(build: str) -> None:
    case = DeltaCase.draw(DeltaHeads(2, 4, 16, 32), [1, 70, 3])
    before = case.states.clone()
    make(build, case)(case.rows, case.states, case.step)
    untouched = np.setdiff1d(np.arange(len(before)), case.step.writes)
    assert torch.equal(case.states[untouched], before[untouched])


@builds
def test_bfloat16_rounds_as_torch_does(build: str) -> None:
    case = DeltaCase.draw(DeltaHeads(2, 4, 16, 32), [1, 40], dtype=torch.bfloat16)
    states = case.states.clone()
    outputs = run_delta_rule(case.heads, case.weights, case.rows, states, case.step)
    found = make(build, case)(case.rows, case.states, case.step)
    assert found.dtype == torch.bfloat16
    check_close(case.states, states)
    # A sum that lies near the border of two values may be rounded to either.
    assert (found == outputs).float().mean() > 0.99
    torch.testing.assert_close(found, outputs, atol=1e-2, rtol=2e-2)


@builds
def test_rows_that_are_parts_of_wider_ones(build: str) -> None:
    case = DeltaCase.draw(DeltaHeads(2, 2, 16, 32), [1, 6])
    outputs, states = expected_of(case)
    joined = torch.cat(case.rows, dim=1)
    case.rows = type(case.rows)(*torch.split(joined, [it.shape[1] for it in case.rows], dim=1))
    wide = torch.zeros(len(joined), 100)
    out = wide[:, 20:84]
    assert make(build, case)(case.rows, case.states, case.step, out) is out
    check_close(out, outputs)
    check_close(case.states_in(case.step.writes), states)
    assert not wide[:, :20].any()
    assert not wide[:, 84:].any()


def in_steps(build: str, case: DeltaCase, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs of one sequence that is computed in several steps, and its state."""
    rule, step, found, start = make(build, case, is_deterministic=True), case.step, [], 0
    for length in lengths:
        part = dataclasses.replace(step, lengths=np.array([length], np.int32))
        found.append(rule(case.rows_of(start, start + length), case.states, part))
        step, start = dataclasses.replace(step, reads=step.writes), start + length
    return torch.cat(found), case.states_in(step.writes)


@builds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_results_depend_on_no_cuts(build: str, dtype: torch.dtype) -> None:
    case = DeltaCase.draw(DeltaHeads(1, 2, 40, 64), [75], is_started=False, dtype=dtype)
    whole = in_steps(build, case, [75])
    for lengths in ([1] * 75, [33, 1, 1, 40], [64, 11]):
        for expected, found in zip(whole, in_steps(build, case, lengths), strict=True):
            assert torch.equal(found, expected)
