"""The gated delta rule against transformers' functions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from delta_reference import expected_of
from delta_steps import DeltaCase
from torch import Tensor

from workers.model.state.delta_rule import run_delta_rule
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.state_step import DeviceStates

HEADS = DeltaHeads(2, 4, 16, 24)


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def run(case: DeltaCase, *, is_deterministic: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the states in the blocks that are written."""
    out = run_delta_rule(
        case.heads, case.weights, case.rows, case.states, case.step, is_deterministic=is_deterministic
    )
    return out, case.states_in(case.step.writes)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_sequences_of_different_lengths_equal_transformers(
    is_started: bool, is_chunked: bool, is_deterministic: bool
) -> None:
    case = DeltaCase.draw(HEADS, [1, 130, 64, 1, 7, 65], is_started=is_started, num_parts=2)
    outputs, states = expected_of(case, is_chunked=is_chunked)
    found, left = run(case, is_deterministic=is_deterministic)
    check_close(found, outputs)
    check_close(left, states)


def test_other_blocks_stay_as_they_are() -> None:
    case = DeltaCase.draw(HEADS, [1, 70, 3])
    before = case.states.clone()
    run(case)
    untouched = np.setdiff1d(np.arange(len(before)), case.step.writes)
    assert torch.equal(case.states[untouched], before[untouched])
    assert not torch.equal(case.states[case.step.writes[1]], before[case.step.writes[1]])


def test_a_sequence_in_steps_equals_it_in_one() -> None:
    case = DeltaCase.draw(HEADS, [150], is_started=False)
    outputs, states = expected_of(case)
    step, found, start = case.step, [], 0
    for length in (70, 1, 1, 64, 14):
        part = dataclasses.replace(step, lengths=np.array([length], np.int32))
        rows = case.rows_of(start, start + length)
        found.append(run_delta_rule(case.heads, case.weights, rows, case.states, part))
        step, start = dataclasses.replace(step, reads=step.writes), start + length
    check_close(torch.cat(found), outputs)
    check_close(case.states_in(step.writes), states)


def test_states_that_the_device_knows_equal_those_of_the_host() -> None:
    case = DeltaCase.draw(HEADS, [1, 1, 1])
    outputs, states = expected_of(case)
    known = DeviceStates(torch.from_numpy(case.step.reads), torch.from_numpy(case.step.writes))
    nowhere = np.zeros_like(case.step.reads)
    case.step = dataclasses.replace(case.step, device=known)
    # What the host says is not used then.
    out = run_delta_rule(
        case.heads,
        case.weights,
        case.rows,
        case.states,
        dataclasses.replace(case.step, reads=nowhere, writes=nowhere),
    )
    check_close(out, outputs)
    check_close(case.states_in(case.step.writes), states)


def test_bfloat16_rounds_where_transformers_does() -> None:
    case = DeltaCase.draw(HEADS, [1, 40], dtype=torch.bfloat16)
    weight = case.weights.norm.weight.bfloat16().float()
    case.weights = dataclasses.replace(
        case.weights, norm=dataclasses.replace(case.weights.norm, weight=weight)
    )
    outputs, states = expected_of(case)
    found, left = run(case)
    assert found.dtype == torch.bfloat16
    check_close(left, states)
    # A sum that lies near the border of two values may be rounded to either.
    assert (found == outputs).float().mean() > 0.99
    torch.testing.assert_close(found, outputs, atol=1e-2, rtol=2e-2)


def test_strong_decays_overflow_nowhere() -> None:
    case = DeltaCase.draw(HEADS, [200], is_started=False)
    case.weights = dataclasses.replace(case.weights, rates=case.weights.rates * 400)
    outputs, states = expected_of(case)
    found, left = run(case)
    assert found.isfinite().all()
    check_close(found, outputs)
    check_close(left, states)


def test_parts_are_of_whole_key_heads() -> None:
    assert HEADS.of_parts(1, 2) == DeltaHeads(1, 2, 16, 24)
    with pytest.raises(ValueError, match="2 key heads do not divide into 4 equal parts"):
        HEADS.of_parts(1, 4)
