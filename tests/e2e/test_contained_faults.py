"""Part of a step cannot be computed at one rank: its request is tried again, and the replica lives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import House, until

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel

SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 77, "max_tokens": 16}
LONG = {**SAMPLING, "max_tokens": 150}
DRAW = random.Random(5)
PROMPT = [DRAW.randrange(3, 190) for _ in range(190)]
NEIGHBOUR = [DRAW.randrange(3, 190) for _ in range(60)]


@pytest.mark.parametrize(
    ("point", "after"), [("rank.layers.prefill.1.1", 45), ("rank.sampling.prefill.0.1", 1)]
)
async def test_a_prompt_that_fails_while_it_is_handed_over(
    house: House, tmp_path: Path, point: str, after: int
) -> None:
    """Chunks before it are on their way to the decode replica; its landing is closed there, the neighbour
    notices nothing, and the next attempt on the same replica succeeds."""
    rule = FaultRule(point, "raise", str(tmp_path / "marker"), after, times=2)
    prefill = await house.add("p0", "prefill", parallel=Parallel(tp=2), faults=[rule])
    decode = await house.add("d0", "decode")
    alone = await house.add("alone", "both")
    wanted = (await house.run(alone, house.submission("alone", PROMPT, **SAMPLING))).sequence()
    beside = (await house.run(alone, house.submission("beside", NEIGHBOUR, **LONG))).sequence()
    first = house.submission("r", PROMPT, decode=decode, **SAMPLING)
    neighbour = house.submission("n", NEIGHBOUR, **LONG)
    prefill.send(neighbour)  # in slot 0, and decodes here
    await until(lambda: ("n", 0) in house.heard and bool(house.heard["n", 0].tokens), "it decodes")
    prefill.send(first)
    failure = (await house.ended(first)).failure
    assert failure is not None
    assert failure.code == "internal"
    assert f"MemoryError: a fault was injected at {point}" in failure.reason
    assert (await house.ended(neighbour)).sequence() == beside
    again = house.submission("r", PROMPT, decode=decode, attempt=1, **SAMPLING)
    assert (await house.run(prefill, again)).sequence() == wanted
    prefill.brain.check_health()
    await house.quiet()
