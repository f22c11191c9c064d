"""The sizes of an exchange of rows between the ranks of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class ExchangeSizes(NamedTuple):
    """The rows that a rank sends to each rank in an exchange, and receives from each (None: as many as they
    send), and their columns and dtype; None: the model's."""

    sent: Sequence[int]
    received: Sequence[int] | None
    num_columns: int
    dtype: torch.dtype | None = None
