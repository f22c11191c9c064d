"""Size prompt chunks so that running decodes keep their time per output token (TPOT)."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import NamedTuple

from workers.scheduler.step import StepBatch
from workers.scheduler.step_costs import StepCosts

# The part of a step that prompts get where no chunk keeps the objective: decodes then take 4/3 of the time
# that they would take alone, and prompts still end.
_PROMPT_SHARE = 0.25


class _Planned(NamedTuple):
    """What a step computes so far: sequences that decode and the tokens before theirs, and the tokens of
    chunks with the tokens that they attend to."""

    num_sequences: int
    num_context_tokens: int
    num_tokens: int
    num_attended: float


class ChunkSizes:
    """Decides how long chunks are beside sequences that decode.

    A step may take as long as the objective allows for one output token, by the costs that the replica has
    measured of its own steps. The first chunk of a step has at least a block, or the rest of its prompt, so
    prompts always progress; a further one waits where it would break the objective. If not even a block
    keeps the objective, prompts get a quarter of the step. Chunks are not limited while nothing decodes, or
    until enough steps were measured."""

    def __init__(
        self, objective_s: float | None, costs: StepCosts, num_stages: int, block_tokens: int
    ) -> None:
        """Without an objective, no chunk is limited."""
        self._objective_s = objective_s
        self._costs = costs
        self._num_stages = num_stages
        self._block_tokens = block_tokens

    def most_tokens(self, batch: StepBatch, start: int, most: int) -> int:
        """Return how many tokens behind `start`, of at most `most`, a chunk in this step may have; 0: the
        prompt waits for the next step."""
        if self._objective_s is None or most <= 1 or not batch.delays_decodes:
            return most
        planned = _planned(batch)
        step_s = partial(self._step_s, planned, start)
        limit_s, least = self._objective_s, min(self._block_tokens, most)
        if step_s(most) <= limit_s:
            return most
        if step_s(least) > limit_s:
            if planned.num_tokens:
                return 0
            limit_s = self._costs.step_s(*planned, num_stages=self._num_stages) / (1 - _PROMPT_SHARE)
        longest = max(least, bisect_right(range(1, most + 1), limit_s, key=step_s))
        end = (start + longest) // self._block_tokens * self._block_tokens
        return max(least, end - start)

    def is_full(self, batch: StepBatch) -> bool:
        """Whether the step has no time left for the first block of another prompt."""
        return self.most_tokens(batch, 0, self._block_tokens) == 0

    def _step_s(self, planned: _Planned, start: int, num_tokens: int) -> float:
        """Return what the step takes with a chunk more; 0.0: not known yet."""
        attended = num_tokens * (start + num_tokens / 2)
        return self._costs.step_s(
            planned.num_sequences,
            planned.num_context_tokens,
            planned.num_tokens + num_tokens,
            planned.num_attended + attended,
            num_stages=self._num_stages,
        )


def _planned(batch: StepBatch) -> _Planned:
    num_sequences, num_context_tokens = len(batch.decodes), sum(batch.decode_starts)
    num_tokens, num_attended = 0, 0.0
    for entry in batch.entries:
        length = entry.end - entry.start
        if length > 1:
            num_tokens += length
            num_attended += length * (entry.start + length / 2)
        else:
            num_sequences += 1
            num_context_tokens += entry.start
    return _Planned(num_sequences, num_context_tokens, num_tokens, num_attended)
