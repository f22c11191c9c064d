"""Step plans written by hand as an engine core would write them: single entries, and a mix of all they
do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.messages import BatchEntry, BlockCopy, SamplingParams, SlotSample, SlotStart, StepPlan

BLOCK = 16
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.1, repetition_penalty=1.1)


def draw(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids below 256."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, 256, (num_tokens,), generator=generator)]


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def started(slot: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, seed: int = 0) -> SlotStart:
    return SlotStart(
        sampling, (SlotSample(slot, seed, prompt[-1]),), packed(prompt) if sampling.penalizes_prompt else b""
    )


def entry(
    slot: int, start: int, tokens: Sequence[int], blocks: Sequence[int], samples: Sequence[int] = ()
) -> BatchEntry:
    """Without `tokens`, one token that continues the slot."""
    return BatchEntry(slot, start, len(tokens) or 1, packed(tokens), tuple(blocks), tuple(samples))


def step(
    *entries: BatchEntry,
    starts: Sequence[SlotStart] = (),
    copies: Sequence[BlockCopy] = (),
    frees: Sequence[int] = (),
    number: int = 1,
) -> StepPlan:
    return StepPlan(number, tuple(frees), tuple(starts), tuple(copies), entries)


def mixed_plans() -> list[StepPlan]:
    """Greedy, seeded and forked sequences in scattered blocks, decoded by slot; only slots 4 and 5 share.

    Slots 2 and 6 are freed and begun again while what they sampled may still be on its way to the first
    stage, slot 6 then as a hand-over begins; slot 3 samples and nobody asks for its tokens.
    """
    first, second, forked, short = draw(45, 1), draw(20, 2), draw(20, 3), draw(5, 4)
    one, two, three = (7, 2, 30, 11, 5), (3, 39), (20, 21)
    tables = {4: (12, 13), 5: (12, 15)}
    plans = [
        step(
            entry(1, 0, first[:17], one),
            entry(2, 0, second, two, [2]),
            starts=[started(1, first), started(2, second, SEEDED, 9)],
        ),
        step(
            entry(2, 20, [], two, [2]),
            entry(1, 17, first[17:], one, [1]),
            entry(4, 0, forked, tables[4], [4, 5]),
            entry(6, 0, short, (33,), [6]),
            starts=[started(4, forked, SEEDED, 111), started(5, forked, SEEDED, 222), started(6, short)],
        ),
        step(
            entry(2, 0, short, (31, 32), [2]),
            entry(1, 45, [], one, [1]),
            *(entry(slot, 20, [], tables[slot], [slot]) for slot in (5, 4)),
            entry(3, 0, short, three, [3]),
            starts=[started(2, short), started(3, short, SEEDED, 5), started(6, second, SEEDED, 1)],
            copies=[BlockCopy(13, 15)],
            frees=[2, 6],
        ),
        step(entry(6, 19, [], two, [6])),
    ]
    for turn in range(6):
        plans.append(
            step(
                entry(2, 5 + turn, [], (31, 32), [2]),
                entry(4, 21 + turn, [], tables[4], [4]),
                entry(3, 5 + turn, [turn], three, [3]),
            )
        )
        plans.append(
            step(
                entry(1, 46 + turn, [], one, [1]),
                entry(5, 21 + turn, [], tables[5], [5]),
                entry(6, 20 + turn, [], two, [6]),
            )
        )
    plans += [step(frees=[1, 2, 3]), step(entry(5, 27, [], tables[5], [5])), step()]
    return [
        step(*plan.entries, starts=plan.starts, copies=plan.copies, frees=plan.free_slots, number=number)
        for number, plan in enumerate(plans, start=1)
    ]
