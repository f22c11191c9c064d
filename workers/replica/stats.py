"""What a replica's steps came to, in totals: batches, tokens, hits, arithmetic. Told by the step loop."""

from __future__ import annotations

import bisect
from collections import Counter
from typing import NamedTuple

from kvtransfer.common.moving_average import moving_average
from workers.messages import DeviceMemory, StepPlan
from workers.model.sizes import ModelWork
from workers.scheduler.step import StepOutcome

# Sequences of a step: the upper bounds of `num_steps_by_batch`, whose last entry counts larger ones.
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Of the newest step in the moving averages.
_WEIGHT = 0.05


class Capability(NamedTuple):
    """The model's work, and what all ranks of the replica together were measured to be able to do."""

    work: ModelWork
    flop_s: float
    byte_s: float


class StepStats:
    """All totals since the start. Without a capability, arithmetic and bytes are not counted."""

    def __init__(self, capability: Capability | None = None) -> None:
        self._capability = capability
        self._average_flop_s = 0.0
        self._average_byte_s = 0.0
        self.num_steps_by_batch = [0] * (len(BATCH_BOUNDS) + 1)
        self.num_batched_sequences = 0
        # Prompt tokens and inputs of decode steps.
        self.num_computed_tokens = 0
        self.num_sampled_tokens = 0
        # Of prompts that are done: what could have been cached.
        self.num_queried_tokens = 0
        # Of those: what was, by the tier it came from.
        self.num_hit_tokens: Counter[str] = Counter()
        self.num_flops = 0.0
        self.num_read_bytes = 0.0
        # Time in which a stage computed, the mean over the stages.
        self.busy_s = 0.0
        self.rank_to_memory: dict[int, DeviceMemory] = {}

    def add(self, plan: StepPlan, stage_to_busy_s: list[float]) -> None:
        """A step is done; `stage_to_busy_s` is what each stage's slowest rank took."""
        num_sequences = len(plan.entries)
        self.num_steps_by_batch[bisect.bisect_left(BATCH_BOUNDS, num_sequences)] += 1
        self.num_batched_sequences += num_sequences
        self.num_computed_tokens += sum(entry.num_tokens for entry in plan.entries)
        busy_s = sum(stage_to_busy_s) / len(stage_to_busy_s)
        self.busy_s += busy_s
        if self._capability is None or busy_s <= 0:
            return
        num_sampled = sum(len(entry.sample_slots) for entry in plan.entries)
        spans = ((entry.start, entry.num_tokens) for entry in plan.entries)
        work = self._capability.work.of(spans, num_sampled)
        self.num_flops += work.flops
        self.num_read_bytes += work.read_bytes
        self._average_flop_s = moving_average(self._average_flop_s, work.flops / busy_s, _WEIGHT)
        self._average_byte_s = moving_average(self._average_byte_s, work.read_bytes / busy_s, _WEIGHT)

    def settled(self, outcome: StepOutcome) -> None:
        """What the scheduler made of it."""
        self.num_sampled_tokens += len(outcome.tokens)
        for prompt in outcome.prompts:
            self.num_queried_tokens += prompt.num_computed_tokens
            num_loaded = min(sum(prompt.num_loaded_tokens.values()), prompt.num_cached_tokens)
            self.num_hit_tokens["device"] += prompt.num_cached_tokens - num_loaded
            self.num_hit_tokens.update(prompt.num_loaded_tokens)

    @property
    def peak_flop_s(self) -> float:
        """0: not measured."""
        return self._capability.flop_s if self._capability else 0.0

    @property
    def peak_byte_s(self) -> float:
        """0: not measured."""
        return self._capability.byte_s if self._capability else 0.0

    @property
    def mfu(self) -> float:
        """Share of the measured arithmetic that recent steps achieved while they ran; 0: not known."""
        return self._average_flop_s / self.peak_flop_s if self.peak_flop_s else 0.0

    @property
    def mbu(self) -> float:
        """The same of the measured memory bandwidth."""
        return self._average_byte_s / self.peak_byte_s if self.peak_byte_s else 0.0
