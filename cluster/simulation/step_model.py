"""What steps of a simulated replica take, and transfers from it: the only part that is modelled.

A step of `n` sequences that decode, with `c` tokens of context in all, takes

    base + n x sequence + c x context

and one that also computes chunks of prompts

    max(base, sum over chunks of tokens x (token + earlier x attention)) + n x sequence + c x context

where `earlier` is the mean number of tokens before those of the chunk: weights are read while prompts are
multiplied. Every replica measures these coefficients of itself (`workers.scheduler.step_costs`), so a running
cluster, `tandem bench engine` and `tandem plan` can all give them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from cluster.planning.device_profile import DeviceProfile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import PlannedModel
from cluster.planning.step_times import StepTimes
from workers.messages.rank_channel import StepPlan
from workers.scheduler.step_costs import StepCosts

# The sequences and tokens of the steps of which `planned_steps` takes the coefficients.
_FEW, _MANY = 1, 64
_SHORT, _LONG = 1024, 4096


class StepModel(NamedTuple):
    """The coefficients, in seconds; see the module's text."""

    base_s: float
    sequence_s: float
    context_s: float
    token_s: float
    attention_s: float = 0.0
    # The rate at which KV leaves the replica, in bytes a second, and what each push takes beside.
    link_bytes_s: float = 12.5e9
    push_s: float = 0.0005

    def decode_s(self, num_sequences: int, num_context_tokens: int) -> float:
        """Return what a step takes without prompts."""
        return self.base_s + (num_sequences * self.sequence_s + num_context_tokens * self.context_s)

    def step_s(self, num_sequences: int, num_context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Return what a step takes. `chunks` are the first position and the tokens of each. One without any
        sequence, by which a replica finds out whether its ranks answer, takes no time."""
        if not num_sequences and not chunks:
            return 0.0
        prompts_s = 0.0
        for start, num_tokens in chunks:
            prompts_s += num_tokens * (self.token_s + self.attention_s * (start + num_tokens / 2))
        return self._with_prompts_s(num_sequences, num_context_tokens, prompts_s)

    def mixed_s(
        self, num_sequences: int, num_context_tokens: int, num_tokens: int, num_attended: float
    ) -> float:
        """Return what a step takes whose chunks have `num_tokens` and attend to `num_attended` others."""
        prompts_s = num_tokens * self.token_s + num_attended * self.attention_s
        return self._with_prompts_s(num_sequences, num_context_tokens, prompts_s)

    def _with_prompts_s(self, num_sequences: int, num_context_tokens: int, prompts_s: float) -> float:
        decodes_s = num_sequences * self.sequence_s + num_context_tokens * self.context_s
        return max(self.base_s, prompts_s) + decodes_s


class KnownCosts(StepCosts):
    """The costs that a replica has measured of steps which take what the model says: those of the model."""

    def __init__(self, model: StepModel) -> None:
        super().__init__()
        self._model = model
        self._coefficients = {
            "prefill_token_s": model.token_s,
            "attention_token_s": model.attention_s,
            "decode_base_s": model.base_s,
            "decode_sequence_s": model.sequence_s,
            "decode_context_s": model.context_s,
        }

    def add(self, plan: StepPlan, decode_starts: Collection[int], stage_to_busy_s: Sequence[float]) -> float:
        """Learn nothing new; return what the model makes of a step with prompts."""
        chunks = [(entry.start, entry.num_tokens) for entry in plan.entries if entry.num_tokens > 1]
        if not chunks:
            return max(stage_to_busy_s)
        starts = [*decode_starts, *(entry.start for entry in plan.entries if entry.num_tokens == 1)]
        return self._model.step_s(len(starts), sum(starts), chunks)

    def step_s(
        self,
        num_sequences: int,
        num_context_tokens: int,
        num_tokens: int,
        num_attended: float,
        *,
        num_stages: int = 1,
    ) -> float:
        return self._model.mixed_s(num_sequences, num_context_tokens, num_tokens, num_attended)

    def coefficients(self) -> dict[str, Any]:
        return self._coefficients


def planned_steps(model: PlannedModel, profile: DeviceProfile, split: DeviceSplit) -> StepModel:
    """Return the coefficients of what a plan predicts: exact for one sequence and for 64 behind 1,024 and
    behind 4,096 tokens, and for prompts of these lengths; in between a plan's steps are a few per cent
    shorter or longer, since reading and multiplying overlap."""
    times = StepTimes(model, profile, split)
    context_s = (times.decode_s(_MANY, _LONG) - times.decode_s(_MANY, _SHORT)) / (_MANY * (_LONG - _SHORT))
    of_one = times.decode_s(_FEW, _SHORT) - _FEW * _SHORT * context_s
    of_many = times.decode_s(_MANY, _SHORT) - _MANY * _SHORT * context_s
    sequence_s = max(0.0, (of_many - of_one) / (_MANY - _FEW))
    short_s, long_s = times.prefill(_SHORT).busy_s, times.prefill(_LONG).busy_s
    # A prompt takes tokens x token + tokens^2 / 2 x attention.
    attention_s = max(0.0, 2 * (long_s / _LONG - short_s / _SHORT) / (_LONG - _SHORT))
    return StepModel(
        base_s=max(of_one - sequence_s, 0.0),
        sequence_s=sequence_s,
        context_s=context_s,
        token_s=long_s / _LONG - attention_s * _LONG / 2,
        attention_s=attention_s,
        link_bytes_s=1e9 * profile.network_gb_s * split.tp,
    )
