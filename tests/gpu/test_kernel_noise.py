"""The noise of the sampling kernels: hashes bit for bit, and what is made of them up to rounding."""

from __future__ import annotations

import pytest
import torch
from splitmix import MASK, WEYL, reference_hash, unmix

from workers.model.noise import gumbel, seed_keys, signed, token_counters

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

import triton
import triton.language as tl

from workers.model.cuda import sampling

hashed, kernel_gumbel, output_key = sampling.hashed, sampling.gumbel, sampling.output_key
NUM_IDS = 64


@triton.jit
def _hash_kernel(records, ids, hashes, NUM: tl.constexpr):
    places = tl.arange(0, NUM)
    result = hashed(output_key(records), tl.load(ids + places))
    tl.store(hashes + places, result.to(tl.int64, bitcast=True))


@triton.jit
def _noise_kernel(keys, noise, NUM: tl.constexpr):
    """Write the noise of token 0 for each key."""
    places = tl.arange(0, NUM)
    key = tl.load(keys + places).to(tl.uint64, bitcast=True)
    tl.store(noise + places, kernel_gumbel(key, tl.zeros((NUM,), tl.int32)))


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("output_index", [0, 1000, 2**31 - 1])
def test_hashes_equal_plain_integers(device: torch.device, seed: int, output_index: int) -> None:
    record = torch.zeros(sampling.RECORD_WORDS, dtype=torch.int32)
    record[:2] = torch.from_numpy(seed_keys([seed])).view(torch.int32)
    record[2] = output_index
    ids = torch.arange(NUM_IDS, dtype=torch.int32) * 2999
    hashes = torch.zeros(NUM_IDS, dtype=torch.int64, device=device)
    _hash_kernel[(1,)](record.to(device), ids.to(device), hashes, NUM=NUM_IDS)
    expected = [reference_hash(seed, output_index, token) for token in ids.tolist()]
    assert [value & MASK for value in hashes.tolist()] == expected


def test_noise_of_any_hash(device: torch.device) -> None:
    """At both ends of the uniform numbers, where the way to compute logarithms changes, and between."""
    sixteenth = 1 << 60
    hashes = [0, 1 << 10, MASK, MASK - (1 << 40), sixteenth, sixteenth - (1 << 30), sixteenth + (1 << 30)]
    hashes += [unmix(number) for number in range(128 - len(hashes))]
    keys = torch.tensor([signed(unmix(value) - WEYL) for value in hashes])
    actual = torch.zeros(len(keys), device=device)
    _noise_kernel[(1,)](keys.to(device), actual, NUM=len(keys))
    expected = gumbel(keys, token_counters(1, torch.device("cpu")))[:, 0]
    assert bool(torch.isfinite(actual).all())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=2e-6)
