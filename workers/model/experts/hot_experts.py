"""Keep the experts that tokens choose most on the device."""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.common.clock import Clock
from workers.model.experts.expert_placement import ExpertPlacement, PlacementRules
from workers.model.experts.host_experts import SplitExperts

# The period in which counts are read.
_PERIOD_S = 0.25
_RULES = PlacementRules()


class HotExperts:
    """Swaps the experts of `layers`, each layer of a rank whose experts are split, by counted use."""

    def __init__(self, layers: Sequence[SplitExperts], clock: Clock, rules: PlacementRules = _RULES) -> None:
        self._layers, self._clock = layers, clock
        now = clock.now()
        self._placement = ExpertPlacement([layer.places >= 0 for layer in layers], rules, now)
        self._counts = [layer.counts.copy() for layer in layers]
        self._next_at = now + _PERIOD_S

    def between_steps(self) -> int:
        """Make the swaps that are due. Returns how many."""
        if not self._layers or (now := self._clock.now()) < self._next_at:
            return 0
        self._next_at = now + _PERIOD_S
        counts = [layer.counts.copy() for layer in self._layers]
        self._placement.count([new - old for new, old in zip(counts, self._counts, strict=True)], now)
        self._counts = counts
        swaps = self._placement.take_swaps(now)
        for swap in swaps:
            self._layers[swap.layer].swap(swap.incoming, swap.outgoing)
        return len(swaps)
