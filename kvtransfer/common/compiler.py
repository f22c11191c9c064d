"""Compile C++ with the machine's compiler, once per sources, flags and CPU, into a private folder.

Used by `kvtransfer.blocks.runs`, `router.native` and `workers.model.native`, which bind the libraries.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvtransfer.common.host import cpu_flags, private_folder

_log = logging.getLogger("tandem.native")

_COMPILE_TIMEOUT_S = 600.0
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


Bound = TypeVar("Bound")


def bound_library(
    source: Path, flags: Sequence[str], bind: Callable[[Path], Bound], instead: str
) -> Bound | None:
    """Return the result of `bind` for the compiled library; None if there is no library to bind, with a
    warning that names the code that runs `instead` where there is a compiler."""
    try:
        path = compile_library(source, flags)
        return None if path is None else bind(path)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s could not be built, %s: %s", source.name, instead, error)
        return None


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that libraries are compiled with; None where none can be."""
    return shutil.which("c++") or shutil.which("g++") if platform.system() == "Linux" else None


def compile_library(source: Path, flags: Sequence[str]) -> Path | None:
    """Return the shared library of `source`, compiled now unless this machine has compiled it and the files
    that it includes by "name" before; None without a compiler. Of processes that ask for the same one, one
    compiles it and the others wait. Raises `OSError` or `subprocess.SubprocessError` if the build fails or
    the library must not be loaded."""
    if (compiler := find_compiler()) is None:
        return None
    cpu = hashlib.sha256("".join(sorted(cpu_flags())).encode()).hexdigest()
    key = hashlib.sha256(f"{tuple(flags)}{cpu}{_text(source)}".encode()).hexdigest()[:16]
    folder = private_folder("tandem-kernels")
    path = folder / f"{key}.so"
    if not path.exists():
        with _only_one(folder / f"{key}.lock"):
            if not path.exists():
                _compile(compiler, source, flags, path)
    return path


def _compile(compiler: str, source: Path, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built, shared = Path(scratch) / "built.o", Path(scratch) / "built.so"
        _run([compiler, *flags, "-fPIC", "-c", str(source), "-o", str(built)])
        # Linked without the flags: the caller loads OpenMP before the library, where it needs it.
        _run([compiler, "-shared", "-o", str(shared), str(built)])
        shared.replace(path)


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Wait until no other process or thread is inside for this file, which stays behind. The lock ends with
    the process that has it."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _text(source: Path) -> str:
    """Return the text of the file and of all that it includes by "name", each once."""
    texts: dict[Path, str] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if path not in texts:
            texts[path] = path.read_text()
            pending += [path.parent / name for name in _INCLUDE.findall(texts[path])]
    return "".join(texts.values())


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
