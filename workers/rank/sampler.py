"""From logits to tokens, for all sampling rows of a step at once; keeps what each slot's sampling depends on.

The order of processing is that of `workers.messages.SamplingParams`. Every operation works row by row, so a
slot's token does not depend on its neighbours in the batch. Shorter ways are taken where they give the same
token: candidates first (`candidates`), and a kernel that computes noise only where it could win. Where
rounding could make a difference they say so, and the row is drawn again by `Warp.dense` and noise for the
whole vocabulary. Letters: R rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages import SampledToken, SamplingParams, SlotSample, SlotStart, TokenLogprob
from workers.model import native
from workers.rank import noise
from workers.rank.candidates import (
    MOST_COUNTED,
    Draw,
    draw_by_rejection,
    draw_from_candidates,
    is_apart,
)
from workers.rank.logits import PromptTokens, TokenPenalties, Warp, penalize_


@dataclass(slots=True)
class _Slot:
    """What one sequence's next token depends on beside the logits."""

    sampling: SamplingParams
    seed: int
    num_output: int
    penalties: TokenPenalties | None
    end_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]

    @property
    def below_min_tokens(self) -> bool:
        return self.num_output < self.sampling.min_tokens


class Sampler:
    """The last step of a rank: `start` and `free` keep the slots, `sample` draws one token for each given."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._counters = noise.counters(vocab_size, device)

    def start(self, start: SlotStart) -> None:
        """Take over slots; their output so far counts for penalties, minimum length and noise. A call that
        fails takes none."""
        prompt = None
        if start.sampling.penalizes_prompt:
            prompt = PromptTokens(start.prompt, self._vocab_size, self._device)
        self._slots |= {it.slot: self._started(it, start.sampling, prompt) for it in start.samples}

    def free(self, slot: int) -> None:
        """Forget a slot."""
        assert slot in self._slots, f"slot {slot} is not in use"
        del self._slots[slot]

    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[SampledToken]:
        """One token for each slot from `logits` [R, V] float32, which may be overwritten; synchronizes."""
        assert logits.shape == (len(slots), self._vocab_size), f"{tuple(logits.shape)} for {len(slots)} slots"
        for slot in slots:
            assert slot in self._slots, f"slot {slot} samples but was never started"
        states = [self._slots[slot] for slot in slots]
        logprobs = _Logprobs(logits, [state.sampling.num_logprobs for state in states])
        self._process(logits, states)
        draw = self._draw(logits, states)
        while True:
            tokens, unsure, row_to_logprob = logprobs.read(draw)
            if not unsure:
                break
            index = self._index(unsure)
            draw.tokens[index] = self._draw_exactly(logits[index], [states[row] for row in unsure])
            draw.is_sure[index] = True
        # Last: a call that fails has changed nothing.
        for state, token in zip(states, tokens, strict=True):
            state.num_output += 1
            if state.penalties is not None:
                state.penalties.count(token)
        return [
            SampledToken(slot, token, row_to_logprob.get(row))
            for row, (slot, token) in enumerate(zip(slots, tokens, strict=True))
        ]

    def processed_logits(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """[R, V]: what the noise would be added to; excluded tokens are -inf. `logits` may be overwritten."""
        states = [self._slots[slot] for slot in slots]
        self._process(logits, states)
        rows = [row for row, state in enumerate(states) if not state.sampling.is_greedy]
        if rows:
            index = self._index(rows)
            logits[index] = self._warp(states[row] for row in rows).dense(logits[index])
        return logits

    def _started(self, sample: SlotSample, sampling: SamplingParams, prompt: PromptTokens | None) -> _Slot:
        assert sample.slot not in self._slots, f"slot {sample.slot} is already in use"
        bias = {id_: value for id_, value in sampling.logit_bias.items() if 0 <= id_ < self._vocab_size}
        has_penalties = sampling.penalizes_output
        return _Slot(
            sampling=sampling,
            seed=sample.seed,
            num_output=sample.num_output_tokens,
            penalties=TokenPenalties(sampling, prompt, sample.output) if has_penalties else None,
            end_ids=self._end_ids(sampling),
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
        )

    # ------------------------------------------------------------------------------------ processing

    def _process(self, logits: Tensor, states: list[_Slot]) -> None:
        """Bias, penalties and minimum length, in place."""
        rows = [row for row, state in enumerate(states) if len(state.bias_ids)]
        if rows:
            where = self._positions(rows, [states[row].bias_ids for row in rows])
            values = torch.from_numpy(np.concatenate([states[row].bias_values for row in rows]))
            logits.index_put_(where, values.to(self._device), accumulate=True)
        row_to_penalties = {row: it.penalties for row, it in enumerate(states) if it.penalties is not None}
        if row_to_penalties:
            penalize_(logits, list(row_to_penalties), list(row_to_penalties.values()))
        rows = [row for row, state in enumerate(states) if state.below_min_tokens and len(state.end_ids)]
        if rows:
            where = self._positions(rows, [states[row].end_ids for row in rows])
            logits.index_put_(where, logits.new_tensor(-torch.inf))

    # --------------------------------------------------------------------------------------- drawing

    def _draw(self, logits: Tensor, states: list[_Slot]) -> Draw:
        """Each row in the shortest way there is for it; see the module's text."""
        way_to_rows: dict[Callable[[Tensor, list[_Slot]], Draw], list[int]] = {}
        for row, state in enumerate(states):
            way_to_rows.setdefault(self._way(state.sampling), []).append(row)
        if len(way_to_rows) == 1:
            (way,) = way_to_rows
            return way(logits, states)
        tokens = torch.empty(len(states), dtype=torch.int64, device=self._device)
        is_sure = torch.empty(len(states), dtype=torch.bool, device=self._device)
        for way, rows in way_to_rows.items():
            index = self._index(rows)
            tokens[index], is_sure[index] = way(logits[index], [states[row] for row in rows])
        return Draw(tokens, is_sure)

    def _way(self, sampling: SamplingParams) -> Callable[[Tensor, list[_Slot]], Draw]:
        if sampling.is_greedy:
            return self._draw_likeliest
        if 0 < sampling.top_k < self._vocab_size:
            return self._draw_counted if sampling.top_k <= MOST_COUNTED else self._draw_filtered
        if sampling.top_p < 1.0:
            return self._draw_by_rejection if self._has_kernels else self._draw_from_nucleus
        if self._has_kernels:
            return self._draw_from_all
        return self._draw_from_nucleus if sampling.min_p > 0.0 else self._draw_filtered

    @property
    def _has_kernels(self) -> bool:
        return native.serves(self._device, torch.float32)

    def _draw_likeliest(self, logits: Tensor, states: list[_Slot]) -> Draw:
        return _certainly(logits.argmax(dim=-1))

    def _draw_counted(self, logits: Tensor, states: list[_Slot]) -> Draw:
        return draw_from_candidates(logits, self._warp(states), self._keys(states), self._counters)

    def _draw_from_nucleus(self, logits: Tensor, states: list[_Slot]) -> Draw:
        return draw_from_candidates(logits, self._warp(states), self._keys(states), self._counters)

    def _draw_from_all(self, logits: Tensor, states: list[_Slot]) -> Draw:
        warp = self._warp(states)
        return self._draw_by_kernel(logits, warp.temperature, warp.least(logits), self._keys(states))

    def _draw_by_rejection(self, logits: Tensor, states: list[_Slot]) -> Draw:
        warp, keys = self._warp(states), self._keys(states)

        def draw(rows: slice, least: Tensor) -> Draw:
            return self._draw_by_kernel(logits[rows], warp.temperature[rows], least, keys[rows])

        return draw_by_rejection(logits, warp, warp.least(logits), draw)

    def _draw_filtered(self, logits: Tensor, states: list[_Slot]) -> Draw:
        if not self._has_kernels:
            return _certainly(self._draw_exactly(logits, states))
        warped = self._warp(states).dense(logits)
        one = torch.ones((len(states), 1))
        return self._draw_by_kernel(warped, one, one * -torch.inf, self._keys(states))

    def _draw_by_kernel(self, logits: Tensor, temperature: Tensor, least: Tensor, keys: Tensor) -> Draw:
        kernels = native.load()
        assert kernels is not None
        tokens, best, second = kernels.gumbel_argmax(logits.contiguous(), temperature, least, keys)
        return Draw(tokens, is_apart(best, second))

    def _draw_exactly(self, logits: Tensor, states: list[_Slot]) -> Tensor:
        """[R]: noise for every token of the vocabulary."""
        warped, keys = self._warp(states).dense(logits), self._keys(states)
        # On a CPU one row's noise at a time, which stays in cache: all at once took twice as long.
        num_rows = 1 if self._device.type == "cpu" else len(states)
        for begin in range(0, len(states), num_rows):
            rows = slice(begin, begin + num_rows)
            warped[rows] += noise.gumbel(keys[rows], self._counters)
        return warped.argmax(dim=-1)

    def _warp(self, states: Iterable[_Slot]) -> Warp:
        return Warp([state.sampling for state in states], self._vocab_size, self._device)

    def _keys(self, states: list[_Slot]) -> Tensor:
        keys = noise.row_keys([state.seed for state in states], [state.num_output for state in states])
        return keys.to(self._device, non_blocking=True)

    # --------------------------------------------------------------------------------- host to device

    def _end_ids(self, sampling: SamplingParams) -> NDArray[np.int64]:
        ids = sorted({*self._eos_token_ids, *sampling.stop_token_ids})
        return np.array([id_ for id_ in ids if 0 <= id_ < self._vocab_size], dtype=np.int64)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _positions(self, rows: list[int], ids: list[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """(row, token id) of every element, as `index_put_` wants them."""
        row_of_id = np.repeat(np.array(rows), [len(part) for part in ids])
        both = torch.from_numpy(np.stack((row_of_id, np.concatenate(ids)))).to(self._device)
        return both[0], both[1]


class _Logprobs:
    """Log-probabilities of the model's own distribution, for the rows that want them; to be made before the
    logits are changed. `num_top` is None for the others."""

    def __init__(self, logits: Tensor, num_top: Sequence[int | None]) -> None:
        self._row_to_num_top = {row: num for row, num in enumerate(num_top) if num is not None}
        if self._row_to_num_top:
            self._width = min(max(self._row_to_num_top.values()), logits.shape[1])
            self._index = torch.tensor(list(self._row_to_num_top)).to(logits.device)
            self._logprobs = torch.log_softmax(logits[self._index], dim=-1)
            self._top = self._logprobs.topk(self._width, dim=-1)

    def read(self, draw: Draw) -> tuple[list[int], list[int], dict[int, TokenLogprob]]:
        """The tokens, the rows that are not sure, and the log-probabilities by row, in one transfer."""
        num_rows = len(draw.tokens)
        # float64 holds every token id and every float32 exactly, so all of it fits one tensor
        parts = [draw.tokens.double(), draw.is_sure.double()]
        if self._row_to_num_top:
            of_chosen = self._logprobs.gather(1, draw.tokens[self._index][:, None])
            top = (self._top.values.double(), self._top.indices.double())
            parts.append(torch.cat((of_chosen.double(), *top), dim=1).flatten())
        flat: list[float] = torch.cat(parts).tolist()
        tokens = [int(token) for token in flat[:num_rows]]
        unsure = [row for row, is_sure in enumerate(flat[num_rows : 2 * num_rows]) if not is_sure]
        row_to_logprob: dict[int, TokenLogprob] = {}
        for number, (row, num_top) in enumerate(self._row_to_num_top.items()):
            begin = 2 * num_rows + number * (1 + 2 * self._width)
            values = flat[begin + 1 : begin + 1 + self._width]
            ids = flat[begin + 1 + self._width : begin + 1 + 2 * self._width]
            pairs = zip(ids[:num_top], values[:num_top], strict=True)
            row_to_logprob[row] = TokenLogprob(flat[begin], tuple((int(id_), value) for id_, value in pairs))
        return tokens, unsure, row_to_logprob


def _certainly(tokens: Tensor) -> Draw:
    return Draw(tokens, torch.ones_like(tokens, dtype=torch.bool))
