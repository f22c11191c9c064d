"""Compiles `kernels.cpp` with the machine's C++ compiler, once per source and CPU, and binds it to tensors.

`load()` is called by `workers.model.layers` and `attention`. Without a compiler, or on another device or
dtype, the torch code beside each call is used: the same numbers up to rounding, more memory traffic.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_log = logging.getLogger("tandem.native")

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Sums may be reordered (that is what makes them vectors); NaN and infinity keep their meaning.
_FLOAT_FLAGS = ("-fassociative-math", "-fno-signed-zeros", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-fno-exceptions", *_FLOAT_FLAGS)
_COMPILE_TIMEOUT_S = 120
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The compiled functions; every tensor must be on the CPU, of one of float32 and bfloat16, and
    contiguous in its last two dimensions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x [T, D] with weight [D], or x [T, heads, D] with weight [heads, D]; `out` may be x."""
        result = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        heads = 1 if x.dim() == 2 else x.shape[1]
        self._call(
            "rms_norm", x, x, _size(x.stride(0)), weight, result, _size(result.stride(0)),
            _size(x.shape[0]), _size(heads), _size(x.shape[-1]), ctypes.c_float(eps),
        )  # fmt: skip
        return result

    def rotate_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, blocks: Tensor, offsets: Tensor, kv: Tensor, layer: int
    ) -> Tensor:
        """Rotate queries and keys of qkv [T, H + 2K, D], put keys and values into `kv`
        [num_blocks, layers, 2, K, block_tokens, D]; returns the queries [T, H, D]."""
        num_tokens, num_rows, head_dim = qkv.shape
        _, _, _, num_kv, block_tokens, _ = kv.shape
        query = torch.empty((num_tokens, num_rows - 2 * num_kv, head_dim), dtype=qkv.dtype)
        self._call(
            "rotate_and_write", qkv, qkv, cos, sin, blocks, offsets, query, kv, _size(kv.stride(0)),
            _size(layer * kv.stride(1)), _size(num_tokens), _size(query.shape[1]), _size(num_kv),
            _size(head_dim), _size(block_tokens),
        )  # fmt: skip
        return query

    def decode_attention(
        self, query: Tensor, kv: Tensor, layer: int, tables: Tensor, firsts: Tensor, ends: Tensor
    ) -> Tensor:
        """query [B, H, D], int64 tables [B, n], firsts and ends [B]; returns [B, H * D]."""
        batch, num_heads, head_dim = query.shape
        _, _, _, num_kv, block_tokens, _ = kv.shape
        out = torch.empty((batch, num_heads * head_dim), dtype=query.dtype)
        self._call(
            "decode_attention", query, query, kv, _size(kv.stride(0)), _size(layer * kv.stride(1)), tables,
            firsts, ends, out, _size(batch), _size(num_heads), _size(num_kv), _size(head_dim),
            _size(block_tokens), _size(tables.shape[1]), ctypes.c_float(head_dim**-0.5),
        )  # fmt: skip
        return out

    def _call(
        self, name: str, typed_by: Tensor, *arguments: Tensor | ctypes.c_int64 | ctypes.c_float
    ) -> None:
        function = getattr(self._library, f"{name}_{_DTYPES[typed_by.dtype]}")
        function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments))


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels are there for tensors of this kind."""
    return device.type == "cpu" and dtype in _DTYPES and load() is not None


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled now if this machine has not compiled them before; None where it cannot."""
    openmp = next(iter((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")), None)
    compiler = shutil.which("c++") or shutil.which("g++")
    if platform.system() != "Linux" or openmp is None or compiler is None:
        _log.info("no C++ compiler or no libgomp beside torch: the torch code is used")
        return None
    try:
        path = _compile(compiler)
        # torch's own OpenMP threads serve the kernels too: a second pool would fight for the cores.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return Kernels(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the kernels could not be built, the torch code is used: %s", error)
        return None


def _compile(compiler: str) -> Path:
    cpu = hashlib.sha256("".join(sorted(_cpu_flags())).encode()).hexdigest()
    key = hashlib.sha256(f"{_FLAGS}{cpu}{_SOURCE.read_text()}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"tandem-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can write to; remove it")
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built, shared = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
            _run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(built)])
            # Linked without -fopenmp: its symbols come from the libgomp that torch has loaded.
            _run([compiler, "-shared", "-o", str(shared), str(built)])
            shared.replace(path)
    return path


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def _size(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
