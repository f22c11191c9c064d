"""Part of a step cannot be computed at some rank: its requests fail, all others have the tokens that they would
have had, the ranks serve on, and nothing leaks. The ranks are threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MakeCheckpoint
from local_engine import LocalEngine
from step_plans import BLOCK, SEEDED, draw, packed

from kvtransfer.faults import FaultRule, Faults
from kvtransfer.keys import block_keys
from workers.config import EngineConfig
from workers.messages import SampleState, SamplingParams, Submission

CONFIG = EngineConfig(block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=40, max_sequences=8)
STAGES = {1: [(0, 2)], 2: [(0, 1), (1, 2)]}
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
FOREVER = 1 << 30
POISON = "poison"


def ask(name: str, num_prompt: int, max_tokens: int, *, n: int = 1, seed: int = 0) -> Submission:
    prompt = packed(draw(num_prompt, seed=seed + num_prompt))
    return Submission(
        request_id=name,
        attempt=1,
        tenant="",
        priority=0,
        prompt=prompt,
        block_keys=block_keys(prompt, BLOCK, b"model", ""),
        samples=tuple(SampleState(index, 31 + index, b"") for index in range(n)),
        sampling=SamplingParams(
            temperature=SEEDED.temperature,
            repetition_penalty=SEEDED.repetition_penalty,
            max_tokens=max_tokens,
            ignore_eos=True,
        ),
        decode=None,
        deadline_s=None,
    )


# Slots are taken in this order, from 0 on: the poison is in slot 1, and its prompt has several chunks.
REQUESTS = (ask("first", 20, 12), ask(POISON, 100, 12), ask("two", 30, 12, n=2), ask("last", 70, 12))
POISON_SLOT = 1


class SwitchedFaults(Faults):
    """Rules that a test sets while the ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Faults()

    @property
    def armed(self) -> bool:
        return self.current.armed

    def at(self, point: str) -> bool:
        return self.current.at(point)


class Replica:
    """An engine whose ranks fail where a test says; each of its runs leaves nothing behind."""

    def __init__(self, model_dir: Path, tp: int, pp: int, host_id: str) -> None:
        self.faults = [SwitchedFaults() for _ in range(tp * pp)]
        self.engine = LocalEngine(
            model_dir, CONFIG, 60, tp=tp, stages=STAGES[pp], host_id=host_id, faults=self.faults
        )

    def run(self, rule: FaultRule | None = None) -> tuple[dict[tuple[str, int], bytes], set[str]]:
        """The outputs, and which requests failed."""
        for faults in self.faults:
            faults.current = Faults([rule] if rule else [])
        self.engine.failures = {}
        self.engine.pool.purge(None)
        outputs = self.engine.run(REQUESTS)
        assert self.engine.pool.num_referenced == 0
        assert {failure.code for failure in self.engine.failures.values()} <= {"internal"}
        return outputs, set(self.engine.failures)


@pytest.mark.parametrize("phase", ["embedding", "layers", "head", "sampling"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_poison_request_fails_alone(make_checkpoint: MakeCheckpoint, tmp_path: Path, phase: str, kind: str) -> None:
    replica = Replica(make_checkpoint("llama"), 1, 1, "")
    expected, failed = replica.run()
    assert not failed
    outputs, failed = replica.run(FaultRule(f"rank.{phase}.{kind}.0.{POISON_SLOT}", "raise", str(tmp_path / "m"), 1, FOREVER))
    assert failed == {POISON}
    assert outputs.keys() <= expected.keys()
    assert {key: out for key, out in outputs.items() if key[0] != POISON} == {key: out for key, out in expected.items() if key[0] != POISON}
