"""Our engine in the engine benchmark: the model runner of one rank, driven with hand-made plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtransfer.common.clock import Clock
from workers.messages import BatchEntry, SamplingParams, SlotSample, SlotStart, StepPlan
from workers.rank.model_runner import ModelRunner

CHUNK_TOKENS = 512


class EngineDriver:
    """Drives a model runner with hand-made plans over random prompts that never repeat."""

    def __init__(self, runner: ModelRunner, clock: Clock, block_tokens: int) -> None:
        self.runner = runner
        self._clock = clock
        self._block_tokens = block_tokens
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, num_tokens: int) -> bytes:
        """Draw random token ids as uint32 bytes."""
        ids = torch.randint(0, self.runner.config.vocab_size, (num_tokens,), generator=self._generator)
        return bytes(ids.numpy().astype("<u4").tobytes())

    def entry(self, slot: int, start: int, tokens: bytes, samples: bool, num_total: int) -> BatchEntry:
        """Make an entry of a sequence that may grow to `num_total` tokens. Sequences lie one after
        another."""
        num_blocks = -(-num_total // self._block_tokens)
        blocks = tuple(range(slot * num_blocks, (slot + 1) * num_blocks))
        return BatchEntry(slot, start, len(tokens) // 4 or 1, tokens, blocks, (slot,) if samples else ())

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds for one prompt, in chunks, up to its first token."""
        prompt = self.draw(num_tokens)
        self._start([prompt[-4:]])
        started_at = self._clock.now()
        for begin in range(0, num_tokens, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, num_tokens)
            is_last = end == num_tokens
            self._run([self.entry(0, begin, prompt[4 * begin : 4 * end], is_last, num_tokens)])
        elapsed_s = self._clock.now() - started_at
        self._run((), frees=(0,))
        return elapsed_s

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps of `batch` sequences that have `context_tokens` tokens.

        The KV before the first step is what `fill_kv` wrote: what it holds does not change the work.
        """
        num_total = context_tokens + num_steps + 1
        last_tokens = [self.draw(1) for _ in range(batch)]
        self._start(last_tokens)
        first = context_tokens - 1
        self._run([self.entry(slot, first, last_tokens[slot], True, num_total) for slot in range(batch)])
        started_at = self._clock.now()
        for position in range(context_tokens, context_tokens + num_steps):
            self._run([self.entry(slot, position, b"", True, num_total) for slot in range(batch)])
        elapsed_s = self._clock.now() - started_at
        self._run((), frees=tuple(range(batch)))
        return elapsed_s

    def fill_kv(self) -> None:
        """Fill the KV pool with random numbers, so that sequences may begin in their middle."""
        kv = self.runner.kv
        kv.copy_(torch.randn(kv.shape[1:], generator=self._generator).to(kv.device, kv.dtype).expand_as(kv))

    def _start(self, last_tokens: Sequence[bytes]) -> None:
        samples = [
            SlotSample(slot, 0, int.from_bytes(token, "little")) for slot, token in enumerate(last_tokens)
        ]
        self._run((), starts=[SlotStart(SamplingParams(), (sample,)) for sample in samples])

    def _run(
        self,
        entries: Sequence[BatchEntry],
        *,
        starts: Sequence[SlotStart] = (),
        frees: tuple[int, ...] = (),
    ) -> None:
        self.runner.run(StepPlan(0, frees, tuple(starts), (), tuple(entries)))
