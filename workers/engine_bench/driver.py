"""Our engine in the engine benchmark: the model runner of one rank, driven with hand-made plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtransfer.common.clock import Clock
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model.attention.quantized_kv import is_quantized
from workers.model.scaled_heads import ScaledHeads
from workers.rank.model_runner import ModelRunner
from workers.rank.tickets import MOST_LAUNCHED, Ticket

CHUNK_TOKENS = 512


class EngineDriver:
    """Drives a model runner with random prompts that never repeat. A plan's slots are 0, 1, ..."""

    def __init__(self, runner: ModelRunner, clock: Clock, block_tokens: int) -> None:
        self.runner = runner
        self._clock = clock
        self._block_tokens = block_tokens
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, num_tokens: int) -> bytes:
        """Draw random token ids as uint32 bytes."""
        ids = torch.randint(0, self.runner.config.vocab_size, (num_tokens,), generator=self._generator)
        return bytes(ids.numpy().astype("<u4").tobytes())

    def prefill_s(self, num_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> float:
        """Return the seconds for one prompt, in chunks, up to its first token."""
        prompt = self.draw(num_tokens)
        begins = range(0, num_tokens, chunk_tokens)
        entries = [_entry(0, begin, prompt, min(begin + chunk_tokens, num_tokens)) for begin in begins]
        with self.started([prompt[-4:]], num_tokens):
            started_at = self._clock.now()
            for entry in entries:
                self._run(entries=(entry,))
            return self._clock.now() - started_at

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps of `batch` sequences that have `context_tokens` tokens.

        The KV before the first step is what `fill_kv` wrote: what it holds does not change the work.
        """
        plan = StepPlan(0, decodes=np.arange(batch, dtype="<u4").tobytes())
        return self._steps_s([self.draw(1) for _ in range(batch)], context_tokens, plan, num_steps)

    def mixed_s(self, num_decodes: int, context_tokens: int, chunk_tokens: int, num_steps: int) -> float:
        """Return the seconds of as many steps, as `decode_s` does, in each of which one more slot computes
        the first `chunk_tokens` of a prompt, always the same."""
        tokens = [self.draw(1) for _ in range(num_decodes + 1)]
        chunk = BatchEntry(num_decodes, 0, chunk_tokens, self.draw(chunk_tokens), ())
        decodes = np.arange(num_decodes, dtype="<u4").tobytes()
        plan = StepPlan(0, entries=(chunk,), decodes=decodes)
        return self._steps_s(tokens, max(context_tokens, chunk_tokens), plan, num_steps)

    def chunk_s(self, num_before: int, num_tokens: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps, each of which computes the same chunk of one sequence
        behind `num_before` tokens and samples; their KV is as in `decode_s`."""
        tokens = self.draw(num_tokens)
        entry = BatchEntry(0, num_before, num_tokens, tokens, (0,))
        with self.started([tokens[-4:]], num_before + num_tokens + 1):
            self._run(entries=(entry,))
            started_at = self._clock.now()
            for _ in range(num_steps):
                self._run(entries=(entry,))
            return self._clock.now() - started_at

    def host_s(self, batch: int, context_tokens: int, num_steps: int, wait: Callable[[], object]) -> float:
        """Return what a step of `decode_s` costs the process of the rank, without the time in which it waits
        for the device, in seconds: the least of `num_steps`. `wait` returns when the device has done all that
        is queued."""
        tokens = [self.draw(1) for _ in range(batch)]
        plan = StepPlan(0, decodes=np.arange(batch, dtype="<u4").tobytes())
        first = context_tokens - 1
        entries = [BatchEntry(slot, first, 1, token, (slot,)) for slot, token in enumerate(tokens)]
        least_s = float("inf")
        with self.started(tokens, context_tokens + num_steps + 1):
            self._run(entries=tuple(entries))
            for _ in range(num_steps):
                began_at = self._clock.now()
                ticket = self.runner.steps.launch(plan)
                launched_at = self._clock.now()
                wait()
                waited_at = self._clock.now()
                self.runner.steps.collect(ticket)
                least_s = min(least_s, launched_at - began_at + self._clock.now() - waited_at)
        return least_s

    def _steps_s(self, tokens: Sequence[bytes], context_tokens: int, plan: StepPlan, num_steps: int) -> float:
        """Return the seconds of `num_steps` of a plan, whose slots decode first, each after one token."""
        first = context_tokens - 1
        entries = [BatchEntry(slot, first, 1, token, (slot,)) for slot, token in enumerate(tokens)]
        most = MOST_LAUNCHED if self.runner.steps.runs_ahead else 1
        under_way: deque[Ticket] = deque()
        with self.started(tokens, context_tokens + num_steps + 1):
            self._run(entries=tuple(entries))
            started_at = self._clock.now()
            for _ in range(num_steps):
                under_way.append(self.runner.steps.launch(plan))
                if len(under_way) == most:
                    self.runner.steps.collect(under_way.popleft())
            for ticket in under_way:
                self.runner.steps.collect(ticket)
            return self._clock.now() - started_at

    def logits(self, tokens: bytes, ends: Sequence[int]) -> Tensor:
        """Return float32 [len(ends), vocab_size]: the logits of the last position of each chunk of one
        prompt. Chunks end before `ends`."""
        begins = [0, *ends[:-1]]
        entries = [_entry(0, begin, tokens, end, True) for begin, end in zip(begins, ends, strict=True)]
        with self.started([tokens[-4:]], len(tokens) // 4):
            return torch.cat([self.runner.steps.logits(StepPlan(0, entries=(entry,))) for entry in entries])

    def fill_kv(self) -> None:
        """Fill the KV pool with random numbers, so that sequences may begin in their middle."""
        kv, cells = self.runner.kv, self.runner.config.kv_cells
        drawn = torch.randn((*kv.shape[1:5], cells.width), generator=self._generator).to(kv.device)
        if not is_quantized(kv):
            kv.copy_(drawn.to(kv.dtype).expand_as(kv))
            return
        block = kv.new_empty(kv.shape[1:])
        ScaledHeads(cells.parts, kv.dtype, drawn.dtype, kv.shape[4]).quantize(drawn, block)
        kv.copy_(block.expand_as(kv))

    @contextmanager
    def started(self, last_tokens: Sequence[bytes], num_total: int) -> Iterator[None]:
        """Hold sequences in the block that may grow to `num_total` tokens each, in blocks one after another.
        They sample greedily after their `last_tokens`, of 4 bytes each."""
        num_blocks = -(-num_total // self._block_tokens)
        blocks = np.arange(len(last_tokens) * num_blocks, dtype="<u4").reshape(-1, num_blocks)
        samples = [
            SlotSample(slot, 0, int.from_bytes(token, "little")) for slot, token in enumerate(last_tokens)
        ]
        self._run(
            starts=tuple(SlotStart(SamplingParams(), (sample,)) for sample in samples),
            tables=(
                *(TableChange(slot, 0, table.tobytes()) for slot, table in enumerate(blocks)),
                *self._state_tables(len(blocks), num_blocks),
            ),
        )
        yield
        self._run(free_slots=tuple(range(len(last_tokens))))

    def _state_tables(self, num_slots: int, num_blocks: int) -> list[TableChange]:
        """Return the tables of layers that keep a state, if there are such: a sequence stays in one block."""
        if self.runner.config.state is None:
            return []
        tables = (np.full(num_blocks, slot, "<u4").tobytes() for slot in range(num_slots))
        return [TableChange(slot, 0, table, 1) for slot, table in enumerate(tables)]

    def _run(self, **changes: Any) -> None:
        """Run a plan with these fields."""
        self.runner.steps.run(StepPlan(0, **changes))


def _entry(slot: int, begin: int, tokens: bytes, end: int, samples: bool = False) -> BatchEntry:
    """Make the entry of the tokens [begin, end) of a prompt, which samples at its end, or if `samples`."""
    is_last = samples or end == len(tokens) // 4
    return BatchEntry(slot, begin, end - begin, tokens[4 * begin : 4 * end], (slot,) if is_last else ())
