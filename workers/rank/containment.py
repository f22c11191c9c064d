"""What a step does where part of it cannot be computed: the sequences concerned fail, the rank serves on.

An error from which the device recovers (no memory, a value that cannot be computed with) ends an *attempt* at
a group of entries, on every rank of the stage: a rank that cannot go on completes the sums that the others
wait for with zeros, and then all exchange whether it went well. If not, the group is computed again in
halves, down to the single entry that fails alone. So the culprit is found whatever the error says, and lack
of memory is met by smaller groups before anything fails. Computing again is safe: inputs are kept, KV is
written to the same places, and a sampler that fails has changed nothing.

The entries that failed are reported; the next stage is told which hidden states it gets, and the first stage
gets token 0 in place of those that were not sampled. Plans that are on their way already may still name the
failed sequences: a stage that knows passes over them, one that does not computes what nobody reads, into
blocks that stay theirs until those plans are settled. Anything else that goes wrong, above all inside a
collective, ends the rank.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from workers.errors import RankDiedError, WorkerError
from workers.messages import BatchEntry, FailedEntry, StepPlan

_SURVIVABLE = (MemoryError, RuntimeError, ValueError, LookupError, ArithmeticError, WorkerError)
_MAX_REASON = 300
_Result = TypeVar("_Result")


class Containment:
    """What failed at this rank: slots whose sequences are lost until they are freed, and the entries of the
    step under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lost_slots: set[int] = set()
        # Why the last attempt failed here; "" when it did not.
        self.reason = ""
        self._has_printed = False
        self._index_to_reason: dict[int, str] = {}

    def begin(self, plan: StepPlan) -> None:
        """A step follows; slots that it frees may be used again."""
        self._lost_slots.difference_update(plan.free_slots)
        self._index_to_reason = {}
        self._has_printed = False

    def intact(self, plan: StepPlan, present: Sequence[int]) -> list[int]:
        """The indices of the entries that can be computed: those `present`, but for sequences that are lost.
        A sequence whose entry is left out is lost with all its samples."""
        kept = set(present)
        for index, entry in enumerate(plan.entries):
            if index not in kept or entry.slot in self._lost_slots:
                kept.discard(index)
                self._lose(index, entry, "")
        return sorted(kept)

    def fail(self, index: int, entry: BatchEntry) -> None:
        """The entry failed alone, here or at another rank of the stage."""
        self._lose(index, entry, self.reason)

    @property
    def failed(self) -> tuple[FailedEntry, ...]:
        """Of the step under way."""
        return tuple(FailedEntry(index, reason) for index, reason in sorted(self._index_to_reason.items()))

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """What `work` returns, or None when it failed and the device survived; raises any other error."""
        self.reason = ""
        try:
            return work()
        except _SURVIVABLE as error:
            if isinstance(error, RankDiedError | torch.AcceleratorError):
                raise
            touch_device(self._device)  # in the error's context: what it raises shows both
            if not self._has_printed:
                traceback.print_exception(error)
                sys.stderr.flush()
            self._has_printed = True
            self.reason = _text(error)
        return None

    def _lose(self, index: int, entry: BatchEntry, reason: str) -> None:
        self._index_to_reason[index] = reason
        self._lost_slots.update((entry.slot, *entry.sample_slots))


def touch_device(device: torch.device) -> None:
    """Compute something and wait for it; raises when the device is unusable."""
    assert float(torch.ones((), device=device) + 1) == 2.0


def _text(error: Exception) -> str:
    """One line of bounded length."""
    line = next(iter(str(error).splitlines()), "")
    text = line if isinstance(error, WorkerError) else f"{type(error).__name__}: {line}"
    return text[:_MAX_REASON]
