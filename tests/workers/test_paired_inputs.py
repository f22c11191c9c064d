"""Weights that make up for what was rounded before them."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.quantizer.gptq import InputProducts
from workers.quantizer.paired_inputs import PairedInputs
from workers.quantizer.token_weights import token_weights


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_weight_moves_towards_that_of_least_squares() -> None:
    """Half of the way, where inputs behind rounded layers differ in the same way for all tokens, and by
    noise: a quarter is left of the squares that can be avoided."""
    weight, exact = _drawn(6, 24, seed=1), _drawn(600, 24, seed=2)
    rounded = exact @ (torch.eye(24) + 0.1 * _drawn(24, 24, seed=3)) + 0.05 * _drawn(600, 24, seed=4)
    pairs = PairedInputs(24)
    for of_exact, of_rounded in zip(torch.split(exact, 200), torch.split(rounded, 200), strict=True):
        pairs.add(of_rounded, of_exact)
    errors = [
        float((rounded @ it.t() - exact @ weight.t()).square().sum()) for it in (weight, pairs.moved(weight))
    ]
    solved = torch.linalg.lstsq(rounded.double(), (exact @ weight.t()).double()).solution.t()
    least = float((rounded.double() @ solved.t() - exact.double() @ weight.double().t()).square().sum())
    halfway = (weight.double() + solved) / 2
    assert float((pairs.moved(weight) - halfway).norm()) < 0.1 * float((weight - halfway).norm())
    assert 0.2 < (errors[1] - least) / (errors[0] - least) < 0.3


def test_a_moved_weight_adds_what_hidden_states_lack() -> None:
    weight, inputs = _drawn(6, 24, seed=1), _drawn(600, 24, seed=2)
    missing = inputs @ (0.2 * _drawn(24, 6, seed=3)) + 0.01 * _drawn(600, 6, seed=4)
    pairs = PairedInputs(24)
    pairs.add(inputs, inputs, missing)
    left = missing + inputs @ (weight - pairs.moved(weight)).t()
    assert float(left.norm()) < 0.55 * float(missing.norm())


def test_long_hidden_states_do_not_outweigh_all_others() -> None:
    """What a token lacks counts by the length of its states, which a norm divides by."""
    weight, inputs = _drawn(6, 24, seed=1), _drawn(600, 24, seed=2)
    missing, states = torch.zeros(600, 6), _drawn(600, 6, seed=3)
    missing[::100], states[::100] = 30 * _drawn(6, 6, seed=4), 3000.0
    moves = []
    for of_states in (None, states):
        pairs = PairedInputs(24)
        pairs.add(inputs, inputs, missing, of_states)
        moves.append(float((pairs.moved(weight) - weight).norm()))
    assert moves[1] < 0.01 * moves[0]


def test_a_weight_stays_where_nothing_has_changed() -> None:
    weight, inputs = _drawn(6, 24, seed=1), _drawn(100, 24, seed=2)
    pairs = PairedInputs(24)
    pairs.add(inputs, inputs, torch.zeros(100, 6))
    assert torch.equal(pairs.moved(weight), weight)


def test_a_token_does_not_outweigh_all_others() -> None:
    """Inputs count as 4 times as long as the median of their window at most; tokens without any stay."""
    inputs = torch.nn.functional.normalize(_drawn(33, 24, seed=4))
    inputs[0], inputs[1] = 1000 * inputs[0], 0.0
    pairs, expected = PairedInputs(24), inputs.clone()
    pairs.add(inputs, inputs)
    expected[0] *= 4 / 1000
    torch.testing.assert_close(inputs * token_weights(inputs), expected)
    torch.testing.assert_close(pairs.products.total, expected.t() @ expected, rtol=1e-4, atol=1e-4)


def test_products_are_solved_for() -> None:
    inputs, weight = _drawn(200, 24, seed=5), _drawn(6, 24, seed=6)
    sums = InputProducts(24)
    sums.add(inputs)
    torch.testing.assert_close(sums.solved(weight @ sums.damped), weight, rtol=1e-3, atol=1e-3)
