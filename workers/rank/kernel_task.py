"""Compile a rank's kernels in a child process, while the rank itself imports torch and loads its weights.

The child (`workers.rank.kernel_compiler`) finds from the configuration alone which variants of Triton's
kernels the rank will launch, and compiles them into Triton's cache, from which the rank then loads them. It
is a process, and not a thread, because a compiler written in Python would take turns with the loading of
weights. This module needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtransfer.codec import framed
from kvtransfer.common.clock import Clock
from workers.errors import WorkerError
from workers.messages.rank_channel import RANK_SPEC_CODEC, RankSpec

_log = logging.getLogger("tandem.rank")

# The time from its start after which the child is ended: kernels are then compiled at their first launch.
MOST_S = 300.0
# The child forks, which libraries with threads of their own do not survive.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_COMMAND = (sys.executable, "-m", "workers.rank.kernel_compiler")


class KernelReport(msgspec.Struct, frozen=True):
    """What the child has done. Of `num_variants` of kernels `num_compiled` were not in Triton's cache, and
    `kernel_to_error` could not be compiled. `is_known`: an earlier child has compiled all of them, so this
    one did nothing. `seconds` are those from its start to its end."""

    num_variants: int = 0
    num_compiled: int = 0
    kernel_to_error: dict[str, str] = {}
    is_known: bool = False
    seconds: float = 0.0


class _Ended(NamedTuple):
    report: KernelReport
    # Why there is none of the child's own; "": there is.
    problem: str


def has_task(spec: RankSpec) -> bool:
    """Whether the kernels of this rank can be found from its configuration: on CUDA, if the model's folder is
    on this host. A GGUF file's folder may not have been made here yet."""
    has_folder = not spec.gguf_file or Path(spec.model_dir).is_dir()
    is_on_cuda = spec.device.partition(":")[0] == "cuda"
    return is_on_cuda and has_folder and importlib.util.find_spec("triton") is not None


class KernelTask:
    """The child of one rank. A context manager: the child ends with it."""

    def __init__(
        self, spec: RankSpec, clock: Clock, command: Sequence[str] = _COMMAND, most_s: float = MOST_S
    ) -> None:
        """Start the child, which takes `most_s` at most. Raises `OSError` if it cannot be started."""
        self._clock = clock
        self._most_s = most_s
        self._began_at = clock.now()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **_ONE_THREAD}
        )
        self._frame = framed(RANK_SPEC_CODEC.encode(spec))
        self._ended: _Ended | None = None
        self._thread = threading.Thread(target=self._follow, name="kernels", daemon=True)
        self._thread.start()

    def __enter__(self) -> KernelTask:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._thread.join()

    @property
    def process_id(self) -> int:
        """The child."""
        return self._process.pid

    def wait(self) -> KernelReport:
        """Return when the child is done: its report, an empty one if it failed. A problem is logged once."""
        waiting_since = self._clock.now()
        self._thread.join()
        assert self._ended is not None
        report, problem = self._ended
        self._ended = _Ended(report, "")
        if problem:
            _log.warning("kernels are compiled at their first launch, for their compiler %s", problem)
        elif waiting_since > self._began_at:
            _log.info(
                "%d variants of kernels, %d of them compiled beside the start in %.1f s, waited for %.1f s",
                report.num_variants,
                report.num_compiled,
                report.seconds,
                self._clock.now() - waiting_since,
            )
        return report

    def _follow(self) -> None:
        """Give the child its specification, and read its report to its end."""
        try:
            written, _ = self._process.communicate(self._frame, timeout=self._most_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            self._ended = _Ended(KernelReport(), f"took more than {self._most_s:g} s")
            return
        seconds = self._clock.now() - self._began_at
        if self._process.returncode:
            self._ended = _Ended(KernelReport(), f"ended with status {self._process.returncode}")
            return
        try:
            report = msgspec.json.decode(written, type=KernelReport)
        except msgspec.DecodeError as error:
            self._ended = _Ended(KernelReport(), f"reported {written[:80]!r}: {error}")
            return
        self._ended = _Ended(msgspec.structs.replace(report, seconds=seconds), "")


@contextlib.contextmanager
def naming_kernels(task: KernelTask | None) -> Iterator[None]:
    """Name the kernels that the child could not compile, once: in the error with which they end the start,
    or in a warning where they do not. Raises `WorkerError` in place of an error of Triton's compiler."""
    if task is None:
        yield
        return
    from triton.compiler.errors import CompilationError  # only here: elsewhere there may be no Triton
    from triton.errors import TritonError

    try:
        yield
    except (CompilationError, TritonError, RuntimeError) as error:
        is_of_passes = type(error) is RuntimeError and "PassManager" in str(error)
        if not (is_of_passes or isinstance(error, CompilationError | TritonError)):
            raise
        failed = task.wait().kernel_to_error
        raise WorkerError(f"a kernel cannot be compiled: {_listed(failed) or error}") from error
    if failed := task.wait().kernel_to_error:
        _log.warning("kernels were compiled at their first launch, not beside loading: %s", _listed(failed))


def _listed(kernel_to_error: dict[str, str]) -> str:
    return "; ".join(f"{kernel}: {error}" for kernel, error in kernel_to_error.items())
