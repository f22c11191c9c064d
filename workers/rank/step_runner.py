"""Run one step of a rank: compute its part of what a plan names, and sample.

What differs between tokens at the host and tokens on the device is behind `workers.rank.steps`.

In shapes, num_tokens counts the tokens of a step (all sequences one after another), num_samples the slots
that sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from workers.messages.rank_channel import BlockCopy, StepPlan, StepReport
from workers.model.attention.interface import AttentionBackend, AttentionPlan, StepInput, to_device
from workers.model.experts.hot_experts import HotExperts
from workers.model.host_kv import HostKv
from workers.model.rank_memory import graph_sizes
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.containment import Containment
from workers.rank.decode_graphs import DecodeGraphs
from workers.rank.device_batch import DeviceBatch, DeviceRows
from workers.rank.device_queue import DeviceQueue, make_queue
from workers.rank.device_sampler import DeviceSampler, make_device_sampler
from workers.rank.device_steps import DeviceSteps
from workers.rank.given_blocks import BlockGiver
from workers.rank.host_steps import HostSteps
from workers.rank.input_batch import InputBatch, PlannedRows
from workers.rank.mixed_graphs import MixedGraphs, MixedSize
from workers.rank.progress import Progress, StepFaults
from workers.rank.prompt_reader import PromptReader
from workers.rank.rank_model import RankModel
from workers.rank.sampled_slots import NoSampler, SampledSlots
from workers.rank.sampler import Sampler
from workers.rank.slot_matchers import NoMatchers, SlotMatchers
from workers.rank.stage_input import HiddenInput, StageInput, TokenInput
from workers.rank.step_parts import Executed, SamplingPart, StepPart
from workers.rank.steps import StepContext, Steps
from workers.rank.tickets import Ticket

_Sample = TypeVar("_Sample")


class BatchLimits(NamedTuple):
    """The most that is in a rank's batch: `max_slots` in use at a time, of up to `max_context_tokens` each,
    and `max_sequences` in a step that decodes. Steps with a chunk of up to `mixed_tokens` may be graphs."""

    max_slots: int
    max_context_tokens: int
    max_sequences: int
    mixed_tokens: int = 0


class StepRunner:
    """Runs the plans of one rank in order. `attention` computes over `kv`, the rank's pool of blocks, and
    `host` are those in host memory (None: there are none).

    `launch` is `execute`, then `sample`. Both halves are there for slots whose next mask or whose end depends
    on the last token: what they need is made between the two, while the device computes."""

    def __init__(
        self,
        model: RankModel,
        attention: AttentionBackend,
        host: HostKv | None,
        clock: Clock,
        faults: Faults,
        *,
        limits: BatchLimits,
        queue: DeviceQueue | None = None,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        """At the rank that samples, outputs may follow `grammars`. With a `queue`, tokens stay on the device,
        and the last block of `kv` is scratch."""
        self._decoder, self._groups, self._unfinished, self._copier = model
        decoder, groups = model.decoder, model.groups
        self._attention = attention
        self._kv = kv = attention.kv
        self._host = host
        self._clock = clock
        self._device = kv.device
        self._containment = Containment(kv.device)
        self.queue = queue or make_queue(kv.device)
        self.progress = Progress(self.queue)
        self._step_faults = StepFaults(self.progress, faults, groups.rank)
        self._reader = PromptReader(model, self._containment, self.queue, self.progress, self._step_faults)
        num_blocks = len(kv) if queue is None else len(kv) - 1
        max_slots, block_tokens = limits.max_slots, attention.block_tokens
        table_blocks = -(-limits.max_context_tokens // block_tokens)
        self.batch = InputBatch(max_slots, table_blocks, block_tokens, num_blocks, len(attention.kvs) - 1)
        vocab_size, end_ids = decoder.config.vocab_size, decoder.config.eos_token_ids
        sampler: Sampler | DeviceSampler | NoSampler = NoSampler()
        if groups.is_sampler and queue is None:
            sampler = Sampler(vocab_size, end_ids, kv.device, max_slots)
        elif groups.is_sampler and queue is not None:
            sampler = make_device_sampler(vocab_size, end_ids, queue, max_slots)
        self._matchers: SlotMatchers = NoMatchers(max_slots)
        if groups.is_sampler and grammars is not None:
            self._matchers = SlotMatchers(grammars, max_slots, torch.get_num_threads(), sampler.lift_minimum)
        self._slots = SampledSlots(sampler, self._matchers, self._containment)
        context = StepContext(
            self.batch,
            self.queue,
            groups,
            self._containment,
            self._slots,
            self._matchers,
            self._step_faults,
            clock,
        )
        self.steps: Steps
        if queue is None:
            assert isinstance(sampler, Sampler | NoSampler)
            self.steps = HostSteps(context, self._stage_input(max_slots), sampler)
        else:
            assert isinstance(sampler, DeviceSampler | NoSampler)
            device_batch = DeviceBatch(
                self.batch,
                queue,
                most_rows=graph_sizes(limits.max_sequences)[-1],
                scratch_blocks=[len(its) - 1 for its in attention.kvs],
                most_chunk_tokens=limits.mixed_tokens,
            )
            graphs = DecodeGraphs(
                model,
                attention,
                device_batch,
                None if isinstance(sampler, NoSampler) else sampler,
                queue,
            )
            mixed = None
            if limits.mixed_tokens and groups.tp == 1 and not isinstance(sampler, NoSampler):
                mixed = MixedGraphs(model, attention, device_batch, sampler, queue)
            self.steps = DeviceSteps(context, device_batch, sampler, graphs, mixed)
        self._giver = BlockGiver(kv, groups, self.progress)
        self._hot_experts = HotExperts(decoder.split_experts, clock)
        self._finished_at = 0.0

    @property
    def rows_of_piece(self) -> int:
        """The number of positions of a prompt that are read at a time; see `workers.rank.prompt_reader`."""
        return self._reader.rows_of_piece

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is still under way when `launch` returns."""
        return self.queue.runs_behind

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Execute this rank's part of one step. An empty plan only touches the device (the health canary)."""
        started_at, rows = self._take_in(plan)
        ticket = self.steps.replay(plan, rows, started_at)
        if ticket is not None:
            self.progress.mark_layer()
            return ticket
        return self._sample(self._execute(plan, rows, started_at), None)

    def collect(self, ticket: Ticket) -> StepReport:
        """Wait until the launched step is done. Its report names what could not be computed; see
        `workers.rank.containment`."""
        report = ticket.report
        if not self.runs_ahead and ticket.results is None:
            return ticket.completed(report)
        ticket.event.synchronize()
        self._groups.check()
        # A step that was launched while another step computed began when that was done.
        started_at = max(report.started_at, self._finished_at)
        self._finished_at = self._clock.now()
        return ticket.completed(replace(report, started_at=started_at, finished_at=self._finished_at))

    def run(self, plan: StepPlan) -> StepReport:
        """Launch a step and collect it."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Executed:
        """Take in a plan and compute it up to the logits."""
        started_at, rows = self._take_in(plan)
        return self._execute(plan, rows, started_at)

    def _take_in(self, plan: StepPlan) -> tuple[float, PlannedRows]:
        """Change this rank's state of its slots and blocks. Returns when it began, and what to compute."""
        started_at = self._clock.now()
        self.progress.begin(plan.step)
        self._containment.begin(plan)
        rows = self.batch.change(plan)
        self.steps.change(plan)
        self._slots.change(plan)
        if plan.given:
            self._giver.give(plan.given)
        if plan.copies:
            self._copy_blocks(plan.copies)
        self._hot_experts.between_steps()
        self._copier.change(plan.expert_copies)
        self._reader.begin(plan)
        return started_at, rows

    def _execute(self, plan: StepPlan, rows: PlannedRows, started_at: float) -> Executed:
        staged = self.steps.stage(plan, rows)
        if not rows.num_sequences:
            # A step that runs ahead has an event that shows whether the device is usable.
            self._containment.touch_device(waits=not self.runs_ahead)
            return Executed(plan.step, rows, started_at, [])
        whole, waited_s = self.steps.input(plan, rows, staged)
        sampling = self._compute_in_parts(rows, whole.only(self._containment.intact(whole.rows)))
        readings = self._reader.take()
        return Executed(plan.step, rows, started_at + waited_s, sampling, staged.rows, readings)

    @torch.inference_mode()
    def sample(self, executed: Executed, masks: NDArray[np.uint32] | None = None) -> Ticket:
        """Sample for a step that is executed: the tokens feed the next one, and go into the report. `masks`
        [num_samples, ceil(vocab_size / 32)] may allow only some tokens to each row of the report, as in
        `Sampler.sample`, in place of those of the slots' grammars."""
        return self._sample(executed, masks)

    def _sample(self, executed: Executed, masks: NDArray[np.uint32] | None) -> Ticket:
        own = self._matchers.masks(executed.rows) if masks is None else None
        if own is not None:
            self._containment.refuse(own.failed)
            masks = own.masks
        drawn = self._sampled_parts(executed, partial(self.steps.draw, masks=masks))
        ticket = self.steps.sample(executed, drawn)
        if own is not None:
            ticket = ticket._replace(report=replace(ticket.report, masks=own.digests))
        return ticket._replace(readings=executed.readings)

    def _sampled_parts(
        self, executed: Executed, draw: Callable[[SamplingPart, Tensor], _Sample]
    ) -> Iterator[tuple[PlannedRows, _Sample]]:
        """Sample all that an executed step has left to sample, in parts if an attempt fails on any rank of
        the stage."""
        pending = executed.sampling[::-1]
        while pending:
            part = pending.pop()
            sampled = self._attempt_sampling(part, draw)
            if sampled is not None:
                yield part.rows, sampled
            elif part.rows.num_sequences == 1:
                self._containment.fail(part.rows)
            else:
                pending += part.halves()

    # --------------------------------------------------------------------------------- graphs

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The numbers of sequences for which decoding steps can be recorded as graphs: none, unless tokens
        stay on the device and nothing of a step is left to the host."""
        return self.steps.graph_sizes

    @torch.inference_mode()
    def record_graphs(self, sizes: Sequence[int]) -> None:
        """Record graphs of some of `graph_sizes`. Nothing is under way."""
        self.steps.record_graphs(sizes)

    @property
    def mixed_sizes(self) -> tuple[MixedSize, ...]:
        """The sizes for which steps with a chunk, alone or beside sequences that decode, can be recorded as
        graphs."""
        return self.steps.mixed_sizes

    @torch.inference_mode()
    def record_mixed(self, sizes: Sequence[MixedSize]) -> None:
        """Record graphs of some of `mixed_sizes`. Nothing is under way."""
        self.steps.record_mixed(sizes)

    # ---------------------------------------------------------------------- for measurements

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute all sequences of a plan in one call, of an unsharded model, and sample nothing. Returns
        float32 [num_samples, vocab_size] at the last positions of those that would sample."""
        rows = self.batch.change(plan)
        _, sampling = self._compute(self.steps.named_input(plan, rows))
        assert sampling.logits is not None
        return sampling.logits

    @torch.inference_mode()
    def rehearse(self, plan: StepPlan, most_layers: int | None = None) -> None:
        """Run what a step takes of this stage, or its first `most_layers`, for a measurement: its layers over
        zeros in place of the plan's tokens and, at the last stage, head and sampling. Waits for the
        device."""
        rows = self.batch.change(plan)
        shape = (rows.num_tokens, self._decoder.num_inputs)
        self._begin(rows, embeds=False)
        staged = self.steps.stage(plan, rows)
        hidden = torch.zeros(shape, dtype=self._attention.dtype, device=self._device)
        hidden = self._decoder.run_layers(hidden, self._plan(rows, staged.rows), most_layers)
        self._reader.begin(plan)
        self._reader.read(rows, hidden)
        self._reader.take()
        if self._groups.is_last_stage and len(rows.sampling):
            last = hidden[to_device(np.cumsum(rows.lengths)[rows.sampling] - 1, self._device)]
            logits = self._decoder.logits(last)
            self.steps.draw(SamplingPart(rows, last, logits), logits, None)
        self.queue.event().synchronize()

    def _begin(self, rows: PlannedRows, *, embeds: bool = True) -> None:
        """Begin to count the collectives of a computation."""
        exchanges = self._attention.exchanges(rows.starts, rows.lengths)
        self._unfinished.begin(rows.num_tokens, len(rows.sampling), embeds=embeds, attention=exchanges)

    def _plan(self, rows: PlannedRows, device_rows: DeviceRows | None) -> AttentionPlan:
        has_host = self._host is not None and self.batch.in_host[rows.slots].any()
        return self._attention.plan(
            StepInput(
                tables=self.batch.tables,
                group_tables=self.batch.group_tables,
                slots=rows.slots,
                starts=rows.starts,
                lengths=rows.lengths,
                block_tokens=self.batch.block_tokens,
                marks=self._step_faults,
                host=self._host.reader if self._host is not None and has_host else None,
                device=self.steps.attention(device_rows),
            )
        )

    def _compute_in_parts(self, rows: PlannedRows, whole: StepPart) -> list[SamplingPart]:
        """Compute the layers of this stage, at once, or in parts if an attempt fails on any rank of the
        stage. What comes last in the plan, sequences that decode, is computed first: where memory lacks, the
        newest fail. Returns what samples; any other stage sends its hidden states on."""
        done: list[StepPart] = []
        sampling: list[SamplingPart] = []
        pending = [whole] if whole.rows.num_sequences else []
        while pending:
            part = pending.pop()
            result = self._attempt(part)
            if result is not None:
                hidden, to_sample = result
                self._reader.read(part.rows, hidden)
                done.append(StepPart(part.rows, hidden))
                sampling += [to_sample] if to_sample.rows.num_sequences else []
            elif part.rows.num_sequences == 1:
                self._containment.fail(part.rows)
            else:
                pending += self._without_lost_states(part)
        if self._groups.is_last_stage:
            return sampling
        done.sort(key=lambda part: int(part.rows.indices[0]))
        self._send_hidden(rows.num_sequences, done)
        return []

    def _without_lost_states(self, part: StepPart) -> Sequence[StepPart]:
        """Return what can be computed again of a part of several sequences that failed: in halves, without
        those whose state was lost."""
        if not self._attention.has_states:
            return part.halves()
        is_lost = part.rows.stays_in_block(self.batch.block_tokens)
        self._containment.lose_states(part.rows.only(is_lost))
        kept = part.only(~is_lost) if is_lost.any() else part
        if kept.rows.num_sequences > 1:
            return kept.halves()
        return [kept] if kept.rows.num_sequences else []

    def _attempt(self, part: StepPart) -> tuple[Tensor, SamplingPart] | None:
        """Compute a part. Returns None if that failed here or at another rank."""
        self._begin(part.rows)
        self._step_faults.begin(part.rows)
        computed = self._containment.attempt(lambda: self._compute(part))
        if computed is None:
            self._unfinished.finish(self._kv)
        return computed if self._groups.agree(computed is not None) else None

    def _compute(self, part: StepPart) -> tuple[Tensor, SamplingPart]:
        """Return hidden states [num_tokens, hidden_size] after this stage's layers, and what samples: at
        stages before the last without logits."""
        rows, device_rows = part.rows, self.steps.place(part)
        attention = self._plan(rows, device_rows)
        if self._groups.is_first_stage:
            self._step_faults.at("embedding")
            hidden = self._decoder.embed(part.inputs.to(self._device, torch.int64, non_blocking=True))
            self.progress.mark_layer()
        else:
            hidden = part.inputs.clone()  # the layers overwrite it, and it may be needed again
        hidden = self._decoder.run_layers(hidden, attention)
        sources = rows.sampling
        is_sampling = np.zeros(rows.num_sequences, np.bool_)
        is_sampling[sources] = True
        last = hidden
        if len(sources) < len(hidden):  # else all are single tokens
            last_rows = (
                to_device(np.cumsum(rows.lengths)[sources] - 1, self._device)
                if device_rows is None
                else device_rows.last_rows
            )
            last = hidden[last_rows]
        sampling = SamplingPart(
            rows.only(is_sampling), last, None, None if device_rows is None else device_rows.sample_slots
        )
        if self._groups.is_last_stage and len(sources):
            sampling = sampling._replace(logits=self._head(last))
        elif self._groups.is_last_stage:
            vocab_size = self._decoder.config.vocab_size
            sampling = sampling._replace(logits=hidden.new_empty((0, vocab_size), dtype=torch.float32))
        return hidden, sampling

    def _head(self, hidden: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] at the sampler, and [0, vocab_size] at ranks that compute only a
        part."""
        self._step_faults.at("head")
        logits = self._decoder.logits(hidden)
        self.progress.mark_layer()
        return logits

    def _attempt_sampling(
        self, part: SamplingPart, draw: Callable[[SamplingPart, Tensor], _Sample]
    ) -> _Sample | None:
        """Sample one token for each slot, at the sampler; the other ranks of its stage return nothing. The
        result is None if that failed here or at another rank."""
        self._step_faults.begin(part.rows)
        logits = part.logits
        if logits is None:  # in a second attempt: the first may have changed them
            self._unfinished.begin_head(part.rows.num_sequences)
            logits = self._containment.attempt(lambda: self._head(part.hidden))
            if logits is None:
                self._unfinished.finish(self._kv)
            if not self._groups.agree(logits is not None) or logits is None:
                return None
        whole = logits
        sampled = self._containment.attempt(lambda: draw(part, whole))
        if not self._groups.agree(sampled is not None) or sampled is None:
            return None
        self.progress.mark_layer()
        return sampled

    def _send_hidden(self, num_sequences: int, done: list[StepPart]) -> None:
        """Send the next stage which sequences were computed, and their hidden states in the plan's order."""
        marks = np.zeros(num_sequences, dtype=np.uint8)
        for part in done:
            marks[part.rows.indices] = 1
        self._groups.send_marks(marks)
        if done:
            hidden = [part.inputs for part in done]
            self._groups.send_hidden(hidden[0] if len(hidden) == 1 else torch.cat(hidden))

    def _stage_input(self, max_slots: int) -> StageInput:
        if self._groups.is_first_stage:
            return TokenInput(self._groups, max_slots, self._clock)
        return HiddenInput(
            self._groups,
            self._decoder.num_inputs,
            self._attention.dtype,
            self._device,
            self._containment,
            self._clock,
        )

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for group, kv in enumerate(self._attention.kvs):
            its = [copy for copy in copies if copy.group == group]
            if group == 0 and self._host is not None:
                its = self._host.copy(its)
            if its:
                src = to_device(np.array([copy.src_block for copy in its]), self._device)
                dst = to_device(np.array([copy.dst_block for copy in its]), self._device)
                kv[dst] = kv[src]
