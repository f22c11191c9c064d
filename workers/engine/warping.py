"""Temperature, top-k, top-p and min-p over whole rows of logits: what every shorter way must agree with.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.messages import SamplingParams

_NUCLEUS_TOKENS = 256
"""Most nuclei are smaller: on the CPU the whole vocabulary is sorted only for the rows where this fails."""


class Warp:
    """The parameters of R rows that all have a temperature. What is off: `top_k` 0, `top_p` 1, `min_p` 0."""

    def __init__(self, sampling: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.temperature = self.column([it.temperature for it in sampling])
        self.top_k = [it.top_k if 0 < it.top_k < vocab_size else 0 for it in sampling]
        self.top_p = [min(it.top_p, 1.0) for it in sampling]
        self.min_p = [max(it.min_p, 0.0) for it in sampling]

    def column(self, values: Sequence[float]) -> Tensor:
        """[R, 1] float32 on the device."""
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)[:, None]

    def index(self, values: Sequence[int]) -> Tensor:
        """[R] int64 on the device."""
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def dense(self, logits: Tensor) -> Tensor:
        """[R, V]: scaled by temperature, -inf where a filter drops the token."""
        logits = logits / self.temperature
        rows = [row for row, top_k in enumerate(self.top_k) if top_k]
        if rows:
            top_k = [self.top_k[row] for row in rows]
            self._replace(logits, rows, lambda part: _keep_top_k(part, self.index(top_k), max(top_k)))
        rows = [row for row, top_p in enumerate(self.top_p) if top_p < 1.0]
        if rows:
            top_p = self.column([self.top_p[row] for row in rows])
            self._replace(logits, rows, lambda part: _keep_top_p(part, top_p))
        rows = [row for row, min_p in enumerate(self.min_p) if min_p > 0.0]
        if rows:
            min_p = self.column([self.min_p[row] for row in rows])
            self._replace(logits, rows, lambda part: _keep_min_p(part, min_p))
        return logits

    def least(self, logits: Tensor) -> Tensor:
        """[R, 1]: what min-p asks of logits [R, V] scaled by temperature."""
        if max(self.min_p) == 0.0:
            return torch.full_like(self.temperature, -torch.inf)
        return logits.amax(-1, keepdim=True) / self.temperature + self.column(self.min_p).log()

    def _replace(self, logits: Tensor, rows: list[int], change: Callable[[Tensor], Tensor]) -> None:
        """logits[rows] = change(logits[rows]), without the gather when `rows` are all."""
        if len(rows) == len(logits):
            logits.copy_(change(logits))
        else:
            index = self.index(rows)
            logits[index] = change(logits[index])


def _keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """All tokens at least as likely as the k-th; ties with it stay, so the result has no arbitrary part."""
    best = logits.topk(largest, dim=-1).values
    return logits.masked_fill(logits < best.gather(1, top_k[:, None] - 1), -torch.inf)


def _keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """The likeliest tokens whose predecessors sum to less than p, at least one; ties with the last stay."""
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
    """[R, 1]: the probability of the last token of the nucleus, from the sorted probabilities [R, n]."""
    before = descending.cumsum(dim=-1) - descending
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, num_kept - 1)


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """All tokens at least `min_p` times as likely as the likeliest."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
