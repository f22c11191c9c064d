"""Accumulate the steps of a replica: batches, tokens, cache hits, arithmetic."""

from __future__ import annotations

import bisect
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtransfer.common.moving_average import moving_average
from workers.messages.rank_channel import StepPlan
from workers.model.sizes import ModelWork
from workers.replica.expert_load import ExpertLoad
from workers.scheduler.step import StepOutcome
from workers.stats_record import BATCH_BOUNDS, DeviceMemory, ReplicaStats

# The weight of the newest step in the moving averages.
_WEIGHT = 0.05


class Capability(NamedTuple):
    """The model's work, and the measured capability of all ranks of the replica together."""

    work: ModelWork
    flop_s: float
    byte_s: float


@dataclass(slots=True)
class StepStats:
    """Counts totals since the start, by the names of `ReplicaStats`. Without a capability, arithmetic and
    bytes are not counted."""

    capability: Capability | None = None
    experts: ExpertLoad = field(default_factory=ExpertLoad)
    # Moving averages of one step's figures, for their quotients (see `StepRates`).
    _average_flops: float = 0.0
    _average_bytes: float = 0.0
    _average_busy_s: float = 0.0
    num_steps_by_batch: list[int] = field(default_factory=lambda: [0] * (len(BATCH_BOUNDS) + 1))
    num_batched_sequences: int = 0
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: Counter[str] = field(default_factory=Counter)
    num_flops: float = 0.0
    num_read_bytes: float = 0.0
    busy_s: float = 0.0
    rank_to_memory: dict[int, DeviceMemory] = field(default_factory=dict)

    def add(self, plan: StepPlan, decode_starts: Collection[int], stage_to_busy_s: Sequence[float]) -> None:
        """Count a step that is done: its decodes computed the tokens at `decode_starts`, and each stage's
        slowest rank took `stage_to_busy_s`."""
        num_sequences = plan.num_sequences
        self.num_steps_by_batch[bisect.bisect_left(BATCH_BOUNDS, num_sequences)] += 1
        self.num_batched_sequences += num_sequences
        self.num_computed_tokens += plan.num_tokens
        busy_s = sum(stage_to_busy_s) / len(stage_to_busy_s)
        self.busy_s += busy_s
        if self.capability is None or busy_s <= 0:
            return
        num_sampled = sum(len(entry.sample_slots) for entry in plan.entries) + len(decode_starts)
        num_sampled += plan.num_targets
        spans = [(entry.start, entry.num_tokens) for entry in plan.entries]
        work = self.capability.work.of(spans, num_sampled, decode_starts)
        self.num_flops += work.flops
        self.num_read_bytes += work.read_bytes
        self._average_flops = moving_average(self._average_flops, work.flops, _WEIGHT)
        self._average_bytes = moving_average(self._average_bytes, work.read_bytes, _WEIGHT)
        self._average_busy_s = moving_average(self._average_busy_s, busy_s, _WEIGHT)

    def pass_over(self, step_s: Sequence[float], num_decodes: int) -> None:
        """Count steps of so many decodes alone, of which each took so long, without their arithmetic."""
        num_steps = len(step_s)
        self.num_steps_by_batch[bisect.bisect_left(BATCH_BOUNDS, num_decodes)] += num_steps
        self.num_batched_sequences += num_steps * num_decodes
        self.num_computed_tokens += num_steps * num_decodes
        self.num_sampled_tokens += num_steps * num_decodes
        for each_s in step_s:
            self.busy_s += each_s

    def settled(self, outcome: StepOutcome) -> None:
        """Count the scheduler's outcome of a step."""
        self.num_sampled_tokens += len(outcome.tokens)
        for prompt in outcome.prompts:
            self.num_queried_tokens += prompt.num_computed_tokens
            num_loaded = min(sum(prompt.num_loaded_tokens.values()), prompt.num_cached_tokens)
            self.num_hit_tokens["device"] += prompt.num_cached_tokens - num_loaded
            self.num_hit_tokens.update(prompt.num_loaded_tokens)

    def totals(self) -> dict[str, Any]:
        """Return the fields of `ReplicaStats` that are kept here."""
        totals: dict[str, Any] = dict(zip(_NAMES, _values_of(self), strict=True))
        totals["num_steps_by_batch"] = tuple(self.num_steps_by_batch)
        totals["num_hit_tokens"] = dict(self.num_hit_tokens)
        totals.update(self.experts.statistics())
        return totals

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """The devices' memory by rank."""
        return tuple(self.rank_to_memory[rank] for rank in sorted(self.rank_to_memory))

    @property
    def peak_flop_s(self) -> float:
        """The measured peak of arithmetic; 0: not measured."""
        return self.capability.flop_s if self.capability else 0.0

    @property
    def peak_byte_s(self) -> float:
        """The measured peak of memory bandwidth; 0: not measured."""
        return self.capability.byte_s if self.capability else 0.0

    @property
    def mfu(self) -> float:
        """The share of the measured arithmetic that recent steps achieved while they ran; 0: not known."""
        return self._share(self._average_flops, self.peak_flop_s)

    @property
    def mbu(self) -> float:
        """The share of the measured memory bandwidth that they achieved; 0: not known."""
        return self._share(self._average_bytes, self.peak_byte_s)

    def _share(self, average: float, peak_per_s: float) -> float:
        return average / self._average_busy_s / peak_per_s if self._average_busy_s and peak_per_s else 0.0


_NAMES = tuple(name for name in ReplicaStats.__struct_fields__ if hasattr(StepStats, name))
_values_of = operator.attrgetter(*_NAMES)
