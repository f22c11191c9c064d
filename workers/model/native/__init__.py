"""Bind the CPU kernels of `kernels.cpp` to tensors; they are compiled for this CPU at first use
(`kvtransfer.common.compiler`).

`load()` is called wherever there is a kernel for some work. Without a compiler, on a CPU without AVX2, or on
another device or dtype, the torch code beside each call runs instead: the same numbers up to rounding, with
more memory traffic."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from kvtransfer.common.compiler import compile_library
from workers.model.native.isa import Isa, chosen_isa

_log = logging.getLogger("tandem.native")

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Sums are computed in the order in which they are written, whatever is computed beside them. Libraries for
# several instruction sets share no variables when one process loads them.
_FLAGS = (
    "-fno-gnu-unique",
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fno-exceptions",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_NO_ID = (1 << 63) - 1
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The compiled functions. Every tensor must be on the CPU, float32 or bfloat16, and contiguous in its
    last two dimensions."""

    def __init__(self, library: ctypes.CDLL, isa: Isa) -> None:
        self.library = library
        self.isa = isa

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Normalize x [num_tokens, size] with weight [size], or x [num_tokens, num_heads, size] with weight
        [num_heads, size]. `out` may be x."""
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
        """Rotate queries and keys of qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim] and write keys
        and values to `kv`. Returns the queries [num_tokens, num_heads, head_dim]."""
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
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        tables: Tensor,
        firsts: Tensor,
        ends: Tensor,
        in_host: Tensor | None = None,
        first_host_id: int = 0,
    ) -> Tensor:
        """Attend from query [num_sequences, num_heads, head_dim] to the blocks of int64 tables
        [num_sequences, num_blocks], keys [firsts, ends). Block ids from `first_host_id` on are rows of
        `in_host`, one layer [num_host_blocks, 2, num_kv_heads, block_tokens, head_dim]. Returns
        [num_sequences, num_heads * head_dim]."""
        batch, num_heads, head_dim = query.shape
        _, _, _, num_kv, block_tokens, _ = kv.shape
        out = torch.empty((batch, num_heads * head_dim), dtype=query.dtype)
        host, first_id = (kv, _NO_ID) if in_host is None else (in_host, first_host_id)
        self._call(
            "decode_attention", query, query, kv, _size(kv.stride(0)), _size(layer * kv.stride(1)), tables,
            firsts, ends, host, _size(host.stride(0)), _size(first_id), out, _size(batch), _size(num_heads),
            _size(num_kv), _size(head_dim), _size(block_tokens), _size(tables.shape[1]),
            ctypes.c_float(head_dim**-0.5),
        )  # fmt: skip
        return out

    def gather_blocks(
        self, kv: Tensor, layer: int, tables: Tensor, in_host: Tensor, first_host_id: int
    ) -> Tensor:
        """Gather the blocks of int64 tables [num_sequences, num_blocks], some of them in host memory as in
        `decode_attention`. Returns [2 * num_sequences * num_kv_heads * num_blocks, block_tokens *
        head_dim]."""
        batch, num_blocks = tables.shape
        _, _, _, num_kv, block_tokens, head_dim = kv.shape
        size = block_tokens * head_dim
        out = torch.empty((2 * batch * num_kv * num_blocks, size), dtype=kv.dtype)
        self._call(
            "gather_blocks", kv, kv, _size(kv.stride(0)), _size(layer * kv.stride(1)), tables, in_host,
            _size(in_host.stride(0)), _size(first_host_id), out, _size(batch), _size(num_kv),
            _size(num_blocks), _size(size),
        )  # fmt: skip
        return out

    def gumbel_argmax(
        self, logits: Tensor, temperature: Tensor, least: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Find in each row of float32 logits [num_rows, vocab_size] the token with the largest logit /
        temperature + noise, among those whose logit / temperature is at least `least`. `temperature` and
        `least` are float32 [num_rows, 1]; `keys` [num_rows] are those of `workers.rank.sampler`. Returns
        tokens, best and second best scores, [num_rows]; the scores are exact up to the rounding of
        logarithms."""
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        tokens = torch.empty(num_rows, dtype=torch.int64)
        best, second = torch.empty(2, num_rows).unbind(0)
        arguments = (logits, temperature.contiguous(), least.contiguous(), keys, tokens, best, second)
        self.library.gumbel_argmax(
            *(ctypes.c_void_p(argument.data_ptr()) for argument in arguments),
            _size(num_rows),
            _size(vocab_size),
        )
        return tokens, best, second

    def _call(
        self, name: str, typed_by: Tensor, *arguments: Tensor | ctypes.c_int64 | ctypes.c_float
    ) -> None:
        function = getattr(self.library, f"{name}_{_DTYPES[typed_by.dtype]}")
        function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments))


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of this kind."""
    return device.type == "cpu" and dtype in _DTYPES and load() is not None


@functools.cache
def load() -> Kernels | None:
    """Return the kernels for the best instruction set of this CPU (`workers.model.native.isa`), compiled now
    unless this machine has compiled them before; None where it cannot."""
    isa = chosen_isa()
    return None if isa is None else compiled(isa)


@functools.cache
def compiled(isa: Isa, *defines: str) -> Kernels | None:
    """Return the kernels for an instruction set that this CPU has, None where they cannot be compiled.
    `defines` are macros for tests."""
    openmp = next(iter((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")), None)
    flags = (*_FLAGS, *isa.compiler_flags, *(f"-D{name}" for name in defines))
    try:
        path = compile_library(_SOURCE, flags) if openmp is not None else None
        if path is None:
            _log.info("no C++ compiler or no libgomp beside torch: the torch code is used")
            return None
        # torch's own OpenMP threads serve the kernels too: a second pool would fight for the cores.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return Kernels(ctypes.CDLL(str(path)), isa)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the kernels could not be built, the torch code is used: %s", error)
        return None


def _size(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
