"""The sampler that computes everything for the whole vocabulary, as the engine's did at first.

Tokens must stay those that this one draws. Letters: R rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.sampling import SamplingParams, TokenLogprob
from workers.model.noise import gumbel, output_keys, seed_keys, token_counters
from workers.rank.sampler import Sampled

# Most nuclei are smaller: on the CPU the whole vocabulary is sorted only for the rows where this fails.
_NUCLEUS_TOKENS = 256


@dataclass(slots=True)
class _Slot:
    """All on which one sequence's next token depends, in addition to the logits."""

    sampling: SamplingParams
    seed: int
    num_output: int
    has_static_work: bool
    penalty_row: int
    end_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]

    @property
    def below_min_tokens(self) -> bool:
        return self.num_output < self.sampling.min_tokens

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is simply the likeliest of the raw logits."""
        return not self.has_static_work and not self.below_min_tokens


class DenseSampler:
    """As `workers.rank.sampler.Sampler`; a slot is started with its prompt and its output."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._counters = token_counters(vocab_size, device)
        self._penalties = _PenaltyTable(vocab_size, device)

    def start(
        self, slot: int, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int
    ) -> None:
        """Take over a slot; its output so far counts for penalties, minimum length and noise."""
        assert slot not in self._slots, f"slot {slot} is already in use"
        tokens = np.array([*prompt, *output], dtype=np.int64)
        has_penalties = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        bias = {id_: value for id_, value in sampling.logit_bias.items() if 0 <= id_ < self._vocab_size}
        self._slots[slot] = _Slot(
            sampling=sampling,
            seed=seed,
            num_output=len(output),
            has_static_work=has_penalties or bool(bias) or sampling.temperature > 0.0,
            penalty_row=self._penalties.add(tokens, len(prompt)) if has_penalties else -1,
            end_ids=self._end_ids(sampling),
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
        )

    def free(self, slot: int) -> None:
        """Forget a slot."""
        state = self._slots.pop(slot, None)
        assert state is not None, f"slot {slot} is not in use"
        if state.penalty_row >= 0:
            self._penalties.remove(state.penalty_row)

    def sample(
        self, logits: Tensor, slots: Sequence[int], masks: NDArray[np.uint32] | None = None
    ) -> Sampled:
        """Sample one token for each slot from `logits` [R, V] float32, which may be overwritten;
        synchronize."""
        assert logits.shape == (len(slots), self._vocab_size), f"{tuple(logits.shape)} for {len(slots)} slots"
        for slot in slots:
            assert slot in self._slots, f"slot {slot} samples but was never started"
        states = [self._slots[slot] for slot in slots]
        worked = [row for row, state in enumerate(states) if not state.is_argmax]
        logprob_rows = [row for row, state in enumerate(states) if state.sampling.num_logprobs is not None]
        raw = logits.clone() if logprob_rows and (masks is not None or len(worked) == len(slots)) else logits
        if masks is not None:  # no processing brings a token back
            bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab_size]
            logits = logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
        if not worked:
            chosen = logits.argmax(dim=-1)
        elif len(worked) == len(slots):
            chosen = self._processed(logits, states, with_noise=True).argmax(dim=-1)
        else:
            chosen = logits.argmax(dim=-1)
            index = self._index(worked)
            part = self._processed(logits[index], [states[row] for row in worked], with_noise=True)
            chosen[index] = part.argmax(dim=-1)
        self._count(states, chosen)
        return self._read(slots, states, chosen, raw, logprob_rows)

    def processed_logits(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the logits [R, V] to which the noise would be added; excluded tokens are -inf. `logits` may
        be overwritten."""
        return self._processed(logits, [self._slots[slot] for slot in slots], with_noise=False)

    # ------------------------------------------------------------------------------------ processing

    def _processed(self, logits: Tensor, states: list[_Slot], with_noise: bool) -> Tensor:
        self._add_bias(logits, states)
        self._penalize(logits, states)
        self._suppress_ends(logits, states)
        samples = [row for row, state in enumerate(states) if state.sampling.temperature > 0.0]
        if not samples:
            return logits
        drawn = [states[row] for row in samples]
        if len(samples) == len(states):
            return self._warped(logits, drawn, with_noise)
        index = self._index(samples)
        logits[index] = self._warped(logits[index], drawn, with_noise)
        return logits

    def _add_bias(self, logits: Tensor, states: list[_Slot]) -> None:
        rows = [row for row, state in enumerate(states) if len(state.bias_ids)]
        if rows:
            where = self._positions(rows, [states[row].bias_ids for row in rows])
            values = torch.from_numpy(np.concatenate([states[row].bias_values for row in rows]))
            logits.index_put_(where, values.to(self._device), accumulate=True)

    def _penalize(self, logits: Tensor, states: list[_Slot]) -> None:
        rows = [row for row, state in enumerate(states) if state.penalty_row >= 0]
        if not rows:
            return
        chosen = [states[row].sampling for row in rows]
        repetition = self._column([sampling.repetition_penalty for sampling in chosen])
        presence = self._column([sampling.presence_penalty for sampling in chosen])
        frequency = self._column([sampling.frequency_penalty for sampling in chosen])
        in_prompt, counts = self._penalties.rows(self._index([states[row].penalty_row for row in rows]))

        def penalized(part: Tensor) -> Tensor:
            in_output = counts > 0
            repeated = torch.where(part < 0, part * repetition, part / repetition)
            part = torch.where(in_prompt | in_output, repeated, part)
            return part - counts * frequency - in_output * presence

        self._replace(logits, rows, penalized)

    def _suppress_ends(self, logits: Tensor, states: list[_Slot]) -> None:
        rows = [row for row, state in enumerate(states) if state.below_min_tokens and len(state.end_ids)]
        if rows:
            where = self._positions(rows, [states[row].end_ids for row in rows])
            logits.index_put_(where, logits.new_tensor(-torch.inf))

    def _warped(self, logits: Tensor, states: list[_Slot], with_noise: bool) -> Tensor:
        """Apply temperature, top-k, top-p, min-p and noise, for rows that all have a temperature."""
        sampling = [state.sampling for state in states]
        logits = logits / self._column([params.temperature for params in sampling])
        rows = [row for row, params in enumerate(sampling) if 0 < params.top_k < self._vocab_size]
        if rows:
            top_k = [sampling[row].top_k for row in rows]
            self._replace(logits, rows, lambda part: _keep_top_k(part, self._index(top_k), max(top_k)))
        rows = [row for row, params in enumerate(sampling) if params.top_p < 1.0]
        if rows:
            top_p = self._column([sampling[row].top_p for row in rows])
            self._replace(logits, rows, lambda part: _keep_top_p(part, top_p))
        rows = [row for row, params in enumerate(sampling) if params.min_p > 0.0]
        if rows:
            min_p = self._column([sampling[row].min_p for row in rows])
            self._replace(logits, rows, lambda part: _keep_min_p(part, min_p))
        if with_noise:
            keys = row_keys([state.seed for state in states], [state.num_output for state in states])
            logits += gumbel(keys.to(self._device), self._counters)
        return logits

    # --------------------------------------------------------------------------------------- results

    def _count(self, states: list[_Slot], chosen: Tensor) -> None:
        rows = [row for row, state in enumerate(states) if state.penalty_row >= 0]
        if rows:
            table_rows = self._index([states[row].penalty_row for row in rows])
            self._penalties.count(table_rows, chosen[self._index(rows)])
        for state in states:
            state.num_output += 1

    def _read(
        self, slots: Sequence[int], states: list[_Slot], chosen: Tensor, raw: Tensor, logprob_rows: list[int]
    ) -> Sampled:
        """Bring the results to the host in one transfer."""
        if not logprob_rows:
            return Sampled(np.array(chosen.tolist(), np.uint32), {})
        num_top = [states[row].sampling.num_logprobs or 0 for row in logprob_rows]
        width = min(max(num_top), self._vocab_size)
        index = self._index(logprob_rows)
        logprobs = torch.log_softmax(raw[index], dim=-1)
        of_chosen = logprobs.gather(1, chosen[index][:, None])
        top = logprobs.topk(width, dim=-1)
        # float64 holds every token id and every float32 exactly, so all of it fits one tensor
        table = torch.cat((of_chosen.double(), top.values.double(), top.indices.double()), dim=1)
        flat: list[float] = torch.cat((chosen.double(), table.flatten())).tolist()
        row_to_logprob: dict[int, TokenLogprob] = {}
        for number, (row, count) in enumerate(zip(logprob_rows, num_top, strict=True)):
            begin = len(slots) + number * (1 + 2 * width)
            values = flat[begin + 1 : begin + 1 + width]
            ids = flat[begin + 1 + width : begin + 1 + 2 * width]
            pairs = tuple((int(id_), value) for id_, value in zip(ids[:count], values[:count], strict=True))
            row_to_logprob[row] = TokenLogprob(flat[begin], pairs)
        return Sampled(np.array(flat[: len(slots)]).astype(np.uint32), row_to_logprob)

    # --------------------------------------------------------------------------------- host to device

    def _end_ids(self, sampling: SamplingParams) -> NDArray[np.int64]:
        ids = sorted({*self._eos_token_ids, *sampling.stop_token_ids})
        return np.array([id_ for id_ in ids if 0 <= id_ < self._vocab_size], dtype=np.int64)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)[:, None]

    def _positions(self, rows: list[int], ids: list[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Return (row, token id) of every element, as `index_put_` wants them."""
        row_of_id = np.repeat(np.array(rows), [len(part) for part in ids])
        both = torch.from_numpy(np.stack((row_of_id, np.concatenate(ids)))).to(self._device)
        return both[0], both[1]

    def _replace(self, logits: Tensor, rows: list[int], change: Callable[[Tensor], Tensor]) -> None:
        """Do logits[rows] = change(logits[rows]), without the gather when `rows` are all."""
        if len(rows) == len(logits):
            logits.copy_(change(logits))
        else:
            index = self._index(rows)
            logits[index] = change(logits[index])


def row_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> Tensor:
    """Return the key of each (seed, output index)."""
    return output_keys(seed_keys(seeds), np.array(output_indices, dtype=np.int32))


class _PenaltyTable:
    """For each slot with penalties a row of [V]: is the token in the prompt, how often in the output."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free_rows: list[int] = []

    def add(self, tokens: NDArray[np.int64], num_prompt_tokens: int) -> int:
        """Return the row of a new slot that has these tokens."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        device = self._counts.device
        self._in_prompt[row] = False
        self._in_prompt[row, torch.from_numpy(tokens[:num_prompt_tokens]).to(device)] = True
        output = np.bincount(tokens[num_prompt_tokens:], minlength=self._counts.shape[1]).astype(np.int32)
        self._counts[row] = torch.from_numpy(output).to(device)
        return row

    def remove(self, row: int) -> None:
        self._free_rows.append(row)

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return (in prompt [R, V] bool, count in output [R, V] int32) of the rows `index` [R]."""
        return self._in_prompt[index], self._counts[index]

    def count(self, index: Tensor, tokens: Tensor) -> None:
        """Count one more of tokens[i] in row index[i]."""
        one = torch.ones((), dtype=torch.int32, device=self._counts.device)
        self._counts.index_put_((index, tokens), one, accumulate=True)

    def _grow(self) -> None:
        num_rows = len(self._counts)
        num_new = max(8, num_rows)
        self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros((num_new, self.vocab_size))))
        self._counts = torch.cat((self._counts, self._counts.new_zeros((num_new, self.vocab_size))))
        self._free_rows.extend(reversed(range(num_rows, num_rows + num_new)))

    @property
    def vocab_size(self) -> int:
        return self._counts.shape[1]


def _keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Keep all tokens at least as likely as the k-th; ties with it stay, so the result has no arbitrary
    part."""
    best = logits.topk(largest, dim=-1).values
    return logits.masked_fill(logits < best.gather(1, top_k[:, None] - 1), -torch.inf)


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the likeliest tokens whose predecessors sum to less than p, at least one; ties with the last
    stay."""
    probabilities = logits.softmax(dim=-1)
    width = min(_NUCLEUS_TOKENS, logits.shape[1])
    if logits.device.type != "cpu":  # asking which rows the short list covers would cost a synchronization
        width = logits.shape[1]
    best = probabilities.topk(width, dim=-1).values
    threshold = _nucleus_threshold(best, top_p)
    if width < logits.shape[1]:
        uncovered = (best.sum(dim=-1) < top_p[:, 0]).nonzero()[:, 0]
        if len(uncovered):
            every = probabilities[uncovered].sort(dim=-1, descending=True).values
            threshold[uncovered] = _nucleus_threshold(every, top_p[uncovered])
    return logits.masked_fill(probabilities < threshold, -torch.inf)


def _nucleus_threshold(descending: Tensor, top_p: Tensor) -> Tensor:
    """Return [R, 1]: the probability of the last token of the nucleus, from the sorted probabilities [R,
    n]."""
    before = descending.cumsum(dim=-1) - descending
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, num_kept - 1)


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep all tokens at least `min_p` times as likely as the likeliest."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
