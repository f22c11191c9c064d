"""Find the smallest form that holds scales and offsets exactly.

Tensors without memory have no values to look at. Where kernels are found by such tensors
(`workers.rank.kernel_rehearsal`), every answer is assumed in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.quantization.quantized_weight import Codes

# The codes of 4 bits that mean zero in formats without zero points.
_ZEROS = (8, 7)
_HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Assumption:
    """What is said of tensors on the device "meta", and whether it was asked for."""

    dtype: torch.dtype
    zero: int | None
    is_dtype_asked: bool = False
    is_zero_asked: bool = False


_assumed: Assumption | None = None


def assumptions() -> Iterator[Assumption]:
    """Yield assumptions, each of which holds until the next, as long as other answers could matter."""
    global _assumed
    is_dtype_asked = is_zero_asked = False
    for zero, dtype in itertools.product((_ZEROS[0], None), (*_HALVES, torch.float32)):
        if (zero is None and not is_zero_asked) or (dtype is not _HALVES[0] and not is_dtype_asked):
            continue
        _assumed = assumption = Assumption(dtype, zero)
        try:
            yield assumption
        finally:
            _assumed = None
        is_dtype_asked |= assumption.is_dtype_asked
        is_zero_asked |= assumption.is_zero_asked


def exact_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of 16 bits that holds all these float32 numbers exactly, else float32."""
    if _assumed is not None and values[0].is_meta:
        _assumed.is_dtype_asked = True
        return _assumed.dtype
    for dtype in _HALVES:
        if all(torch.equal(it.to(dtype).float(), it) for it in values):
            return dtype
    return torch.float32


def common_zero(codes: Codes, scales: Sequence[Tensor], offsets: Sequence[Tensor]) -> int | None:
    """Return the code that means 0 in all groups, where there is one of 4 bits, so that offsets say no
    more."""
    if codes is not Codes.UINT4:
        return None
    if _assumed is not None and scales[0].is_meta:
        _assumed.is_zero_asked = True
        return _assumed.zero
    for zero in _ZEROS:
        if all(torch.equal(at, of * -zero) for of, at in zip(scales, offsets, strict=True)):
            return zero
    return None
