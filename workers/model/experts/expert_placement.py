"""Decide which experts of each layer the device holds, by how many tokens choose them, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtransfer.common.moving_average import kept_share


class PlacementRules(NamedTuple):
    """Configures when an expert of the device makes place for another one: where the load of the other one,
    the tokens that chose it, exceeds `factor` times its own by at least `margin`. A token counts 1/e after
    `memory_s`.

    A swap copies the weights of an expert while decoding waits, so there are at most `swaps_per_s`, and no
    more than this at once after a pause."""

    factor: float = 1.5
    margin: float = 8.0
    memory_s: float = 30.0
    swaps_per_s: float = 4.0


class Swap(NamedTuple):
    """The exchange of one layer's expert on the device for another."""

    layer: int
    incoming: int
    outgoing: int


class ExpertPlacement:
    """The experts of all layers and their loads. Times are seconds of one clock, which does not go back."""

    def __init__(self, is_on_device: Sequence[NDArray[np.bool_]], rules: PlacementRules, now: float) -> None:
        """Take for each layer which of its experts are on the device, [num_experts]."""
        self._is_on_device = np.array(is_on_device, dtype=bool)
        self._rules = rules
        self._loads = np.zeros(self._is_on_device.shape)
        self._most_at_once = max(rules.swaps_per_s, 1.0)
        self._num_allowed = self._most_at_once
        self._now = now

    @property
    def is_on_device(self) -> NDArray[np.bool_]:
        """Whether each expert is on the device, [num_layers, num_experts]."""
        return self._is_on_device.copy()

    def count(self, tokens: Sequence[NDArray[np.int64]], now: float) -> None:
        """Count the tokens that chose each expert of each layer, [num_experts], since the last call."""
        self._advance(now)
        self._loads += np.array(tokens)

    def take_swaps(self, now: float) -> list[Swap]:
        """Return the swaps to be made now, those with the largest gains of all layers, and count them as
        made."""
        self._advance(now)
        swaps: list[Swap] = []
        while self._num_allowed >= 1 and (swap := self._best()) is not None:
            self._is_on_device[swap.layer, swap.incoming] = True
            self._is_on_device[swap.layer, swap.outgoing] = False
            self._num_allowed -= 1
            swaps.append(swap)
        return swaps

    def _advance(self, now: float) -> None:
        elapsed_s, self._now = now - self._now, now
        assert elapsed_s >= 0
        self._loads *= kept_share(elapsed_s, self._rules.memory_s)
        self._num_allowed = min(self._num_allowed + elapsed_s * self._rules.swaps_per_s, self._most_at_once)

    def _best(self) -> Swap | None:
        """Return the swap that the rules allow with the largest gain in load; None if there is none."""
        hot = np.where(self._is_on_device, -np.inf, self._loads)
        cold = np.where(self._is_on_device, self._loads, np.inf)
        incoming, outgoing = hot.argmax(1), cold.argmin(1)
        gained, lost = hot.max(1), cold.min(1)
        is_worth = gained >= self._rules.factor * lost + self._rules.margin
        if not is_worth.any():
            return None
        layer = int(np.where(is_worth, gained - lost, -np.inf).argmax())
        return Swap(layer, int(incoming[layer]), int(outgoing[layer]))
