"""Counter noise against splitmix64 in plain Python integers, and against the distribution it must have."""

from __future__ import annotations

import math

import pytest
import torch
from dense_sampler import row_keys
from splitmix import MASK, WEYL, reference_hash, unmix

from workers.model.noise import gumbel, hashes, mix_, signed, token_counters


def test_the_finalizer_is_splitmix64() -> None:
    """The published generator's first outputs from state 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = torch.tensor([signed(1234567 + number * WEYL) for number in (1, 2, 3)])
    assert [value & MASK for value in mix_(states).tolist()] == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 42, -(2**63), 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_hashes_equal_plain_integers(seed: int) -> None:
    indices = [0, 1, 2, 1000, 2**31 - 1]
    counters = token_counters(300, torch.device("cpu"))
    actual = hashes(row_keys([seed] * len(indices), indices), counters)
    for row, index in enumerate(indices):
        assert [value & MASK for value in actual[row].tolist()] == [
            reference_hash(seed, index, token) for token in range(300)
        ]


def test_gumbel_equals_its_definition_on_the_hash() -> None:
    noise_rows = gumbel(row_keys([17], [3]), token_counters(2000, torch.device("cpu")))
    for token, value in enumerate(noise_rows[0].tolist()):
        uniform = ((reference_hash(17, 3, token) >> 10) | 1) / 2**54
        exponential = -math.log1p(-uniform)
        rounding = 2**-24 / (1 - uniform) / exponential  # of the uniform number to float32
        assert value == pytest.approx(-math.log(exponential), abs=rounding + 1e-6, rel=1e-6)


def test_gumbel_has_its_mean_and_variance() -> None:
    rows = gumbel(row_keys(range(200), range(200)), token_counters(1000, torch.device("cpu")))
    assert torch.isfinite(rows).all()
    assert float(rows.mean()) == pytest.approx(0.5772157, abs=0.012)  # 4 standard errors
    assert float(rows.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)


def test_neighbouring_seeds_and_indices_are_independent() -> None:
    counters = token_counters(20_000, torch.device("cpu"))
    rows = gumbel(row_keys([0, 1, 0, 1], [0, 0, 1, 1]), counters).double()
    correlation = torch.corrcoef(rows) - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < 0.03  # 4 standard errors


def test_extreme_hashes_stay_finite() -> None:
    """A counter that brings the hash to all zeros or all ones: the ends of the uniform range."""
    for target in (0, MASK):
        counter = torch.tensor([signed(unmix(target))])
        value = float(gumbel(torch.zeros(1, dtype=torch.int64), counter)[0, 0])
        assert math.isfinite(value)
        assert -3.0 < value < 38.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_hashes_on_cuda_equal_the_cpu() -> None:
    keys = row_keys(range(64), range(64))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    expected = hashes(keys, token_counters(5000, cpu))
    assert torch.equal(hashes(keys.to(cuda), token_counters(5000, cuda)).cpu(), expected)
    torch.testing.assert_close(
        gumbel(keys.to(cuda), token_counters(5000, cuda)).cpu(),
        gumbel(keys, token_counters(5000, cpu)),
    )
