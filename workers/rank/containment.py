"""Contain errors in a step: the affected sequences fail, and the rank continues to serve.

An error from which the device recovers (out of memory, a value that cannot be computed with) ends an
*attempt* at a group of entries, on every rank of the stage. The rank that failed completes with zeros the
sums that the others wait for; then all ranks exchange whether their attempt succeeded. If not, the group is
computed again in halves, down to the single entry that fails alone. The culprit is thus found whatever the
error says, and lack of memory leads to smaller groups before anything fails: first to fail is then a chunk of
a prompt, the newest of a plan, since what decodes is computed before it. Computing again is safe: inputs are
kept, KV is written to the same blocks, and a sampler that fails has changed nothing.

A recurrent state is the exception, where a sequence reads it from the block that it leaves it in, as every
one does that decodes: after a failed attempt nobody knows which layers have moved it on. Such sequences are
not computed again but reported as `STATE_LOST`, and start over from their last snapshot. Their first chunk
then reads one block and writes another, so the search above finds the culprit if it is among them. One that
is alone in its attempt is known to be the culprit.

The report names the entries that failed. The next stage learns which hidden states it gets, and the first
stage gets token 0 in place of those that were not sampled. Plans that are already in flight may still name
the failed sequences: a stage that knows them skips them; another one computes results that nobody reads, into
blocks that stay theirs until those plans are settled. Any other error, above all inside a collective, ends
the rank."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from workers.errors import RankDiedError, WorkerError
from workers.messages.rank_channel import STATE_LOST, FailedEntry, StepPlan
from workers.rank.input_batch import PlannedRows

_SURVIVABLE = (MemoryError, RuntimeError, ValueError, LookupError, ArithmeticError, WorkerError)
_MAX_REASON = 300
_LOST_STATE = "the step failed when it may have changed the sequence's state"
_Result = TypeVar("_Result")


class Containment:
    """Tracks the failures at this rank: slots whose sequences are lost until they are freed, and the failed
    entries of the current step."""

    def __init__(self, device: torch.device) -> None:
        # Memory of the device, so that the check whether it still computes takes none.
        self._touched = torch.zeros((), dtype=torch.int64, device=device)
        self._num_touches = 0
        self._lost_slots: set[int] = set()
        # Those of them whose state is lost, and nothing else.
        self._stateless_slots: set[int] = set()
        # The reason why the last attempt failed here; "" if it succeeded.
        self.reason = ""
        self._has_printed = False
        self._index_to_failed: dict[int, FailedEntry] = {}

    def begin(self, plan: StepPlan) -> None:
        """Begin a step. Slots that it frees may be used again."""
        self._lost_slots.difference_update(plan.free_slots)
        self._stateless_slots.difference_update(plan.free_slots)
        self._index_to_failed = {}
        self._has_printed = False

    def intact(self, rows: PlannedRows) -> NDArray[np.bool_]:
        """Mark the sequences [num_sequences] that can be computed: all except lost ones. A sequence that is
        left out is lost with all its samples."""
        kept: NDArray[np.bool_] = np.ones(rows.num_sequences, np.bool_)
        if self._lost_slots:
            kept = ~np.isin(rows.slots, list(self._lost_slots))
            is_stateless = ~kept & np.isin(rows.slots, list(self._stateless_slots))
            self._lose(rows.only(~kept & ~is_stateless), "")
            self.lose_states(rows.only(is_stateless))
        return kept

    def lose_states(self, rows: PlannedRows) -> None:
        """Record sequences whose states an attempt may have changed before it failed."""
        lost = {index: FailedEntry(index, _LOST_STATE, STATE_LOST) for index in rows.indices.tolist()}
        self._index_to_failed |= lost
        for slots in (self._lost_slots, self._stateless_slots):
            slots.update(rows.slots.tolist(), rows.sample_slots.tolist())

    def miss(self, rows: PlannedRows) -> None:
        """Record sequences that the stage before could not compute."""
        self._lose(rows, "")

    def fail(self, rows: PlannedRows) -> None:
        """Record a sequence that failed alone, here or at another rank of the stage."""
        self._lose(rows, self.reason)

    def withhold(self, rows: PlannedRows) -> None:
        """Record sequences that are computed, at every rank, but whose results this one cannot report."""
        self._fail(rows, self.reason)

    def refuse(self, failed: Sequence[FailedEntry]) -> None:
        """Record sequences that are computed, at every rank, but may not go on."""
        self._index_to_failed |= {entry.index: entry for entry in failed}

    @property
    def failed(self) -> tuple[FailedEntry, ...]:
        """The failed entries of the current step."""
        return tuple(entry for _, entry in sorted(self._index_to_failed.items()))

    @property
    def has_lost_slots(self) -> bool:
        """Whether a sequence failed whose slot is not freed yet."""
        return bool(self._lost_slots)

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """Return the result of `work`, or None if it failed and the device recovered; raises any other
        error."""
        self.reason = ""
        try:
            return work()
        except _SURVIVABLE as error:
            if isinstance(error, RankDiedError | torch.AcceleratorError):
                raise
            self.touch_device()  # in the error's context: what it raises shows both
            lacks_memory = isinstance(error, torch.OutOfMemoryError)
            if not self._has_printed:
                traceback.print_exception(error)
                sys.stderr.flush()
            self._has_printed = True
            self.reason = _text(error)
        if lacks_memory:  # now that the error holds none of it
            torch.cuda.empty_cache()
        return None

    def retry_after_freeing_cache(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which takes little memory and may be done twice. Where memory lacks,
        the memory that torch keeps is released; raises what a second try raises."""
        try:
            return work()
        except torch.OutOfMemoryError:
            pass  # the error holds what the try had until here
        torch.cuda.empty_cache()
        return work()

    def touch_device(self, *, waits: bool = True) -> None:
        """Compute something and wait for it, or only queue it. Raises if the device is unusable."""
        self._num_touches += 1
        self._touched.fill_(self._num_touches)
        assert not waits or self._touched.item() == self._num_touches

    def _lose(self, rows: PlannedRows, reason: str) -> None:
        self._fail(rows, reason)
        self._lost_slots.update(rows.slots.tolist(), rows.sample_slots.tolist())

    def _fail(self, rows: PlannedRows, reason: str) -> None:
        self._index_to_failed |= {index: FailedEntry(index, reason) for index in rows.indices.tolist()}


def _text(error: Exception) -> str:
    """Format the error as one line of bounded length."""
    line = next(iter(str(error).splitlines()), "")
    text = line if isinstance(error, WorkerError) else f"{type(error).__name__}: {line}"
    return text[:_MAX_REASON]
