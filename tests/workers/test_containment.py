"""Part of a step cannot be computed at some rank: its requests fail, all others have the tokens that they would
have had, the ranks serve on, and nothing leaks. The ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_engine import LocalEngine
from step_plans import BLOCK, SEEDED, draw, packed

from kvtransfer.faults import FaultRule, Faults
from kvtransfer.keys import block_keys
from workers.config import EngineConfig
from workers.messages import SampleState, SamplingParams, Submission
from workers.model.random_checkpoint import write_random_checkpoint

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
        self.engine.scheduler._life._free_slots.sort(reverse=True)  # the poison's slot is always the same
        outputs = self.engine.run(REQUESTS)
        assert self.engine.pool.num_referenced == 0
        self.engine.pool.check()
        self.engine.pool.purge(None)
        assert {failure.code for failure in self.engine.failures.values()} <= {"internal"}
        return outputs, set(self.engine.failures)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int, str], Replica]]:
    """Replicas by `tp`, `pp` and the ranks' host, each made once."""
    model_dir = tmp_path_factory.mktemp("model")
    write_random_checkpoint(model_dir, "llama", seed=3)
    made: dict[tuple[int, int, str], Replica] = {}

    def make(tp: int, pp: int, host_id: str) -> Replica:
        if (tp, pp, host_id) not in made:
            made[tp, pp, host_id] = Replica(model_dir, tp, pp, host_id)
        return made[tp, pp, host_id]

    yield make
    for replica in made.values():
        replica.engine.close()


@pytest.fixture(scope="module")
def expected(replicas: Callable[[int, int, str], Replica]) -> dict[tuple[str, int], bytes]:
    """The tokens of a run that nothing disturbs."""
    outputs, failed = replicas(1, 1, "").run()
    assert not failed
    return outputs


def phases(tp: int, pp: int, rank: int) -> list[str]:
    """What can fail at this rank."""
    stage = rank // tp
    found = ["layers"] + ["embedding"] * (stage == 0) + ["head"] * (stage == pp - 1)
    return found + ["sampling"] * (rank == tp * (pp - 1))


CASES = [
    pytest.param(
        tp, pp, rank, phase, kind, links, id=f"{tp}x{pp}-{links or 'gloo'}-rank{rank}-{phase}-{kind}"
    )
    for tp, pp in SHAPES
    for links in (["here", ""] if tp * pp > 1 else [""])
    for rank in range(tp * pp)
    for phase in phases(tp, pp, rank)
    for kind in ("prefill", "decode")
]


@pytest.mark.parametrize(("tp", "pp", "rank", "phase", "kind", "links"), CASES)
def test_a_poison_request_fails_alone(
    replicas: Callable[[int, int, str], Replica],
    expected: dict[tuple[str, int], bytes],
    tmp_path: Path,
    tp: int,
    pp: int,
    rank: int,
    phase: str,
    kind: str,
    links: str,
) -> None:
    """In the middle of a layer of its second chunk, or from some decode step on, an allocation fails at the rank
    whenever it computes the request."""
    in_layers = {"prefill": 13, "decode": 33}[kind]
    after = in_layers if phase == "layers" else {"prefill": 1, "decode": 3}[kind]
    point = f"rank.{phase}.{kind}.{rank}.{POISON_SLOT}"
    rule = FaultRule(point, "raise", str(tmp_path / "marker"), after, FOREVER)
    outputs, failed = replicas(tp, pp, links).run(rule)
    assert failed == {POISON}
    others = {name: tokens for name, tokens in expected.items() if name[0] != POISON}
    assert {name: tokens for name, tokens in outputs.items() if name[0] != POISON} == others
    told = outputs.get((POISON, 0), b"")
    assert expected[POISON, 0].startswith(told), "no token of a step that failed is told"
    assert replicas(tp, pp, links).run() == (expected, set()), "the ranks serve on"
