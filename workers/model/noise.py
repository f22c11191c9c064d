"""Counter-based noise: a uniform number for every (seed, output index, token id), and Gumbel noise from it.

The noise has no state: a token that is drawn again (after a replica's death, in another batch, on another
device) sees the same noise. The integer part is splitmix64 on int64 with wraparound, equal bit for bit on CPU
and CUDA, in torch and in the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's step from one counter to the next
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB
UNIFORM_BITS = 54
LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1

_BITS = 64
_MASK = (1 << _BITS) - 1


def signed(value: int) -> int:
    """Return the int64 with the same low 64 bits as `value`."""
    value &= _MASK
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def mix_(x: Tensor) -> Tensor:
    """Apply splitmix64's finalizer to every element (int64) in place: a bijection whose bits look random."""
    x ^= _shift_right(x, 30)
    x *= signed(MULTIPLY_1)
    x ^= _shift_right(x, 27)
    x *= signed(MULTIPLY_2)
    x ^= _shift_right(x, 31)
    return x


def token_counters(num_tokens: int, device: torch.device) -> Tensor:
    """Return the counter of each token id, int64 [vocab_size]; made once, passed to `hashes`."""
    ids = torch.arange(1, num_tokens + 1, dtype=torch.int64, device=device)
    return ids.mul_(signed(WEYL))


def seed_keys(seeds: Sequence[int]) -> NDArray[np.int64]:
    """Return the part of each sample's key that does not change, [num_samples]. Seeds lie in [-(2^63),
    2^64)."""
    return np.array([signed(_mixed(seed ^ WEYL)) for seed in seeds], dtype=np.int64)


def _mixed(value: int) -> int:
    """Apply `mix_` to one number."""
    value &= _MASK
    value = (value ^ value >> 30) * MULTIPLY_1 & _MASK
    value = (value ^ value >> 27) * MULTIPLY_2 & _MASK
    return value ^ value >> 31


def output_keys(keys: NDArray[np.int64], output_indices: NDArray[np.int32]) -> Tensor:
    """Return the key of each (sample, output index), int64 [num_rows] on the CPU, from `seed_keys`."""
    steps = torch.from_numpy(output_indices.astype(np.int64))
    return mix_(steps.mul_(signed(WEYL)).add_(torch.from_numpy(keys)))


def hashes(keys: Tensor, token_counters: Tensor) -> Tensor:
    """Hash each row's key [num_rows] with the counters [vocab_size] or [num_rows, num_ids] of its tokens."""
    return mix_(keys[:, None] + token_counters)


def gumbel(keys: Tensor, token_counters: Tensor) -> Tensor:
    """Return independent standard Gumbel noise -log(E), E exponential, float32 of the shape of `hashes`.

    E = -log(1 - u) with u in (0, 1) of 54 bits: the resolution is finest where E is small, which is where
    an unlikely token wins. All values are finite (from -2.9 to 37.5), so a masked token stays masked.
    """
    bits = _shift_right(hashes(keys, token_counters), _BITS - UNIFORM_BITS)
    bits |= 1  # never zero
    uniform = bits.to(torch.float32)
    uniform *= 2.0**-UNIFORM_BITS
    uniform.clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Shift logically: torch's shift is arithmetic, so the copies of the sign bit are masked off."""
    shifted = x >> num_bits
    shifted &= (1 << (_BITS - num_bits)) - 1
    return shifted
