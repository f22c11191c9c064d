"""Bind the CPU kernels of `kernels.cpp` to tensors; they are compiled for this CPU at first use
(`kvtransfer.common.compiler`).

`load()` is called wherever there is a kernel for some work. Without a compiler, on a CPU without AVX2, or on
another device or dtype, the torch code next to each call runs instead: the same numbers up to rounding, with
more memory traffic."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.common.compiler import compile_library
from workers.model.attention.quantized_kv import head_dim_of, is_quantized
from workers.model.native.isa import Isa, is_forced, usable_isas
from workers.model.norm import Norm

_log = logging.getLogger("tandem.native")

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Sums are computed in the order in which they are written, whatever else is computed. Libraries for several
# instruction sets share no variables when one process loads them.
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
# A ratio far from both kinds of CPU, which take 0.5 and 1.3 times the time with bfloat16 operands that they
# take with float: every process of a machine chooses alike.
_CLEARLY = 1.1
# The dtypes that the kernels serve.
DTYPES = (torch.float32, torch.bfloat16)
# Those of quantized KV, as `KvElements` of `kv_elements.h` numbers them; 0: as activations.
KV_ELEMENTS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class NormArguments(ctypes.Structure):
    """`Norm` of `layer_ops.h`."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("rounds_first", ctypes.c_int32))

    @staticmethod
    def of(norm: Norm | None, size: int) -> NormArguments:
        """Describe a norm of rows of this size, which must live until the result is used no more; None: no
        norm."""
        if norm is None:
            return NormArguments()
        assert norm.weight.dtype == torch.float32
        assert norm.weight.shape == (size,)
        assert norm.weight.is_contiguous()
        return NormArguments(norm.weight.data_ptr(), norm.eps, norm.is_rounded_first)


class RotatedLayer(ctypes.Structure):
    """A layer for `Kernels.rotate_and_write`: `RotatedLayer` of `layer_ops.h`."""

    _fields_ = (
        *((name, NormArguments) for name in ("q_norm", "k_norm")),
        ("kv", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                "block_stride",
                "kind_stride",
                "head_stride",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "is_bf16",
                "kv_elements",
                "block_tokens",
            )
        ),
    )

    @staticmethod
    def of(
        kv: Tensor,
        layer: int,
        num_heads: int,
        q_norm: Norm | None,
        k_norm: Norm | None,
        *,
        is_written: bool = True,
        dtype: torch.dtype | None = None,
    ) -> RotatedLayer:
        """Describe layer `layer` of `kv` [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim],
        with norms of heads if there are any; unless it is written, there are queries alone. `dtype` is that
        of queries (None: that of the KV). KV and norms must live until the result is used no more."""
        _, _, _, num_kv_heads, block_tokens, _ = kv.shape
        head_dim = head_dim_of(kv)
        assert head_dim % (16 if is_quantized(kv) else 2) == 0
        assert kv.stride()[4:] == (kv.shape[5], 1)
        return RotatedLayer(
            NormArguments.of(q_norm, head_dim), NormArguments.of(k_norm, head_dim),
            kv.data_ptr() + layer * kv.stride(1) * kv.itemsize, kv.stride(0), kv.stride(2), kv.stride(3),
            num_heads, num_kv_heads if is_written else 0, head_dim, (dtype or kv.dtype) == torch.bfloat16,
            KV_ELEMENTS.get(kv.dtype, 0), block_tokens,
        )  # fmt: skip


class RotatedTokens(ctypes.Structure):
    """The tokens of a step for `Kernels.rotate_and_write`: `RotatedTokens` of `layer_ops.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "blocks", "offsets")),
        ("num_rows", ctypes.c_int64),
    )

    @staticmethod
    def of(cos: Tensor, sin: Tensor, blocks: Tensor, offsets: Tensor) -> RotatedTokens:
        """Describe tokens: float32 `cos` and `sin` [num_tokens, head_dim / 2], int32 `blocks` and `offsets`
        in them, [num_tokens]. The tensors must live until the result is used no more."""
        assert cos.dtype == sin.dtype == torch.float32
        assert blocks.dtype == offsets.dtype == torch.int32
        assert all(tensor.is_contiguous() for tensor in (cos, sin, blocks, offsets))
        return RotatedTokens(
            cos.data_ptr(), sin.data_ptr(), blocks.data_ptr(), offsets.data_ptr(), len(blocks)
        )


class _SamplingStep(ctypes.Structure):
    """`Step` of `sampling.h`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("is_sure", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
    )


class SamplingArguments:
    """The arguments of the sampling kernels, made once with arrays for up to `max_rows` rows. The table of
    slots at `table_address` (`workers.rank.logits.SLOT`) must outlive them."""

    def __init__(self, table_address: int, max_rows: int) -> None:
        self._slots = np.zeros(max_rows, np.int32)
        self._tokens = np.zeros(max_rows, np.int32)
        self._is_sure = np.zeros(max_rows, np.bool_)
        arrays = {"slots": self._slots, "tokens": self._tokens, "is_sure": self._is_sure}
        self.step = _SamplingStep(
            table=table_address, **{name: array.ctypes.data for name, array in arrays.items()}
        )
        self.reference = ctypes.byref(self.step)

    def of_logits(
        self, logits: Tensor, slots: NDArray[np.int32], masks: NDArray[np.uint32] | None
    ) -> SamplingArguments:
        """Take float32 logits [num_rows, vocab_size], which a kernel changes in place, with a slot for each
        row; `masks` as in `workers.rank.sampler.Sampler.sample`. Logits and masks must live until the kernel
        has run."""
        num_rows, vocab_size = logits.shape
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        step = self.step
        step.logits, step.vocab_size, step.masks = logits.data_ptr(), vocab_size, None
        if masks is not None:
            assert masks.shape == (num_rows, -(-vocab_size // 32)), f"masks {masks.shape}"
            assert masks.dtype == np.uint32
            assert masks.flags.c_contiguous
            step.masks = masks.ctypes.data
        self._slots[:num_rows], step.num_rows = slots, num_rows
        return self

    def of_tokens(self, slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> SamplingArguments:
        """Take a token for each slot."""
        num_rows = len(slots)
        self._slots[:num_rows], self._tokens[:num_rows], self.step.num_rows = slots, tokens, num_rows
        return self

    def drawn(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens that a kernel has drawn, and whether rounding cannot have decided, [num_rows]."""
        num_rows = self.step.num_rows
        return self._tokens[:num_rows].copy(), self._is_sure[:num_rows].copy()


class Kernels:
    """The compiled functions. Every tensor must be on the CPU, float32 or bfloat16, and contiguous in its
    last two dimensions."""

    def __init__(self, library: ctypes.CDLL, isa: Isa) -> None:
        library.count_tokens.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int64)
        self.library = library
        self.isa = isa

    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        """Normalize x [num_tokens, size]. `out` may be x."""
        result = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        assert x.dtype == result.dtype
        arguments = NormArguments.of(norm, x.shape[1])
        self.library.tandem_rms_norm(
            _address(x), _size(x.stride(0)), ctypes.byref(arguments), _address(result),
            _size(result.stride(0)), _size(x.shape[0]), _size(x.shape[1]), _size(x.dtype == torch.bfloat16),
        )  # fmt: skip
        return result

    def gate_mul(self, gate: Tensor, up: Tensor, *, is_gelu: bool) -> Tensor:
        """Multiply the activation of `gate` [num_tokens, size], in place, by `up` [num_tokens, size]; the
        activation is SiLU or the approximation of GeLU by tanh."""
        assert gate.dtype == up.dtype
        self.library.tandem_gate_mul(
            _address(gate), _size(gate.stride(0)), _address(up), _size(up.stride(0)), _size(gate.shape[0]),
            _size(gate.shape[1]), _size(is_gelu), _size(gate.dtype == torch.bfloat16),
        )  # fmt: skip
        return gate

    def scale_by_sigmoid(self, x: Tensor, gates: Tensor) -> Tensor:
        """Multiply x [num_tokens, size], in place, by the sigmoid of `gates` [num_tokens, 1]."""
        assert x.dtype == gates.dtype
        assert gates.shape == (len(x), 1)
        assert gates.is_contiguous()
        self.library.tandem_scale_by_sigmoid(
            _address(x), _size(x.stride(0)), _address(gates), _size(x.shape[0]), _size(x.shape[1]),
            _size(x.dtype == torch.bfloat16),
        )  # fmt: skip
        return x

    def multiply_by(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply x [num_tokens, size], in place, by `factors` of the same shape."""
        self._multiply(self.library.tandem_multiply_by, x, factors)
        return x

    def multiply_by_sigmoids(self, x: Tensor, gates: Tensor) -> Tensor:
        """Multiply x [num_tokens, size], in place, by the rounded sigmoids of `gates` of the same shape."""
        self._multiply(self.library.tandem_multiply_by_sigmoids, x, gates)
        return x

    @staticmethod
    def _multiply(run: Any, x: Tensor, factors: Tensor) -> None:
        assert x.dtype == factors.dtype
        assert x.shape == factors.shape
        assert x.stride(1) == factors.stride(1) == 1
        run(
            _address(x), _size(x.stride(0)), _address(factors), _size(factors.stride(0)), _size(len(x)),
            _size(x.shape[1]), _size(x.dtype == torch.bfloat16),
        )  # fmt: skip

    def rotate_and_write(self, layer: RotatedLayer, tokens: RotatedTokens, qkv: Tensor) -> None:
        """Normalize, if the layer has norms, and rotate queries and keys of qkv [num_tokens, (num_heads + 2 *
        num_kv_heads) * head_dim], the queries in place; write keys and values to their blocks."""
        self.library.tandem_rotate_and_write(
            ctypes.byref(layer), ctypes.byref(tokens), _address(qkv), _size(qkv.stride(0))
        )

    def sample_rows(self, arguments: SamplingArguments) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Change the logits as their slots demand, and draw a token for each row. Returns tokens, and whether
        rounding cannot have decided, [num_rows]."""
        self.library.sample_rows(arguments.reference)
        return arguments.drawn()

    def change_rows(self, arguments: SamplingArguments) -> None:
        """Change the logits as `sample_rows` does, and draw nothing."""
        self.library.change_rows(arguments.reference)

    def floats_are_faster(self) -> bool:
        """Whether products are clearly faster with operands that are widened to float: the bfloat16 products
        of a CPU may have no more than half the units that float32 has. Takes some milliseconds."""
        bf16_ns, float_ns = ctypes.c_double(), ctypes.c_double()
        self.library.tandem_time_operands(ctypes.byref(bf16_ns), ctypes.byref(float_ns))
        return float_ns.value * _CLEARLY < bf16_ns.value

    def count_tokens(self, arguments: SamplingArguments) -> None:
        """Count the tokens as output of those of their slots that have penalties."""
        step = arguments.step
        self.library.count_tokens(step.table, step.slots, step.tokens, step.num_rows)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of this kind."""
    return device.type == "cpu" and dtype in DTYPES and load() is not None


@functools.cache
def load() -> Kernels | None:
    """Return the kernels for the best instruction set of this CPU (`workers.model.native.isa`), compiled now
    unless this machine has compiled them before; None where it cannot. An instruction set that the compiler
    or the operating system does not know is passed over, and AVX-512 with bf16 where a measurement shows that
    products are faster without."""
    slower: Kernels | None = None
    for isa in usable_isas():
        kernels = compiled(isa)
        if kernels is None:
            continue
        if slower is not None or is_forced() or not kernels.floats_are_faster():
            return kernels
        slower = kernels
    return slower


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
        library = ctypes.CDLL(str(path))
        if not library.tandem_initialize():
            _log.warning("the operating system does not permit %s", isa.value)
            return None
        return Kernels(library, isa)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("the kernels for %s could not be built: %s", isa.value, error)
        return None


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _size(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
