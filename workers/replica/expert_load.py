"""The recent load of a model's experts, from what the ranks have counted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from kvtransfer.common.moving_average import kept_share
from workers.messages.rank_channel import ExpertCounts

# Tokens of this age weigh 1/e.
_MEMORY_S = 60.0
# The tokens of an expert, in the mean over a layer, below which chance decides which has most.
_LEAST_TOKENS = 16.0
# An expert of a lower load has had no token lately.
_IDLE_TOKENS = 0.5


class HotExpert(NamedTuple):
    """An expert, and the share of its layer's tokens that it gets."""

    layer: int
    expert: int
    share: float


class _LayerLoad(NamedTuple):
    """The load of each expert of a layer, in tokens, as of `updated_at`."""

    loads: list[float]
    total: float
    num_chosen: int
    updated_at: float


class ExpertLoad:
    """Keeps the tokens that each expert of each layer has had, of which older ones weigh less.

    Figures are those of layers with enough tokens to tell the experts apart, and 0 while there are none.
    Nothing is forgotten while there are no tokens: figures then stay as they were."""

    def __init__(self, expert_to_rank: Sequence[int] = (), memory_s: float = _MEMORY_S) -> None:
        """Take the rank of a stage that has each expert, counted from 0; (): one rank has all. Ranks that
        share their experts count as one."""
        self._expert_to_rank = tuple(expert_to_rank)
        self._num_ranks = max(expert_to_rank, default=0) + 1
        self._memory_s = memory_s
        self._layers: dict[int, _LayerLoad] = {}
        # Of `statistics`, which is asked for much more often than something is added; None: to be computed.
        self._statistics: dict[str, Any] | None = None

    def add(self, report: ExpertCounts, now: float) -> None:
        """Take in what a stage has counted since its last report."""
        counts = memoryview(report.counts).cast("I")
        num_experts = len(counts) // len(report.layers)
        for place, layer in enumerate(report.layers):
            loads: list[float] = [float(it) for it in counts[place * num_experts : (place + 1) * num_experts]]
            if (before := self._layers.get(layer)) is not None:
                kept = kept_share(now - before.updated_at, self._memory_s)
                loads = [kept * old + new for old, new in zip(before.loads, loads, strict=True)]
            self._layers[layer] = _LayerLoad(loads, sum(loads), report.num_chosen, now)
        self._statistics = None

    @property
    def imbalance(self) -> float:
        """The load of a layer's busiest expert over that of its mean expert, the mean over layers."""
        return _mean(_most_over_mean(layer.loads) for layer in self._known.values())

    @property
    def rank_imbalance(self) -> float:
        """The load of a layer's busiest rank over that of its mean rank, the mean over layers."""
        return _mean(_most_over_mean(self._of_ranks(layer.loads)) for layer in self._known.values())

    @property
    def num_idle(self) -> int:
        """The experts of all layers that have had no token lately."""
        return sum(load < _IDLE_TOKENS for layer in self._known.values() for load in layer.loads)

    def hottest(self, count: int = 1) -> list[HotExpert]:
        """Return the experts with the largest shares of their layers' tokens, the largest first."""
        experts = (
            HotExpert(number, expert, load * layer.num_chosen / layer.total)
            for number, layer in self._known.items()
            for expert, load in heapq.nlargest(count, enumerate(layer.loads), key=lambda it: it[1])
        )
        return heapq.nlargest(count, experts, key=lambda it: it.share)

    def statistics(self) -> dict[str, Any]:
        """Return the fields of `ReplicaStats` that concern experts; {}: nothing is known of any."""
        if self._statistics is None:
            self._statistics = self._computed() if self._known else {}
        return self._statistics

    def _computed(self) -> dict[str, Any]:
        hottest = self.hottest()[0]
        return {
            "expert_imbalance": self.imbalance,
            "expert_rank_imbalance": self.rank_imbalance,
            "num_idle_experts": self.num_idle,
            "hottest_expert_layer": hottest.layer,
            "hottest_expert": hottest.expert,
            "hottest_expert_share": hottest.share,
        }

    @property
    def _known(self) -> dict[int, _LayerLoad]:
        """The layers with enough tokens."""
        return {
            number: layer
            for number, layer in self._layers.items()
            if layer.total >= _LEAST_TOKENS * len(layer.loads)
        }

    def _of_ranks(self, loads: Sequence[float]) -> Sequence[float]:
        """Return the load of each rank."""
        if not self._expert_to_rank:
            return [sum(loads)]
        of_ranks = [0.0] * self._num_ranks
        for rank, load in zip(self._expert_to_rank, loads, strict=True):
            of_ranks[rank] += load
        return of_ranks


def _most_over_mean(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads)


def _mean(values: Iterable[float]) -> float:
    """Return the mean; 0.0 of nothing."""
    listed = list(values)
    return fmean(listed) if listed else 0.0
