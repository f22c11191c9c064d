"""What is fuzzed: named targets, each of which runs one case at a time from a source of randomness."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

# Longer than any case takes on a machine that is busy with other work.
HANG_S = 20.0


class HangError(Exception):
    """A case did not end within `HANG_S`."""


class FindingError(Exception):
    """A case ended in a way that the target does not accept, without an exception of its own."""


@dataclass(frozen=True)
class Target:
    """One thing that is fuzzed. `run(rng)` runs one case and returns the name of its outcome: what it raises
    is a finding. `num_quick` is the number of cases that `make test` runs."""

    name: str
    run: Callable[[Random], str]
    num_quick: int
    # Processes beside this one whose memory and descriptors must not grow either.
    processes: tuple[int, ...] = field(default=())


# Makes the targets of a module: they last until the stack is closed, and may use the folder.
OpenTargets = Callable[[ExitStack, Path], list[Target]]


def outcome(action: Callable[[], object], *documented: type[BaseException]) -> str:
    """Run the action; return "ok", or the name of the documented error that it raised."""
    try:
        action()
    except documented as error:
        return type(error).__name__
    return "ok"


@contextmanager
def stderr_in(file: Path) -> Iterator[None]:
    """Write into the file what code of any language, and the processes that are started, write to standard
    error in the block."""
    before = os.dup(2)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(descriptor, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(descriptor)


def rng_of(name: str, seed: int, number: int) -> Random:
    """Return the source of randomness of a case: equal for equal arguments, on every machine."""
    return Random(f"{name} {seed} {number}")


@contextmanager
def bounded(seconds: float = HANG_S) -> Iterator[None]:
    """Raise `HangError` in the block when it lasts longer; in the main thread only."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise HangError(f"no end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
