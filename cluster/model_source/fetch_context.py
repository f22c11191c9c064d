"""What a download is given: where its progress is shown, and what interrupts it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.errors import StartError

_INTERRUPTED = "interrupted while the model was being downloaded; the next start continues it"


class FetchProgress(NamedTuple):
    """Represents how far a download is. `total_bytes` 0: not known yet."""

    stage: str
    num_bytes: int = 0
    total_bytes: int = 0

    @property
    def text(self) -> str:
        """`downloading org/name, 1.2 of 15.2 GB`."""
        if not self.total_bytes:
            return self.stage
        return f"{self.stage}, {self.num_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB"


def _show_nothing(progress: FetchProgress) -> None:
    pass


@dataclass(frozen=True, slots=True)
class FetchContext:
    """Carries the two; `report` is called from several threads. `failed`: another file of the same model
    could not be fetched."""

    report: Callable[[FetchProgress], None] = _show_nothing
    interrupted: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise `StartError` when interrupted, or when another file has failed."""
        if self.interrupted.is_set() or self.failed.is_set():
            raise StartError(_INTERRUPTED)

    def pause(self, delay_s: float) -> None:
        """Return after the delay; raise `StartError` at once when interrupted."""
        self.interrupted.wait(delay_s)
        self.check()


class ByteCount:
    """Counts the bytes of one download, for all of its threads."""

    def __init__(self, context: FetchContext, stage: str, total_bytes: int) -> None:
        self._context = context
        self._stage = stage
        self._total_bytes = total_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, or (negative) that must arrive again."""
        with self._lock:
            self._num_bytes += num_bytes
            self._context.report(FetchProgress(self._stage, self._num_bytes, self._total_bytes))
