"""Run one step of a rank: compute its part of what a plan names, and sample.

On a CPU tokens are at the host when a step is computed. On a device that runs behind the host they stay there
(`workers.rank.device_batch`): they feed the next step without the host, which reads them when they have been
copied out. Steps of which every sequence decodes are replayed from graphs where these were recorded.

In shapes, num_tokens counts the tokens of a step (all sequences one after another), num_samples the slots
that sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from workers.errors import WorkerError
from workers.messages.rank_channel import BlockCopy, RowLogprob, SlotStart, StepPlan, StepReport
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    DeviceStep,
    StepInput,
    to_device,
)
from workers.model.decoder import Decoder
from workers.model.host_kv import HostKv
from workers.model.parallel import Unfinished
from workers.rank.collectives import RankGroups
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.containment import Containment
from workers.rank.decode_graphs import DecodeGraphs, graph_sizes
from workers.rank.device_batch import DeviceBatch, RowsThere
from workers.rank.device_queue import DeviceQueue, make_queue
from workers.rank.device_sampler import DeviceSampler, Drawn, make_device_sampler
from workers.rank.input_batch import InputBatch, InputTokens, PlannedRows
from workers.rank.progress import Progress, StepFaults
from workers.rank.prompt_reader import PromptReader
from workers.rank.sampler import Sampled, Sampler
from workers.rank.slot_matchers import SlotMatchers
from workers.rank.step_parts import Executed, SamplingPart, StepPart
from workers.rank.tickets import DrawnRows, Results, Ticket, row_logprobs

_Sample = TypeVar("_Sample")


class StepRunner:
    """Runs the plans of one rank in order. `decoder` is its part of the model, which `parallelize` has joined
    with those of the stage's other ranks, over `unfinished`; `attention` computes over `kv`, its pool of
    blocks, and `host` are those in host memory (None: there are none).

    `launch` is `execute`, then `sample`. Both halves are there for slots whose next mask or whose end depends
    on the last token: what they need is made between the two, while the device computes."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        host: HostKv | None,
        groups: RankGroups,
        unfinished: Unfinished,
        block_tokens: int,
        clock: Clock,
        faults: Faults,
        *,
        max_slots: int,
        max_context_tokens: int,
        queue: DeviceQueue | None = None,
        num_graph_rows: int = 0,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        """`max_slots` may be in use at a time, with up to `max_context_tokens` each. At the rank that samples
        their outputs may follow `grammars`.

        With a `queue`, tokens stay on the device, and the last block of `kv` is scratch. `record_graphs` then
        records graphs of up to `num_graph_rows` sequences."""
        self._decoder = decoder
        self._attention = attention
        self._kv = kv = attention.kv
        self._host = host
        self._groups = groups
        self._block_tokens = block_tokens
        self._clock = clock
        self._device = kv.device
        self._unfinished = unfinished
        self._containment = Containment(kv.device)
        self.queue = queue or make_queue(kv.device)
        self.progress = Progress(self.queue)
        self._step_faults = StepFaults(self.progress, faults, groups.rank)
        self._reader = PromptReader(
            decoder, groups, unfinished, self._containment, self.queue, self.progress, self._step_faults
        )
        num_blocks = len(kv) if queue is None else len(kv) - 1
        self.batch = InputBatch(max_slots, -(-max_context_tokens // block_tokens), block_tokens, num_blocks)
        self._inputs = InputTokens(groups, max_slots) if groups.is_first_stage and queue is None else None
        self._slot_to_refusal: dict[int, str] = {}  # slots with which the sampler could not begin
        self._sampler: Sampler | None = None
        self._sampler_there: DeviceSampler | None = None
        vocab_size, end_ids = decoder.config.vocab_size, decoder.config.eos_token_ids
        if groups.is_sampler and queue is None:
            self._sampler = Sampler(vocab_size, end_ids, kv.device, max_slots)
        if groups.is_sampler and queue is not None:
            self._sampler_there = make_device_sampler(vocab_size, end_ids, queue, max_slots)
        self._matchers: SlotMatchers | None = None
        if grammars is not None and (sampler := self._sampler_there or self._sampler) is not None:
            self._matchers = SlotMatchers(grammars, max_slots, torch.get_num_threads(), sampler.lift_minimum)
        self._there: DeviceBatch | None = None
        self._graphs: DecodeGraphs | None = None
        if queue is not None:
            self._there = there = DeviceBatch(
                self.batch, queue, most_rows=graph_sizes(num_graph_rows)[-1], scratch_block=num_blocks
            )
            self._graphs = DecodeGraphs(
                decoder, attention, there, self._sampler_there, groups, unfinished, queue
            )
        self._finished_at = 0.0

    @property
    def rows_of_piece(self) -> int:
        """How many positions of a prompt are read at a time; see `workers.rank.prompt_reader`."""
        return self._reader.rows_of_piece

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is still under way when `launch` returns."""
        return self.queue.runs_behind

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Execute this rank's part of one step. An empty plan only touches the device (the health canary)."""
        started_at, rows = self._take_in(plan)
        ticket = self._replay(plan, rows, started_at)
        return ticket or self._sample(self._execute(plan, rows, started_at), None)

    def collect(self, ticket: Ticket) -> StepReport:
        """Wait until the launched step is done. Its report names what could not be computed; see
        `workers.rank.containment`."""
        report = ticket.report
        if not self.runs_ahead and ticket.results is None:
            return ticket.completed(report)
        ticket.event.synchronize()
        # A step that was launched while another one computed began when that was done.
        started_at = max(report.started_at, self._finished_at)
        self._finished_at = self._clock.now()
        return ticket.completed(replace(report, started_at=started_at, finished_at=self._finished_at))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Executed:
        """Take in a plan and compute it up to the logits."""
        started_at, rows = self._take_in(plan)
        return self._execute(plan, rows, started_at)

    def _take_in(self, plan: StepPlan) -> tuple[float, PlannedRows]:
        """Change what this rank knows of its slots and blocks. Returns when it began, and what to compute."""
        started_at = self._clock.now()
        self.progress.begin(plan.step)
        self._containment.begin(plan)
        rows = self.batch.change(plan)
        if self._inputs is not None:
            self._inputs.change(plan)
        self._change_slots(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        self._reader.begin(plan)
        return started_at, rows

    def _execute(self, plan: StepPlan, rows: PlannedRows, started_at: float) -> Executed:
        there: RowsThere | None = None
        if self._there is not None:
            there, tokens = self._stage(plan, rows, self._there)
            whole = StepPart(rows, tokens, there).only(self._containment.intact(rows))
        if not rows.num_sequences:
            # What runs ahead has an event that shows whether the device is usable.
            self._containment.touch_device(waits=not self.runs_ahead)
            return Executed(plan.step, rows, started_at, [])
        if there is None:
            whole, waited_s = self._input(plan, rows)
            started_at += waited_s
        sampling = self._compute_in_parts(rows, whole)
        return Executed(plan.step, rows, started_at, sampling, there, self._reader.take())

    @torch.inference_mode()
    def sample(self, executed: Executed, masks: NDArray[np.uint32] | None = None) -> Ticket:
        """Sample for a step that is executed: the tokens feed the next one, and go into the report. `masks`
        [num_samples, ceil(vocab_size / 32)] may allow only some tokens to each row of the report, as in
        `Sampler.sample`, in place of those of the slots' grammars."""
        return self._sample(executed, masks)

    def _sample(self, executed: Executed, masks: NDArray[np.uint32] | None) -> Ticket:
        sample = self._sample_here if self._there is None else self._sample_there
        own = None if self._matchers is None or masks is not None else self._matchers.masks(executed.rows)
        if own is None:
            return sample(executed, masks)._replace(readings=executed.readings)
        self._containment.refuse(own.failed)
        ticket = sample(executed, own.masks)
        return ticket._replace(report=replace(ticket.report, masks=own.digests), readings=executed.readings)

    def _sample_here(self, executed: Executed, masks: NDArray[np.uint32] | None) -> Ticket:
        tokens = np.zeros(len(executed.rows.sample_slots), np.int64)
        logprobs: list[RowLogprob] = []
        for rows, sampled in self._sampled_parts(executed, partial(self._draw, masks=masks)):
            tokens[rows.sample_rows] = sampled.tokens
            if sampled.row_to_logprob:
                logprobs += row_logprobs(rows, sampled.row_to_logprob)
            if self._matchers is not None:
                self._containment.refuse(self._matchers.advance(rows, sampled.tokens))
        packed = b""
        if self._sampler is not None:
            self._hand_out(executed, tokens)
            packed = tokens.astype("<u4").tobytes()
        report = self._report(executed.step, executed.started_at, packed, tuple(logprobs))
        return Ticket(report, self.queue.event())

    def _sample_there(self, executed: Executed, masks: NDArray[np.uint32] | None) -> Ticket:
        """Do what `_sample_here` does, with tokens that stay on the device."""
        num_samples = len(executed.rows.sample_slots)
        allocate = partial(torch.zeros, num_samples, dtype=torch.int32, device=self._device)
        tokens = self._containment.insist(allocate)
        drawings: list[DrawnRows] = []
        draw = partial(self._draw_there, masks=masks)
        for rows, drawn in self._sampled_parts(executed, draw):
            if self._sampler_there is None:
                continue  # the tokens come from the rank that samples
            if len(rows.sample_rows) == num_samples:
                tokens = drawn.tokens
            else:
                self._containment.insist(partial(_put, tokens, rows.sample_rows, drawn.tokens))
            drawings.append(DrawnRows(rows, drawn.logprobs))
        report = self._report(executed.step, executed.started_at)
        if executed.there is None or not num_samples:
            return Ticket(report, self.queue.event())
        return self._hand_out_there(report, executed.there.sample_slots, tokens, drawings)

    def _hand_out_there(
        self, report: StepReport, slots: Tensor, tokens: Tensor, drawings: Sequence[DrawnRows]
    ) -> Ticket:
        """Let `tokens` [num_samples] feed the next step of these slots, and copy them to the host."""
        assert self._there is not None
        if self._groups.tp > 1:
            self._groups.broadcast(tokens)
        self._containment.insist(partial(self._there.sampled, slots, tokens))
        if self._sampler_there is None:
            return Ticket(report, self.queue.event())
        copied = self.queue.copy_out(tokens, self.queue.host_memory(tokens))
        if self._matchers is None:
            return Ticket(report, copied.event, Results(copied, drawings))
        bound = self._matchers.expect(copied, [drawn.rows for drawn in drawings])
        return Ticket(report, copied.event, Results(copied, drawings, partial(self._matchers.take, bound)))

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

    def _report(
        self, step: int, started_at: float, tokens: bytes = b"", logprobs: tuple[RowLogprob, ...] = ()
    ) -> StepReport:
        """Return the report of a step, by default without what it sampled."""
        return StepReport(
            step, tokens, started_at, self._clock.now(), None, self._containment.failed, logprobs
        )

    # --------------------------------------------------------------------------------- graphs

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The numbers of sequences for which decoding steps can be recorded as graphs: none, unless tokens
        stay on the device and nothing of a step is left to the host."""
        return self._graphs.sizes if self._graphs is not None and self._graphs.can_record else ()

    @torch.inference_mode()
    def record_graphs(self, sizes: Sequence[int]) -> None:
        """Record graphs of some of `graph_sizes`. Nothing is under way."""
        if sizes and self._graphs is not None:
            self._graphs.record(sizes)

    def _replay(self, plan: StepPlan, rows: PlannedRows, started_at: float) -> Ticket | None:
        """Compute a step by a graph, if there is one for it."""
        if self._graphs is None:
            return None
        size = self._graphs.size_for(rows.num_sequences) if self._is_recordable(rows) else None
        if not self._groups.agree(size is not None) or size is None:
            return None
        event, results = self._graphs.run(plan, rows, size, self._containment)
        self.progress.mark_layer()
        return Ticket(self._report(plan.step, started_at), event, results)

    def _is_recordable(self, rows: PlannedRows) -> bool:
        """Return whether every sequence has one token and samples for its own slot, all on the device."""
        return (
            np.array_equal(rows.sample_slots, rows.slots)
            and rows.num_tokens == rows.num_sequences
            and not self.batch.in_host[rows.slots].any()
            and not self._slot_to_refusal
            and not self._containment.has_lost_slots
            and not (self._matchers is not None and self._matchers.bind(rows.sample_slots))
        )

    # ---------------------------------------------------------------------- for measurements

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute all sequences of a plan in one call, of an unsharded model, and sample nothing. Returns
        float32 [num_samples, vocab_size] at the last positions of those that would sample."""
        rows = self.batch.change(plan)
        if self._there is not None:
            there, tokens = self._stage(plan, rows, self._there)
            whole = StepPart(rows, tokens, there)
        else:
            assert self._inputs is not None
            self._inputs.change(plan)
            whole = StepPart(rows, torch.from_numpy(self._inputs.tokens(plan)))
        _, sampling = self._compute(whole)
        assert sampling.logits is not None
        return sampling.logits

    @torch.inference_mode()
    def rehearse(self, plan: StepPlan, most_layers: int | None = None) -> None:
        """Run what a step takes of this stage, or its first `most_layers`, for a measurement: its layers over
        zeros in place of the plan's tokens and, at the last stage, head and sampling. Waits for the
        device."""
        rows = self.batch.change(plan)
        shape = (rows.num_tokens, self._decoder.config.hidden_size)
        self._unfinished.begin(rows.num_tokens, len(rows.sampling))
        there: RowsThere | None = None
        if self._there is not None:
            there, _ = self._stage(plan, rows, self._there)
        hidden = torch.zeros(shape, dtype=self._kv.dtype, device=self._device)
        hidden = self._decoder.run_layers(hidden, self._plan(rows, there), most_layers)
        self._reader.begin(plan)
        self._reader.read(rows, hidden)
        self._reader.take()
        if self._groups.is_last_stage and len(rows.sampling):
            last = hidden[to_device(np.cumsum(rows.lengths)[rows.sampling] - 1, self._device)]
            logits = self._decoder.logits(last)
            draw = self._draw if self._there is None else self._draw_there
            draw(SamplingPart(rows, last, logits), logits, None)
        self.queue.event().synchronize()

    def _plan(self, rows: PlannedRows, there: RowsThere | None) -> AttentionPlan:
        device: DeviceStep | None = None
        if self._there is not None and there is not None:
            device = self._there.step(there.slots, there.starts, there.lengths)
        has_host = self._host is not None and self.batch.in_host[rows.slots].any()
        return self._attention.plan(
            StepInput(
                tables=self.batch.tables,
                slots=rows.slots,
                starts=rows.starts,
                lengths=rows.lengths,
                block_tokens=self._block_tokens,
                marks=self._step_faults,
                host=self._host.reader if self._host is not None and has_host else None,
                device=device,
            )
        )

    def _change_slots(self, plan: StepPlan) -> None:
        sampler = self._sampler_there or self._sampler
        if sampler is None:
            return
        for slot in plan.free_slots:
            if self._slot_to_refusal.pop(slot, None) is None:
                sampler.free(slot)
            if self._matchers is not None:
                self._matchers.free(slot)
        for start in plan.starts:
            if not self._containment.attempt(partial(_start, sampler, start)):
                reason = self._containment.reason
                self._slot_to_refusal |= dict.fromkeys((sample.slot for sample in start.samples), reason)
            elif self._matchers is not None:
                self._matchers.start(start)

    def _stage(self, plan: StepPlan, rows: PlannedRows, there: DeviceBatch) -> tuple[RowsThere, Tensor]:
        """Copy to the device what a plan changes, and return its rows and its tokens [num_tokens] there."""
        changes = () if self._sampler_there is None else self._sampler_there.changes()
        stage = partial(there.stage, plan, rows, changes)
        rows_there, tokens, changes_there = self._containment.insist(stage)
        if self._sampler_there is not None:
            self._sampler_there.change(changes_there)
        return rows_there, tokens

    def _input(self, plan: StepPlan, rows: PlannedRows) -> tuple[StepPart, float]:
        """Return what this stage can compute of the step, and the seconds that this rank waited for it."""
        began_at = self._clock.now()
        if self._inputs is not None:
            tokens = self._inputs.tokens(plan)
            waited_s = self._clock.now() - began_at
            self._inputs.expect(plan.step, rows.sample_slots)
            whole = StepPart(rows, torch.from_numpy(tokens))
            return whole.only(self._containment.intact(rows)), waited_s
        is_present = self._groups.receive_marks(rows.num_sequences) > 0
        self._containment.miss(rows.only(~is_present))
        received = rows.only(is_present)
        shape = (received.num_tokens, self._decoder.config.hidden_size)
        hidden = torch.empty(shape, dtype=self._kv.dtype, device=self._device)
        if received.num_sequences:
            self._groups.receive_hidden(hidden)
        waited_s = self._clock.now() - began_at
        return StepPart(received, hidden).only(self._containment.intact(received)), waited_s

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
                pending += part.halves()
        if self._groups.is_last_stage:
            return sampling
        done.sort(key=lambda part: int(part.rows.indices[0]))
        self._send_hidden(rows.num_sequences, done)
        return []

    def _attempt(self, part: StepPart) -> tuple[Tensor, SamplingPart] | None:
        """Compute a part. Returns None if that failed here or at another rank."""
        self._unfinished.begin(part.rows.num_tokens, len(part.rows.sampling))
        self._step_faults.begin(part.rows)
        computed = self._containment.attempt(lambda: self._compute(part))
        if computed is None:
            self._unfinished.finish(self._kv)
        return computed if self._groups.agree(computed is not None) else None

    def _compute(self, part: StepPart) -> tuple[Tensor, SamplingPart]:
        """Return hidden states [num_tokens, hidden_size] after this stage's layers, and what samples: at
        stages before the last without logits."""
        rows, there = part.rows, part.there
        if there is None and self._there is not None:
            there = self._there.place(rows)
        attention = self._plan(rows, there)
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
                if there is None
                else there.last_rows
            )
            last = hidden[last_rows]
        sampling = SamplingPart(
            rows.only(is_sampling), last, None, None if there is None else there.sample_slots
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

    def _draw(self, part: SamplingPart, logits: Tensor, masks: NDArray[np.uint32] | None) -> Sampled:
        slots = part.rows.sample_slots
        if self._sampler is None:
            return Sampled(np.zeros(len(slots), np.uint32), {})
        logits = self._logits_of_samples(part.rows, logits)
        return self._sampler.sample(
            logits, slots, masks[part.rows.sample_rows] if masks is not None else None
        )

    def _draw_there(self, part: SamplingPart, logits: Tensor, masks: NDArray[np.uint32] | None) -> Drawn:
        slots = part.rows.sample_slots
        if self._sampler_there is None:  # must not fail: the rank that samples has counted its tokens
            return _NOTHING_DRAWN
        logits = self._logits_of_samples(part.rows, logits)
        slots_there = to_device(slots, self._device) if part.slots_there is None else part.slots_there
        masks = masks[part.rows.sample_rows] if masks is not None else None
        return self._sampler_there.draw(logits, slots, slots_there, masks)

    def _logits_of_samples(self, rows: PlannedRows, logits: Tensor) -> Tensor:
        """Return logits [num_samples, vocab_size] from those of the sequences that sample. Raises WorkerError
        if the sampling of one cannot begin."""
        self._step_faults.at("sampling")
        if self._slot_to_refusal:
            for slot in rows.sample_slots.tolist():
                if slot in self._slot_to_refusal:
                    raise WorkerError(f"its sampling cannot begin: {self._slot_to_refusal[slot]}")
        if len(rows.sample_slots) > len(logits):  # several samples fork from one prompt
            logits = logits[to_device(rows.sample_sources, self._device)]
        return logits

    def _hand_out(self, executed: Executed, tokens: NDArray[np.int64]) -> None:
        """Pass the tokens to the first stage: one for every slot that should have sampled, 0 if it failed."""
        if not len(tokens):
            return
        if self._groups.tp * self._groups.pp > 1:
            self._groups.send_tokens(executed.step, tokens)
        if self._inputs is not None:
            self._inputs.sampled(executed.rows.sample_slots, tokens)

    def _send_hidden(self, num_sequences: int, done: list[StepPart]) -> None:
        """Send the next stage which sequences were computed, and their hidden states in the plan's order."""
        marks = np.zeros(num_sequences, dtype=np.uint8)
        for part in done:
            marks[part.rows.indices] = 1
        self._groups.send_marks(marks)
        if done:
            hidden = [part.inputs for part in done]
            self._groups.send_hidden(hidden[0] if len(hidden) == 1 else torch.cat(hidden))

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self._host is not None and not (copies := self._host.copy(copies)):
            return
        src = to_device(np.array([copy.src_block for copy in copies]), self._device)
        dst = to_device(np.array([copy.dst_block for copy in copies]), self._device)
        self._kv[dst] = self._kv[src]


# At a rank that does not sample.
_NOTHING_DRAWN = Drawn(torch.zeros(0, dtype=torch.int32), dict)


def _put(tokens: Tensor, places: NDArray[np.int32], values: Tensor) -> None:
    tokens[to_device(places, tokens.device)] = values


def _start(sampler: Sampler | DeviceSampler, start: SlotStart) -> bool:
    sampler.start(start)
    return True
