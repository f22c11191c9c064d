"""Panics of libraries that are written in Rust, as errors like any other.

A panic reaches Python as `pyo3_runtime.PanicException`, which is no `Exception`: nothing that handles errors
sees it, and it may end a call without an answer, or a thread without a word.
"""

from __future__ import annotations

from types import TracebackType

_MODULE = "pyo3_runtime"


class PanicError(Exception):
    """A library panicked. Its words may be those of a prompt: they are not shown."""

    def __init__(self) -> None:
        super().__init__("a library failed in its own code (panic)")


class _Translation:
    """Turns a panic within into a `PanicError`. Without a state: one serves all, at the same time."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and is_panic(kind):
            raise PanicError from error


def is_panic(kind: type[BaseException]) -> bool:
    """Whether it is the class of a panic."""
    return kind.__module__ == _MODULE


# Stands around every call of such a library: `with panics_as_errors: ...`.
panics_as_errors = _Translation()
