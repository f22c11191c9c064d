"""The dataset `sessions`: drawn users who talk for several turns, in groups that share a system prompt."""

from __future__ import annotations

from functools import partial

import numpy as np

from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.drawn_tokens import ANSWER, PROMPT, THINK, drawn_tokens, shared_prefix
from cluster.bench.serving_load import PlannedTurn, Session, poisson_arrivals_s
from cluster.errors import BenchError


def sessions_load(settings: DatasetSettings, run: RunSettings) -> Load:
    """Return sessions of users who say `input_tokens` in each turn, after a system prompt that those of a
    group share."""
    num_turns = settings.num_turns or 4
    num_output = settings.output_tokens or 32
    most = settings.shared_prefix_tokens + num_turns * (settings.input_tokens + num_output)
    if run.context_tokens and most > run.context_tokens:
        raise BenchError(
            f"a session of {num_turns} turns has up to {most} tokens, the model's context "
            f"{run.context_tokens}: lower --turns, --input-tokens, --output-tokens or --shared-prefix"
        )
    think = np.random.default_rng((run.seed, THINK))
    sessions = []
    for number, at in enumerate(poisson_arrivals_s(settings.num_sessions, run.rate_per_s, run.seed)):
        turns = []
        for turn in range(num_turns):
            new = partial(_new_tokens, settings, run, number, turn)
            think_s = float(think.exponential(settings.think_s)) if turn and settings.think_s else 0.0
            turns.append(PlannedTurn(new, num_output, think_s))
        sessions.append(Session(turns, at, partial(_stand_in, run, number)))
    return Load(sessions)


def _new_tokens(settings: DatasetSettings, run: RunSettings, session: int, turn: int) -> list[int]:
    tokens = drawn_tokens(settings.input_tokens, run.vocab_size, run.seed, PROMPT, session, turn)
    if turn > 0:
        return tokens
    return [*shared_prefix(settings, run, session, settings.shared_prefix_tokens), *tokens]


def _stand_in(run: RunSettings, session: int, num_tokens: int) -> list[int]:
    return drawn_tokens(num_tokens, run.vocab_size, run.seed, ANSWER, session)
