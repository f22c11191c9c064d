"""Child processes of the tests: a set-up that fails ends what it has started; no module leaves any behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

import psutil
from patience import WAIT_S

# Words of the command lines of those that end with the session.
LASTING = ("rank_processes.py", "multiprocessing.resource_tracker", "multiprocessing.forkserver")


Process = subprocess.Popen[bytes] | subprocess.Popen[str]


class _Closable(Protocol):
    def close(self) -> object: ...


def children() -> set[psutil.Process]:
    """Return the processes that this one has started and that have not ended."""
    return set(psutil.Process().children())


def assert_ended(processes: set[psutil.Process], timeout_s: float = WAIT_S) -> None:
    """Fail with the command lines of the processes that do not end soon, and kill them."""
    _, alive = psutil.wait_procs([each for each in processes if not _is_lasting(each)], timeout=timeout_s)
    left = [(each.pid, command) for each in alive if (command := _command(each))]
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    assert left == [], f"processes were left behind: {left}"


@contextmanager
def killed_on_error(processes: Process | Sequence[Process]) -> Iterator[None]:
    """Kill the process or processes, and all below them, if the block fails: for set-ups and orderly ends."""
    try:
        yield
    except BaseException:
        for process in [processes] if isinstance(processes, subprocess.Popen) else processes:
            kill_family(process)
        raise


@contextmanager
def closed_on_error(opened: _Closable) -> Iterator[None]:
    """Close `opened` if the block fails."""
    with ExitStack() as stack:
        stack.callback(opened.close)
        yield
        stack.pop_all()


def close_all(opened: Iterable[_Closable]) -> list[object]:
    """Close each of them, also after one that fails. Return their results."""
    results: list[object] = []
    with ExitStack() as stack:
        for each in reversed(list(opened)):
            stack.callback(_close_into, results, each)
    return results


def _close_into(results: list[object], opened: _Closable) -> None:
    results.append(opened.close())


def kill_family(process: Process) -> None:
    """Kill a process and all below it, and close its pipes. Returns when they are gone."""
    family: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, timeout=WAIT_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _command(process: psutil.Process) -> str:
    """Return the command line of a running process; "" for one that has ended, waited for or not."""
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline())
    return ""


def _is_lasting(process: psutil.Process) -> bool:
    return any(word in _command(process) for word in LASTING)
