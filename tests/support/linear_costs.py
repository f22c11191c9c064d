"""Costs of steps that are known exactly and never change."""

from __future__ import annotations

from typing import NamedTuple

from workers.scheduler.step_costs import StepCosts


class Prices(NamedTuple):
    """Seconds of a step, a sequence that decodes, a token before it, a token of a chunk, and one that a
    chunk's attends to. Defaults are binary fractions, so that sums are exact."""

    base_s: float = 2.0**-7
    sequence_s: float = 2.0**-12
    context_s: float = 2.0**-24
    token_s: float = 2.0**-14
    attention_s: float = 2.0**-28


class LinearCosts(StepCosts):
    """Costs by prices."""

    def __init__(self, prices: Prices) -> None:
        super().__init__()
        self.prices = prices

    def step_s(
        self,
        num_sequences: int,
        num_context_tokens: int,
        num_tokens: int,
        num_attended: float,
        *,
        num_stages: int = 1,
    ) -> float:
        prices = self.prices
        chunks_s = num_stages * (num_tokens * prices.token_s + num_attended * prices.attention_s)
        decodes_s = num_sequences * prices.sequence_s + num_context_tokens * prices.context_s
        return prices.base_s + chunks_s + decodes_s
