"""Sampling whose tokens stay on the device."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import SlotStart
from workers.messages.sampling import TokenLogprob
from workers.model.noise import seed_keys
from workers.rank.device_queue import DeviceQueue
from workers.rank.logits import SlotNeeds, Slots, SlotTable, distinct_tokens
from workers.rank.sampler import Logprobs, Sampler

RowLogprobs = Callable[[], dict[int, TokenLogprob]]


class Drawn(NamedTuple):
    """A token for each row, int32 [num_rows] on the device, and what returns the log-probabilities that were
    asked for, by row, when the step is done."""

    tokens: Tensor
    logprobs: RowLogprobs


class DeviceSampler(ABC):
    """Draws tokens for the slots of a rank, like `workers.rank.sampler.Sampler`."""

    # Whether nothing of a draw is left to the host, so that a CUDA graph can capture it.
    can_capture: bool

    @abstractmethod
    def start(self, start: SlotStart) -> None:
        """Add slots. A call that fails adds none."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Forget a slot."""

    @abstractmethod
    def lift_minimum(self, slot: int) -> None:
        """Let the slot end before it has its minimum of tokens. Its start is on the device by then."""

    @abstractmethod
    def changes(self) -> tuple[NDArray[np.int32], ...]:
        """Return what the device must be given of the slots that were started since the last call."""

    @abstractmethod
    def change(self, changes: Sequence[Tensor]) -> None:
        """Take `changes`, which are on the device now."""

    @abstractmethod
    def draw(
        self, logits: Tensor, slots: Slots, device_slots: Tensor, masks: NDArray[np.uint32] | None
    ) -> Drawn:
        """Draw one token for each slot from float32 `logits` [num_slots, vocab_size], which may be
        overwritten. `device_slots` are the same `slots` on the device; `masks` as for `Sampler.sample`. A
        call that fails has changed nothing."""

    @abstractmethod
    def draw_captured(self, logits: Tensor, device_slots: Tensor) -> Tensor:
        """Draw like `draw`, with nothing at the host that changes from call to call, and without changing the
        logits. A row of slot -1 is left out. Returns int32 [num_slots]."""

    @abstractmethod
    def logprobs(self, logits: Tensor, slots: Slots, tokens: Tensor) -> RowLogprobs:
        """Begin to compute the log-probabilities that go with `tokens` [num_slots] of a captured draw, whose
        `logits` [num_slots, vocab_size] may be those of some of its rows. Returns what `Drawn.logprobs`
        is."""


class SamplerByHost(DeviceSampler):
    """Draws with torch, and waits for the device: where there are no kernels that sample."""

    can_capture = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def start(self, start: SlotStart) -> None:
        self._sampler.start(start)

    def free(self, slot: int) -> None:
        self._sampler.free(slot)

    def lift_minimum(self, slot: int) -> None:
        self._sampler.lift_minimum(slot)

    def changes(self) -> tuple[NDArray[np.int32], ...]:
        return ()

    def change(self, changes: Sequence[Tensor]) -> None:
        assert not changes

    def draw(
        self, logits: Tensor, slots: Slots, device_slots: Tensor, masks: NDArray[np.uint32] | None
    ) -> Drawn:
        tokens = logits.new_empty(len(slots), dtype=torch.int32)  # before the tokens are counted
        sampled = self._sampler.sample(logits, slots, masks)
        tokens.copy_(torch.from_numpy(sampled.tokens.view(np.int32)))
        return Drawn(tokens, lambda: sampled.row_to_logprob)

    def draw_captured(self, logits: Tensor, device_slots: Tensor) -> Tensor:
        raise NotImplementedError("torch reads the slots' parameters at the host")

    def logprobs(self, logits: Tensor, slots: Slots, tokens: Tensor) -> RowLogprobs:
        raise NotImplementedError("they come with the draw")


class KernelSampler(DeviceSampler):
    """Draws with the kernels of `workers.model.cuda.sampling`, from parameters on the device."""

    can_capture = True

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], queue: DeviceQueue, max_slots: int
    ) -> None:
        from workers.model.cuda import sampling  # only here: elsewhere there may be no Triton

        self._vocab_size = vocab_size
        self._queue = queue
        self._table = SlotTable(max_slots, vocab_size, eos_token_ids)
        self._device_slots = sampling.DeviceSlots(max_slots, vocab_size, queue.device)
        self._sample, self._words = sampling.sample, sampling.record_words
        self._started: list[int] = []

    def start(self, start: SlotStart) -> None:
        params, samples = start.sampling, start.samples
        prompt_ids = distinct_tokens(start.prompt if params.penalizes_prompt else b"", self._vocab_size)
        self._table.start(samples, params, seed_keys([sample.seed for sample in samples]), prompt_ids)
        slots = [sample.slot for sample in samples]
        with contextlib.ExitStack() as if_it_fails:
            for slot in slots:
                if_it_fails.callback(self._table.free, slot)
            for slot in slots:
                if self._table.needs(np.array([slot]))[0] & _LISTED:
                    self._device_slots.start_tokens(slot, *self._table.tokens(slot))
            if_it_fails.pop_all()
        self._started += slots

    def free(self, slot: int) -> None:
        self._table.free(slot)

    def lift_minimum(self, slot: int) -> None:
        self._table.lift_minimum(slot)
        self._device_slots.lift_minimum(slot)

    def changes(self) -> tuple[NDArray[np.int32], ...]:
        if not self._started:
            return ()
        slots = np.array(self._started, np.int32)
        self._started = []
        return slots, self._words(self._table.records[slots]).reshape(-1)

    def change(self, changes: Sequence[Tensor]) -> None:
        if changes:
            slots, words = changes
            self._device_slots.start(slots, words.view(len(slots), -1))

    def draw(
        self, logits: Tensor, slots: Slots, device_slots: Tensor, masks: NDArray[np.uint32] | None
    ) -> Drawn:
        device_masks: Tensor | None = None
        if masks is not None:
            (flat,) = self._queue.upload([masks.view(np.int32).reshape(-1)])
            device_masks = flat.view(masks.shape)
        asked = self._asked(logits, slots)  # whatever can fail, before the kernel counts what it draws
        tokens = self._sample(logits, self._device_slots, device_slots, device_masks)
        return Drawn(tokens, dict if asked is None else asked.of(tokens))

    def draw_captured(self, logits: Tensor, device_slots: Tensor) -> Tensor:
        return self._sample(logits, self._device_slots, device_slots)

    def logprobs(self, logits: Tensor, slots: Slots, tokens: Tensor) -> RowLogprobs:
        asked = self._asked(logits, slots)
        return dict if asked is None else asked.of(tokens)

    def _asked(self, logits: Tensor, slots: Slots) -> _AskedLogprobs | None:
        """Compute what slots ask for of `logits`; None if none asks."""
        needs = self._table.needs(slots)
        rows = np.flatnonzero(needs & SlotNeeds.LOGPROBS).astype(np.int32)
        if not len(rows):
            return None
        return _AskedLogprobs(self._queue, logits, rows, self._table.num_logprobs[slots[rows]])


class _AskedLogprobs:
    """Log-probabilities of some `rows` of logits, with the memory for all that is left to do."""

    def __init__(
        self, queue: DeviceQueue, logits: Tensor, rows: NDArray[np.int32], num_top: NDArray[np.int32]
    ) -> None:
        self._queue = queue
        (self._device_rows,) = queue.upload([rows])
        self._logprobs = Logprobs(logits[self._device_rows], rows, num_top)
        self._tokens = torch.empty_like(self._device_rows)
        self._ids = torch.empty_like(self._device_rows, dtype=torch.int64)
        self._host = queue.host_memory(self._logprobs.table)

    def of(self, tokens: Tensor) -> RowLogprobs:
        """Begin to copy out those of `tokens` int32 [num_rows], of all rows of the logits."""
        torch.index_select(tokens, 0, self._device_rows, out=self._tokens)
        self._logprobs.fill(self._ids.copy_(self._tokens))
        table = self._queue.copy_out(self._logprobs.table, self._host)
        return lambda: self._logprobs.read(table.host)


# The features of a slot of which lists are kept.
_LISTED = SlotNeeds.BIAS | SlotNeeds.ENDS | SlotNeeds.PENALTIES


def make_device_sampler(
    vocab_size: int, eos_token_ids: Sequence[int], queue: DeviceQueue, max_slots: int
) -> DeviceSampler:
    """Return what samples on a device."""
    if queue.has_triton:
        return KernelSampler(vocab_size, eos_token_ids, queue, max_slots)
    return SamplerByHost(Sampler(vocab_size, eos_token_ids, queue.device, max_slots))
