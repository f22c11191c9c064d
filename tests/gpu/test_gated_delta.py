"""The gated delta rule by Triton kernels against torch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from delta_steps import DeltaCase
from torch import Tensor

from workers.model.state.delta_rule import run_delta_rule
from workers.model.state.delta_shape import DeltaHeads
from workers.model.state.state_step import DeviceStates

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

HEADS = DeltaHeads(1, 2, 20, 40)
# Triton's interpreter does not round to bfloat16 as devices do.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def run(case: DeltaCase, *, is_deterministic: bool = False) -> Tensor:
    from workers.model.state.triton_delta import TritonDeltaRule

    rule = TritonDeltaRule(case.heads, case.weights, is_deterministic=is_deterministic)
    return rule(case.rows, case.states, case.step)


def check(case: DeltaCase, *, is_deterministic: bool = False) -> None:
    states = case.states.clone()
    expected = run_delta_rule(
        case.heads, case.weights, case.rows, states, case.step, is_deterministic=is_deterministic
    )
    check_close(run(case, is_deterministic=is_deterministic), expected)
    check_close(case.states, states)


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_sequences_of_different_lengths(
    device: torch.device, is_started: bool, is_deterministic: bool
) -> None:
    lengths = [1, 70, 3, 64, 1, 9]
    case = DeltaCase.draw(HEADS, lengths, is_started=is_started, num_parts=1, device=device)
    check(case, is_deterministic=is_deterministic)


@pytest.mark.parametrize("heads", [DeltaHeads(2, 4, 16, 32), DeltaHeads(2, 2, 32, 16)], ids=str)
def test_heads_in_parts(device: torch.device, heads: DeltaHeads) -> None:
    check(DeltaCase.draw(heads, [1, 20], num_parts=2, device=device))


def test_strong_decays_overflow_nowhere(device: torch.device) -> None:
    case = DeltaCase.draw(HEADS, [40], device=device)
    case.weights = dataclasses.replace(case.weights, rates=case.weights.rates * 400)
    check(case)


def test_states_that_the_device_knows_are_read(device: torch.device) -> None:
    case = DeltaCase.draw(HEADS, [1, 1, 1], device=device)
    step, states = case.step, case.states.clone()
    expected = run_delta_rule(case.heads, case.weights, case.rows, states, step)
    known = DeviceStates(*(torch.from_numpy(it).to(device) for it in (step.reads, step.writes)))
    nowhere = np.zeros_like(step.reads)
    case.step = dataclasses.replace(step, reads=nowhere, writes=nowhere, device=known)
    check_close(run(case), expected)
    check_close(case.states, states)


def test_narrow_activations(device: torch.device) -> None:
    case = DeltaCase.draw(HEADS, [1, 30], dtype=NARROW, device=device)
    states = case.states.clone()
    expected = run_delta_rule(case.heads, case.weights, case.rows, states, case.step)
    found = run(case)
    assert found.dtype == NARROW
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=2e-2)
    torch.testing.assert_close(case.states, states, atol=1e-3, rtol=1e-3)


def test_deterministic_results_depend_on_no_cuts(device: torch.device) -> None:
    case = DeltaCase.draw(HEADS, [12], is_started=False, device=device)
    whole = run(case, is_deterministic=True)
    after = case.states_in(case.step.writes)
    step, found, rows = case.step, [], case.rows
    for start, end in ((0, 1), (1, 10), (10, 12)):
        case.rows = type(rows)(*(it[start:end] for it in rows))
        case.step = dataclasses.replace(step, lengths=np.array([end - start], np.int32))
        found.append(run(case, is_deterministic=True))
        step = dataclasses.replace(step, reads=step.writes)
    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(case.states_in(step.writes), after)
