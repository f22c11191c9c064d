"""What is wanted of a dataset of `tandem bench serve`, and the load that it makes for a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.bench.serving_load import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings:
    """What is wanted of a dataset. Which settings a kind uses: `load_options.py` refuses the others."""

    num_requests: int = 64
    input_tokens: int = 256
    # Of recorded answers: the most.
    output_tokens: int | None = None
    shared_prefix_tokens: int = 0
    num_groups: int = 1
    # Of `uniform`: lengths are up to so much of the mean away; of `lognormal`: sigma.
    length_spread: float = 0.5
    num_sessions: int = 8
    num_turns: int | None = None
    think_s: float = 0.0
    time_scale: float = 1.0


class RunSettings(NamedTuple):
    """Of one run, of which a sweep has several."""

    rate_per_s: float
    seed: int
    vocab_size: int
    # Of the model; 0: not known.
    context_tokens: int


class Load(NamedTuple):
    """What a run sends."""

    sessions: Sequence[Session]
    # Requests that do not fit into the model's context.
    num_left_out: int = 0

    @property
    def num_requests(self) -> int:
        """Of all sessions."""
        return sum(len(session.turns) for session in self.sessions)
