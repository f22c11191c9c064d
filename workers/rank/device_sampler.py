"""Sampling whose tokens stay on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import SlotStart
from workers.messages.sampling import TokenLogprob
from workers.rank.logits import Slots
from workers.rank.sampler import Sampler


class Drawn(NamedTuple):
    """A token for each row, int32 [num_rows] on the device, and what returns the log-probabilities that were
    asked for, by row, when the step is done."""

    tokens: Tensor
    logprobs: Callable[[], dict[int, TokenLogprob]]


class DeviceSampler(ABC):
    """Draws tokens for the slots of a rank, like `workers.rank.sampler.Sampler`."""

    # Whether `draw_captured` may be called, so that a CUDA graph can capture it.
    can_capture: bool

    @abstractmethod
    def start(self, start: SlotStart) -> None:
        """Add slots. A call that fails adds none."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Forget a slot."""

    @abstractmethod
    def draw(
        self, logits: Tensor, slots: Slots, slots_there: Tensor, masks: NDArray[np.uint32] | None
    ) -> Drawn:
        """Draw one token for each slot from float32 `logits` [num_slots, vocab_size], which may be
        overwritten. `slots_there` are the same `slots` on the device."""

    @abstractmethod
    def draw_captured(self, logits: Tensor, slots_there: Tensor) -> Tensor:
        """Draw as `draw` does without masks, with nothing at the host that changes from call to call, and
        without changing the logits. Returns int32 [num_slots]."""

    @abstractmethod
    def logprobs(self, logits: Tensor, slots: Slots, tokens: Tensor) -> Callable[[], dict[int, TokenLogprob]]:
        """Begin to compute the log-probabilities that go with `tokens` [num_slots], of the first rows of
        `logits`. Returns what `Drawn.logprobs` is."""


class SamplerByHost(DeviceSampler):
    """Draws with torch, and waits for the device: where there is no kernel that samples."""

    can_capture = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def start(self, start: SlotStart) -> None:
        self._sampler.start(start)

    def free(self, slot: int) -> None:
        self._sampler.free(slot)

    def draw(
        self, logits: Tensor, slots: Slots, slots_there: Tensor, masks: NDArray[np.uint32] | None
    ) -> Drawn:
        sampled = self._sampler.sample(logits, slots, masks)
        tokens = torch.from_numpy(sampled.tokens.view(np.int32)).to(logits.device, non_blocking=True)
        return Drawn(tokens, lambda: sampled.row_to_logprob)

    def draw_captured(self, logits: Tensor, slots_there: Tensor) -> Tensor:
        raise NotImplementedError("torch reads the slots' parameters at the host")

    def logprobs(self, logits: Tensor, slots: Slots, tokens: Tensor) -> Callable[[], dict[int, TokenLogprob]]:
        raise NotImplementedError("they come with the draw")
