"""Run one step of a rank: compute its part of a plan's entries, and sample.

In shapes, num_tokens counts the tokens of a step (all sequences one after another), num_rows those that
sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from workers.errors import WorkerError
from workers.messages import BatchEntry, BlockCopy, SampledToken, SlotStart, StepPlan, StepReport
from workers.model.attention.interface import AttentionBackend, AttentionPlan, SequenceSpan, StepInput
from workers.model.decoder import Decoder
from workers.model.host_kv import HostKv
from workers.model.parallel import Unfinished, parallelize
from workers.rank.collectives import RankGroups
from workers.rank.containment import Containment, touch_device
from workers.rank.progress import Progress, StepFaults
from workers.rank.sampler import Sampler


class _Part(NamedTuple):
    """Entries of a plan and the rows of all their tokens, one entry after another: token ids [T], or hidden
    states [T, C]."""

    plan: StepPlan
    indices: list[int]
    rows: Tensor

    @property
    def entries(self) -> list[BatchEntry]:
        return [self.plan.entries[index] for index in self.indices]

    @property
    def num_rows(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    def only(self, indices: list[int]) -> _Part:
        """The part with these entries."""
        if indices == self.indices:
            return self
        ends = np.cumsum([entry.num_tokens for entry in self.entries])
        index_to_end = dict(zip(self.indices, ends, strict=True))
        kept = [
            self.rows[index_to_end[index] - self.plan.entries[index].num_tokens : index_to_end[index]]
            for index in indices
        ]
        return _Part(self.plan, indices, torch.cat(kept) if kept else self.rows[:0])


class StepRunner:
    """Runs the plans of one rank in order. `decoder` is its part of the model, which is joined here with
    those of the stage's other ranks; `attention` computes over `kv`, its pool of blocks, and `host` are those
    in host memory (None: there are none)."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        host: HostKv | None,
        groups: RankGroups,
        block_tokens: int,
        clock: Clock,
        faults: Faults,
    ) -> None:
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
        self._inputs = InputTokens(groups) if groups.is_first_stage else None
        self._sampler: Sampler | None = None
        self._slot_to_refusal: dict[int, str] = {}  # slots with which the sampler could not begin
        if groups.is_sampler:
            config = decoder.config
            self._sampler = Sampler(config.vocab_size, config.eos_token_ids, kv.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepReport:
        """Execute this rank's part of one step. An empty plan only touches the device (the health canary).
        The report names entries that could not be computed; see `workers.rank.containment`."""
        started_at = self._clock.now()
        self.progress.begin(plan.step)
        self._containment.begin(plan)
        if self._inputs is not None:
            self._inputs.change(plan)
        self._change_slots(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        if not plan.entries:
            touch_device(self._device)
            return StepReport(plan.step, (), started_at, self._clock.now())
        whole, waited_s = self._input(plan)
        done, sampled = self._compute_in_parts(plan, whole)
        if self._groups.is_last_stage:
            self._hand_out(plan, sampled)
        else:
            self._send_hidden(plan, done)
        if not sampled:
            self._synchronize()
        failed = self._containment.failed
        finished_at = self._clock.now()
        return StepReport(plan.step, tuple(sampled), started_at + waited_s, finished_at, failed=failed)

    @torch.inference_mode()
    def logits(self, entries: tuple[BatchEntry, ...]) -> Tensor:
        """Compute all entries of an unsharded model in one call. Returns float32 [num_rows, vocab_size] at
        the last positions of the entries that sample."""
        assert self._inputs is not None
        tokens = self._upload(self._inputs.tokens(entries))
        hidden = self._decoder.run_layers(self._decoder.embed(tokens), self._plan(entries))
        return self._logits(entries, hidden)

    @torch.inference_mode()
    def layers_only(self, entry: BatchEntry) -> None:
        """Run this stage's layers over one token of zeros, for a measurement, and wait for the device."""
        shape = (1, self._decoder.config.hidden_size)
        self._unfinished.begin(1, 0)
        hidden = torch.zeros(shape, dtype=self._kv.dtype, device=self._device)
        self._decoder.run_layers(hidden, self._plan([entry]))
        self._synchronize()

    def _plan(self, entries: Sequence[BatchEntry]) -> AttentionPlan:
        spans = [SequenceSpan(entry.start, entry.num_tokens, entry.block_ids) for entry in entries]
        reader = None
        if self._host is not None:
            reader = self._host.reader_for([span.block_ids for span in spans])
        return self._attention.plan(StepInput.of(spans, self._block_tokens, reader, self._step_faults))

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

    def _input(self, plan: StepPlan) -> tuple[_Part, float]:
        """Return what this stage can compute of the step, and the seconds that this rank waited for it."""
        began_at = self._clock.now()
        entries = plan.entries
        if self._inputs is not None:
            intact = self._containment.intact(plan, range(len(entries)))
            tokens = self._inputs.tokens(tuple(entries[index] for index in intact))
            waited_s = self._clock.now() - began_at
            self._inputs.expect(plan)
            return _Part(plan, intact, torch.from_numpy(tokens)), waited_s
        present = [int(index) for index in np.flatnonzero(self._groups.receive_marks(len(entries)))]
        received = _Part(plan, present, torch.empty(0))
        shape = (received.num_rows, self._decoder.config.hidden_size)
        hidden = torch.empty(shape, dtype=self._kv.dtype, device=self._device)
        if present:
            self._groups.receive_hidden(hidden)
        waited_s = self._clock.now() - began_at
        received = _Part(plan, present, hidden)
        return received.only(self._containment.intact(plan, present)), waited_s

    def _compute_in_parts(self, plan: StepPlan, whole: _Part) -> tuple[list[_Part], list[SampledToken]]:
        """Return the hidden states after this stage's layers, and the tokens that this rank sampled: computed
        at once, or in parts if an attempt fails on any rank of the stage."""
        done: list[_Part] = []
        sampled: list[SampledToken] = []
        pending = [whole] if whole.indices else []
        while pending:
            part = pending.pop()
            result = self._attempt(part)
            if result is not None:
                hidden, tokens = result
                done.append(_Part(plan, part.indices, hidden))
                sampled += tokens
            elif len(part.indices) == 1:
                self._containment.fail(part.indices[0], part.entries[0])
            else:
                middle = len(part.indices) // 2
                pending += [part.only(part.indices[middle:]), part.only(part.indices[:middle])]
        return done, sampled

    def _attempt(self, part: _Part) -> tuple[Tensor, list[SampledToken]] | None:
        """Compute these entries and sample for them. Returns None if that failed here or at another rank."""
        slots = [slot for entry in part.entries for slot in entry.sample_slots]
        num_sampled = sum(bool(entry.sample_slots) for entry in part.entries)
        self._unfinished.begin(part.num_rows, num_sampled)
        self._step_faults.begin(part.entries)
        computed = self._containment.attempt(lambda: self._compute(part))
        if computed is None:
            self._unfinished.finish(self._kv)
        if not self._groups.agree(computed is not None) or computed is None:
            return None
        hidden, logits = computed
        if not slots or logits is None:
            return hidden, []
        sampled = self._containment.attempt(lambda: self._sample(part.entries, slots, logits))
        if not self._groups.agree(sampled is not None) or sampled is None:
            return None
        self.progress.mark_layer()
        return hidden, sampled

    def _compute(self, part: _Part) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [num_tokens, hidden_size] after this stage's layers and, on the last stage,
        logits [num_rows, vocab_size]."""
        attention = self._plan(part.entries)
        if self._groups.is_first_stage:
            self._step_faults.at("embedding")
            hidden = self._decoder.embed(part.rows.to(self._device, non_blocking=True))
            self.progress.mark_layer()
        else:
            hidden = part.rows.clone()  # the layers overwrite it, and it may be needed again
        hidden = self._decoder.run_layers(hidden, attention)
        if not self._groups.is_last_stage:
            return hidden, None
        self._step_faults.at("head")
        logits = self._logits(part.entries, hidden)
        self.progress.mark_layer()
        return hidden, logits

    def _logits(self, entries: Sequence[BatchEntry], hidden: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] at the sampler, and [0, vocab_size] at ranks that compute only a
        part."""
        ends = np.cumsum([entry.num_tokens for entry in entries]) - 1
        rows = [row for row, entry in enumerate(entries) if entry.sample_slots]
        if not rows:
            return hidden.new_empty((0, self._decoder.config.vocab_size), dtype=torch.float32)
        if len(rows) == len(hidden):  # all are single tokens
            return self._decoder.logits(hidden)
        return self._decoder.logits(hidden[self._upload(ends[rows])])

    def _sample(
        self, entries: Sequence[BatchEntry], slots: Sequence[int], logits: Tensor
    ) -> list[SampledToken]:
        """Sample one token for each slot, at the sampler; the other ranks of its stage return nothing."""
        if self._sampler is None:
            return []
        self._step_faults.at("sampling")
        for slot in slots:
            if slot in self._slot_to_refusal:
                raise WorkerError(f"its sampling cannot begin: {self._slot_to_refusal[slot]}")
        if len(slots) > len(logits):  # several samples fork from one prompt
            num_samples = [len(entry.sample_slots) for entry in entries if entry.sample_slots]
            logits = logits[self._upload(np.repeat(np.arange(len(logits)), num_samples))]
        return self._sampler.sample(logits, slots)

    def _hand_out(self, plan: StepPlan, sampled: list[SampledToken]) -> None:
        """Pass the tokens to the first stage: one for every slot that should have sampled, 0 if it failed."""
        slots = sampling_slots(plan)
        if not slots or self._sampler is None:
            return
        slot_to_sampled = {token.slot: token for token in sampled}
        tokens = [slot_to_sampled.get(slot, SampledToken(slot, 0, None)) for slot in slots]
        if self._groups.tp * self._groups.pp > 1:
            self._groups.send_tokens(plan.step, np.array([token.token for token in tokens]))
        if self._inputs is not None:
            self._inputs.sampled(tokens)

    def _send_hidden(self, plan: StepPlan, done: list[_Part]) -> None:
        """Send the next stage which entries were computed, and their hidden states in the plan's order."""
        marks = np.zeros(len(plan.entries), dtype=np.uint8)
        marks[[index for part in done for index in part.indices]] = 1
        self._groups.send_marks(marks)
        if done:
            rows = [part.rows for part in done]
            self._groups.send_hidden(rows[0] if len(rows) == 1 else torch.cat(rows))

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self._host is not None and not (copies := self._host.copy(copies)):
            return
        src = self._upload(np.array([copy.src_block for copy in copies]))
        dst = self._upload(np.array([copy.dst_block for copy in copies]))
        self._kv[dst] = self._kv[src]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _upload(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


class InputTokens:
    """What a rank of the first stage embeds: tokens that plans name, and the last token of each slot.

    If the sampler is another rank, its messages come in the order of the plans that sample, and are awaited
    when a slot's token is needed. `_unread` holds the slots of messages that have not been read;
    `_slot_to_message` holds the number of the message with the slot's newest token.
    """

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._slot_to_token: dict[int, int] = {}
        self._slot_to_message: dict[int, int] = {}
        self._unread: deque[list[int]] = deque()
        self._num_read = 0
        # With more plans than can be in flight, the sampler has reported the oldest, so its tokens are sent.
        self._most_unread = groups.pp + 1

    def change(self, plan: StepPlan) -> None:
        """Forget the slots that the plan frees, then begin those that it starts."""
        for slot in plan.free_slots:
            assert slot in self._slot_to_token, f"slot {slot} is freed but was never started"
            del self._slot_to_token[slot]
            self._slot_to_message.pop(slot, None)
        for sample in (sample for start in plan.starts for sample in start.samples):
            assert sample.slot not in self._slot_to_token, f"slot {sample.slot} is already in use"
            self._slot_to_token[sample.slot] = sample.last_token

    def tokens(self, entries: tuple[BatchEntry, ...]) -> NDArray[np.int64]:
        """Return the input tokens [num_tokens]. An entry without any continues with its slot's last token."""
        parts = []
        for entry in entries:
            parts.append(entry.tokens or self._last(entry.slot).to_bytes(4, "little"))
            assert len(parts[-1]) == 4 * entry.num_tokens, f"slot {entry.slot}: {len(entry.tokens)} bytes"
        return np.frombuffer(b"".join(parts), dtype="<u4").astype(np.int64)

    def expect(self, plan: StepPlan) -> None:
        """Expect another rank to sample for the plan. Called before the plan is computed."""
        slots = sampling_slots(plan)
        if self._groups.is_sampler or not slots:
            return
        self._groups.expect_tokens(plan.step, len(slots))
        self._unread.append(slots)
        for slot in slots:
            assert slot in self._slot_to_token, f"slot {slot} samples but was never started"
            self._slot_to_message[slot] = self._num_read + len(self._unread)
        if len(self._unread) > self._most_unread:
            self._read()

    def sampled(self, tokens: list[SampledToken]) -> None:
        """Take the tokens that this rank itself sampled."""
        for token in tokens:
            self._slot_to_token[token.slot] = token.token

    def _last(self, slot: int) -> int:
        assert slot in self._slot_to_token, f"slot {slot} continues but was never started"
        while self._slot_to_message.get(slot, 0) > self._num_read:
            self._read()
        return self._slot_to_token[slot]

    def _read(self) -> None:
        _, tokens = self._groups.receive_tokens()
        self._num_read += 1
        for slot, token in zip(self._unread.popleft(), tokens, strict=True):
            if self._slot_to_message.get(slot) == self._num_read:  # else it was freed, or sampled again
                self._slot_to_token[slot] = int(token)


def sampling_slots(plan: StepPlan) -> list[int]:
    """Return the slots that sample, in the order in which their tokens are reported."""
    return [slot for entry in plan.entries for slot in entry.sample_slots]
