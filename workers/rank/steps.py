"""Separate two kinds of ranks: tokens at the host (`HostSteps`), or on a device that runs behind the
host (`DeviceSteps`).

`StepRunner` chooses one when it is made, and knows nothing else of the difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.common.clock import Clock
from workers.messages.rank_channel import RowLogprob, StepPlan, StepReport
from workers.model.attention.interface import DeviceStep, to_device
from workers.rank.collectives import RankGroups
from workers.rank.containment import Containment
from workers.rank.device_batch import DeviceRows
from workers.rank.device_queue import DeviceQueue
from workers.rank.input_batch import InputBatch, PlannedRows
from workers.rank.mixed_graphs import MixedSize
from workers.rank.progress import StepFaults
from workers.rank.sampled_slots import SampledSlots
from workers.rank.slot_matchers import SlotMatchers
from workers.rank.step_parts import Executed, SamplingPart, StepPart
from workers.rank.tickets import Ticket


class StepContext(NamedTuple):
    """The parts that both kinds of ranks share."""

    batch: InputBatch
    queue: DeviceQueue
    groups: RankGroups
    containment: Containment
    slots: SampledSlots
    matchers: SlotMatchers
    step_faults: StepFaults
    clock: Clock

    def report(
        self, step: int, started_at: float, tokens: bytes = b"", logprobs: tuple[RowLogprob, ...] = ()
    ) -> StepReport:
        """Return the report of a step, by default without what it sampled."""
        return StepReport(step, tokens, started_at, self.clock.now(), None, self.containment.failed, logprobs)

    def logits_of_samples(self, rows: PlannedRows, logits: Tensor) -> Tensor:
        """Return logits [num_samples, vocab_size] from those of the sequences that sample. Raises
        `WorkerError` if the sampling of one cannot begin."""
        self.step_faults.at("sampling")
        self.slots.check(rows.sample_slots)
        if len(rows.sample_slots) > len(logits):  # several samples fork from one prompt
            logits = logits[to_device(rows.sample_sources, logits.device)]
        return logits


class Staged(NamedTuple):
    """The data that `Steps.stage` has copied to the device: the rows of a step, and its tokens
    [num_tokens]."""

    rows: DeviceRows | None = None
    tokens: Tensor | None = None


class Steps(ABC):
    """Takes tokens to the layers and from the sampler."""

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The numbers of sequences for which decoding steps can be recorded as graphs."""
        return ()

    @abstractmethod
    def change(self, plan: StepPlan) -> None:
        """Take over the last tokens of the slots that the plan starts."""

    @abstractmethod
    def stage(self, plan: StepPlan, rows: PlannedRows) -> Staged:
        """Copy to the device what the plan changes, and what it computes."""

    @abstractmethod
    def input(self, plan: StepPlan, rows: PlannedRows, staged: Staged) -> tuple[StepPart, float]:
        """Return what this stage can compute of the step, and the seconds that this rank waited for it."""

    @abstractmethod
    def named_input(self, plan: StepPlan, rows: PlannedRows) -> StepPart:
        """Return the whole step, for a measurement without sampling."""

    @abstractmethod
    def place(self, part: StepPart) -> DeviceRows | None:
        """Return the rows of a part on the device; None where they stay at the host."""

    @abstractmethod
    def attention(self, rows: DeviceRows | None) -> DeviceStep | None:
        """Return what attention plans from on the device; None where it plans at the host."""

    @abstractmethod
    def draw(self, part: SamplingPart, logits: Tensor, masks: NDArray[np.uint32] | None) -> Any:
        """Draw a token for each slot of the part. `masks` is for all rows of the report, as in
        `Sampler.sample`. What is returned is for `sample`."""

    @abstractmethod
    def sample(self, executed: Executed, drawn: Iterable[tuple[PlannedRows, Any]]) -> Ticket:
        """Let what was drawn feed the next step, and put it into the report."""

    def replay(self, plan: StepPlan, rows: PlannedRows, started_at: float) -> Ticket | None:
        """Compute a step by a graph; None where there is none for it."""
        return None

    def record_graphs(self, sizes: Sequence[int]) -> None:
        """Record graphs of some of `graph_sizes`. Nothing is under way."""
        assert not sizes

    @property
    def mixed_sizes(self) -> tuple[MixedSize, ...]:
        """The sizes for which steps with a chunk, alone or beside sequences that decode, can be recorded as
        graphs."""
        return ()

    def record_mixed(self, sizes: Sequence[MixedSize]) -> None:
        """Record graphs of some of `mixed_sizes`. Nothing is under way."""
        assert not sizes
