"""Change logits before a token is drawn: penalties, then temperature, top-k, top-p and min-p.

Penalties read and write only the logits of tokens that a slot's prompt and output hold. `Warp.dense` filters
whole rows; every shortcut of the sampler must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages import SamplingParams

# Most nuclei are smaller: on the CPU the whole vocabulary is sorted only for the rows where this fails.
_NUCLEUS_TOKENS = 256


class PromptTokens:
    """The distinct tokens of a prompt, shared by the samples of a request."""

    def __init__(self, prompt: bytes, vocab_size: int, device: torch.device) -> None:
        is_there = np.zeros(vocab_size, dtype=np.bool_)
        is_there[np.frombuffer(prompt, dtype="<u4")] = True
        self._sorted = np.flatnonzero(is_there)
        self.ids = torch.from_numpy(self._sorted).to(device)

    def contains(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the tokens occur in the prompt."""
        places = np.searchsorted(self._sorted, tokens).clip(max=len(self._sorted) - 1)
        are_there: NDArray[np.bool_] = self._sorted[places] == tokens
        return are_there


class TokenPenalties:
    """The penalties of one slot's tokens on its next logits.

    `prompt` is None if the repetition penalty is off. Output tokens are kept on the host, where they become
    known; prompt tokens are kept on the device.
    """

    def __init__(self, sampling: SamplingParams, prompt: PromptTokens | None, output: bytes) -> None:
        self.sampling = sampling
        self.prompt = prompt
        ids, counts = np.unique(np.frombuffer(output, dtype="<u4"), return_counts=True)
        self._ids = ids.astype(np.int64)
        self._counts = counts.astype(np.float32)
        self._repetitions = self._repetitions_of(self._ids)
        self._token_to_place = {token: place for place, token in enumerate(ids.tolist())}

    def count(self, token: int) -> None:
        """Count one more of this token in the output."""
        place = self._token_to_place.get(token)
        if place is None:
            place = self._token_to_place[token] = len(self._token_to_place)
            if place == len(self._ids):
                num_more = max(16, place)
                self._ids, self._counts, self._repetitions = (
                    np.concatenate((values, np.zeros(num_more, values.dtype)))
                    for values in (self._ids, self._counts, self._repetitions)
                )
            self._ids[place] = token
            self._repetitions[place] = self._repetitions_of(self._ids[place : place + 1])[0]
        self._counts[place] += 1

    def _repetitions_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        repetitions = np.full(len(ids), self.sampling.repetition_penalty, dtype=np.float32)
        if self.prompt is not None:
            repetitions[self.prompt.contains(ids)] = 1.0
        return repetitions

    @property
    def output(self) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """The id, the count and the repetition penalty of each distinct output token. The penalty is 1 for
        tokens that the prompt holds too."""
        num = len(self._token_to_place)
        return self._ids[:num], self._counts[:num], self._repetitions[:num]


def penalize_(logits: Tensor, rows: Sequence[int], penalties: Sequence[TokenPenalties]) -> None:
    """Apply one of `penalties` to each of the rows of `logits` [num_rows, vocab_size], in place."""
    _penalize_prompts(logits, rows, penalties)
    outputs = [it.output for it in penalties]
    lengths = [len(ids) for ids, _, _ in outputs]
    if not sum(lengths):
        return
    ids, counts, repetitions = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
    chosen = [it.sampling for it in penalties]
    frequencies = np.repeat(_float32([it.frequency_penalty for it in chosen]), lengths)
    presences = np.repeat(_float32([it.presence_penalty for it in chosen]), lengths)
    places = np.stack((np.repeat(np.array(rows), lengths), ids))
    values = np.stack((counts, repetitions, frequencies, presences))
    row, token = torch.from_numpy(places).to(logits.device, non_blocking=True)
    count, repetition, frequency, presence = torch.from_numpy(values).to(logits.device, non_blocking=True)
    part = _repeated(logits[row, token], repetition)
    logits[row, token] = part - count * frequency - presence


def _penalize_prompts(logits: Tensor, rows: Sequence[int], penalties: Sequence[TokenPenalties]) -> None:
    those = [(row, it.prompt, it.sampling) for row, it in zip(rows, penalties, strict=True) if it.prompt]
    if not those:
        return
    lengths = [len(prompt.ids) for _, prompt, _ in those]
    device, num_tokens = logits.device, sum(lengths)
    of_rows = torch.tensor([[row for row, _, _ in those], lengths]).to(device, non_blocking=True)
    factors = torch.from_numpy(_float32([it.repetition_penalty for _, _, it in those])).to(device)
    row = torch.repeat_interleave(of_rows[0], of_rows[1], output_size=num_tokens)
    repetition = torch.repeat_interleave(factors, of_rows[1], output_size=num_tokens)
    token = torch.cat([prompt.ids for _, prompt, _ in those])
    logits[row, token] = _repeated(logits[row, token], repetition)


def _repeated(part: Tensor, repetition: Tensor) -> Tensor:
    """Lower logits by the repetition penalty, on either side of zero."""
    return torch.where(part < 0, part * repetition, part / repetition)


def _float32(values: Sequence[float]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


class Warp:
    """Temperature and filters of rows that all have a temperature. A filter is off at `top_k` 0, `top_p` 1
    and `min_p` 0."""

    def __init__(self, sampling: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.temperature = self.column([it.temperature for it in sampling])
        self.top_k = [it.top_k if 0 < it.top_k < vocab_size else 0 for it in sampling]
        self.top_p = [min(it.top_p, 1.0) for it in sampling]
        self.min_p = [max(it.min_p, 0.0) for it in sampling]

    def column(self, values: Sequence[float]) -> Tensor:
        """Return the values as float32 [num_rows, 1] on the device."""
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)[:, None]

    def index(self, values: Sequence[int]) -> Tensor:
        """Return the values as int64 [num_rows] on the device."""
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def dense(self, logits: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] scaled by temperature, -inf where a filter drops the token."""
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
        """Return the least scaled logit that min-p keeps, [num_rows, 1]."""
        if max(self.min_p) == 0.0:
            return torch.full_like(self.temperature, -torch.inf)
        return logits.amax(-1, keepdim=True) / self.temperature + self.column(self.min_p).log()

    def _replace(self, logits: Tensor, rows: list[int], change: Callable[[Tensor], Tensor]) -> None:
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
    """Return the probability of the nucleus's last token, [num_rows, 1], from probabilities in descending
    order."""
    before = descending.cumsum(dim=-1) - descending
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
    return descending.gather(1, num_kept - 1)


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep all tokens at least `min_p` times as likely as the likeliest."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
