"""What was asked of a gateway and how it was served: the totals that the autoscaler forecasts from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Demand:
    """Since the gateway's start; fields as in `tandem.v1.Demand`, which tells what each is."""

    num_arrived: int = 0
    num_sequences: int = 0
    num_prompts: int = 0
    num_computed_tokens: int = 0
    computed_tokens_squared: float = 0.0
    num_ended: int = 0
    num_output_tokens: int = 0
    output_tokens_squared: float = 0.0
    num_first_tokens: int = 0
    num_late_first_tokens: int = 0
    num_gaps: int = 0
    num_late_gaps: int = 0

    def prompt(self, num_computed_tokens: int) -> None:
        """A prompt's prefill was reported."""
        self.num_prompts += 1
        self.num_computed_tokens += num_computed_tokens
        self.computed_tokens_squared += num_computed_tokens**2

    def ended(self, output_lengths: Iterable[int]) -> None:
        """The continuations of a request ended, each after so many tokens."""
        for num_tokens in output_lengths:
            self.num_ended += 1
            self.num_output_tokens += num_tokens
            self.output_tokens_squared += num_tokens**2

    def first_token(self, is_late: bool) -> None:
        """A request's first token came."""
        self.num_first_tokens += 1
        self.num_late_first_tokens += is_late

    def gaps(self, num_gaps: int, are_late: bool) -> None:
        """Further tokens of a continuation came."""
        self.num_gaps += num_gaps
        self.num_late_gaps += num_gaps * are_late
