"""Drawn requests whose rate and lengths change over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from cluster.simulation.simulated_load import DrawnLengths, SimulatedSession, SimulatedTurn, drawn_prompt

# The points at which the largest rate is looked for.
_NUM_POINTS = 1000


def varying_sessions(
    rate_s: Callable[[float], float], lengths: Callable[[float], DrawnLengths], span_s: float, seed: int
) -> Iterator[SimulatedSession]:
    """Yield requests that arrive at random for `span_s` seconds, at `rate_s(at)` a second, with
    `lengths(at)`."""
    source = np.random.default_rng(seed)
    most_s = max(rate_s(float(at)) for at in np.linspace(0.0, span_s, _NUM_POINTS))
    at_s = 0.0
    while (at_s := at_s + source.exponential(1 / most_s)) < span_s:
        if source.random() < rate_s(at_s) / most_s:
            num_input, num_output = lengths(at_s).draw(source)
            new = partial(drawn_prompt, int(source.integers(1 << 62)), num_input)
            yield SimulatedSession(at_s, (SimulatedTurn(new, num_output),))
