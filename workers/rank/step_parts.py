"""Sequences of a step between its stages of work: with what goes into layers, with what samples, and all that
a step has left to sample when its layers are computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.rank.device_batch import DeviceRows
from workers.rank.input_batch import PlannedRows
from workers.rank.prompt_reader import PromptReadings


class StepPart(NamedTuple):
    """Sequences of a step and the inputs of all their tokens, one sequence after another: token ids [T], or
    hidden states [T, C]. `device_rows` are the rows on the device, where they are known to it already."""

    rows: PlannedRows
    inputs: Tensor
    device_rows: DeviceRows | None = None

    def only(self, kept: NDArray[np.bool_]) -> StepPart:
        """Return the part with the sequences that `kept` marks."""
        if kept.all():
            return self
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(kept, self.rows.lengths)))
        return StepPart(self.rows.only(kept), self.inputs[tokens.to(self.inputs.device)])

    def halves(self) -> tuple[StepPart, StepPart]:
        is_first = np.arange(self.rows.num_sequences) < self.rows.num_sequences // 2
        return self.only(is_first), self.only(~is_first)


class SamplingPart(NamedTuple):
    """Sequences that sample, one row each: the hidden states [num_rows, C] of their last tokens and, unless
    an attempt to sample has used them up, logits [num_rows, vocab_size]. `device_slots` are the slots that
    sample, where the device knows them already."""

    rows: PlannedRows
    hidden: Tensor
    logits: Tensor | None
    device_slots: Tensor | None = None

    def halves(self) -> tuple[SamplingPart, SamplingPart]:
        middle = self.rows.num_sequences // 2
        is_first = np.arange(self.rows.num_sequences) < middle
        return (
            SamplingPart(self.rows.only(is_first), self.hidden[:middle], None),
            SamplingPart(self.rows.only(~is_first), self.hidden[middle:], None),
        )


class Executed(NamedTuple):
    """A step whose layers and head are computed (or queued), and that has still to sample. `readings` are
    what was asked of its prompts."""

    step: int
    rows: PlannedRows
    started_at: float
    sampling: list[SamplingPart]
    device_rows: DeviceRows | None = None
    readings: PromptReadings | None = None
