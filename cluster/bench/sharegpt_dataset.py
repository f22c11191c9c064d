"""The dataset `sharegpt`: recorded conversations, sent turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from cluster.api.generate_options import Turn
from cluster.bench.conversations import QuestionAnswer
from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.drawn_tokens import THINK
from cluster.bench.serving_load import PlannedTurn, Session, poisson_arrivals_s
from cluster.errors import BenchError

# Of a text whose tokens are not counted: about what English has.
BYTES_PER_TOKEN = 4


def sharegpt_load(
    name: str, conversations: Iterator[list[QuestionAnswer]], settings: DatasetSettings, run: RunSettings
) -> Load:
    """Return the next conversations. A prompt has the recorded answers to the turns before it, so that the
    load is the same whatever the model says."""
    plans: list[list[PlannedTurn]] = []
    num_wanted, num_left_out = settings.num_requests, 0
    generator = np.random.default_rng((run.seed, THINK))
    while num_wanted > 0 and (exchanges := next(conversations, None)) is not None:
        plan, num_past = _plan(exchanges[: settings.num_turns][:num_wanted], settings, run, generator)
        num_left_out += num_past
        num_wanted -= len(plan)
        if plan:
            plans.append(plan)
    if not plans:
        raise BenchError(f"{name} has no conversation for this run: too few, or none fits into the context")
    arrivals = poisson_arrivals_s(len(plans), run.rate_per_s, run.seed)
    return Load([Session(plan, at) for plan, at in zip(plans, arrivals, strict=True)], num_left_out)


def _plan(
    exchanges: Sequence[QuestionAnswer],
    settings: DatasetSettings,
    run: RunSettings,
    generator: np.random.Generator,
) -> tuple[list[PlannedTurn], int]:
    """Return the turns of a conversation that fit into the context, and how many do not."""
    turns: list[PlannedTurn] = []
    before: list[Turn] = []
    num_tokens = 0
    for exchange in exchanges:
        num_output = _num_tokens(exchange.answer)
        num_tokens += sum(_num_tokens(turn.content) for turn in exchange.asked) + num_output
        if run.context_tokens and num_tokens > run.context_tokens:
            break
        num_output = min(num_output, settings.output_tokens or num_output)
        think_s = float(generator.exponential(settings.think_s)) if turns and settings.think_s else 0.0
        turns.append(PlannedTurn(partial(list, [*before, *exchange.asked]), num_output, think_s))
        before = [Turn("assistant", exchange.answer)]
    return turns, len(exchanges) - len(turns)


def _num_tokens(text: str) -> int:
    return max(1, len(text.encode(errors="surrogatepass")) // BYTES_PER_TOKEN)
