"""Replicas with experts on several ranks when a rank dies, a piece is spoiled, clients go and copies of hot
experts move while requests run: every attempt ends once, tokens stay those of one process, and nothing is
left behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e_harness import E2eHarness, Heard, fired, rule, until
from paged_model import continued, tokens_of
from skewed_experts import NUM_LAYERS, write_skewed

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel
from workers.messages.link import Cancel

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
# The second, in slot 1, takes more rows than `LEAST_ROWS`: rows are sent to the ranks of their experts.
PROMPTS = [tokens_of(seed, length) for seed, length in enumerate((33, 600, 9, 54, 41, 70))]
ENGINE = {"kv_tokens": 4096, "max_batch_tokens": 640, "chunk_tokens": 640, "expert_copies": 2}
# Experts in two parts by their numbers, and each of them in two by its columns.
WIDE, NARROW = Parallel(tp=4, ep=2), Parallel(tp=2, ep=2)
MOST_ROUNDS = 40


class _Fault(NamedTuple):
    """What happens at which replica."""

    at: str
    point: str
    action: str
    after: int = 1


FAULTS = {
    "none": None,
    "a rank dies in a step": _Fault("d0", "rank.step.decode", "kill", 9),
    # The third mark of a layer is between the exchange of partial sums and that of routed rows.
    "a rank dies between exchanges of rows": _Fault("p0", "rank.layers.prefill.1.1", "kill", 3),
    "a rank dies while it writes": _Fault("p0", "push.half", "kill", 2),
    "a written piece is spoiled": _Fault("p0", "push.corrupt", "corrupt", 3),
    "a rank dies while experts are copied": _Fault("d0", "rank.step.copies", "kill"),
}


def _rules(fault: _Fault | None, at: str, folder: Path) -> list[FaultRule]:
    if fault is None or fault.at != at:
        return []
    return [rule(fault.point, fault.action, folder, fault.after)]


class _Round:
    """Requests to a prefill and a decode replica at once, some of whose clients go. Those that fail are
    submitted again to a spare one."""

    def __init__(self, harness: E2eHarness, expected: list[list[int]]) -> None:
        self._harness, self._expected = harness, expected
        self.num_failed = 0

    async def run(self, turn: int, seed: int) -> None:
        draw = random.Random(seed * 1000 + turn)
        going = [draw.random() < 0.3 for _ in PROMPTS]
        steps = [draw.randrange(1, NUM_TOKENS - 4) for _ in PROMPTS]
        await asyncio.gather(
            *(
                self._go(f"{turn}-{number}", number, steps[number])
                if going[number]
                else self._stay(f"{turn}-{number}", number)
                for number in range(len(PROMPTS))
            )
        )

    async def _stay(self, name: str, number: int) -> None:
        prefill, decode, spare = (self._harness.replicas[it] for it in ("p0", "d0", "b0"))
        wanted = self._expected[number]
        how: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
        first = self._harness.submission(name, PROMPTS[number], decode=decode, **how)
        heard = await self._harness.run(prefill, first)
        begun = heard.sequence()
        assert begun == wanted[: len(begun)]
        if heard.failure is None:
            assert begun == wanted
            return
        self.num_failed += 1
        again = self._harness.submission(name, PROMPTS[number], attempt=1, output=begun, **how)
        second = await self._harness.run(spare, again)
        assert second.failure is None, second.failure
        assert begun + [second.tokens[0][it] for it in sorted(second.tokens[0])] == wanted

    async def _go(self, name: str, number: int, num_tokens: int) -> None:
        prefill, decode = (self._harness.replicas[it] for it in ("p0", "d0"))
        submission = self._harness.submission(
            name, PROMPTS[number], decode=decode, max_tokens=NUM_TOKENS, temperature=0.0
        )
        heard = self._harness.heard.setdefault((name, 0), Heard())
        prefill.send(submission)
        await until(lambda: heard.num_ends > 0 or len(heard.tokens.get(0, {})) >= num_tokens, name)
        for replica in (prefill, decode):
            if not replica.core._death:
                replica.send(Cancel(name, 0))


async def _add(harness: E2eHarness, fault: _Fault | None, folder: Path) -> None:
    shapes = {"p0": ("prefill", WIDE), "d0": ("decode", NARROW), "b0": ("both", NARROW)}
    for name, (role, parallel) in shapes.items():
        rules = _rules(fault, name, folder)
        await harness.add(name, role, parallel=parallel, engine=ENGINE, faults=rules)


@pytest.mark.parametrize("name", FAULTS)
async def test_requests_to_replicas_with_experts_end_well(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    write_skewed(tmp_path, max_position_embeddings=1024)
    expected = [continued(tmp_path, prompt, NUM_TOKENS) for prompt in PROMPTS]
    async with E2eHarness(tmp_path) as harness:
        await _add(harness, fault, tmp_path)
        decode, rounds = harness.replicas["d0"], _Round(harness, expected)
        for turn in range(MOST_ROUNDS):
            await rounds.run(turn, len(name))
            if fault is not None and any(map(fired, _rules(fault, fault.at, tmp_path))):
                break
            load = decode.core.reports.load()
            if fault is None and turn > 1 and load.num_expert_copies >= NUM_LAYERS:
                break
        else:
            pytest.fail("nothing happened: no fault, or no copies")
        dead = fault.at if fault is not None and fault.action == "kill" else ""
        assert bool(rounds.num_failed) <= bool(dead)
        await harness.quiet(*(replica for at, replica in harness.replicas.items() if at != dead))
        ends = {key: heard.num_ends for key, heard in harness.heard.items()}
        assert set(ends.values()) <= {0, 1}, ends
