"""Track the progress of a rank's steps: one thread runs them and marks pieces, another reads and reports.

A mark means that one piece of a step is done: a product, a part of a chunk's attention, a layer. On a CPU a
piece is done when its call returns, so the step's thread counts it; kernels that run a whole layer in one
call count its pieces themselves. On CUDA calls return when their kernels are queued: a mark is an event
behind them on the stream, and counts once the device has passed it. A kernel that hangs therefore stops the
progress although its launches succeeded, and a long step makes progress while its thread only waits for the
device. A step that a graph computes has one mark, its end: it is shorter than most pieces of other steps.

Waiting for another rank makes no mark: ranks that wait for each other make no progress.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvtransfer.common.faults import Faults
from workers.model.attention.interface import Marks
from workers.rank.device_queue import DeviceQueue, Event
from workers.rank.input_batch import PlannedRows


class ProgressReading(NamedTuple):
    """The oldest step that has begun and is not done, else the last one, and the number of pieces of all
    steps that are done so far."""

    step: int
    num_pieces: int


class Progress(Marks):
    """Marks of a rank's steps, written by the step's thread and read by one other thread."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__()
        self._queue = queue
        self._step = 0
        self._num_passed = 0
        self._events: deque[tuple[int, Event]] = deque()

    def begin(self, step: int) -> None:
        """Begin a step: later marks belong to it."""
        self._step = step

    def mark(self) -> None:
        """Mark a piece of a layer as done. On CUDA, where it is only queued, this does nothing."""
        if not self._queue.runs_behind:
            self.pieces.value += 1

    def mark_layer(self) -> None:
        """Mark all that was computed or queued so far as one piece."""
        if self._queue.runs_behind:
            self._events.append((self._step, self._queue.event()))
        else:
            self.pieces.value += 1

    def read(self) -> ProgressReading:
        """Return how far the step's thread (on CUDA: the device) has come. Raises RuntimeError if the device
        has failed."""
        while self._events:
            step, event = self._events[0]
            if not event.query():
                return ProgressReading(step, self.pieces.value + self._num_passed)
            self._events.popleft()
            self._num_passed += 1
        return ProgressReading(self._step, self.pieces.value + self._num_passed)


class StepFaults(Marks):
    """Passes marks on to `progress`, with fault points at which a test makes a rank fail inside a step.

    For every sequence of the current computation the points `rank.PHASE.KIND.RANK` and
    `rank.PHASE.KIND.RANK.SLOT` are passed. Phases are "embedding", "layers" (at every mark but those that
    kernels count), "head", "reading" (of a prompt, at every piece) and "sampling" (of those that sample),
    kinds "prefill" and "decode".
    """

    def __init__(self, progress: Progress, faults: Faults, rank: int) -> None:
        super().__init__()
        self.pieces = progress.pieces
        self._progress = progress
        self._faults = faults
        self._rank = rank
        self._rows: PlannedRows | None = None

    def begin(self, rows: PlannedRows) -> None:
        """Begin a computation: later points belong to these sequences."""
        self._rows = rows

    def at(self, phase: str) -> None:
        """Pass the points of this phase."""
        if not self._faults.armed or self._rows is None:
            return
        rows = self._rows
        sampling = set(rows.sample_sources.tolist())
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            if phase != "sampling" or row in sampling:
                kind = "prefill" if length > 1 else "decode"
                self._faults.at(f"rank.{phase}.{kind}.{self._rank}")
                self._faults.at(f"rank.{phase}.{kind}.{self._rank}.{slot}")

    def mark(self) -> None:
        self.at("layers")
        self._progress.mark()

    def mark_layer(self) -> None:
        self.at("layers")
        self._progress.mark_layer()
