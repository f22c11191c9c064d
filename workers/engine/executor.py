"""The hands of a rank: executes its part of step plans on one device. Model, KV pool, sampling; no decisions.

Called by a rank process with the brain's plans, and directly by the engine benchmark. Letters: T tokens of a
step (all sequences one after another), C hidden size, R rows that sample, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.clock import Clock
from kvtransfer.device import DevicePool
from kvtransfer.faults import Faults
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, Shard
from kvtransfer.pool import HostPool, KvPool
from workers.engine.containment import Containment
from workers.engine.groups import RankGroups
from workers.engine.input_tokens import InputTokens, sampling_slots
from workers.engine.progress import Progress, StepFaults
from workers.engine.sampler import Sampler
from workers.errors import CapacityError, WorkerError
from workers.messages import (
    BatchEntry,
    BlockCopy,
    SampledToken,
    SamplingParams,
    SlotStart,
    StepPlan,
    StepReport,
)
from workers.model.batch import AttentionBatch, SequenceSpan
from workers.model.config import ModelConfig, model_fingerprint
from workers.model.decoder import load_decoder
from workers.model.host_kv import MODES, HostKv, OffloadMode
from workers.model.parallel import Unfinished, parallelize
from workers.model.split import kv_heads
from workers.model.weights import ShardSpec

_log = logging.getLogger("tandem.rank")

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_WARM_UP_TOKENS = 48
_MEASURED_HOST_TOKENS = 4096
"""The step that decides how blocks in host memory are read has so many tokens there."""
_NUM_MEASURED_STEPS = 4


@dataclass(frozen=True, slots=True)
class ReadyFields:
    """What the brain must know of a loaded executor."""

    num_blocks: int
    num_offload_blocks: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    compatibility: CompatibilityRecord


def read_dtype(name: str) -> torch.dtype:
    """The dtype of that name; `WorkerError` naming the known ones."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise WorkerError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return dtype


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


class Executor:
    """Loads a rank's part of the model and its KV pool, then turns each `StepPlan` into a `StepReport`.

    The ranks of a replica run the same plans in the same order and meet in `groups`: the first stage embeds,
    each hands its hidden states [T, C] to the next, and the first rank of the last stage samples.
    `kv` is `[num_blocks, layers, 2, kv_heads, block_tokens, head_dim]` of this rank's layers and heads, and
    `pool` the same memory as the transports see it. Raises `CheckpointError` for a folder that cannot be
    served and `CapacityError` for a pool without room.
    """

    def __init__(
        self,
        *,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int,
        num_kv_tokens: int,
        num_threads: int,
        clock: Clock,
        shard: ShardSpec | None = None,
        groups: RankGroups | None = None,
        num_offload_tokens: int = 0,
        offload_mode: OffloadMode | Literal["auto"] = "auto",
        faults: Faults | None = None,
    ) -> None:
        """`shard` (None: the whole model) is this rank's place in `groups` (None: it is the only one).

        Block ids after those of the device's `num_kv_tokens` are of `num_offload_tokens` in host memory; with
        the mode "auto" the warm-up measures which way to read them is faster.
        """
        torch.set_num_threads(num_threads)
        self._clock = clock
        self._device = device
        self.progress = Progress(device)
        self._dtype = dtype
        self._block_tokens = block_tokens
        self._groups = groups or RankGroups(None, tp=1, pp=1, rank=0, device=device, host="")
        self._decoder = load_decoder(model_dir, dtype, device, shard)
        self._unfinished = Unfinished(self._groups, self._decoder)
        parallelize(self._decoder, self._unfinished)
        self._containment = Containment(self._touch_device)
        self._step_faults = StepFaults(self.progress, faults or Faults(), self._groups.rank)
        self.config = config = self._decoder.config
        self.layout = _layout(config, self._decoder.shard, block_tokens, dtype)
        num_blocks = num_kv_tokens // block_tokens
        if num_blocks < 1:
            raise CapacityError(f"kv_tokens {num_kv_tokens} is less than one block of {block_tokens} tokens")
        self.kv, self.pool = _allocate(self.layout, num_blocks, dtype, device)
        self._offload_mode = offload_mode
        self.host = self._allocate_host(num_offload_tokens // block_tokens)
        self._inputs: InputTokens | None = None
        if self._groups.is_first_stage:
            self._inputs = InputTokens(self._groups)
        self._sampler: Sampler | None = None
        self._slot_to_refusal: dict[int, str] = {}  # slots with which the sampler could not begin
        if self._groups.is_sampler:
            self._sampler = Sampler(config.vocab_size, config.eos_token_ids, device)
        num_offload_blocks = len(self.host.kv) if self.host is not None else 0
        num_context_tokens = (num_blocks + num_offload_blocks) * block_tokens
        self.ready_fields = ReadyFields(
            num_blocks=num_blocks,
            num_offload_blocks=num_offload_blocks,
            vocab_size=config.vocab_size,
            max_context_tokens=min(config.max_context_tokens, num_context_tokens),
            eos_token_ids=config.eos_token_ids,
            compatibility=CompatibilityRecord(
                protocol=PROTOCOL_VERSION,
                model_fingerprint=model_fingerprint(model_dir),
                dtype=str(dtype).removeprefix("torch."),
                block_tokens=block_tokens,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepReport:
        """Execute this rank's part of one step. An empty plan touches the device and reports: the health
        canary. Entries that cannot be computed are in the report; `workers.engine.containment` tells how."""
        started_at = self._clock.now()
        self.progress.begin(plan.step)
        self._containment.begin(plan)
        if self._inputs is not None:
            self._inputs.change(plan)
        self._change_slots(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        if not plan.entries:
            self._touch_device()
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
        """Of a whole model: compute all entries in one call; [R, V] float32 at the last position of those
        that sample."""
        assert self._inputs is not None
        tokens = self._upload(self._inputs.tokens(entries))
        hidden = self._decoder.forward(tokens, self._batch(entries), self.kv)
        return self._logits(entries, hidden)

    def warm_up(self) -> None:
        """One small prefill and one decode step, so that the first request does not pay for lazy set-up. The
        ranks of a replica do it together."""
        fields = self.ready_fields
        most = min(self.config.max_context_tokens, fields.num_blocks * self._block_tokens)
        num_tokens = max(1, min(_WARM_UP_TOKENS, most - 1, fields.vocab_size))
        tokens = np.arange(num_tokens, dtype="<u4").tobytes()
        blocks = tuple(range(-(-(num_tokens + 1) // self._block_tokens)))[: fields.num_blocks]
        start = SlotStart(-1, tokens, num_tokens, 0, SamplingParams(temperature=1.0))
        prefill = BatchEntry(-1, 0, num_tokens, tokens, blocks, (-1,))
        self.run(StepPlan(0, (), (start,), (), (prefill,)))
        if num_tokens < most:
            decode = BatchEntry(-1, num_tokens, 1, b"", blocks, (-1,))
            self.run(StepPlan(0, (), (), (), (decode,)))
        self.run(StepPlan(0, (-1,), (), (), ()))
        if self.host is not None and self._offload_mode == "auto":
            self._choose_offload_mode(self.host)

    def close(self) -> None:
        """Give up the pool's memory and leave the groups; nothing may be run after this."""
        self._groups.close()
        if self.host is not None:
            self.host.close()
        del self.kv
        self.pool.close()

    # ---------------------------------------------------------------------------------------- a step

    def _batch(self, entries: Sequence[BatchEntry]) -> AttentionBatch:
        spans = [SequenceSpan(entry.start, entry.num_tokens, entry.block_ids) for entry in entries]
        if self.host is None:
            return AttentionBatch.build(spans, self._block_tokens, self._device, marks=self._step_faults)
        reader = self.host.reader_for([span.block_ids for span in spans])
        batch = AttentionBatch.build(spans, self._block_tokens, self._device, reader, self._step_faults)
        if reader is not None:
            reader.begin(batch)
        return batch

    def _change_slots(self, plan: StepPlan) -> None:
        if self._sampler is None:
            return
        for slot in plan.free_slots:
            if self._slot_to_refusal.pop(slot, None) is None:
                self._sampler.free(slot)
        for start in plan.starts:
            try:
                self._sampler.start(start)
            except (ValueError, OverflowError) as error:
                self._slot_to_refusal[start.slot] = str(error)

    def _input(self, plan: StepPlan) -> tuple[_Part, float]:
        """What this stage can compute of the step, and the seconds that this rank has waited for it."""
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
        shape = (received.num_rows, self.config.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        if present:
            self._groups.receive_hidden(hidden)
        waited_s = self._clock.now() - began_at
        received = _Part(plan, present, hidden)
        return received.only(self._containment.intact(plan, present)), waited_s

    def _compute_in_parts(self, plan: StepPlan, whole: _Part) -> tuple[list[_Part], list[SampledToken]]:
        """The hidden states after this stage's layers, and the tokens that this rank sampled: at once, or in
        parts where an attempt fails on any rank of the stage."""
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
        """Compute these entries and sample for them; None when that failed here or at another rank."""
        slots = [slot for entry in part.entries for slot in entry.sample_slots]
        num_asked = sum(bool(entry.sample_slots) for entry in part.entries)
        self._unfinished.begin(part.num_rows, num_asked)
        self._step_faults.begin(part.entries)
        computed = self._containment.attempt(lambda: self._compute(part))
        if computed is None:
            self._unfinished.finish(self.kv)
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
        """Hidden states [T, C] after this stage's layers and, on the last stage, logits [R, V]."""
        batch = self._batch(part.entries)
        if self._groups.is_first_stage:
            self._step_faults.at("embedding")
            hidden = self._decoder.embed(part.rows.to(self._device, non_blocking=True))
            self.progress.mark_layer()
        else:
            hidden = part.rows.clone()  # the layers overwrite it, and it may be needed again
        hidden = self._decoder.run_layers(hidden, batch, self.kv)
        if not self._groups.is_last_stage:
            return hidden, None
        self._step_faults.at("head")
        logits = self._logits(part.entries, hidden)
        self.progress.mark_layer()
        return hidden, logits

    def _logits(self, entries: Sequence[BatchEntry], hidden: Tensor) -> Tensor:
        """[R, V] at the sampler; [0, V] at the ranks that only compute a part of it."""
        ends = np.cumsum([entry.num_tokens for entry in entries]) - 1
        rows = [row for row, entry in enumerate(entries) if entry.sample_slots]
        if not rows:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if len(rows) == len(hidden):  # all are single tokens
            return self._decoder.logits(hidden)
        return self._decoder.logits(hidden[self._upload(ends[rows])])

    def _sample(
        self, entries: Sequence[BatchEntry], slots: Sequence[int], logits: Tensor
    ) -> list[SampledToken]:
        """One token for each slot, at the sampler; nothing at the other ranks of its stage."""
        if self._sampler is None:
            return []
        self._step_faults.at("sampling")
        for slot in slots:
            if slot in self._slot_to_refusal:
                raise WorkerError(f"its sampling cannot be done: {self._slot_to_refusal[slot]}")
        if len(slots) > len(logits):  # several samples fork from one prompt
            num_samples = [len(entry.sample_slots) for entry in entries if entry.sample_slots]
            logits = logits[self._upload(np.repeat(np.arange(len(logits)), num_samples))]
        return self._sampler.sample(logits, slots)

    def _hand_out(self, plan: StepPlan, sampled: list[SampledToken]) -> None:
        """Pass the tokens to the first stage: of every slot that should have sampled, 0 where it failed."""
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
        """To the next stage: which entries were computed, and their hidden states in the plan's order."""
        marks = np.zeros(len(plan.entries), dtype=np.uint8)
        marks[[index for part in done for index in part.indices]] = 1
        self._groups.send_marks(marks)
        if done:
            rows = [part.rows for part in done]
            self._groups.send_hidden(rows[0] if len(rows) == 1 else torch.cat(rows))

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if self.host is not None and not (copies := self.host.copy(copies)):
            return
        src = self._upload(np.array([copy.src_block for copy in copies]))
        dst = self._upload(np.array([copy.dst_block for copy in copies]))
        self.kv[dst] = self.kv[src]

    def _allocate_host(self, num_blocks: int) -> HostKv | None:
        if not num_blocks:
            return None
        shard = self._decoder.shard
        windows = self.config.sliding_windows[shard.layer_start : shard.layer_end]
        host = HostKv(self.kv, num_blocks, windows)
        if self._offload_mode != "auto":
            host.use(self._offload_mode)
        return host

    @torch.inference_mode()
    def _choose_offload_mode(self, host: HostKv) -> None:
        """Take the way in which a decode step over a long context in host memory is faster. Ranks of a stage
        measure together, and may choose differently."""
        num_blocks = min(len(host.kv), -(-_MEASURED_HOST_TOKENS // self._block_tokens))
        host.kv[:num_blocks].zero_()  # memory that was never written is not read from memory
        table = (*range(host.first_id, host.first_id + num_blocks), 0)
        entry = BatchEntry(-1, num_blocks * self._block_tokens, 1, b"", table, ())
        mode_to_s: dict[OffloadMode, float] = {}
        for mode in MODES:
            host.use(mode)
            times = []
            for _ in range(_NUM_MEASURED_STEPS):
                started_at = self._clock.now()
                hidden = torch.zeros((1, self.config.hidden_size), dtype=self._dtype, device=self._device)
                self._unfinished.begin(1, 0)
                self._decoder.run_layers(hidden, self._batch([entry]), self.kv)
                self._synchronize()
                times.append(self._clock.now() - started_at)
            mode_to_s[mode] = min(times)
        host.use(min(reversed(MODES), key=mode_to_s.__getitem__))
        taken = ", ".join(f"{mode} {time_s * 1e3:.1f} ms" for mode, time_s in mode_to_s.items())
        _log.info("blocks in host memory are read %s; a step takes: %s", host.mode, taken)

    def _touch_device(self) -> None:
        assert float(torch.ones((), device=self._device) + 1) == 2.0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _upload(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _layout(config: ModelConfig, shard: ShardSpec, block_tokens: int, dtype: torch.dtype) -> BlockLayout:
    heads = kv_heads(config.num_kv_heads, shard.tp_rank, shard.tp_size)
    held = Shard(shard.layer_start, shard.layer_end, heads.start, heads.stop)
    return BlockLayout(held, config.head_dim, block_tokens, dtype.itemsize)


def _allocate(
    layout: BlockLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, KvPool]:
    """Zeroed blocks, as the model sees them and as the transports do."""
    shard = layout.shard
    num_layers, num_heads = shard.layer_end - shard.layer_start, shard.head_end - shard.head_start
    shape = (num_blocks, num_layers, 2, num_heads, layout.block_tokens, layout.head_dim)
    if device.type == "cpu":
        memory = KvMemory.allocate(num_blocks * layout.block_bytes)
        memory.populate()
        return torch.frombuffer(memory.buffer, dtype=dtype).view(shape), HostPool(layout, memory)
    kv = torch.zeros(shape, dtype=dtype, device=device)
    return kv, DevicePool(layout, kv.view(num_blocks, -1).view(torch.uint8))
