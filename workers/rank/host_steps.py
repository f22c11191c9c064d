"""Run steps whose tokens are at the host when a step is computed, as on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import RowLogprob, StepPlan
from workers.model.attention.interface import DeviceStep
from workers.rank.device_batch import DeviceRows
from workers.rank.input_batch import PlannedRows
from workers.rank.sampled_slots import NoSampler
from workers.rank.sampler import Sampled, Sampler
from workers.rank.stage_input import StageInput
from workers.rank.step_parts import Executed, SamplingPart, StepPart
from workers.rank.steps import Staged, StepContext, Steps
from workers.rank.tickets import Ticket, row_logprobs


class HostSteps(Steps):
    """Reads tokens from plans, from this rank's sampler or from that of another rank, and returns the sampled
    tokens with the step."""

    def __init__(self, context: StepContext, stage_input: StageInput, sampler: Sampler | NoSampler) -> None:
        self._context = context
        self._input = stage_input
        self.sampler = sampler

    def change(self, plan: StepPlan) -> None:
        self._input.change(plan)

    def stage(self, plan: StepPlan, rows: PlannedRows) -> Staged:
        return Staged()

    def input(self, plan: StepPlan, rows: PlannedRows, staged: Staged) -> tuple[StepPart, float]:
        return self._input.read(plan, rows)

    def named_input(self, plan: StepPlan, rows: PlannedRows) -> StepPart:
        self._input.change(plan)
        return self._input.named(plan, rows)

    def place(self, part: StepPart) -> DeviceRows | None:
        return None

    def attention(self, rows: DeviceRows | None) -> DeviceStep | None:
        return None

    def draw(self, part: SamplingPart, logits: Tensor, masks: NDArray[np.uint32] | None) -> Sampled:
        slots = part.rows.sample_slots
        if isinstance(self.sampler, NoSampler):
            return Sampled(np.zeros(len(slots), np.uint32), {})
        logits = self._context.logits_of_samples(part.rows, logits)
        return self.sampler.sample(logits, slots, masks[part.rows.sample_rows] if masks is not None else None)

    def sample(self, executed: Executed, drawn: Iterable[tuple[PlannedRows, Sampled]]) -> Ticket:
        context = self._context
        tokens = np.zeros(len(executed.rows.sample_slots), np.int64)
        logprobs: list[RowLogprob] = []
        for rows, sampled in drawn:
            tokens[rows.sample_rows] = sampled.tokens
            if sampled.row_to_logprob:
                logprobs += row_logprobs(rows, sampled.row_to_logprob)
            context.containment.refuse(context.matchers.advance(rows, sampled.tokens))
        packed = b""
        if not isinstance(self.sampler, NoSampler):
            self._publish(executed, tokens)
            packed = tokens.astype("<u4").tobytes()
        report = context.report(executed.step, executed.started_at, packed, tuple(logprobs))
        return Ticket(report, context.queue.event())

    def _publish(self, executed: Executed, tokens: NDArray[np.int64]) -> None:
        """Pass the tokens to the first stage: one for every slot that should have sampled, 0 if it failed."""
        if not len(tokens):
            return
        groups = self._context.groups
        if groups.tp * groups.pp > 1:
            groups.send_tokens(executed.step, tokens)
        self._input.sampled(executed.rows.sample_slots, tokens)
