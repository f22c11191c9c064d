"""Which experts the device holds, against a placement that keeps every token that was counted."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slow_cases import examples

from workers.model.experts.expert_placement import ExpertPlacement, PlacementRules, Swap

RULES = PlacementRules(factor=1.5, margin=3.0, memory_s=10.0, swaps_per_s=2.0)
MOST_AT_ONCE = 2
SLACK = 1e-6


class Counted(NamedTuple):
    at: float
    layer: int
    expert: int
    num_tokens: int


class PlacementMachine(RuleBasedStateMachine):
    """Counts and swaps at drawn times. The model adds up each load from all that was counted, and finds the
    best swap by trying all pairs."""

    @initialize(num_layers=st.integers(1, 3), num_experts=st.integers(1, 5), data=st.data())
    def start(self, num_layers: int, num_experts: int, data: st.DataObject) -> None:
        self.shape = num_layers, num_experts
        num_places = data.draw(st.integers(0, num_experts))
        self.num_places = num_places
        self.on_device = [set(range(num_places)) for _ in range(num_layers)]
        is_on_device = [np.arange(num_experts) < num_places for _ in range(num_layers)]
        self.now = 5.0
        self.placement = ExpertPlacement(is_on_device, RULES, self.now)
        self.counted: list[Counted] = []
        self.swap_times: list[float] = []

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def count(self, data: st.DataObject) -> None:
        num_layers, num_experts = self.shape
        numbers = st.lists(st.integers(0, 40), min_size=num_experts, max_size=num_experts)
        tokens = [data.draw(numbers) for _ in range(num_layers)]
        self.placement.count([np.array(it) for it in tokens], self.now)
        for layer, of_layer in enumerate(tokens):
            self.counted += [Counted(self.now, layer, *it) for it in enumerate(of_layer)]

    @rule()
    def swap(self) -> None:
        swaps = self.placement.take_swaps(self.now)
        for swap in swaps:
            gain = self.gain(*swap)
            assert swap.incoming not in self.on_device[swap.layer]
            assert swap.outgoing in self.on_device[swap.layer]
            assert gain is not None
            assert gain >= self.best_gain() - SLACK
            self.on_device[swap.layer] ^= {swap.incoming, swap.outgoing}
        self.swap_times += [self.now] * len(swaps)
        if len(swaps) < MOST_AT_ONCE and not self.is_limited():
            assert self.best_gain() <= 0, "a swap was due"

    @invariant()
    def every_place_is_taken(self) -> None:
        found = self.placement.is_on_device
        assert [set(np.flatnonzero(row)) for row in found] == self.on_device
        assert all(len(of_layer) == self.num_places for of_layer in self.on_device)

    @invariant()
    def swaps_are_few(self) -> None:
        """In every span of time no more than it allows, and those that were allowed before."""
        for first, begin in enumerate(self.swap_times):
            for last in range(first, len(self.swap_times)):
                span = self.swap_times[last] - begin
                assert last - first + 1 <= MOST_AT_ONCE + RULES.swaps_per_s * span + SLACK

    def is_limited(self) -> bool:
        """Whether swaps of the last while are as many as there may be."""
        recent = [at for at in self.swap_times if at > self.now - MOST_AT_ONCE / RULES.swaps_per_s]
        return bool(recent)

    def load(self, layer: int, expert: int) -> float:
        return math.fsum(
            it.num_tokens * math.exp((it.at - self.now) / RULES.memory_s)
            for it in self.counted
            if (it.layer, it.expert) == (layer, expert)
        )

    def gain(self, layer: int, incoming: int, outgoing: int) -> float | None:
        """Return what the swap gains; None if the load of the incoming expert is too small for it."""
        gained, lost = self.load(layer, incoming), self.load(layer, outgoing)
        return gained - lost if gained >= RULES.factor * lost + RULES.margin - SLACK else None

    def best_gain(self) -> float:
        """Return the largest gain of all swaps that are surely allowed; 0 if there is none."""
        num_layers, num_experts = self.shape
        gains = [0.0]
        for layer in range(num_layers):
            for incoming in set(range(num_experts)) - self.on_device[layer]:
                for outgoing in self.on_device[layer]:
                    gained, lost = self.load(layer, incoming), self.load(layer, outgoing)
                    if gained >= RULES.factor * lost + RULES.margin + SLACK:
                        gains.append(gained - lost)
        return max(gains)


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


def test_experts_that_are_chosen_nearly_as_often_do_not_change_places() -> None:
    placement = ExpertPlacement([np.array([True, False])], RULES, 0.0)
    placement.count([np.array([100, 140])], 0.0)
    assert placement.take_swaps(0.0) == []
    placement.count([np.array([0, 20])], 0.0)
    assert placement.take_swaps(0.0) == [Swap(0, 1, 0)]
    assert placement.take_swaps(0.0) == []


def test_the_largest_gain_comes_first_not_the_largest_load() -> None:
    rules = RULES._replace(swaps_per_s=1.0)
    placement = ExpertPlacement([np.array([True, False])] * 2, rules, 0.0)
    placement.count([np.array([60, 100]), np.array([0, 90])], 0.0)
    assert placement.take_swaps(0.0) == [Swap(1, 1, 0)]
    assert placement.take_swaps(0.5) == []
    assert placement.take_swaps(1.0) == [Swap(0, 1, 0)]


def test_a_load_is_forgotten() -> None:
    placement = ExpertPlacement([np.array([True, False])], RULES, 0.0)
    placement.count([np.array([1000, 0])], 0.0)
    placement.count([np.array([0, 20])], 60.0)
    assert placement.take_swaps(60.0) == [Swap(0, 1, 0)]
    with pytest.raises(AssertionError):
        placement.take_swaps(59.0)
