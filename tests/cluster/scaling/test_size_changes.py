"""Sizes of requests that change over time: those of before the change say nothing of the load now."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scaling_harness import config, demand, history_of, prefilling

from cluster.metrics.demand import Demand
from cluster.scaling.measured_rates import measured_sizes

SETTINGS = config()
NOW = 400.0


def test_sizes_are_those_since_the_change() -> None:
    """Twenty requests of the new sizes are enough, and a few are not."""

    def asked(at: float, changed_at: float) -> Demand:
        return demand(2, 6000, 20) if at < changed_at else demand(2, 1000, 200)

    def means(changed_at: float) -> tuple[float, float]:
        history = history_of(SETTINGS, lambda at: ([prefilling()], asked(at, changed_at)))
        sizes = measured_sizes(history, NOW, 150.0)
        assert sizes.prompt is not None
        assert sizes.output is not None
        return sizes.prompt.mean, sizes.output.mean

    assert means(382.0) == pytest.approx((1000.0, 200.0))
    prompt, output = means(396.0)
    assert prompt > 5000
    assert output < 60


def test_sizes_that_only_spread_are_measured_over_the_whole_history() -> None:
    source = np.random.default_rng(5)
    lengths: dict[float, list[float]] = {}

    def asked(at: float) -> Demand:
        own = lengths.setdefault(at, (2000 * source.lognormal(0, 0.8, 2)).round().tolist())
        return Demand(
            num_arrived=2,
            num_sequences=2,
            num_prompts=2,
            num_computed_tokens=int(sum(own)),
            computed_tokens_squared=sum(each**2 for each in own),
        )

    history = history_of(SETTINGS, lambda at: ([prefilling()], asked(at)))
    weights = {at: math.exp(-(NOW - at) / 150.0) for at in lengths if at >= next(iter(history)).at}
    total = sum(weights[at] * sum(lengths[at]) for at in weights)
    sizes = measured_sizes(history, NOW, 150.0)
    assert sizes.prompt is not None
    assert sizes.prompt.mean == pytest.approx(total / (2 * sum(weights.values())), rel=1e-6)
    assert sizes.output is None
