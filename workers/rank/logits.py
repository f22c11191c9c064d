"""Sampling parameters by slot in preallocated arrays, and what they do to logits before a token is drawn:
bias, penalties, minimum length and mask, then temperature, top-k, top-p and min-p.

The first four read and write only some logits of a row, in place. `Warp.dense` filters whole rows; every
shortcut of the sampler, compiled ones included, must agree with it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import SlotSample
from workers.messages.sampling import SamplingParams

# Most nuclei are smaller: on the CPU the whole vocabulary is sorted only for the rows where this fails.
NUCLEUS_TOKENS = 256
_MOST_INT32 = (1 << 31) - 1

Slots = NDArray[np.int32]


class SlotNeeds(enum.IntFlag):
    """The features of a slot, apart from its temperature and filters."""

    NOTHING = 0
    IN_USE = 1
    BIAS = 2
    PENALTIES = 4
    ENDS = 8
    LOGPROBS = 16


# A slot's parameters as the kernels read them (`workers/model/native/sampling.h`); addresses point into the
# arrays of its `SlotTokens`. A temperature of 0 is greedy, a top_k of 0 is off.
SLOT = np.dtype(
    [
        ("key", np.int64),
        ("bias_ids", np.uint64),
        ("bias_values", np.uint64),
        ("end_ids", np.uint64),
        ("token_ids", np.uint64),
        ("counts", np.uint64),
        ("num_bias", np.int32),
        ("num_ends", np.int32),
        ("num_tokens", np.int32),
        ("token_capacity", np.int32),
        ("num_output", np.int32),
        ("min_tokens", np.int32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("log_min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("needs", np.uint32),
    ],
    align=True,
)


class SlotTokens(NamedTuple):
    """The tokens that a slot treats specially. `ids` are the distinct tokens of its output and, for a
    repetition penalty, of its prompt; `counts` says how often each is in the output. Both have room for
    more."""

    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    end_ids: NDArray[np.int32]
    ids: NDArray[np.int32]
    counts: NDArray[np.int32]


_NO_TOKENS = SlotTokens(*(np.zeros(0, dtype) for dtype in (np.int32, np.float32, *[np.int32] * 3)))


class SlotTable:
    """The parameters of every slot, in arrays that are never reallocated: `records` [max_slots] of `SLOT`,
    whose fields are attributes for reading by a step's slots at once."""

    def __init__(self, max_slots: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._slot_to_tokens: dict[int, SlotTokens] = {}
        self.records = np.zeros(max_slots, SLOT)
        self.address = self.records.ctypes.data
        self.keys: NDArray[np.int64] = self.records["key"]
        self.num_output: NDArray[np.int32] = self.records["num_output"]
        self.num_logprobs: NDArray[np.int32] = self.records["num_logprobs"]
        self.temperature: NDArray[np.float32] = self.records["temperature"]
        self.top_k: NDArray[np.int32] = self.records["top_k"]
        self.top_p: NDArray[np.float32] = self.records["top_p"]
        self.min_p: NDArray[np.float32] = self.records["min_p"]
        self._needs: NDArray[np.uint32] = self.records["needs"]
        self._num_tokens: NDArray[np.int32] = self.records["num_tokens"]
        self._token_capacity: NDArray[np.int32] = self.records["token_capacity"]

    def start(
        self,
        samples: Sequence[SlotSample],
        sampling: SamplingParams,
        keys: NDArray[np.int64],
        prompt_ids: NDArray[np.int32],
    ) -> None:
        """Take the samples' slots. `keys` [num_samples] are those of their noise, `prompt_ids` the sorted
        tokens that are penalized from the start. A call that fails takes none."""
        for sample in samples:
            assert not self._needs[sample.slot], f"slot {sample.slot} is already in use"
        tokens = [self._tokens_of(sampling, sample, prompt_ids) for sample in samples]
        needs: SlotNeeds = SlotNeeds.IN_USE
        needs |= SlotNeeds.BIAS if len(tokens[0].bias_ids) else SlotNeeds.NOTHING
        needs |= SlotNeeds.PENALTIES if sampling.penalizes_output else SlotNeeds.NOTHING
        needs |= SlotNeeds.ENDS if len(tokens[0].end_ids) else SlotNeeds.NOTHING
        needs |= SlotNeeds.LOGPROBS if sampling.num_logprobs is not None else SlotNeeds.NOTHING
        min_p = np.float32(max(sampling.min_p, 0.0))
        records = np.zeros(len(samples), SLOT)
        records["key"] = keys
        records["num_bias"], records["num_ends"] = len(tokens[0].bias_ids), len(tokens[0].end_ids)
        records["num_tokens"] = [len(it.ids) for it in tokens]
        records["num_output"] = [sample.num_output_tokens for sample in samples]
        records["min_tokens"] = min(sampling.min_tokens, _MOST_INT32)
        records["top_k"] = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        records["num_logprobs"] = min(sampling.num_logprobs or 0, self._vocab_size)
        records["temperature"] = 0.0 if sampling.is_greedy else sampling.temperature
        records["top_p"], records["min_p"] = min(sampling.top_p, 1.0), min_p
        # Torch's logarithm: all ways to draw must compare with the same.
        records["log_min_p"] = torch.tensor([min_p]).log().item() if min_p else -np.inf
        records["repetition"] = sampling.repetition_penalty
        records["presence"], records["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
        records["needs"] = needs
        for sample, record, its_tokens in zip(samples, records, tokens, strict=True):
            self.records[sample.slot] = record
            self._slot_to_tokens[sample.slot] = its_tokens
            if its_tokens is not _NO_TOKENS:
                self._point(sample.slot)

    def free(self, slot: int) -> None:
        """Forget a slot."""
        assert self._needs[slot], f"slot {slot} is not in use"
        self._needs[slot] = 0
        del self._slot_to_tokens[slot]

    def lift_minimum(self, slot: int) -> None:
        """Allow end tokens to a slot that has fewer than its minimum of tokens."""
        self.records["min_tokens"][slot] = 0

    def needs(self, slots: Slots) -> NDArray[np.uint32]:
        """Return what each of the slots needs, which must be in use."""
        needs = self._needs[slots]
        if not needs.all():
            raise AssertionError(f"slot {slots[np.flatnonzero(needs == 0)[0]]} samples but was never started")
        return needs

    def tokens(self, slot: int) -> SlotTokens:
        """Return the tokens that a slot treats specially."""
        tokens, num_tokens = self._slot_to_tokens[slot], self._num_tokens[slot]
        return tokens._replace(ids=tokens.ids[:num_tokens], counts=tokens.counts[:num_tokens])

    def change_(self, logits: Tensor, slots: Slots, needs: NDArray[np.uint32]) -> None:
        """Apply bias, penalties and minimum length to `logits` [num_slots, vocab_size], in place."""
        rows = np.flatnonzero(needs & SlotNeeds.BIAS)
        if len(rows):
            tokens = [self._slot_to_tokens[slot] for slot in slots[rows].tolist()]
            where = _positions(rows, [it.bias_ids for it in tokens], logits.device)
            values = torch.from_numpy(np.concatenate([it.bias_values for it in tokens]))
            logits.index_put_(where, values.to(logits.device), accumulate=True)
        rows = np.flatnonzero(needs & SlotNeeds.PENALTIES)
        if len(rows):
            self._penalize_(logits, rows, slots[rows])
        rows = np.flatnonzero(needs & SlotNeeds.ENDS)
        rows = rows[self.num_output[slots[rows]] < self.records["min_tokens"][slots[rows]]]
        if len(rows):
            ends = [self._slot_to_tokens[slot].end_ids for slot in slots[rows].tolist()]
            logits.index_put_(_positions(rows, ends, logits.device), logits.new_tensor(-torch.inf))

    def reserve(self, slots: Slots) -> None:
        """Grow the arrays of slots with penalties where one more token would not fit."""
        for slot in slots[self._num_tokens[slots] == self._token_capacity[slots]].tolist():
            tokens, more = self._slot_to_tokens[slot], np.zeros(max(16, self._num_tokens[slot]), np.int32)
            ids, counts = np.concatenate((tokens.ids, more)), np.concatenate((tokens.counts, more))
            self._slot_to_tokens[slot] = tokens._replace(ids=ids, counts=counts)
            self._point(slot)

    def count(self, slots: Slots, tokens: NDArray[np.int32]) -> None:
        """Count one more token as output of each of these slots, which have penalties and are reserved
        for."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            it, num_tokens = self._slot_to_tokens[slot], int(self._num_tokens[slot])
            places = np.flatnonzero(it.ids[:num_tokens] == token)
            if not len(places):
                it.ids[num_tokens], it.counts[num_tokens] = token, 0
                self._num_tokens[slot] += 1
            it.counts[places[0] if len(places) else num_tokens] += 1

    def _tokens_of(
        self, sampling: SamplingParams, sample: SlotSample, prompt_ids: NDArray[np.int32]
    ) -> SlotTokens:
        bias = {id_: value for id_, value in sampling.logit_bias.items() if 0 <= id_ < self._vocab_size}
        ends = sorted({*self._eos_token_ids, *sampling.stop_token_ids}) if sampling.min_tokens else []
        ids, counts = prompt_ids, np.zeros(len(prompt_ids), np.int32)
        if sampling.penalizes_output and sample.output:
            output = np.frombuffer(sample.output, dtype="<u4")
            output_ids, output_counts = np.unique(output, return_counts=True)
            if output_ids[-1] >= self._vocab_size:
                raise IndexError(f"output token {output_ids[-1]} of a vocabulary of {self._vocab_size}")
            ids = np.union1d(prompt_ids, output_ids.astype(np.int32))
            counts = np.zeros(len(ids), np.int32)
            counts[np.searchsorted(ids, output_ids)] = output_counts
        if not (bias or ends or sampling.penalizes_output):
            return _NO_TOKENS
        return SlotTokens(
            bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            end_ids=np.array([id_ for id_ in ends if 0 <= id_ < self._vocab_size], dtype=np.int32),
            ids=ids.copy(),  # shared by no other sample
            counts=counts,
        )

    def _point(self, slot: int) -> None:
        """Store where the slot's arrays are."""
        tokens, record = self._slot_to_tokens[slot], self.records[slot]
        names = ("bias_ids", "bias_values", "end_ids", "token_ids", "counts")
        for name, array in zip(names, tokens, strict=True):
            record[name] = array.__array_interface__["data"][0]
        record["token_capacity"] = len(tokens.ids)

    def _penalize_(self, logits: Tensor, rows: NDArray[np.int64], slots: Slots) -> None:
        lengths = self._num_tokens[slots]
        if not lengths.any():
            return
        parts = [
            (self._slot_to_tokens[slot], length)
            for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)
        ]
        counts = np.concatenate([it.counts[:length] for it, length in parts]).astype(np.float32)
        penalties = [np.repeat(self.records[name][slots], lengths) for name in ("repetition", "frequency")]
        presences = np.repeat(self.records["presence"][slots], lengths) * (counts > 0)
        values = torch.from_numpy(np.stack((counts, *penalties, presences)))
        where = _positions(rows, [it.ids[:length] for it, length in parts], logits.device)
        count, repetition, frequency, presence = values.to(logits.device, non_blocking=True)
        part = logits[where]
        part = torch.where(part < 0, part * repetition, part / repetition)
        logits[where] = part - count * frequency - presence


def distinct_tokens(prompt: bytes, vocab_size: int) -> NDArray[np.int32]:
    """Return the distinct tokens of a prompt in order. Raises `IndexError` for one beyond the vocabulary."""
    if not prompt:
        return np.zeros(0, np.int32)
    is_there = np.zeros(vocab_size, dtype=np.bool_)
    is_there[np.frombuffer(prompt, dtype="<u4")] = True
    return np.flatnonzero(is_there).astype(np.int32)


def apply_masks_(logits: Tensor, masks: NDArray[np.uint32]) -> None:
    """Set the logits [num_rows, vocab_size] of tokens whose bit in `masks` [num_rows, num_words] is 0 to
    -inf, in place. Bit i of word w belongs to token 32 w + i."""
    words = torch.from_numpy(masks.view(np.int32)).to(logits.device, non_blocking=True)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def _positions(
    rows: NDArray[np.int64], ids: Sequence[NDArray[np.int32]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (row, token id) of every element, in the form of `index_put_`."""
    row_of_id = np.repeat(rows, [len(part) for part in ids])
    both = torch.from_numpy(np.stack((row_of_id, np.concatenate(ids)))).to(device, non_blocking=True)
    return both[0], both[1]


class Warp:
    """Temperature and filters of rows that all have a temperature. A filter is off at `top_k` 0, `top_p` 1
    and `min_p` 0."""

    def __init__(self, table: SlotTable, slots: Slots, device: torch.device) -> None:
        self._device = device
        self.top_k = table.top_k[slots]
        self.top_p = table.top_p[slots]
        self.min_p = table.min_p[slots]
        self.temperature = self.column(table.temperature[slots])
        self.log_min_p = self.column(table.records["log_min_p"][slots])

    def column(self, values: NDArray[np.float32]) -> Tensor:
        """Return the values as float32 [num_rows, 1] on the device."""
        return torch.from_numpy(values).to(self._device, non_blocking=True)[:, None]

    def index(self, values: NDArray[np.integer]) -> Tensor:
        """Return the values as int64 [num_rows] on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self._device, non_blocking=True)

    def dense(self, logits: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] scaled by temperature, -inf where a filter drops the token."""
        logits = logits / self.temperature
        rows = np.flatnonzero(self.top_k)
        if len(rows):
            top_k = self.top_k[rows]
            self._replace(logits, rows, lambda part: _keep_top_k(part, self.index(top_k), int(top_k.max())))
        rows = np.flatnonzero(self.top_p < 1.0)
        if len(rows):
            top_p = self.column(self.top_p[rows])
            self._replace(logits, rows, lambda part: _keep_top_p(part, top_p))
        rows = np.flatnonzero(self.min_p)
        if len(rows):
            log_min_p = self.log_min_p[self.index(rows)]
            self._replace(logits, rows, lambda part: _keep_min_p(part, log_min_p))
        return logits

    def _replace(self, logits: Tensor, rows: NDArray[np.int64], change: Callable[[Tensor], Tensor]) -> None:
        """Set logits[rows] = change(logits[rows]), without a gather if `rows` are all."""
        if len(rows) == len(logits):
            logits.copy_(change(logits))
        else:
            index = self.index(rows)
            logits[index] = change(logits[index])


def _keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Keep all tokens at least as likely as the k-th. Ties with it stay, so the result is not arbitrary."""
    best = logits.topk(largest, dim=-1).values
    return logits.masked_fill(logits < best.gather(1, top_k[:, None] - 1), -torch.inf)


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the likeliest tokens whose predecessors sum to less than p, at least one, and ties with the
    last."""
    probabilities = logits.softmax(dim=-1)
    width = min(NUCLEUS_TOKENS, logits.shape[1])
    if logits.device.type != "cpu":  # asking which rows the short list covers would cost a synchronization
        width = logits.shape[1]
    best = probabilities.topk(width, dim=-1).values
    threshold = nucleus_end(best, top_p).threshold
    if width < logits.shape[1]:
        uncovered = (best.sum(dim=-1) < top_p[:, 0]).nonzero()[:, 0]
        if len(uncovered):
            every = probabilities[uncovered].sort(dim=-1, descending=True).values
            threshold[uncovered] = nucleus_end(every, top_p[uncovered]).threshold
    return logits.masked_fill(probabilities < threshold, -torch.inf)


class NucleusEnd(NamedTuple):
    """The place where top-p cuts off: the sums of the probabilities before each token, [num_rows,
    num_tokens], and the probability of the last token that it keeps, [num_rows, 1]."""

    before: Tensor
    threshold: Tensor


def nucleus_end(descending: Tensor, top_p: Tensor) -> NucleusEnd:
    """Apply top-p, [num_rows, 1], to probabilities [num_rows, num_tokens] in descending order."""
    before = descending.cumsum(dim=-1) - descending
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return NucleusEnd(before, descending.gather(1, num_kept - 1))


def _keep_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Keep all tokens at least min_p times as likely as the likeliest."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + log_min_p, -torch.inf)
