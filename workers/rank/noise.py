"""Counter noise: a uniform number for every (seed, output index, token id), and Gumbel noise from it.

No state: a token drawn again elsewhere (after a replica's death, in another batch, on another device) sees
the same noise. The integer part is splitmix64 on int64 with wraparound, equal bit for bit on CPU and CUDA.
Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = 64
_WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's step from one counter to the next
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 54
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1


def signed(value: int) -> int:
    """The int64 with the same low 64 bits as `value`."""
    value &= (1 << _BITS) - 1
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def mix_(x: Tensor) -> Tensor:
    """splitmix64's finalizer of every element (int64), in place: a bijection whose bits look independent."""
    x ^= _shift_right(x, 30)
    x *= signed(_MULTIPLY_1)
    x ^= _shift_right(x, 27)
    x *= signed(_MULTIPLY_2)
    x ^= _shift_right(x, 31)
    return x


def counters(num_tokens: int, device: torch.device) -> Tensor:
    """[V] int64: the counter of each token id; made once, passed to `hashes`."""
    ids = torch.arange(1, num_tokens + 1, dtype=torch.int64, device=device)
    return ids.mul_(signed(_WEYL))


def row_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> Tensor:
    """[R] int64 on the CPU: one key per (seed, output index). Seeds are ints in [-(2^63), 2^64)."""
    keys = mix_(torch.tensor([signed(seed ^ _WEYL) for seed in seeds], dtype=torch.int64))
    steps = torch.tensor(output_indices, dtype=torch.int64)
    return mix_(keys.add_(steps.mul_(signed(_WEYL))))


def hashes(keys: Tensor, token_counters: Tensor) -> Tensor:
    """[R, V] int64: the hash of each row's key [R] and each token's counter, [V] or for every row [R, V]."""
    return mix_(keys[:, None] + token_counters)


def gumbel(keys: Tensor, token_counters: Tensor) -> Tensor:
    """[R, V] float32: independent standard Gumbel noise, -log(E) with E exponential.

    E = -log(1 - u) with u in (0, 1) of 54 bits: the resolution is finest where E is small, that is where an
    unlikely token wins. All values are finite (from -2.9 to 37.5), so a masked token stays masked.
    """
    bits = _shift_right(hashes(keys, token_counters), _BITS - _UNIFORM_BITS)
    bits |= 1  # never zero
    uniform = bits.to(torch.float32)
    uniform *= 2.0**-_UNIFORM_BITS
    uniform.clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic, so the copies of the sign bit are masked off."""
    shifted = x >> num_bits
    shifted &= (1 << (_BITS - num_bits)) - 1
    return shifted
