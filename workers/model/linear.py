"""Products with weights in oneDNN's packed order, by private functions of torch that are tried before use."""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger("tandem.rank")

# oneDNN packs a weight for an expected number of rows; this one serves one row and hundreds alike.
# It also compiles code for every number of rows it meets, and keeps it (some 0.4 MB each): more rows than
# this are padded to a multiple of it, so that a rank meets few numbers.
_PACK_ROWS = 16
_OPS = torch.ops.mkldnn
_TRIED_SHAPE = (24, 32)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this kind are faster with packed weights, and torch still has them. float16 gained
    nothing where it was measured."""
    return (
        device.type == "cpu"
        and dtype in _TOLERANCES
        and bool(torch.backends.mkldnn.enabled)
        and _works(dtype)
    )


def pack(weight: Tensor) -> Tensor:
    """The weight [outputs, inputs] in packed order."""
    packed: Tensor = _OPS._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, inputs] to [T, outputs]."""
    num_rows = x.shape[0]
    if num_rows > _PACK_ROWS and num_rows % _PACK_ROWS:
        x = F.pad(x, (0, 0, 0, -num_rows % _PACK_ROWS))
    result: Tensor = _OPS._linear_pointwise(x, packed, bias, "none", [], "")
    return result[:num_rows]


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Try it once: another version of torch may lack these functions, or mean something else by them."""
    try:
        if dtype == torch.bfloat16 and not _OPS._is_mkldnn_bf16_supported():
            return False
        problem = _try(dtype)
    except (AttributeError, RuntimeError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    if problem:
        _log.warning(
            "torch %s has no packed products of %s (%s): plain ones are used, which read weights more slowly",
            torch.__version__,
            dtype,
            problem,
        )
    return not problem


@torch.inference_mode()
def _try(dtype: torch.dtype) -> str:
    """What is wrong with a packed product; "" when it is right."""
    num_outputs, num_inputs = _TRIED_SHAPE
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    packed = pack(weight)
    for num_rows in (1, _PACK_ROWS + 1):
        x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
        expected = F.linear(x, weight, bias).float()
        actual = packed_product(x, packed, bias).float()
        if actual.shape != expected.shape:
            return f"shape {list(actual.shape)} in place of {list(expected.shape)}"
        error = float((actual - expected).abs().max() / expected.abs().max())
        if not error <= _TOLERANCES[dtype]:
            return f"results are off by {error:.1e}"
    return ""
