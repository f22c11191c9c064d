"""Multiply what heads of attention mix by gates."""

from __future__ import annotations

from torch import Tensor

from workers.model import native


class OutputGate:
    """The gates of a layer's heads, which follow queries, keys and values among the columns of their
    product."""

    def __init__(self, num_columns: int) -> None:
        """`num_columns` are those of all heads that the rank holds."""
        self._num_columns = num_columns

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values, and the gates [num_tokens, num_columns], as views."""
        num_others = projected.shape[1] - self._num_columns
        return projected[:, :num_others], projected[:, num_others:]

    @staticmethod
    def multiply(mixed: Tensor, gates: Tensor) -> Tensor:
        """Multiply `mixed` [num_tokens, num_columns], in place, by the rounded sigmoid of the gates, which
        may be overwritten."""
        if native.serves(mixed.device, mixed.dtype):
            kernels = native.load()
            assert kernels is not None
            return kernels.multiply_by_sigmoids(mixed, gates)
        return mixed.mul_(gates.sigmoid_())
