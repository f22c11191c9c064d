"""Start and free the slots that sample, and remember those whose sampling cannot begin."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from workers.errors import WorkerError
from workers.messages.rank_channel import SlotStart, StepPlan
from workers.rank.containment import Containment
from workers.rank.input_batch import Ids
from workers.rank.slot_matchers import SlotMatchers


class SlotSampler(Protocol):
    """Holds the parameters by which each slot samples."""

    def start(self, start: SlotStart) -> None:
        """Add slots. A call that fails adds none."""

    def free(self, slot: int) -> None:
        """Forget a slot."""

    def lift_minimum(self, slot: int) -> None:
        """Let the slot end before it has its minimum of tokens."""


class SampledSlots:
    """The slots of the rank that samples."""

    def __init__(self, sampler: SlotSampler, matchers: SlotMatchers, containment: Containment) -> None:
        self._sampler = sampler
        self._matchers = matchers
        self._containment = containment
        self._slot_to_refusal: dict[int, str] = {}

    @property
    def has_refused(self) -> bool:
        """Whether the sampling of any slot could not begin."""
        return bool(self._slot_to_refusal)

    def change(self, plan: StepPlan) -> None:
        """Free and start the slots that the plan names."""
        for slot in plan.free_slots:
            if self._slot_to_refusal.pop(slot, None) is None:
                self._sampler.free(slot)
            self._matchers.free(slot)
        for start in plan.starts:
            if self._containment.attempt(partial(self._start, start)):
                self._matchers.start(start)
            else:
                reason = self._containment.reason
                self._slot_to_refusal |= dict.fromkeys((sample.slot for sample in start.samples), reason)

    def check(self, slots: Ids) -> None:
        """Raise `WorkerError` if the sampling of one of these slots could not begin."""
        if self._slot_to_refusal:
            for slot in slots.tolist():
                if slot in self._slot_to_refusal:
                    raise WorkerError(f"its sampling cannot begin: {self._slot_to_refusal[slot]}")

    def _start(self, start: SlotStart) -> bool:
        self._sampler.start(start)
        return True


class NoSampler:
    """Stands for the sampler at ranks that do not sample."""

    def start(self, start: SlotStart) -> None: ...

    def free(self, slot: int) -> None: ...

    def lift_minimum(self, slot: int) -> None: ...
