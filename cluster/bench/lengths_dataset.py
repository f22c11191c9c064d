"""The dataset `lengths`: single requests of drawn tokens, whose lengths are drawn or read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.drawn_tokens import LENGTHS, PROMPT, drawn_tokens, shared_prefix
from cluster.bench.request_lengths import Lengths, read_lengths
from cluster.bench.serving_load import PlannedTurn, Session, poisson_arrivals_s
from cluster.bench.trace_file import MAX_LENGTH_TOKENS
from cluster.errors import BenchError


def lengths_load(name: str, is_table: bool, settings: DatasetSettings, run: RunSettings) -> Load:
    """Return requests of drawn tokens, whose lengths are read from the table `name` or drawn from the
    distribution of that name."""
    lengths: Iterable[Lengths]
    if is_table:
        lengths = itertools.islice(_repeated(Path(name)), settings.num_requests)
    else:
        lengths = drawn_lengths(name, settings, run.seed)
    turns = []
    num_left_out = 0
    for number, (num_input, num_output) in enumerate(lengths):
        if run.context_tokens and num_input + num_output > run.context_tokens:
            num_left_out += 1
            continue
        make = partial(_prompt_of_length, settings, run, number, num_input)
        turns.append(PlannedTurn(make, num_output))
    if not turns:
        raise BenchError("no request fits into the model's context: lower the lengths")
    arrivals = poisson_arrivals_s(len(turns), run.rate_per_s, run.seed)
    return Load([Session((turn,), at) for turn, at in zip(turns, arrivals, strict=True)], num_left_out)


def _prompt_of_length(settings: DatasetSettings, run: RunSettings, number: int, num_tokens: int) -> list[int]:
    prefix = shared_prefix(settings, run, number, min(settings.shared_prefix_tokens, num_tokens))
    rest = drawn_tokens(num_tokens - len(prefix), run.vocab_size, run.seed, PROMPT, number)
    return [*prefix, *rest]


def drawn_lengths(kind: str, settings: DatasetSettings, seed: int) -> list[Lengths]:
    """Draw the lengths of all requests; their means are those of the settings."""
    generator = np.random.default_rng((seed, LENGTHS))
    num, spread = settings.num_requests, settings.length_spread

    def draw(mean: int) -> Any:
        if kind == "fixed":
            return np.full(num, mean)
        if kind == "uniform":
            return generator.uniform(mean * (1 - min(spread, 1.0)), mean * (1 + spread), num)
        return generator.lognormal(math.log(mean) - spread**2 / 2, spread, num)

    inputs, outputs = draw(settings.input_tokens), draw(settings.output_tokens or 32)
    both = np.clip(np.rint(np.stack([inputs, outputs], axis=1)), 1, MAX_LENGTH_TOKENS).astype(int)
    return [Lengths(*row) for row in both.tolist()]


def _repeated(path: Path) -> Iterator[Lengths]:
    """Yield the lengths of the file, again and again."""
    while True:
        found = False
        for lengths in read_lengths(path):
            found = True
            yield lengths
        if not found:
            raise BenchError(f"{path} has no lengths: expected lines of INPUT,OUTPUT")
