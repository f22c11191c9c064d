"""The child process that compiles a rank's kernels into Triton's cache (`workers.rank.kernel_task`).

    python -m workers.rank.kernel_compiler

reads a `RankSpec` frame from standard input and prints a `KernelReport` in JSON. What takes long, a process
each compiles in turn. When all variants of a configuration are in the cache, a mark beside them says so, and
the next child of the same configuration ends before it imports torch. Not yet validated on a card."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from kvtransfer.errors import TransferError
from workers.errors import CheckpointError
from workers.messages.rank_channel import RankSpec
from workers.rank.kernel_task import KernelReport
from workers.rank.start import read_spec

if TYPE_CHECKING:
    from workers.rank.kernel_rehearsal import KernelVariant

# Processes beside each other; each compiles a kernel in about a second.
_MOST_PROCESSES = 8
_NICENESS = 5
_PR_SET_PDEATHSIG = 1
_MAJOR_ATTRIBUTE, _MINOR_ATTRIBUTE = 75, 76
_ROOT = Path(__file__).resolve().parent.parent.parent
# The sources that decide which kernels there are, and how they are launched.
_SOURCES = ("workers/model", "workers/rank", "kvtransfer/blocks")
# What differs between ranks with the same kernels.
_UNLIKE = {"replica", "engine_core_address", "trust", "transfer", "faults", "ticket", "num_threads", "device"}

# The variants that a process of the pool finds when it is forked.
_variants: Sequence[KernelVariant] = ()


class _Compiled(NamedTuple):
    """The outcome of one variant: whether it was in the cache, and why it cannot be compiled ("": it can)."""

    is_cached: bool
    error: str = ""


def compile_kernels(spec: RankSpec, capability: int) -> KernelReport:
    """Compile the kernels of a rank for a card of this compute capability, unless that was done."""
    mark = _cache_folder() / f"tandem-{_key(spec, capability)}"
    if mark.exists():
        return KernelReport(is_known=True)
    mark.parent.mkdir(parents=True, exist_ok=True)
    variants = _rehearsed(spec, capability)
    with _alone(mark.parent / f"tandem-{_key(replace(spec, rank=0), capability)}.lock"):
        if mark.exists():  # by another rank of this host, in the meantime
            return KernelReport(is_known=True)
        num_cores = len(os.sched_getaffinity(0))
        report = compile_variants(variants, max(1, min(_MOST_PROCESSES, num_cores - 1)))
        if not report.kernel_to_error:
            mark.touch()
    return report


def compile_variants(variants: Sequence[KernelVariant], num_processes: int) -> KernelReport:
    """Compile variants in so many processes at a time, and report all of them."""
    global _variants
    _variants = variants
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, context) as pool:
        compiled = list(pool.map(_compile, range(len(variants))))
    errors: dict[str, str] = {}
    for variant, outcome in zip(variants, compiled, strict=True):
        if outcome.error:
            errors.setdefault(variant.name, outcome.error)
    return KernelReport(len(variants), sum(not it.is_cached for it in compiled), errors)


def _rehearsed(spec: RankSpec, capability: int) -> Sequence[KernelVariant]:
    """Return the variants that the rank launches."""
    import torch  # only here: with all kernels in the cache it is not needed

    from workers.rank.kernel_rehearsal import rehearse

    torch.set_num_threads(1)
    return rehearse(spec, capability)


def _compile(index: int) -> _Compiled:
    """Compile a variant in a process of the pool."""
    from triton import knobs
    from triton.compiler.errors import CompilationError
    from triton.errors import TritonError

    hits: list[bool] = []

    def note(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = note
    try:
        _variants[index].compile()
    except (CompilationError, TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return _Compiled(is_cached=False, error=lines[-1][:300])
    return _Compiled(is_cached=all(hits))


def device_capability(device: str) -> int | None:
    """Return the compute capability of a CUDA device, 90 for 9.0, without using the device; None where there
    is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    index = int(device.partition(":")[2] or 0)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(found), index)
    for number, attribute in ((major, _MAJOR_ATTRIBUTE), (minor, _MINOR_ATTRIBUTE)):
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, found)
    return None if failed else 10 * major.value + minor.value


def _cache_folder() -> Path:
    """Return the folder of Triton's cache."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _key(spec: RankSpec, capability: int) -> str:
    """Return a name for everything that decides which kernels the rank launches."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for source in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(source.read_bytes())
    fields = {name: value for name, value in msgspec.structs.asdict(spec).items() if name not in _UNLIKE}
    versions = [importlib.metadata.version(name) for name in ("torch", "triton")]
    digest.update(repr((sorted(fields.items()), capability, versions)).encode())
    with contextlib.suppress(OSError):  # reported by the rank
        digest.update((Path(spec.model_dir) / "config.json").read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process compiles kernels of the same replica: its ranks share most of them."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compile the kernels of the rank on standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(_NICENESS)
    try:
        spec = read_spec(sys.stdin.buffer)
        capability = device_capability(spec.device)
        report = KernelReport() if capability is None else compile_kernels(spec, capability)
    except (TransferError, CheckpointError) as error:  # the rank reports it, too
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
