"""Run steps whose tokens stay on the device (`workers.rank.device_batch`).

Sampled tokens feed the next step without the host, which reads them when they have been copied out. Steps
of which every sequence decodes are replayed from graphs where these were recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import StepPlan, StepReport
from workers.model.attention.interface import DeviceStep, to_device
from workers.rank.decode_graphs import DecodeGraphs
from workers.rank.device_batch import DeviceBatch, DeviceRows
from workers.rank.device_sampler import DeviceSampler, Drawn
from workers.rank.input_batch import PlannedRows
from workers.rank.mixed_graphs import MixedGraphs, MixedSize, mixed_sizes
from workers.rank.sampled_slots import NoSampler
from workers.rank.step_parts import Executed, SamplingPart, StepPart
from workers.rank.steps import Staged, StepContext, Steps
from workers.rank.tickets import DrawnRows, Results, Ticket

# The results at a rank that does not sample.
_NOTHING_DRAWN = Drawn(torch.zeros(0, dtype=torch.int32), dict)


class DeviceSteps(Steps):
    """Stages each plan on the device in one copy, and lets sampled tokens feed the next step there."""

    def __init__(
        self,
        context: StepContext,
        batch: DeviceBatch,
        sampler: DeviceSampler | NoSampler,
        graphs: DecodeGraphs,
        mixed: MixedGraphs | None = None,
    ) -> None:
        """`mixed` are the graphs of steps with a chunk; None: there are none."""
        self._context = context
        self._batch = batch
        self.sampler = sampler
        self.graphs = graphs
        self.mixed = mixed

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The sizes of graphs; none, unless nothing of a step is left to the host."""
        return self.graphs.sizes if self.graphs.can_record else ()

    def change(self, plan: StepPlan) -> None:
        """Do nothing: `stage` copies the tokens that a plan names."""

    def stage(self, plan: StepPlan, rows: PlannedRows) -> Staged:
        changes = () if isinstance(self.sampler, NoSampler) else self.sampler.changes()
        stage = partial(self._batch.stage, plan, rows, changes)
        device_rows, tokens, device_changes = self._context.containment.retry_after_freeing_cache(stage)
        if not isinstance(self.sampler, NoSampler):
            self.sampler.change(device_changes)
        return Staged(device_rows, tokens)

    def input(self, plan: StepPlan, rows: PlannedRows, staged: Staged) -> tuple[StepPart, float]:
        assert staged.tokens is not None
        return StepPart(rows, staged.tokens, staged.rows), 0.0

    def named_input(self, plan: StepPlan, rows: PlannedRows) -> StepPart:
        return self.input(plan, rows, self.stage(plan, rows))[0]

    def place(self, part: StepPart) -> DeviceRows:
        return self._batch.place(part.rows) if part.device_rows is None else part.device_rows

    def attention(self, rows: DeviceRows | None) -> DeviceStep:
        assert rows is not None
        return self._batch.step(rows.slots, rows.starts, rows.lengths)

    def draw(self, part: SamplingPart, logits: Tensor, masks: NDArray[np.uint32] | None) -> Drawn:
        slots = part.rows.sample_slots
        if isinstance(self.sampler, NoSampler):  # must not fail: the rank that samples has counted its tokens
            return _NOTHING_DRAWN
        logits = self._context.logits_of_samples(part.rows, logits)
        device_slots = to_device(slots, logits.device) if part.device_slots is None else part.device_slots
        masks = masks[part.rows.sample_rows] if masks is not None else None
        return self.sampler.draw(logits, slots, device_slots, masks)

    def sample(self, executed: Executed, drawn: Iterable[tuple[PlannedRows, Drawn]]) -> Ticket:
        context = self._context
        retry = context.containment.retry_after_freeing_cache
        num_samples = len(executed.rows.sample_slots)
        tokens = retry(partial(torch.zeros, num_samples, dtype=torch.int32, device=context.queue.device))
        drawings: list[DrawnRows] = []
        for rows, part in drawn:
            if isinstance(self.sampler, NoSampler):
                continue  # the tokens come from the rank that samples
            if len(rows.sample_rows) == num_samples:
                tokens = part.tokens
            else:
                retry(partial(_put, tokens, rows.sample_rows, part.tokens))
            drawings.append(DrawnRows(rows, part.logprobs))
        report = context.report(executed.step, executed.started_at)
        if executed.device_rows is None or not num_samples:
            return Ticket(report, context.queue.event())
        return self._publish(report, executed.device_rows.sample_slots, tokens, drawings)

    def replay(self, plan: StepPlan, rows: PlannedRows, started_at: float) -> Ticket | None:
        context = self._context
        if self.mixed is not None and (mixed := self._mixed_size(plan, rows)) is not None:
            of_chunk = self.mixed.run(plan, rows, mixed, context.containment)
            return Ticket(context.report(plan.step, started_at), *of_chunk)
        size = self.graphs.size_for(rows.num_sequences) if self._is_recordable(rows) else None
        if not context.groups.agree(size is not None) or size is None:
            return None
        event, results = self.graphs.run(plan, rows, size, context.containment)
        return Ticket(context.report(plan.step, started_at), event, results)

    def record_graphs(self, sizes: Sequence[int]) -> None:
        if sizes:
            self.graphs.record(sizes)

    @property
    def mixed_sizes(self) -> tuple[MixedSize, ...]:
        if self.mixed is None or not self.mixed.can_record:
            return ()
        return mixed_sizes(len(self._batch.chunk_tokens), self._batch.mixed_rows.shape[1] - 1)

    def record_mixed(self, sizes: Sequence[MixedSize]) -> None:
        if sizes:
            assert self.mixed is not None
            self.mixed.record(sizes)

    def _publish(
        self, report: StepReport, slots: Tensor, tokens: Tensor, drawings: Sequence[DrawnRows]
    ) -> Ticket:
        """Let `tokens` [num_samples] feed the next step of these slots, and copy them to the host."""
        context = self._context
        if context.groups.tp > 1:
            context.groups.broadcast(tokens)
        context.containment.retry_after_freeing_cache(partial(self._batch.sampled, slots, tokens))
        if isinstance(self.sampler, NoSampler):
            return Ticket(report, context.queue.event())
        copied = context.queue.copy_out(tokens, context.queue.host_memory(tokens))
        bound = context.matchers.expect(copied, [drawn.rows for drawn in drawings])
        return Ticket(report, copied.event, Results(copied, drawings, partial(context.matchers.take, bound)))

    def _is_recordable(self, rows: PlannedRows) -> bool:
        """Return whether every sequence has one token and samples for its own slot, all on the device."""
        is_decode = np.array_equal(rows.sample_slots, rows.slots) and rows.num_tokens == rows.num_sequences
        return is_decode and self._is_on_device(rows)

    def _mixed_size(self, plan: StepPlan, rows: PlannedRows) -> MixedSize | None:
        """Return the size of the graph for a step with a chunk; None: there is none."""
        assert self.mixed is not None
        size = self.mixed.size_for(plan, rows)
        return size if size is not None and self._is_on_device(rows) else None

    def _is_on_device(self, rows: PlannedRows) -> bool:
        """Whether nothing of a step is left to the host."""
        context = self._context
        return not (
            context.batch.in_host[rows.slots].any()
            or context.slots.has_refused
            or context.containment.has_lost_slots
            or context.matchers.bind(rows.sample_slots)
        )


def _put(tokens: Tensor, places: NDArray[np.int32], values: Tensor) -> None:
    tokens[to_device(places, tokens.device)] = values
