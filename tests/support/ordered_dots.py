"""Products of Triton's interpreter as tensor cores have them: an element's sum depends on its own row and
column, and on nothing else of the tile.

The interpreter multiplies tiles by numpy, whose library takes other instructions for the rows at a tile's end
than for those before, on some CPUs (Haswell and Zen, of OpenBLAS's kernels): a row's bits then depend on its
place in the tile, which they do on no card. Nor does it know bfloat16, whose bits it multiplies as
integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter


def use_ordered_dots(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add the products of a tile one input after another, in float32 or int32."""
    create = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if a.data.ndim != 2 or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return create(builder, a, b, d, precision, imprecise)
        sums = ordered_dot(_values(a), _values(b), d.data)
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def ordered_dot(a: NDArray[Any], b: NDArray[Any], sums: NDArray[Any]) -> NDArray[Any]:
    """Return sums [num_rows, num_columns] plus the product of a [num_rows, size] and b [size, num_columns],
    in the dtype of the sums."""
    total = np.zeros_like(sums)
    a, b = a.astype(sums.dtype), b.astype(sums.dtype)
    for row, column in zip(a.T, b, strict=True):
        total += row[:, None] * column
    result: NDArray[Any] = sums + total
    return result


def _values(handle: Any) -> NDArray[Any]:
    data: NDArray[Any] = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data
