"""Sample tokens from logits, for all sampling rows of a step at once, and keep what each slot's sampling
needs.

Processing follows the order of `workers.messages.SamplingParams`. Every operation works row by row, so a
slot's token does not depend on its neighbours in the batch. Shortcuts are taken where they give the same
token: the few likeliest candidates first, where top-k, top-p or min-p drops all others, and a kernel that
computes noise only where it could win. Where rounding could decide otherwise, or the candidates may not be
all, the row is not sure; it is drawn again by `Warp.dense` and noise for the whole vocabulary. Drawing from
candidates is not yet validated on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages import SamplingParams, SlotSample, SlotStart, TokenLogprob
from workers.model import native
from workers.rank.logits import PromptTokens, TokenPenalties, Warp, penalize_

# The largest top-k for which candidates are taken first.
MOST_COUNTED = 1024
_NUCLEUS_TOKENS = 256
_MOST_TRIES = 16
# More than two ways to sum up to `MOST_COUNTED` probabilities in float32 differ by.
_MASS_ERROR = 2e-5
# More than two ways to compute a probability in float32 differ by, beside their sums.
_RATIO_ERROR = 2e-6
# More than ten times what logarithms of float32 that are exact to one unit in the last place make of a score
# and its noise, relative to the size of both.
_SCORE_ERROR = 2.0**-20
_MOST_NOISE = 64.0

_BITS = 64
_WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's step from one counter to the next
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_UNIFORM_BITS = 54
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1


@dataclass(slots=True)
class _Slot:
    """The state of one sequence's sampling: what its next token depends on besides the logits."""

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


class SampledToken(NamedTuple):
    """The token a slot sampled."""

    slot: int
    token: int
    logprob: TokenLogprob | None


class Sampler:
    """Draws tokens: `start` and `free` maintain slots, `sample` draws one token for each given slot."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._counters = token_counters(vocab_size, device)

    def start(self, start: SlotStart) -> None:
        """Add slots. Their output so far counts for penalties, minimum length and  A call that fails
        adds none."""
        prompt = None
        if start.sampling.penalizes_prompt:
            prompt = PromptTokens(start.prompt, self._vocab_size, self._device)
        self._slots |= {it.slot: self._started(it, start.sampling, prompt) for it in start.samples}

    def free(self, slot: int) -> None:
        """Forget a slot."""
        assert slot in self._slots, f"slot {slot} is not in use"
        del self._slots[slot]

    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[SampledToken]:
        """Draw one token for each slot from float32 `logits` [num_slots, vocab_size], which may be
        overwritten. Synchronizes with the device."""
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
        """Apply bias, penalties and minimum length, in place."""
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
        """Draw each row in the shortest way that its parameters allow."""
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

    # Two names, so that `_draw` keeps rows with a top-k apart from those without.
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
        """Draw with noise for every token of the vocabulary."""
        warped, keys = self._warp(states).dense(logits), self._keys(states)
        # On a CPU one row's noise at a time, which stays in cache: all at once took twice as long.
        num_rows = 1 if self._device.type == "cpu" else len(states)
        for begin in range(0, len(states), num_rows):
            rows = slice(begin, begin + num_rows)
            warped[rows] += gumbel(keys[rows], self._counters)
        return warped.argmax(dim=-1)

    def _warp(self, states: Iterable[_Slot]) -> Warp:
        return Warp([state.sampling for state in states], self._vocab_size, self._device)

    def _keys(self, states: list[_Slot]) -> Tensor:
        keys = row_keys([state.seed for state in states], [state.num_output for state in states])
        return keys.to(self._device, non_blocking=True)

    # --------------------------------------------------------------------------------- host to device

    def _end_ids(self, sampling: SamplingParams) -> NDArray[np.int64]:
        ids = sorted({*self._eos_token_ids, *sampling.stop_token_ids})
        return np.array([id_ for id_ in ids if 0 <= id_ < self._vocab_size], dtype=np.int64)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _positions(self, rows: list[int], ids: list[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Return (row, token id) of every element, in the form of `index_put_`."""
        row_of_id = np.repeat(np.array(rows), [len(part) for part in ids])
        both = torch.from_numpy(np.stack((row_of_id, np.concatenate(ids)))).to(self._device)
        return both[0], both[1]


class _Logprobs:
    """Log-probabilities of the model's own distribution, for the rows whose `num_top` is not None. Must be
    made before the logits are changed."""

    def __init__(self, logits: Tensor, num_top: Sequence[int | None]) -> None:
        self._row_to_num_top = {row: num for row, num in enumerate(num_top) if num is not None}
        if self._row_to_num_top:
            self._width = min(max(self._row_to_num_top.values()), logits.shape[1])
            self._index = torch.tensor(list(self._row_to_num_top)).to(logits.device)
            self._logprobs = torch.log_softmax(logits[self._index], dim=-1)
            self._top = self._logprobs.topk(self._width, dim=-1)

    def read(self, draw: Draw) -> tuple[list[int], list[int], dict[int, TokenLogprob]]:
        """Return the tokens, the rows that are not sure, and the log-probabilities by row, in one
        transfer."""
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


# ------------------------------------------------------------------------------- drawing from candidates


class Draw(NamedTuple):
    """A token for each row, and whether it is certain."""

    tokens: Tensor
    is_sure: Tensor


def draw_from_candidates(logits: Tensor, warp: Warp, keys: Tensor, counters: Tensor) -> Draw:
    """Draw from `logits` [num_rows, vocab_size] with the noise of `keys` [num_rows] and `counters`
    [vocab_size].

    Either every row has a top-k of at most `MOST_COUNTED`, or none has one.
    """
    vocab_size, is_counted = logits.shape[1], bool(warp.top_k[0])
    most = max(warp.top_k)
    width = min(vocab_size, most + most // 4 + 16 if is_counted else _NUCLEUS_TOKENS)
    best, ids = largest(logits, width)
    scaled = best / warp.temperature
    last = scaled[:, -1:]
    is_dropped = torch.zeros_like(scaled, dtype=torch.bool)
    is_covered = torch.full_like(last, width == vocab_size, dtype=torch.bool)
    is_sure = torch.ones_like(is_covered)
    if is_counted:
        kth = scaled.gather(1, warp.index(warp.top_k)[:, None] - 1)
        is_dropped = scaled < kth
        is_covered |= last < kth
    if min(warp.top_p) < 1.0:
        if is_counted:
            probabilities = scaled.masked_fill(is_dropped, -torch.inf).softmax(-1)
        else:
            probabilities = (logits / warp.temperature).softmax(-1).gather(1, ids)
        nucleus = _nucleus(probabilities, warp, is_exact=not is_counted and logits.device.type == "cpu")
        is_dropped |= nucleus.is_dropped
        is_sure = nucleus.is_sure
        if not is_counted:
            is_covered |= nucleus.is_covered
    if max(warp.min_p) > 0.0:
        least = scaled[:, :1] + warp.column(warp.min_p).log()
        is_dropped |= scaled < least
        if not is_counted:
            is_covered |= last < least
    scores = scaled + gumbel(keys, counters[ids])
    top = scores.masked_fill_(is_dropped, -torch.inf).topk(min(2, width), dim=-1)
    is_sure = (is_sure & is_covered)[:, 0]
    if width > 1:
        is_sure &= is_apart(top.values[:, 0], top.values[:, 1])
    return Draw(ids.gather(1, top.indices[:, :1])[:, 0], is_sure)


def draw_by_rejection(
    logits: Tensor, warp: Warp, least: Tensor, draw: Callable[[slice, Tensor], Draw]
) -> Draw:
    """Draw on a CPU from rows that all have a top-p and no top-k, without sorting any.

    `draw(rows, least)` draws the best of all tokens of these rows whose scaled logit is at least `least`
    [num_rows, 1]. The best of all tokens is the best of the nucleus if the nucleus contains it. Otherwise the
    nucleus contains no token as unlikely, and the draw is repeated among likelier tokens.
    """
    tokens, is_sole = draw(slice(None), least)
    is_sure = torch.zeros_like(is_sole)
    scaled, probabilities = torch.empty(2, logits.shape[1]).unbind(0)  # for one row after another, in cache
    for row, top_p in enumerate(warp.column(warp.top_p)[:, 0].tolist()):
        torch.div(logits[row], warp.temperature[row], out=scaled)
        torch.softmax(scaled, -1, out=probabilities)
        for _ in range(_MOST_TRIES):
            token = int(tokens[row])
            above = float(torch.threshold(probabilities, float(probabilities[token]), 0.0).sum())
            if not is_sole[row] or above == 0 or above < top_p - _MASS_ERROR:
                is_sure[row] = is_sole[row]
                break
            if above < top_p + _MASS_ERROR:
                break
            only, likelier = slice(row, row + 1), scaled[token].nextafter(scaled.new_tensor(torch.inf))
            tokens[only], is_sole[only] = draw(only, likelier.view(1, 1))
    return Draw(tokens, is_sure)


def is_apart(best: Tensor, second: Tensor) -> Tensor:
    """Return whether no rounding of logarithms and sums could bring the second score before the best one."""
    return best - second > (best.abs() + _MOST_NOISE) * _SCORE_ERROR


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of `logits` in descending order, and their ids; any of equal
    ones.

    Only the blocks of a row with the largest maxima are searched: `count` blocks, each of which holds a token
    that is at least as large as every token of the other blocks.
    """
    vocab_size = logits.shape[1]
    size = 1 << int(math.log2(max(1.0, vocab_size / count)) / 2)
    if size < 4:
        values, ids = logits.topk(count, dim=-1)
        return values, ids
    num_blocks = vocab_size // size
    # Block b is b, b + num_blocks, b + 2 * num_blocks, ...: its maximum is taken across vectors.
    body = logits[:, : size * num_blocks].view(len(logits), size, num_blocks)
    blocks = body.amax(1).topk(count, dim=-1).indices
    steps = torch.arange(0, size * num_blocks, num_blocks, device=logits.device)
    rest = torch.arange(size * num_blocks, vocab_size, device=logits.device)
    ids = torch.cat(((blocks[:, None, :] + steps[:, None]).flatten(1), rest.expand(len(logits), -1)), 1)
    best = logits.gather(1, ids).topk(count, dim=-1)
    return best.values, ids.gather(1, best.indices)


class _Nucleus(NamedTuple):
    """The candidates [num_rows, num_candidates] that top-p drops, whether it keeps none beyond them, and
    whether rounding cannot change either, [num_rows, 1]."""

    is_dropped: Tensor
    is_covered: Tensor
    is_sure: Tensor


def _nucleus(probabilities: Tensor, warp: Warp, is_exact: bool) -> _Nucleus:
    """Apply top-p as `Warp.dense` does, over candidates. With `is_exact`, their probabilities are those of
    the whole row bit for bit, and sums are taken in order."""
    top_p = warp.column([top_p if top_p < 1.0 else 2.0 for top_p in warp.top_p])  # 2: never reached
    ordered = probabilities.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    threshold = ordered.gather(1, num_kept - 1)
    is_dropped = probabilities < threshold
    next_below = probabilities.masked_fill(~is_dropped, -1.0).amax(-1, keepdim=True)
    is_sure = next_below < threshold * (1 - _RATIO_ERROR)
    if not is_exact:
        is_near = (before - top_p).abs() <= _MASS_ERROR
        is_sure &= ~is_near[:, 1:].any(-1, keepdim=True)  # the first is 0 however it is summed up
    is_sure |= top_p > 1.0
    return _Nucleus(is_dropped, ordered[:, -1:] < threshold * (1 - _RATIO_ERROR), is_sure)


# ------------------------------------------------------------------------------------------------ noise
# Counter-based noise: a uniform number for every (seed, output index, token id), and Gumbel noise from it.
#
# The noise has no state: a token that is drawn again (after a replica's death, in another batch, on another
# device) sees the same noise. The integer part is splitmix64 on int64 with wraparound, equal bit for bit on
# CPU and CUDA.


def signed(value: int) -> int:
    """Return the int64 with the same low 64 bits as `value`."""
    value &= (1 << _BITS) - 1
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def mix_(x: Tensor) -> Tensor:
    """Apply splitmix64's finalizer to every element (int64) in place: a bijection whose bits look random."""
    x ^= _shift_right(x, 30)
    x *= signed(_MULTIPLY_1)
    x ^= _shift_right(x, 27)
    x *= signed(_MULTIPLY_2)
    x ^= _shift_right(x, 31)
    return x


def token_counters(num_tokens: int, device: torch.device) -> Tensor:
    """Return the counter of each token id, int64 [vocab_size]; made once, passed to `hashes`."""
    ids = torch.arange(1, num_tokens + 1, dtype=torch.int64, device=device)
    return ids.mul_(signed(_WEYL))


def row_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> Tensor:
    """Return a key for each (seed, output index), int64 [num_rows] on the CPU. Seeds lie in [-(2^63),
    2^64)."""
    keys = mix_(torch.tensor([signed(seed ^ _WEYL) for seed in seeds], dtype=torch.int64))
    steps = torch.tensor(output_indices, dtype=torch.int64)
    return mix_(keys.add_(steps.mul_(signed(_WEYL))))


def hashes(keys: Tensor, token_counters: Tensor) -> Tensor:
    """Hash each row's key [num_rows] with the counters [vocab_size] or [num_rows, num_ids] of its tokens."""
    return mix_(keys[:, None] + token_counters)


def gumbel(keys: Tensor, token_counters: Tensor) -> Tensor:
    """Return independent standard Gumbel noise -log(E), E exponential, float32 of the shape of `hashes`.

    E = -log(1 - u) with u in (0, 1) of 54 bits: the resolution is finest where E is small, which is where
    an unlikely token wins. All values are finite (from -2.9 to 37.5), so a masked token stays masked.
    """
    bits = _shift_right(hashes(keys, token_counters), _BITS - _UNIFORM_BITS)
    bits |= 1  # never zero
    uniform = bits.to(torch.float32)
    uniform *= 2.0**-_UNIFORM_BITS
    uniform.clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Shift logically: torch's shift is arithmetic, so the copies of the sign bit are masked off."""
    shifted = x >> num_bits
    shifted &= (1 << (_BITS - num_bits)) - 1
    return shifted
