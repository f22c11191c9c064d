"""Part of a step cannot be computed at one rank: its request is tried again, and the replica lives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import E2eHarness, until

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
    harness: E2eHarness, tmp_path: Path, point: str, after: int
) -> None:
    """Chunks before it are on their way to the decode replica; its landing is closed there, the neighbour
    notices nothing, and the next attempt on the same replica succeeds."""
    rule = FaultRule(point, "raise", str(tmp_path / "marker"), after, times=2)
    prefill = await harness.add("p0", "prefill", parallel=Parallel(tp=2), faults=[rule])
    decode = await harness.add("d0", "decode")
    alone = await harness.add("alone", "both")
    wanted = (await harness.run(alone, harness.submission("alone", PROMPT, **SAMPLING))).sequence()
    beside = (await harness.run(alone, harness.submission("beside", NEIGHBOUR, **LONG))).sequence()
    first = harness.submission("r", PROMPT, decode=decode, **SAMPLING)
    neighbour = harness.submission("n", NEIGHBOUR, **LONG)
    prefill.send(neighbour)  # in slot 0, and decodes here
    await until(lambda: ("n", 0) in harness.heard and bool(harness.heard["n", 0].tokens), "it decodes")
    prefill.send(first)
    failure = (await harness.ended(first)).failure
    assert failure is not None
    assert failure.code == "internal"
    assert f"MemoryError: a fault was injected at {point}" in failure.reason
    assert (await harness.ended(neighbour)).sequence() == beside
    again = harness.submission("r", PROMPT, decode=decode, attempt=1, **SAMPLING)
    assert (await harness.run(prefill, again)).sequence() == wanted
    prefill.core.check_health()
    await harness.quiet()
