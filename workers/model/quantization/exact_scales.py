"""Find the smallest form that holds scales and offsets exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model.quantization.quantized_weight import Codes

# The codes of 4 bits that mean zero in formats without zero points.
_ZEROS = (8, 7)


def exact_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of 16 bits that holds all these float32 numbers exactly, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(it.to(dtype).float(), it) for it in values):
            return dtype
    return torch.float32


def common_zero(codes: Codes, scales: Sequence[Tensor], offsets: Sequence[Tensor]) -> int | None:
    """Return the code that means 0 in all groups, where there is one of 4 bits, so that offsets say no
    more."""
    if codes is not Codes.UINT4:
        return None
    for zero in _ZEROS:
        if all(torch.equal(at, of * -zero) for of, at in zip(scales, offsets, strict=True)):
            return zero
    return None
