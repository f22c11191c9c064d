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


def isa_marks(isa: Isa) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of tests with an instruction set of this CPU: with one between its best and its least
    they are slow, for each build takes long and few lines are that one's alone."""
    every = available_isas()
    return (needs_compiler,) if isa in (every[0], every[-1]) else (needs_compiler, pytest.mark.slow)


KERNELS = tuple(pytest.param(isa.value, marks=isa_marks(isa)) for isa in available_isas())
ISAS = tuple(pytest.param(isa, marks=isa_marks(isa), id=isa.value) for isa in available_isas())
# The same for tests of which the best instruction set is enough for the fast suite.
BEST_ISA = tuple(
    pytest.param(isa, marks=[needs_compiler, *([pytest.mark.slow] if rank else [])], id=isa.value)
    for rank, isa in enumerate(available_isas())
)
BACKENDS = ("torch", *KERNELS)
# The kernels, and AMX tiles emulated along with the least instruction set of this CPU, a build of their own.
TILED_KERNELS = (
    *KERNELS,
    *(
        pytest.param(isa.value + _EMULATING, marks=(needs_compiler, pytest.mark.slow))
        for isa in available_isas()[-1:]
    ),
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
            pytest.param(isa.value, *values, marks=isa_marks(isa))
            for values in of_kernels
            for isa in available_isas()
        ),
    ]
