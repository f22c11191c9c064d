"""Sample tokens from logits, for all sampling rows of a step at once, and keep what each slot's sampling
needs.

Processing follows the order of `workers.messages.sampling.SamplingParams`. Every operation works row by row,
so a slot's token does not depend on its neighbours in the batch. Shortcuts are taken where they give the same
token: the few likeliest candidates first, where top-k, top-p or min-p drops all others, and a kernel that
computes noise only where it could win. Where rounding could decide otherwise, or the candidates may not be
all, the row is not sure; it is drawn again by `Warp.dense` and noise for the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import SlotStart
from workers.messages.sampling import TokenLogprob
from workers.model import native
from workers.model.noise import gumbel, output_keys, seed_keys, token_counters
from workers.rank.candidate_draw import Draw, draw_from_candidates
from workers.rank.logits import (
    SlotNeeds,
    Slots,
    SlotTable,
    Warp,
    apply_masks_,
    distinct_tokens,
)

# The largest top-k for which candidates are taken first.
MOST_COUNTED = 1024


class Sampled(NamedTuple):
    """A token for each row, and by row the log-probabilities where they are asked for."""

    tokens: NDArray[np.uint32]
    row_to_logprob: dict[int, TokenLogprob]


class Sampler:
    """Draws tokens: `start` and `free` maintain slots, `sample` draws one token for each given slot. Slots
    are numbers below `max_slots`; each may be given once a call."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device, max_slots: int
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = SlotTable(max_slots, vocab_size, eos_token_ids)
        self._counters = token_counters(vocab_size, device)
        self._arguments = native.SamplingArguments(self._table.address, max_slots)

    def start(self, start: SlotStart) -> None:
        """Add slots. Their output so far counts for penalties, minimum length and noise. A call that fails
        adds none."""
        sampling, samples = start.sampling, start.samples
        prompt_ids = distinct_tokens(start.prompt if sampling.penalizes_prompt else b"", self._vocab_size)
        self._table.start(samples, sampling, seed_keys([sample.seed for sample in samples]), prompt_ids)

    def free(self, slot: int) -> None:
        """Forget a slot."""
        self._table.free(slot)

    def lift_minimum(self, slot: int) -> None:
        """Let the slot end before it has its minimum of tokens."""
        self._table.lift_minimum(slot)

    def sample(self, logits: Tensor, slots: Slots, masks: NDArray[np.uint32] | None = None) -> Sampled:
        """Draw one token for each slot from float32 `logits` [num_slots, vocab_size], which may be
        overwritten. `masks` [num_slots, ceil(vocab_size / 32)] may allow only some tokens: bit i of word w is
        that of token 32 w + i. Synchronizes with the device; a call that fails has changed nothing."""
        assert logits.shape == (len(slots), self._vocab_size), f"{tuple(logits.shape)} for {len(slots)} slots"
        needs = self._table.needs(slots)
        some = int(np.bitwise_or.reduce(needs)) if len(slots) else 0
        logprobs: Logprobs | None = None
        asking = np.flatnonzero(needs & SlotNeeds.LOGPROBS)
        if len(asking):
            their_logits = logits[torch.from_numpy(asking).to(self._device)]
            logprobs = Logprobs(their_logits, asking, self._table.num_logprobs[slots[asking]])
        kernels = native.load() if self._has_kernels else None
        if kernels is not None:
            logits = logits.contiguous()
            draw = kernels.sample_rows(self._arguments.of_logits(logits, slots, masks))
        else:
            draw = self._sample_rows(logits, slots, needs, masks)
        tokens, is_sure = draw
        if not is_sure.all():
            rows = np.flatnonzero(~is_sure)
            exact = self._draw_exactly(logits[torch.from_numpy(rows).to(self._device)], slots[rows])
            tokens[rows] = exact.cpu().numpy()
        found = Sampled(tokens.view(np.uint32), {})
        if logprobs is not None:
            chosen = torch.from_numpy(tokens[asking].astype(np.int64)).to(self._device)
            logprobs.fill(chosen)
            found.row_to_logprob.update(logprobs.read(logprobs.table))
        if some & SlotNeeds.PENALTIES:
            rows = np.flatnonzero(needs & SlotNeeds.PENALTIES)
            self._table.reserve(slots[rows])
            if kernels is not None:
                kernels.count_tokens(self._arguments.of_tokens(slots[rows], tokens[rows]))
            else:
                self._table.count(slots[rows], tokens[rows])
        self._table.num_output[slots] += 1
        return found

    @property
    def _has_kernels(self) -> bool:
        return native.serves(self._device, torch.float32)

    # --------------------------------------------------------------------------------- without kernels

    def _sample_rows(
        self, logits: Tensor, slots: Slots, needs: NDArray[np.uint32], masks: NDArray[np.uint32] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Draw as the kernel `sample_rows` does, and change the logits in place like it."""
        self._table.change_(logits, slots, needs)
        if masks is not None:
            apply_masks_(logits, masks)
        draw = self._draw(logits, slots)
        both = torch.stack((draw.tokens, draw.is_sure.to(torch.int64))).cpu().numpy()
        return both[0].astype(np.int32), both[1].astype(np.bool_)

    def _draw(self, logits: Tensor, slots: Slots) -> Draw:
        """Draw each row in the shortest way that its parameters allow."""
        table = self._table
        is_greedy = table.temperature[slots] == 0.0
        top_k = table.top_k[slots]
        is_filtered = (table.top_p[slots] < 1.0) | (table.min_p[slots] > 0.0)
        is_counted = ~is_greedy & (top_k > 0) & (top_k <= MOST_COUNTED)
        is_nucleus = ~is_greedy & (top_k == 0) & is_filtered
        way_to_rows: dict[Callable[[Tensor, Slots], Draw], NDArray[np.bool_]] = {
            self._draw_likeliest: is_greedy,
            self._draw_counted: is_counted,
            self._draw_from_nucleus: is_nucleus,
            self._draw_filtered: ~(is_greedy | is_counted | is_nucleus),
        }
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        is_sure = torch.empty(len(slots), dtype=torch.bool, device=self._device)
        for way, are_there in way_to_rows.items():
            if are_there.all():
                return way(logits, slots)
            if are_there.any():
                index = torch.from_numpy(np.flatnonzero(are_there)).to(self._device, non_blocking=True)
                tokens[index], is_sure[index] = way(logits[index], slots[are_there])
        return Draw(tokens, is_sure)

    def _draw_likeliest(self, logits: Tensor, slots: Slots) -> Draw:
        return _certainly(logits.argmax(dim=-1))

    # Two names, so that `_draw` keeps rows with a top-k apart from those without.
    def _draw_counted(self, logits: Tensor, slots: Slots) -> Draw:
        return draw_from_candidates(logits, self._warp(slots), self._keys(slots), self._counters)

    def _draw_from_nucleus(self, logits: Tensor, slots: Slots) -> Draw:
        return draw_from_candidates(logits, self._warp(slots), self._keys(slots), self._counters)

    def _draw_filtered(self, logits: Tensor, slots: Slots) -> Draw:
        return _certainly(self._draw_exactly(logits, slots))

    def _draw_exactly(self, logits: Tensor, slots: Slots) -> Tensor:
        """Draw with noise for every token that no filter drops."""
        warped, keys = self._warp(slots).dense(logits), self._keys(slots)
        if self._device.type != "cpu":
            return (warped + gumbel(keys, self._counters)).argmax(dim=-1)
        tokens = torch.zeros(len(slots), dtype=torch.int64)
        for row, scores in enumerate(warped):  # one after another, in cache
            ids = (scores != -torch.inf).nonzero()[:, 0]
            if len(ids):
                noise = gumbel(keys[row : row + 1], self._counters[ids])[0]
                tokens[row] = ids[(scores[ids] + noise).argmax()]
        return tokens

    def _warp(self, slots: Slots) -> Warp:
        return Warp(self._table, slots, self._device)

    def _keys(self, slots: Slots) -> Tensor:
        keys = output_keys(self._table.keys[slots], self._table.num_output[slots])
        return keys.to(self._device, non_blocking=True)


class Logprobs:
    """Log-probabilities of the model's own distribution, for the `rows` of a step that need them: of each the
    chosen token's and the `num_top` largest, from their `logits` [num_rows, vocab_size] before these are
    changed. `table` is all that goes with the rows, of which the first column is still to be filled. It takes
    memory only when it is made."""

    def __init__(self, logits: Tensor, rows: NDArray[np.integer], num_top: NDArray[np.int32]) -> None:
        self._rows = rows.tolist()
        self._num_top = num_top.tolist()
        self._width = max(self._num_top)
        self._logprobs = torch.log_softmax(logits, dim=-1)
        self._of_tokens = self._logprobs.new_empty((len(self._rows), 1))
        top = self._logprobs.topk(self._width, dim=-1)
        # float64 holds every token id and every float32 exactly
        parts = (self._of_tokens, top.values, top.indices)
        self.table = torch.cat([part.double() for part in parts], dim=1)

    def fill(self, tokens: Tensor) -> None:
        """Fill in the rows' `tokens` int64 [num_rows]."""
        torch.gather(self._logprobs, 1, tokens[:, None], out=self._of_tokens)
        self.table[:, :1].copy_(self._of_tokens)

    def read(self, table: Tensor) -> dict[int, TokenLogprob]:
        """Return the log-probabilities of a table that was copied to the host, by row of the step."""
        row_to_logprob: dict[int, TokenLogprob] = {}
        for row, num_top, (value, *best) in zip(self._rows, self._num_top, table.tolist(), strict=True):
            pairs = zip(best[self._width :][:num_top], best[:num_top], strict=True)
            row_to_logprob[row] = TokenLogprob(value, tuple((int(id_), logprob) for id_, logprob in pairs))
        return row_to_logprob


def _certainly(tokens: Tensor) -> Draw:
    return Draw(tokens, torch.ones_like(tokens, dtype=torch.bool))
