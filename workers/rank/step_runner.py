"""Run one step of a rank: compute its part of what a plan names, and sample.

In shapes, num_tokens counts the tokens of a step (all sequences one after another), num_samples the slots
that sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from workers.errors import WorkerError
from workers.messages.rank_channel import BlockCopy, RowLogprob, SlotStart, StepPlan, StepReport
from workers.model.attention.interface import AttentionBackend, AttentionPlan, StepInput, to_device
from workers.model.decoder import Decoder
from workers.model.host_kv import HostKv
from workers.model.parallel import Unfinished, parallelize
from workers.rank.collectives import RankGroups
from workers.rank.containment import Containment, touch_device
from workers.rank.input_batch import InputBatch, InputTokens, PlannedRows
from workers.rank.progress import Progress, StepFaults
from workers.rank.sampler import Sampled, Sampler


class _Part(NamedTuple):
    """Sequences of a step and the inputs of all their tokens, one sequence after another: token ids [T], or
    hidden states [T, C]."""

    rows: PlannedRows
    inputs: Tensor

    def only(self, kept: NDArray[np.bool_]) -> _Part:
        """The part with the sequences that `kept` marks."""
        if kept.all():
            return self
        tokens = torch.from_numpy(np.repeat(kept, self.rows.lengths))
        return _Part(self.rows.only(kept), self.inputs[tokens.to(self.inputs.device)])

    def halves(self) -> tuple[_Part, _Part]:
        is_first = np.arange(self.rows.num_sequences) < self.rows.num_sequences // 2
        return self.only(is_first), self.only(~is_first)


class _Sampling(NamedTuple):
    """Sequences that sample, one row each: the hidden states [num_rows, C] of their last tokens and, unless
    an attempt to sample has used them up, logits [num_rows, vocab_size]."""

    rows: PlannedRows
    hidden: Tensor
    logits: Tensor | None

    def halves(self) -> tuple[_Sampling, _Sampling]:
        middle = self.rows.num_sequences // 2
        is_first = np.arange(self.rows.num_sequences) < middle
        return (
            _Sampling(self.rows.only(is_first), self.hidden[:middle], None),
            _Sampling(self.rows.only(~is_first), self.hidden[middle:], None),
        )


class Executed(NamedTuple):
    """A step whose layers and head are computed (or queued), and that has still to sample."""

    step: int
    rows: PlannedRows
    started_at: float
    sampling: list[_Sampling]


class Ticket(NamedTuple):
    """A step that is launched. Its report holds once the device has passed `event` (None: it holds now)."""

    report: StepReport
    event: torch.cuda.Event | None


class StepRunner:
    """Runs the plans of one rank in order. `decoder` is its part of the model, which is joined here with
    those of the stage's other ranks; `attention` computes over `kv`, its pool of blocks, and `host` are those
    in host memory (None: there are none).

    `launch` is `execute`, then `sample`. Both halves are there for slots whose next mask or whose end depends
    on the last token: what they need is made between the two, while the device computes."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        host: HostKv | None,
        groups: RankGroups,
        block_tokens: int,
        clock: Clock,
        faults: Faults,
        *,
        max_slots: int,
        max_context_tokens: int,
    ) -> None:
        """`max_slots` may be in use at a time, with up to `max_context_tokens` each."""
        self._decoder = decoder
        self._attention = attention
        self._kv = kv = attention.kv
        self._host = host
        self._groups = groups
        self._block_tokens = block_tokens
        self._clock = clock
        self._device = kv.device
        self._unfinished = Unfinished(groups, decoder)
        parallelize(decoder, self._unfinished)
        self._containment = Containment(kv.device)
        self.progress = Progress(kv.device)
        self._step_faults = StepFaults(self.progress, faults, groups.rank)
        self.batch = InputBatch(max_slots, -(-max_context_tokens // block_tokens), block_tokens, len(kv))
        self._inputs = InputTokens(groups, max_slots) if groups.is_first_stage else None
        self._sampler: Sampler | None = None
        self._slot_to_refusal: dict[int, str] = {}  # slots with which the sampler could not begin
        if groups.is_sampler:
            config = decoder.config
            self._sampler = Sampler(config.vocab_size, config.eos_token_ids, kv.device, max_slots)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is still under way when `launch` returns."""
        return self._device.type == "cuda"

    def launch(self, plan: StepPlan) -> Ticket:
        """Execute this rank's part of one step. An empty plan only touches the device (the health canary)."""
        return self.sample(self.execute(plan))

    def collect(self, ticket: Ticket) -> StepReport:
        """Wait until the launched step is done. Its report names what could not be computed; see
        `workers.rank.containment`."""
        if ticket.event is None:
            return ticket.report
        ticket.event.synchronize()
        return replace(ticket.report, finished_at=self._clock.now())

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Executed:
        """Take in a plan and compute it up to the logits."""
        started_at = self._clock.now()
        self.progress.begin(plan.step)
        self._containment.begin(plan)
        rows = self.batch.change(plan)
        if self._inputs is not None:
            self._inputs.change(plan)
        self._change_slots(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        if not rows.num_sequences:
            touch_device(self._device)
            return Executed(plan.step, rows, started_at, [])
        whole, waited_s = self._input(plan, rows)
        sampling = self._compute_in_parts(rows, whole)
        return Executed(plan.step, rows, started_at + waited_s, sampling)

    @torch.inference_mode()
    def sample(self, executed: Executed, masks: NDArray[np.uint32] | None = None) -> Ticket:
        """Sample for a step that is executed: the tokens feed the next one, and go into the report. `masks`
        [num_samples, ceil(vocab_size / 32)] may allow only some tokens to each row of the report, as in
        `Sampler.sample`."""
        tokens = np.zeros(len(executed.rows.sample_slots), np.int64)
        logprobs: list[RowLogprob] = []
        pending = executed.sampling[::-1]
        while pending:
            part = pending.pop()
            sampled = self._attempt_sampling(part, masks)
            if sampled is not None:
                tokens[part.rows.sample_rows] = sampled.tokens
                logprobs += [
                    RowLogprob(int(part.rows.sample_rows[row]), logprob)
                    for row, logprob in sampled.row_to_logprob.items()
                ]
            elif part.rows.num_sequences == 1:
                self._containment.fail(part.rows)
            else:
                pending += part.halves()[::-1]
        packed = b""
        if self._sampler is not None:
            self._hand_out(executed, tokens)
            packed = tokens.astype("<u4").tobytes()
        report = StepReport(
            executed.step,
            packed,
            executed.started_at,
            self._clock.now(),
            failed=self._containment.failed,
            logprobs=tuple(logprobs),
        )
        return Ticket(report, self._event())

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute all sequences of a plan in one call, of an unsharded model, and sample nothing. Returns
        float32 [num_samples, vocab_size] at the last positions of those that would sample."""
        assert self._inputs is not None
        rows = self.batch.change(plan)
        self._inputs.change(plan)
        tokens = torch.from_numpy(self._inputs.tokens(plan))
        _, sampling = self._compute(_Part(rows, tokens))
        assert sampling.logits is not None
        return sampling.logits

    @torch.inference_mode()
    def layers_only(self, plan: StepPlan, most_layers: int | None = None) -> None:
        """Run this stage's layers, or the first `most_layers`, over zeros in place of the plan's tokens, for
        a measurement, and wait for the device."""
        rows = self.batch.change(plan)
        shape = (rows.num_tokens, self._decoder.config.hidden_size)
        self._unfinished.begin(rows.num_tokens, 0)
        hidden = torch.zeros(shape, dtype=self._kv.dtype, device=self._device)
        self._decoder.run_layers(hidden, self._plan(rows), most_layers)
        event = self._event()
        if event is not None:
            event.synchronize()

    def _plan(self, rows: PlannedRows) -> AttentionPlan:
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
            )
        )

    def _change_slots(self, plan: StepPlan) -> None:
        if self._sampler is None:
            return
        for slot in plan.free_slots:
            if self._slot_to_refusal.pop(slot, None) is None:
                self._sampler.free(slot)
        for start in plan.starts:
            if self._containment.attempt(partial(self._start, start)) is None:
                reason = self._containment.reason
                self._slot_to_refusal |= dict.fromkeys((sample.slot for sample in start.samples), reason)

    def _start(self, start: SlotStart) -> bool:
        assert self._sampler is not None
        self._sampler.start(start)
        return True

    def _input(self, plan: StepPlan, rows: PlannedRows) -> tuple[_Part, float]:
        """Return what this stage can compute of the step, and the seconds that this rank waited for it."""
        began_at = self._clock.now()
        if self._inputs is not None:
            tokens = self._inputs.tokens(plan)
            waited_s = self._clock.now() - began_at
            self._inputs.expect(plan.step, rows.sample_slots)
            whole = _Part(rows, torch.from_numpy(tokens))
            return whole.only(self._containment.intact(rows)), waited_s
        is_present = self._groups.receive_marks(rows.num_sequences) > 0
        self._containment.miss(rows.only(~is_present))
        received = rows.only(is_present)
        shape = (received.num_tokens, self._decoder.config.hidden_size)
        hidden = torch.empty(shape, dtype=self._kv.dtype, device=self._device)
        if received.num_sequences:
            self._groups.receive_hidden(hidden)
        waited_s = self._clock.now() - began_at
        return _Part(received, hidden).only(self._containment.intact(received)), waited_s

    def _compute_in_parts(self, rows: PlannedRows, whole: _Part) -> list[_Sampling]:
        """Compute the layers of this stage, at once, or in parts if an attempt fails on any rank of the
        stage. Returns what samples; any other stage sends its hidden states on."""
        done: list[_Part] = []
        sampling: list[_Sampling] = []
        pending = [whole] if whole.rows.num_sequences else []
        while pending:
            part = pending.pop()
            result = self._attempt(part)
            if result is not None:
                hidden, to_sample = result
                done.append(_Part(part.rows, hidden))
                sampling += [to_sample] if to_sample.rows.num_sequences else []
            elif part.rows.num_sequences == 1:
                self._containment.fail(part.rows)
            else:
                pending += part.halves()[::-1]
        if self._groups.is_last_stage:
            return sampling
        self._send_hidden(rows.num_sequences, done)
        return []

    def _attempt(self, part: _Part) -> tuple[Tensor, _Sampling] | None:
        """Compute a part. Returns None if that failed here or at another rank."""
        self._unfinished.begin(part.rows.num_tokens, len(part.rows.sampling))
        self._step_faults.begin(part.rows)
        computed = self._containment.attempt(lambda: self._compute(part))
        if computed is None:
            self._unfinished.finish(self._kv)
        return computed if self._groups.agree(computed is not None) else None

    def _compute(self, part: _Part) -> tuple[Tensor, _Sampling]:
        """Return hidden states [num_tokens, hidden_size] after this stage's layers, and what samples: at
        stages before the last without logits."""
        rows = part.rows
        attention = self._plan(rows)
        if self._groups.is_first_stage:
            self._step_faults.at("embedding")
            hidden = self._decoder.embed(part.inputs.to(self._device, non_blocking=True))
            self.progress.mark_layer()
        else:
            hidden = part.inputs.clone()  # the layers overwrite it, and it may be needed again
        hidden = self._decoder.run_layers(hidden, attention)
        sources = rows.sampling
        is_sampling = np.zeros(rows.num_sequences, np.bool_)
        is_sampling[sources] = True
        last = hidden
        if len(sources) < len(hidden):  # else all are single tokens
            last = hidden[to_device(np.cumsum(rows.lengths)[sources] - 1, self._device)]
        sampling = _Sampling(rows.only(is_sampling), last, None)
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

    def _attempt_sampling(self, part: _Sampling, masks: NDArray[np.uint32] | None) -> Sampled | None:
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
        sampled = self._containment.attempt(lambda: self._draw(part.rows, whole, masks))
        if not self._groups.agree(sampled is not None) or sampled is None:
            return None
        self.progress.mark_layer()
        return sampled

    def _draw(self, rows: PlannedRows, logits: Tensor, masks: NDArray[np.uint32] | None) -> Sampled:
        if self._sampler is None:
            return Sampled(np.zeros(len(rows.sample_slots), np.uint32), {})
        self._step_faults.at("sampling")
        if self._slot_to_refusal:
            for slot in rows.sample_slots.tolist():
                if slot in self._slot_to_refusal:
                    raise WorkerError(f"its sampling cannot begin: {self._slot_to_refusal[slot]}")
        if len(rows.sample_slots) > len(logits):  # several samples fork from one prompt
            logits = logits[to_device(rows.sample_sources, self._device)]
        masks = masks[rows.sample_rows] if masks is not None else None
        return self._sampler.sample(logits, rows.sample_slots, masks)

    def _hand_out(self, executed: Executed, tokens: NDArray[np.int64]) -> None:
        """Pass the tokens to the first stage: one for every slot that should have sampled, 0 if it failed."""
        if not len(tokens):
            return
        if self._groups.tp * self._groups.pp > 1:
            self._groups.send_tokens(executed.step, tokens)
        if self._inputs is not None:
            self._inputs.sampled(executed.rows.sample_slots, tokens)

    def _send_hidden(self, num_sequences: int, done: list[_Part]) -> None:
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

    def _event(self) -> torch.cuda.Event | None:
        """Return the point that the device has reached when all that was queued so far is done."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def launched(
    plans: SimpleQueue[StepPlan | None], launch: Callable[[StepPlan], Ticket], most: int
) -> Iterator[Ticket]:
    """Launch the plans of the queue in order, until None comes. Yields each ticket when it is to be
    collected: when `most` are launched, or no further plan is there."""
    tickets: deque[Ticket] = deque()
    has_ended = False
    while tickets or not has_ended:
        if not has_ended and (not tickets or (len(tickets) < most and not plans.empty())):
            plan = plans.get()
            if plan is None:
                has_ended = True
            else:
                tickets.append(launch(plan))
        else:
            yield tickets.popleft()
