"""Bind the compiled loops of a decision and the compiled table of block keys (`native.cpp`), which are built
at first use.

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
        self.new_block_table: Any = library.new_block_table
        self.new_block_table.restype = address
        self.new_block_table.argtypes = []
        self.delete_block_table: Any = library.delete_block_table
        self.delete_block_table.restype = None
        self.delete_block_table.argtypes = [address]
        self.block_table_size: Any = library.block_table_size
        self.block_table_size.restype = count
        self.block_table_size.argtypes = [address]
        self.change_masks: Any = library.change_masks
        self.change_masks.restype = None
        self.change_masks.argtypes = [address, ctypes.c_char_p, count, count, count]
        self.read_masks: Any = library.read_masks
        self.read_masks.restype = count
        self.read_masks.argtypes = [address, ctypes.c_char_p, count, count, address, count]
        self.count_blocks: Any = library.count_blocks
        self.count_blocks.restype = None
        self.count_blocks.argtypes = [address, count, count, address]
        self.limit_to_marks: Any = library.limit_to_marks
        self.limit_to_marks.restype = None
        self.limit_to_marks.argtypes = [address, count, count, address, address, count]
        self.find_cheapest: Any = library.find_cheapest
        self.find_cheapest.restype = None
        self.find_cheapest.argtypes = [address] * 6


@functools.cache
def load_kernel() -> RouterKernel | None:
    """Return the kernel, or None where Python has to do its work."""
    return bound_library(_SOURCE, _FLAGS, RouterKernel, "Python prices each replica")
