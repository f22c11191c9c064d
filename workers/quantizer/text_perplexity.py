"""The perplexity of a model over windows of a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.decoder import Decoder
from workers.quantizer.window_states import Watch, WindowStates

# Logits of so many tokens are in memory at a time.
_CHUNK_TOKENS = 128


def text_windows(tokens: npt.NDArray[np.uint32], num_windows: int, num_tokens: int) -> list[Tensor]:
    """Return windows of at most `num_tokens`, int64, from all over the tokens of a text."""
    num_tokens = min(num_tokens, len(tokens))
    starts = np.linspace(0, len(tokens) - num_tokens, num_windows).astype(int)
    starts = np.unique(starts)
    return [torch.from_numpy(tokens[at : at + num_tokens].astype(np.int64)) for at in starts]


@torch.inference_mode()
def layered_perplexity(
    folder: Path,
    dtype: torch.dtype,
    windows: list[Tensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    watch: Watch = lambda decoder: None,
) -> float:
    """Return the perplexity of the windows, each from its first token on, with one layer of the model in
    memory at a time. `progress` is called with the stages done and all, `watch` with each stage before it
    runs. Raises the errors of `WindowStates`."""
    model = WindowStates(folder, dtype, windows)
    stages = model.stages()
    for number, stage in enumerate(stages):
        progress(number, len(stages))
        decoder = model.advance(stage, watch)
    losses = [_losses(decoder, states, tokens) for states, tokens in zip(model.states, windows, strict=True)]
    return perplexity_of(losses)


def perplexity_of(losses: list[Tensor]) -> float:
    """Return that of tokens with these losses, in nats."""
    return math.exp(torch.cat(losses).double().mean())


def token_losses(logits: Tensor, following: Tensor) -> Tensor:
    """Return the negative log-likelihoods, in nats, of the tokens that follow those of the `logits`."""
    return F.cross_entropy(logits, following, reduction="none")


def _losses(decoder: Decoder, states: Tensor, tokens: Tensor) -> Tensor:
    losses = []
    for begin in range(0, len(tokens) - 1, _CHUNK_TOKENS):
        end = min(begin + _CHUNK_TOKENS, len(tokens) - 1)
        losses.append(token_losses(decoder.logits(states[begin:end]), tokens[begin + 1 : end + 1]))
    return torch.cat(losses)
