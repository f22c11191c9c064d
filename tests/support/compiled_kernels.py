"""The compiled kernels that tests run: those of every instruction set of this CPU. For another one, which it
cannot execute, no test is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from optional_programs import needs_compiler

from workers.model import native
from workers.model.native.isa import Isa, available_isas

EMULATED = "TANDEM_EMULATE_AMX"
_EMULATING = " with emulated amx"

KERNELS = tuple(pytest.param(isa.value, marks=needs_compiler) for isa in available_isas())
BACKENDS = ("torch", *KERNELS)
# The kernels, and AMX tiles emulated along with the least instruction set of this CPU.
TILED_KERNELS = (
    *KERNELS,
    *(pytest.param(isa.value + _EMULATING, marks=needs_compiler) for isa in available_isas()[-1:]),
)


def kernels_of(isa: Isa | str, *defines: str) -> native.Kernels:
    """Return the kernels of an instruction set, by its name one of `TILED_KERNELS`; the test that calls is
    marked with `needs_compiler`."""
    if isinstance(isa, str) and isa.endswith(_EMULATING):
        isa, defines = isa.removesuffix(_EMULATING), (*defines, EMULATED)
    kernels = native.compiled(Isa(isa), *defines)
    assert kernels is not None, "there is a C++ compiler, but the kernels could not be built"
    return kernels


def backend_cases(of_torch: Iterable[tuple[Any, ...]], of_kernels: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return a backend's name and what it serves, for each of `BACKENDS`."""
    return [
        *(pytest.param("torch", *values) for values in of_torch),
        *(
            pytest.param(isa.value, *values, marks=needs_compiler)
            for values in of_kernels
            for isa in available_isas()
        ),
    ]
