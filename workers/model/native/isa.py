"""The instruction sets that the CPU kernels are compiled for, and which of them this CPU has."""

from __future__ import annotations

import enum
import os

from kvtransfer.common.host import cpu_flags
from workers.errors import WorkerError

_FORCED = "TANDEM_CPU_ISA"
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")


class Isa(enum.Enum):
    """An instruction set, best first: the kernels of each are compiled from the same source."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"

    @property
    def needed_flags(self) -> frozenset[str]:
        """The CPU flags, as the kernel names them, that a CPU must have."""
        return frozenset(_NEEDED[self])

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """The flags that the compiler is given for it, in place of -march, with those of extensions that few
        lines use where this CPU has them."""
        extensions = _EXTENSIONS.get(self, {})
        return _COMPILER_FLAGS[self] + tuple(flag for name, flag in extensions.items() if name in cpu_flags())


_NEEDED = {
    Isa.AVX2: ("avx2", "fma", "f16c", "bmi2"),
    Isa.AVX512: ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
}
_NEEDED[Isa.AVX512_BF16] = (*_NEEDED[Isa.AVX512], "avx512_bf16")
_NEEDED[Isa.AMX] = (*_NEEDED[Isa.AVX512_BF16], "amx_tile", "amx_bf16")
_COMPILER_FLAGS = {
    Isa.AVX2: _AVX2,
    Isa.AVX512: _AVX512,
    Isa.AVX512_BF16: _AVX512_BF16,
    Isa.AMX: (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
}
_VNNI = {"avx512_vnni": "-mavx512vnni"}
# Tables of bytes, for codes whose products are of bf16.
_VBMI = {"avx512_vbmi": "-mavx512vbmi"}
# Extensions that a CPU with the instruction set may have: its CPU flag, and the compiler's.
_EXTENSIONS = {
    Isa.AVX512: _VNNI,
    Isa.AVX512_BF16: _VNNI | _VBMI,
    Isa.AMX: _VNNI | _VBMI | {"amx_int8": "-mamx-int8"},
}


def available_isas(flags: frozenset[str] | None = None) -> tuple[Isa, ...]:
    """Return the instruction sets of a CPU with these flags (default: this CPU), best first."""
    found = cpu_flags() if flags is None else flags
    return tuple(isa for isa in Isa if isa.needed_flags <= found)


def is_forced() -> bool:
    """Whether the environment variable TANDEM_CPU_ISA names an instruction set, for tests and benchmarks."""
    return bool(os.environ.get(_FORCED))


def usable_isas() -> tuple[Isa, ...]:
    """Return the instruction sets of this CPU, best first, from the forced one on if one is forced; raise
    `WorkerError` if this CPU lacks that one."""
    available = available_isas()
    forced = os.environ.get(_FORCED)
    if not forced:
        return available
    for place, isa in enumerate(available):
        if isa.value == forced:
            return available[place:]
    names = ", ".join(isa.value for isa in available) or "none"
    raise WorkerError(f"{_FORCED}={forced}: this CPU has {names}")
