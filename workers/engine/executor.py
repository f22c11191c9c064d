"""The hands of a replica: executes step plans on one device. Model, KV pool, sampling; no decisions.

Called by a rank process with the brain's plans, and directly by the engine benchmark. Letters: T tokens of a
step (all sequences one after another), R rows that sample, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.clock import Clock
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import KvMemory
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, Shard
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
from workers.model.attention import AttentionBatch, SequenceSpan
from workers.model.config import model_fingerprint
from workers.model.decoder import load_decoder

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_WARM_UP_TOKENS = 48


@dataclass(frozen=True, slots=True)
class ReadyFields:
    """What the brain must know of a loaded executor."""

    num_blocks: int
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


class Executor:
    """Loads the model and its KV pool, then turns each `StepPlan` into a `StepReport`.

    `memory` is the pool's host memory, which other processes may be given; None when the pool is in device
    memory. `kv` is `[num_blocks, layers, 2, kv_heads, block_tokens, head_dim]`. Raises `CheckpointError` for
    a folder that cannot be served and `CapacityError` for a pool without room.
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
    ) -> None:
        torch.set_num_threads(num_threads)
        self._clock = clock
        self._device = device
        self._block_tokens = block_tokens
        self._decoder = load_decoder(model_dir, dtype, device)
        self.config = config = self._decoder.config
        shard = Shard(0, config.num_layers, 0, config.num_kv_heads)
        self.layout = BlockLayout(shard, config.head_dim, block_tokens, dtype.itemsize)
        num_blocks = num_kv_tokens // block_tokens
        if num_blocks < 1:
            raise CapacityError(f"kv_tokens {num_kv_tokens} is less than one block of {block_tokens} tokens")
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_tokens, config.head_dim)
        self.memory: KvMemory | None = None
        if device.type == "cpu":
            self.memory = KvMemory.allocate(num_blocks * self.layout.block_bytes)
            self.kv = torch.frombuffer(self.memory.buffer, dtype=dtype).view(shape)
        else:
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self._sampler = Sampler(config.vocab_size, config.eos_token_ids, device)
        self._slot_to_last_token: dict[int, int] = {}
        self.ready_fields = ReadyFields(
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            max_context_tokens=min(config.max_context_tokens, num_blocks * block_tokens),
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
        """Execute one step. An empty plan touches the device and reports: the health canary."""
        started_at = self._clock.now()
        for slot in plan.free_slots:
            assert slot in self._slot_to_last_token, f"slot {slot} is freed but was never started"
            del self._slot_to_last_token[slot]
            self._sampler.free(slot)
        for start in plan.starts:
            self._sampler.start(start)
            self._slot_to_last_token[start.slot] = int.from_bytes(start.tokens[-4:], "little")
        if plan.copies:
            self._copy_blocks(plan.copies)
        sampled = self._compute(plan.entries) if plan.entries else self._touch_device()
        return StepReport(plan.step, tuple(sampled), started_at, self._clock.now())

    @torch.inference_mode()
    def logits(self, entries: tuple[BatchEntry, ...]) -> Tensor:
        """Compute all entries in one model call; [R, V] float32 at the last position of those that sample."""
        spans = [SequenceSpan(entry.start, entry.num_tokens, entry.block_ids) for entry in entries]
        batch = AttentionBatch.build(spans, self._block_tokens, self._device)
        hidden = self._decoder.forward(self._tokens(entries), batch, self.kv)
        ends = np.cumsum([entry.num_tokens for entry in entries]) - 1
        rows = [row for row, entry in enumerate(entries) if entry.sample_slots]
        if not rows:
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if len(rows) == len(hidden):  # all are single tokens
            return self._decoder.logits(hidden)
        return self._decoder.logits(hidden[self._upload(ends[rows])])

    def warm_up(self) -> None:
        """One small prefill and one decode step, so that the first request does not pay for lazy set-up."""
        fields = self.ready_fields
        num_tokens = max(1, min(_WARM_UP_TOKENS, fields.max_context_tokens - 1, fields.vocab_size))
        tokens = np.arange(num_tokens, dtype="<u4").tobytes()
        blocks = tuple(range(-(-(num_tokens + 1) // self._block_tokens)))[: fields.num_blocks]
        start = SlotStart(-1, tokens, num_tokens, 0, SamplingParams(temperature=1.0))
        prefill = BatchEntry(-1, 0, num_tokens, tokens, blocks, (-1,))
        self.run(StepPlan(0, (), (start,), (), (prefill,)))
        if num_tokens < fields.max_context_tokens:
            decode = BatchEntry(-1, num_tokens, 1, b"", blocks, (-1,))
            self.run(StepPlan(0, (), (), (), (decode,)))
        self.run(StepPlan(0, (-1,), (), (), ()))

    def close(self) -> None:
        """Give up the pool's memory; nothing may be run after this."""
        del self.kv
        if self.memory is not None:
            self.memory.close()

    # ---------------------------------------------------------------------------------------- a step

    def _compute(self, entries: tuple[BatchEntry, ...]) -> list[SampledToken]:
        logits = self.logits(entries)
        slots = [slot for entry in entries for slot in entry.sample_slots]
        if not slots:
            self._synchronize()
            return []
        if len(slots) > len(logits):  # several samples fork from one prompt
            num_samples = [len(entry.sample_slots) for entry in entries if entry.sample_slots]
            logits = logits[self._upload(np.repeat(np.arange(len(logits)), num_samples))]
        sampled = self._sampler.sample(logits, slots)
        for token in sampled:
            self._slot_to_last_token[token.slot] = token.token
        return sampled

    def _tokens(self, entries: tuple[BatchEntry, ...]) -> Tensor:
        """[T] int64: the input tokens; an entry without any continues with its slot's last token."""
        last = self._slot_to_last_token
        parts = []
        for entry in entries:
            assert entry.tokens or entry.slot in last, f"slot {entry.slot} continues but was never started"
            parts.append(entry.tokens or last[entry.slot].to_bytes(4, "little"))
            assert len(parts[-1]) == 4 * entry.num_tokens, f"slot {entry.slot}: {len(entry.tokens)} bytes"
        return self._upload(np.frombuffer(b"".join(parts), dtype="<u4").astype(np.int64))

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        src = self._upload(np.array([copy.src_block for copy in copies]))
        dst = self._upload(np.array([copy.dst_block for copy in copies]))
        self.kv[dst] = self.kv[src]

    def _touch_device(self) -> list[SampledToken]:
        assert float(torch.ones((), device=self._device) + 1) == 2.0
        return []

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _upload(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
