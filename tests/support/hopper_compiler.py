"""Compiles Triton kernels for Hopper, or another device, on any machine, and reports what the compiler made
of them. This needs a process in which Triton does not interpret (`TRITON_INTERPRET`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from import_path import import_path
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from workers.model.cuda import card

# The compute capability of Hopper.
HOPPER = 90
_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """What a program of a kernel takes of a multiprocessor: registers and bytes of stack (spilled registers)
    of a thread, and bytes of shared memory; and how often some instructions occur: products of a warpgroup
    (or on Blackwell of a program) and of a warp, and asynchronous copies to shared memory."""

    name: str
    num_warps: int
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    num_group_products: int
    num_warp_products: int
    num_copies: int

    @property
    def num_on_multiprocessor(self) -> int:
        """The number of programs that share the 65,536 registers and 227 KiB of one of Hopper's
        multiprocessors."""
        registers = -(-self.num_registers // 8) * 8 * 32 * self.num_warps
        return min(65_536 // registers, 232_448 // (self.shared_bytes + 1024))


class _Driver:
    """Stands for the driver of a device of a compute capability: it knows the target, and launches
    nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_for_hopper() -> contextlib.AbstractContextManager[list[CompiledKernel]]:
    """Compile kernels for Hopper as `compiled_for` does."""
    return compiled_for(HOPPER)


@contextlib.contextmanager
def compiled_for(capability: int) -> Iterator[list[CompiledKernel]]:
    """Compile kernels for a compute capability in place of their launches, for arguments of the same kinds:
    the tensors may be empty. Yields a list that they are appended to."""
    kernels: list[CompiledKernel] = []

    def compile_only(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            made = kernel.warmup(*args, grid=grid, **kwargs)
            kernels.append(_read(kernel.fn.__name__, made.metadata, made.asm["cubin"]))

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", compile_only)
        patch.setattr(triton.runtime.driver, "_active", _Driver(capability))
        patch.setattr(card, "stand_in", card.Card(capability))
        yield kernels


def compile_by_script(script: Path, cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a script of `tests/gpu`, with these arguments, that prints a JSON line about each kernel; `cache`
    is a folder for compiled code. Return the lines."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = import_path(_ROOT, _ROOT / "tests" / "support")
    env["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def print_kernels(kernels: list[CompiledKernel]) -> None:
    """Print the lines that `compile_by_script` reads."""
    for kernel in kernels:
        print(json.dumps(dataclasses.asdict(kernel) | {"programs": kernel.num_on_multiprocessor}))


def _read(name: str, metadata: Any, cubin: bytes) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    registers, stack = (int(re.findall(rf"{item}:(\d+)", usage)[-1]) for item in ("REG", "STACK"))
    counts = (len(re.findall(rf"\b{it}\b", code)) for it in (r"HGMMA|\bUTC\w*MMA", "HMMA", "LDGSTS"))
    return CompiledKernel(name, metadata.num_warps, registers, stack, metadata.shared, *counts)


def _output(program: str, *arguments: str) -> str:
    command = [str(_PROGRAMS / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
