"""Read the input of a stage: tokens at the first stage, hidden states of the stage before at the others."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from kvtransfer.common.clock import Clock
from workers.messages.rank_channel import StepPlan
from workers.rank.collectives import RankGroups
from workers.rank.containment import Containment
from workers.rank.input_batch import Ids, InputTokens, PlannedRows
from workers.rank.step_parts import StepPart


class StageInput(ABC):
    """Gives the rank of one stage what its layers compute from."""

    @abstractmethod
    def change(self, plan: StepPlan) -> None:
        """Take over the last tokens of the slots that the plan starts."""

    @abstractmethod
    def read(self, plan: StepPlan, rows: PlannedRows) -> tuple[StepPart, float]:
        """Return what this stage can compute of the step, and the seconds that this rank waited for it."""

    @abstractmethod
    def named(self, plan: StepPlan, rows: PlannedRows) -> StepPart:
        """Return the whole step, of which nothing will be sampled."""

    @abstractmethod
    def sampled(self, slots: Ids, tokens: NDArray[np.int64]) -> None:
        """Take the tokens that this rank itself sampled."""


class TokenInput(StageInput):
    """The tokens that the first stage embeds."""

    def __init__(self, groups: RankGroups, max_slots: int, clock: Clock) -> None:
        self._tokens = InputTokens(groups, max_slots)
        self._clock = clock

    def change(self, plan: StepPlan) -> None:
        self._tokens.change(plan)

    def read(self, plan: StepPlan, rows: PlannedRows) -> tuple[StepPart, float]:
        began_at = self._clock.now()
        whole = self.named(plan, rows)
        waited_s = self._clock.now() - began_at
        self._tokens.expect(plan.step, rows.sample_slots)
        return whole, waited_s

    def named(self, plan: StepPlan, rows: PlannedRows) -> StepPart:
        return StepPart(rows, torch.from_numpy(self._tokens.tokens(plan)))

    def sampled(self, slots: Ids, tokens: NDArray[np.int64]) -> None:
        self._tokens.sampled(slots, tokens)


class HiddenInput(StageInput):
    """What a later stage receives, [num_tokens, num_columns]: hidden states, and what its layers take beside
    them."""

    def __init__(
        self,
        groups: RankGroups,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device,
        containment: Containment,
        clock: Clock,
    ) -> None:
        self._groups = groups
        self._num_columns = num_columns
        self._dtype = dtype
        self._device = device
        self._containment = containment
        self._clock = clock

    def change(self, plan: StepPlan) -> None:
        """Do nothing: tokens are at the first stage."""

    def read(self, plan: StepPlan, rows: PlannedRows) -> tuple[StepPart, float]:
        began_at = self._clock.now()
        is_present = self._groups.receive_marks(rows.num_sequences) > 0
        self._containment.miss(rows.only(~is_present))
        received = rows.only(is_present)
        shape = (received.num_tokens, self._num_columns)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        if received.num_sequences:
            self._groups.receive_hidden(hidden)
        return StepPart(received, hidden), self._clock.now() - began_at

    def named(self, plan: StepPlan, rows: PlannedRows) -> StepPart:
        raise NotImplementedError("the tokens are at the first stage")

    def sampled(self, slots: Ids, tokens: NDArray[np.int64]) -> None:
        """Do nothing: the first stage gets them by a message."""
