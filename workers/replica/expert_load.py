"""The recent load of a model's experts, from what the ranks have counted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
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


class _Part:
    """The tokens that a rank has computed lately, by the experts that it owns and by copies of others."""

    def __init__(self, num_owned: int) -> None:
        self.owned = [0.0] * num_owned
        self.copied: dict[int, float] = {}

    def decay(self, kept: float) -> None:
        self.owned = [kept * load for load in self.owned]
        self.copied = {expert: kept * load for expert, load in self.copied.items()}

    def add(self, counts: Sequence[int], copied: Mapping[int, int]) -> None:
        self.owned = [old + new for old, new in zip(self.owned, counts, strict=True)]
        for expert, count in copied.items():
            self.copied[expert] = self.copied.get(expert, 0.0) + count

    @property
    def total(self) -> float:
        return sum(self.owned) + sum(self.copied.values())


class _Layer:
    """The load of a layer's experts in tokens, whose parts come from the ranks that own them."""

    def __init__(self, num_experts: int, num_chosen: int) -> None:
        self.num_chosen = num_chosen
        self._num_experts = num_experts
        # By the first expert that the rank owns.
        self._parts: dict[int, _Part] = {}
        self._updated_at = 0.0
        self.loads: list[float] = []
        self.total = 0.0
        self.rank_totals: list[float] = []
        # The same if there were no copies.
        self.owner_totals: list[float] = []

    @property
    def is_known(self) -> bool:
        """Whether all ranks have reported, and enough tokens."""
        return len(self.loads) == self._num_experts and self.total >= _LEAST_TOKENS * self._num_experts

    def add(
        self,
        first_expert: int,
        counts: Sequence[int],
        copied: Mapping[int, int],
        now: float,
        memory_s: float,
    ) -> None:
        """Add what a rank has computed since its last report: by its own experts, from the first one on, and
        by copies of others. The loads of all ranks decay, also of one that has no tokens and reports
        nothing."""
        kept, self._updated_at = kept_share(now - self._updated_at, memory_s), now
        for part in self._parts.values():
            part.decay(kept)
        self._parts.setdefault(first_expert, _Part(len(counts))).add(counts, copied)
        in_order = sorted(self._parts.items())
        self.loads = [load for _, part in in_order for load in part.owned]
        for expert, load in (it for _, part in in_order for it in part.copied.items()):
            if expert < len(self.loads):  # else its owner has not reported yet
                self.loads[expert] += load
        self.rank_totals = [part.total for _, part in in_order]
        self.total = sum(self.rank_totals)
        self.owner_totals = [sum(self.loads[first : first + len(part.owned)]) for first, part in in_order]


class ExpertLoad:
    """Keeps the tokens that each expert of each layer has had, of which older ones weigh less. Ranks that
    hold the same experts count as one; which experts a rank holds is in its reports.

    Figures are those of layers with enough tokens to tell the experts apart, and 0 while there are none.
    Nothing is forgotten while there are no tokens: figures then stay as they were."""

    def __init__(self, memory_s: float = _MEMORY_S) -> None:
        """Let a token weigh 1/e after `memory_s`."""
        self._memory_s = memory_s
        self._layers: dict[int, _Layer] = {}
        # The result of `statistics`, which is asked for much more often than something is added; None: it is
        # to be computed.
        self._statistics: dict[str, Any] | None = None

    def add(self, report: ExpertCounts, now: float) -> None:
        """Take in what a rank has counted since its last report."""
        counts, copied = (memoryview(it).cast("I").tolist() for it in (report.counts, report.copied))
        num_owned = len(counts) // len(report.layers)
        layer_to_copied: dict[int, dict[int, int]] = {}
        for number, expert, count in zip(*(copied[it::3] for it in range(3)), strict=True):
            layer_to_copied.setdefault(number, {})[expert] = count
        for place, number in enumerate(report.layers):
            layer = self._layers.setdefault(number, _Layer(report.num_experts, report.num_chosen))
            own = counts[place * num_owned : (place + 1) * num_owned]
            layer.add(report.first_expert, own, layer_to_copied.get(number, {}), now, self._memory_s)
        self._statistics = None

    def loads(self, layer: int) -> list[float] | None:
        """Return the load of each expert of a layer, wherever it was computed; None: it is not known yet."""
        found = self._layers.get(layer)
        return found.loads if found is not None and found.is_known else None

    @property
    def imbalance(self) -> float:
        """The load of a layer's busiest expert over that of its mean expert, the mean over layers."""
        return _mean(_most_over_mean(layer.loads) for layer in self._known.values())

    @property
    def rank_imbalance(self) -> float:
        """The load of a layer's busiest rank over that of its mean rank, the mean over layers."""
        return _mean(_most_over_mean(layer.rank_totals) for layer in self._known.values())

    @property
    def uncopied_imbalance(self) -> float:
        """The imbalance of ranks as it would be without copies of experts."""
        return _mean(_most_over_mean(layer.owner_totals) for layer in self._known.values())

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
            "expert_uncopied_imbalance": self.uncopied_imbalance,
            "num_idle_experts": self.num_idle,
            "hottest_expert_layer": hottest.layer,
            "hottest_expert": hottest.expert,
            "hottest_expert_share": hottest.share,
        }

    @property
    def _known(self) -> dict[int, _Layer]:
        """The layers with enough tokens."""
        return {number: layer for number, layer in self._layers.items() if layer.is_known}


def _most_over_mean(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads)


def _mean(values: Iterable[float]) -> float:
    """Return the mean; 0.0 of nothing."""
    listed = list(values)
    return fmean(listed) if listed else 0.0
