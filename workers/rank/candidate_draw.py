"""Draw a token from the largest logits alone, where that gives the token of the whole distribution."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.model.noise import gumbel
from workers.rank.logits import NUCLEUS_TOKENS, Warp, nucleus_end

# A bound on the difference of two ways to sum up to `MOST_COUNTED` probabilities in float32.
_MASS_ERROR = 2e-5
# A bound on the difference of two ways to compute a probability in float32, apart from their sums.
_RATIO_ERROR = 2e-6
# More than ten times the error that logarithms of float32 that are exact to one unit in the last place make
# in a score and its noise, relative to the size of both.
_SCORE_ERROR = 2.0**-20
_MOST_NOISE = 64.0


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
    most = int(warp.top_k.max())
    width = min(vocab_size, most + most // 4 + 16 if is_counted else NUCLEUS_TOKENS)
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
    if warp.top_p.min() < 1.0:
        if is_counted:
            probabilities = scaled.masked_fill(is_dropped, -torch.inf).softmax(-1)
        else:
            probabilities = (logits / warp.temperature).softmax(-1).gather(1, ids)
        nucleus = _nucleus(probabilities, warp, is_exact=not is_counted and logits.device.type == "cpu")
        is_dropped |= nucleus.is_dropped
        is_sure = nucleus.is_sure
        if not is_counted:
            is_covered |= nucleus.is_covered
    if warp.min_p.max() > 0.0:
        least = scaled[:, :1] + warp.log_min_p
        is_dropped |= scaled < least
        if not is_counted:
            is_covered |= last < least
    scores = scaled + gumbel(keys, counters[ids])
    top = scores.masked_fill_(is_dropped, -torch.inf).topk(min(2, width), dim=-1)
    is_sure = (is_sure & is_covered)[:, 0]
    if width > 1:
        is_sure &= is_apart(top.values[:, 0], top.values[:, 1])
    return Draw(ids.gather(1, top.indices[:, :1])[:, 0], is_sure)


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
    top_p = warp.column(np.where(warp.top_p < 1.0, warp.top_p, np.float32(2.0)))  # 2: never reached
    ordered = probabilities.sort(dim=-1, descending=True).values
    before, threshold = nucleus_end(ordered, top_p)
    is_dropped = probabilities < threshold
    next_below = probabilities.masked_fill(~is_dropped, -1.0).amax(-1, keepdim=True)
    is_sure = next_below < threshold * (1 - _RATIO_ERROR)
    if not is_exact:
        is_near = (before - top_p).abs() <= _MASS_ERROR
        is_sure &= ~is_near[:, 1:].any(-1, keepdim=True)  # the first is 0 however it is summed up
    is_sure |= top_p > 1.0
    return _Nucleus(is_dropped, ordered[:, -1:] < threshold * (1 - _RATIO_ERROR), is_sure)
