"""Remember of the inputs of a product what its factors are searched by."""

from __future__ import annotations

import torch
from torch import Tensor

# Of each window.
_NUM_ROWS = 8
# Moves the rows that are taken from window to window: any number without a factor in common with lengths.
_STRIDE = 37


class InputSample:
    """Keeps the magnitude of each input of a product, and the inputs of a few tokens."""

    def __init__(self, num_inputs: int) -> None:
        self._fourth_powers, self._num_tokens = torch.zeros(num_inputs), 0
        self._rows: list[Tensor] = []

    def add(self, inputs: Tensor) -> None:
        """See the inputs of a window, [num_tokens, num_inputs]."""
        num_tokens = len(inputs)
        self._fourth_powers += inputs.float().square().square_().sum(0)
        self._num_tokens += num_tokens
        places = torch.arange(0, num_tokens, -(-num_tokens // _NUM_ROWS))
        self._rows.append(inputs[(places + _STRIDE * len(self._rows)) % num_tokens].float())

    @property
    def magnitudes(self) -> Tensor:
        """The root of the mean of the fourth powers of each input, float32 [num_inputs]: between that of the
        squares and the largest, which is that of a single token."""
        return (self._fourth_powers / self._num_tokens).pow_(0.25)

    @property
    def rows(self) -> Tensor:
        """The inputs of some tokens, from all windows, float32 [num_rows, num_inputs]."""
        return torch.cat(self._rows)
