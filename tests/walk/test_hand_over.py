"""One request through two replicas: the same tokens as through one, moved once, checked, and freed."""

from __future__ import annotations

import random
from typing import Any

from walk_house import BLOCK_TOKENS, House

PROMPT = [random.Random(1).randrange(3, 190) for _ in range(100)]


async def test_disaggregated_tokens_equal_those_of_one_engine(house: House) -> None:
    prefill = await house.add("p0", "prefill")
    decode = await house.add("d0", "decode")
    alone = await house.add("b0", "both")
    cases: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 12},
    ]
    for number, sampling in enumerate(cases):
        wanted = await house.run(alone, house.submission(f"a{number}", PROMPT, max_tokens=24, **sampling))
        split = house.submission(f"s{number}", PROMPT, decode=decode, max_tokens=24, **sampling)
        got = await house.run(prefill, split)
        assert got.failure is None
        assert got.sequence() == wanted.sequence()
        assert len(got.sequence()) == 24
        assert got.hand_over is not None
        assert got.hand_over.num_bad_pieces == 0
    first, second = house.heard["s0", 0], house.heard["s1", 0]
    assert first.hand_over is not None
    assert first.hand_over.num_held_tokens == 0
    assert second.prefill is not None
    assert second.prefill.num_cached_tokens == 96, "the prefill side reuses its own blocks"
    assert second.hand_over is not None
    assert second.hand_over.num_held_tokens == 96, "only what the decode side lacks is moved"
    assert 0 < second.hand_over.num_moved_bytes < first.hand_over.num_moved_bytes / 6
    await house.quiet()
    assert prefill.events
    assert sum(len(stored.keys) for event in decode.events for stored in event.stored) >= 100 // BLOCK_TOKENS
