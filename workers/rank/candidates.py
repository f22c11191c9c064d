"""Draws from the few likeliest tokens, where top-k, top-p or min-p drops all others.

The token is the one that `Warp.dense` and noise for the whole vocabulary would give. Where rounding could
decide otherwise, or the candidates may not be all, the row is not sure, and is drawn again from everything.
Not yet validated on CUDA.
Letters: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.rank import noise
from workers.rank.logits import Warp

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


class Draw(NamedTuple):
    """A token for each row, and whether it is certainly the right one."""

    tokens: Tensor
    is_sure: Tensor


def draw_from_candidates(logits: Tensor, warp: Warp, keys: Tensor, counters: Tensor) -> Draw:
    """[R] tokens from `logits` [R, V] with the noise of `keys` [R] and `counters` [V].

    Either every row has a top-k, of at most `MOST_COUNTED`, or none has one.
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
    scores = scaled + noise.gumbel(keys, counters[ids])
    top = scores.masked_fill_(is_dropped, -torch.inf).topk(min(2, width), dim=-1)
    is_sure = (is_sure & is_covered)[:, 0]
    if width > 1:
        is_sure &= is_apart(top.values[:, 0], top.values[:, 1])
    return Draw(ids.gather(1, top.indices[:, :1])[:, 0], is_sure)


def draw_by_rejection(
    logits: Tensor, warp: Warp, least: Tensor, draw: Callable[[slice, Tensor], Draw]
) -> Draw:
    """[R] tokens from `logits` [R, V] on a CPU whose rows all have a top-p and no top-k, without sorting any.

    `draw(rows, least)` is the best of all tokens of these rows that are scaled to at least `least` [r, 1].
    The best of all is the best of the nucleus if it is in there. Otherwise nothing as unlikely is, so the
    draw is repeated among what is likelier.
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
    """[R]: whether no rounding of logarithms and sums could bring the second score before the best one."""
    return best - second > (best.abs() + _MOST_NOISE) * _SCORE_ERROR


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of [R, V] in descending order, and their ids; of equal ones any.

    Only the blocks of a row with the largest maxima are searched: as many blocks as there are tokens wanted,
    each with one token that is at least as large as all tokens elsewhere.
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
    """Which candidates [R, C] top-p drops; [R, 1]: whether none beyond them is kept, and whether rounding
    cannot change either."""

    is_dropped: Tensor
    is_covered: Tensor
    is_sure: Tensor


def _nucleus(probabilities: Tensor, warp: Warp, is_exact: bool) -> _Nucleus:
    """As `warping` does it, over candidates. `is_exact`: their probabilities are those of the whole row bit
    for bit, and sums are taken in order."""
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
