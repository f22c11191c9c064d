"""The compiled form of `kvtransfer.blocks.runs`: `load()` gives it, or None where there is no C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from pathlib import Path

from kvtransfer.native.build import compile_library

_log = logging.getLogger("tandem.native")

_SOURCE = Path(__file__).with_name("runs.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fno-exceptions", "-Wno-psabi")
_THIS_CPU = "-march=native"


class RunKernel:
    """`move_runs` of runs.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._move_runs = library.move_runs
        self._move_runs.restype = None
        self._move_runs.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_void_p,
        ]

    def move_runs(
        self,
        src: int,
        src_offsets: int,
        dst: int | None,
        dst_offsets: int | None,
        num_blocks: int,
        runs: int,
        num_runs: int,
        streamed: bool,
        sums: int | None,
    ) -> None:
        """All by address: offsets are int64, runs int64 [num_runs, 3], sums uint64. Gives up the GIL."""
        self._move_runs(src, src_offsets, dst, dst_offsets, num_blocks, runs, num_runs, streamed, sums)


@functools.cache
def load(cpu: str = _THIS_CPU) -> RunKernel | None:
    """The compiled code for `cpu` (a compiler flag); None where it cannot be had, and numpy does the work."""
    try:
        path = compile_library(_SOURCE, (*_FLAGS, cpu))
        return RunKernel(ctypes.CDLL(str(path))) if path is not None else None
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the copy kernels could not be built, numpy is used: %s", error)
        return None
