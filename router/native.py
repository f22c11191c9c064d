"""Bind the compiled loops of a decision (`native.cpp`), which are built at first use.

Without a compiler `router.radix` counts and `router.policies.cost_policy` prices in Python: the same numbers,
in ten times the time.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from kvtransfer.common.compiler import bound_library

_SOURCE = Path(__file__).with_name("native.cpp")
# Costs are those of Python to the last bit, so no product is fused with a sum.
_FLAGS = ("-O3", "-std=c++17", "-fno-exceptions", "-ffp-contract=off", "-march=native")


class RouterKernel:
    """`count_blocks`, `limit_to_marks` and `find_cheapest` of native.cpp. They keep the GIL: they take
    microseconds."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        address, count = ctypes.c_void_p, ctypes.c_int64
        self.count_blocks: Any = library.count_blocks
        self.count_blocks.restype = None
        self.count_blocks.argtypes = [ctypes.c_char_p, count, count, address]
        self.limit_to_marks: Any = library.limit_to_marks
        self.limit_to_marks.restype = None
        self.limit_to_marks.argtypes = [ctypes.c_char_p, count, count, address, address, count]
        self.find_cheapest: Any = library.find_cheapest
        self.find_cheapest.restype = None
        self.find_cheapest.argtypes = [address] * 6


@functools.cache
def load_kernel() -> RouterKernel | None:
    """Return the kernel, or None where Python has to do its work."""
    return bound_library(_SOURCE, _FLAGS, RouterKernel, "Python prices each replica")
