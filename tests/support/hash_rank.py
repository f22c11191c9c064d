"""A model of a replica's one rank that computes from step plans alone; `staged_engine` has one of several.

Its KV is token ids by (block, offset), and it samples a hash of the context that it reads back through the
block table. So a wrong table, a missed copy, a block reused too early or a wrong start is a wrong token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from workers.messages import SampledToken, SamplingParams, StepPlan, StepReport

BLOCK_TOKENS = 4
VOCABULARY = 24
END = 0
MAX_CONTEXT = 40
FINGERPRINT = b"model"


def pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def unpack(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[start : start + 4], "little") for start in range(0, len(tokens), 4)]


def sample(context: list[int], seed: int) -> int:
    return hashlib.sha256(pack([seed, *context])).digest()[0] % VOCABULARY


def alone(prompt: list[int], seed: int, limit: int, sampling: SamplingParams) -> list[int]:
    """The output of one sample computed without an engine."""
    output: list[int] = []
    while len(output) < limit and (sampling.ignore_eos or output[-1:] != [END]):
        output.append(sample(prompt + output, seed))
    return output


@dataclass
class SlotState:
    """`context` is None until it is known: plans say it only where penalties look at it."""

    seed: int
    last_token: int
    context: list[int] | None
    sampled_in_step: int = 0

    @staticmethod
    def started_by(plan: StepPlan) -> dict[int, SlotState]:
        """Of each slot that the plan starts."""
        slot_to_state: dict[int, SlotState] = {}
        for start in plan.starts:
            assert bool(start.prompt) == start.sampling.penalizes_prompt
            for it in start.samples:
                context = unpack(start.prompt) + unpack(it.output) if start.prompt else None
                if context is not None:
                    assert len(it.output) == 4 * it.num_output_tokens
                    assert context[-1] == it.last_token
                assert it.slot not in slot_to_state
                slot_to_state[it.slot] = SlotState(it.seed, it.last_token, context)
        return slot_to_state

    def sample(self, context: list[int], step: int) -> int:
        """The next token after the context that the KV holds."""
        if self.context is not None:
            assert context == self.context, "the KV under the table is not the slot's context"
        assert context[-1] == self.last_token, "the KV under the table is not the slot's context"
        token = sample(context, self.seed)
        self.context, self.last_token, self.sampled_in_step = [*context, token], token, step
        return token


class HashRank:
    """Executes plans in order; knows nothing but what they carry."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], int] = {}
        self.slots: dict[int, SlotState] = {}
        self.step = 0

    def run(self, plan: StepPlan) -> StepReport:
        assert plan.step == self.step + 1
        self.step = plan.step
        for slot in plan.free_slots:
            del self.slots[slot]
        started = SlotState.started_by(plan)
        assert not started.keys() & self.slots.keys()
        self.slots.update(started)
        copied = {
            (copy.dst_block, offset): self.kv[copy.src_block, offset]
            for copy in plan.copies
            for offset in range(BLOCK_TOKENS)
            if (copy.src_block, offset) in self.kv
        }
        self.kv.update(copied)
        self._write(plan)
        tokens = []
        for entry in plan.entries:
            for slot in entry.sample_slots:
                context = [
                    self.kv[entry.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
                    for position in range(entry.start + entry.num_tokens)
                ]
                token = self.slots[slot].sample(context, plan.step)
                tokens.append(SampledToken(slot=slot, token=token, logprob=None))
        return StepReport(step=plan.step, tokens=tuple(tokens), started_at=0.0, finished_at=0.0)

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        for entry in plan.entries:
            assert entry.num_tokens > 0
            tokens = unpack(entry.tokens)
            if not tokens:
                state = self.slots[entry.slot]
                assert 0 < state.sampled_in_step < plan.step, "the slot has not sampled anything"
                tokens = [state.last_token]
            assert len(tokens) == entry.num_tokens
            for position, token in enumerate(tokens, entry.start):
                place = entry.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                assert place not in written
                written.add(place)
                self.kv[place] = token
