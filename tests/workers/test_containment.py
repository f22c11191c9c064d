"""Part of a step cannot be computed at some rank: its requests fail, all others have the tokens that they
would have had, the ranks serve on, and nothing leaks. The ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from local_engine import BLOCK, SEEDED, LocalEngine, draw, entry, packed, started, step, submitted
from msgspec.structs import replace
from slow_cases import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.faults import FaultRule, Faults
from workers.config import EngineConfig
from workers.errors import RankDiedError
from workers.messages.link import Submission
from workers.messages.rank_channel import SlotStart
from workers.messages.sampling import SamplingParams
from workers.rank.containment import Containment
from workers.rank.sampler import Sampler

CONFIG = EngineConfig(block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=40, max_sequences=8)
STAGES = {1: [(0, 2)], 2: [(0, 1), (1, 2)]}
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
FOREVER = 1 << 30
POISON = "poison"


def ask(name: str, num_prompt: int, max_tokens: int, *, n: int = 1, seed: int = 0) -> Submission:
    prompt = packed(draw(num_prompt, seed=seed + num_prompt))
    return submitted(
        name,
        prompt,
        SamplingParams(
            temperature=SEEDED.temperature,
            repetition_penalty=SEEDED.repetition_penalty,
            max_tokens=max_tokens,
            ignore_eos=True,
        ),
        n=n,
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

    def __init__(
        self,
        model_dir: Path,
        tp: int,
        pp: int,
        host_id: str,
        config: EngineConfig = CONFIG,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.faults = [SwitchedFaults() for _ in range(tp * pp)]
        self.engine = LocalEngine(
            model_dir, config, 60, tp=tp, stages=STAGES[pp], host_id=host_id, faults=self.faults, dtype=dtype
        )

    def run(
        self, rule: FaultRule | None = None, requests: Sequence[Submission] = REQUESTS
    ) -> tuple[dict[tuple[str, int], bytes], set[str]]:
        """The outputs, and which requests failed."""
        for faults in self.faults:
            faults.current = Faults([rule] if rule else [])
        self.engine.failures = {}
        self.engine.scheduler.life._free_slots.sort(reverse=True)  # the poison's slot is always the same
        outputs = self.engine.run(requests)
        assert self.engine.pool.num_referenced == 0
        self.engine.pool.check()
        self.engine.pool.purge(None)
        assert {failure.code for failure in self.engine.failures.values()} <= {"internal"}
        return outputs, set(self.engine.failures)


MakeReplica = Callable[[int, int, str], Replica]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


@pytest.fixture(scope="module")
def replicas(model_dir: Path) -> Iterator[MakeReplica]:
    """Replicas by `tp`, `pp` and the ranks' host, each made once."""
    made: dict[tuple[int, int, str], Replica] = {}

    def make(tp: int, pp: int, host_id: str) -> Replica:
        if (tp, pp, host_id) not in made:
            made[tp, pp, host_id] = Replica(model_dir, tp, pp, host_id)
        return made[tp, pp, host_id]

    yield make
    for replica in made.values():
        replica.engine.close()


@pytest.fixture(scope="module")
def expected(replicas: MakeReplica) -> dict[tuple[str, int], bytes]:
    """The tokens of a run that nothing disturbs."""
    outputs, failed = replicas(1, 1, "").run()
    assert not failed
    return outputs


def phases(tp: int, pp: int, rank: int) -> list[str]:
    """What can fail at this rank."""
    stage = rank // tp
    found = ["layers"] + ["embedding"] * (stage == 0) + ["head"] * (stage == pp - 1)
    return found + ["sampling"] * (rank == tp * (pp - 1))


def case(tp: int, pp: int, links: str, rank: int, phase: str, kind: str) -> Any:
    """Fast are one rank, decoding in the layers and the sampling of four ranks, and one case of each other
    shape."""
    is_fast = tp * pp == 1 or (links == "here" and phase in ("layers", "sampling") and tp * pp == 4)
    is_fast &= tp * pp == 1 or kind == "decode" or rank == 3
    is_fast |= rank == tp * pp - 1 and (phase, kind) == ("layers", "decode")
    return pytest.param(
        *(tp, pp, links, rank, phase, kind),
        id=f"{tp}x{pp}-{links or 'gloo'}-rank{rank}-{phase}-{kind}",
        marks=[] if is_fast else pytest.mark.slow,
    )


CASES = [
    case(tp, pp, links, rank, phase, kind)
    for tp, pp in SHAPES
    for links in (["here", ""] if tp * pp > 1 else [""])
    for rank in range(tp * pp)
    for phase in phases(tp, pp, rank)
    for kind in ("prefill", "decode")
]


@pytest.mark.parametrize(("tp", "pp", "links", "rank", "phase", "kind"), CASES)
def test_a_poison_request_fails_alone(
    replicas: MakeReplica,
    expected: dict[tuple[str, int], bytes],
    tmp_path: Path,
    tp: int,
    pp: int,
    links: str,
    rank: int,
    phase: str,
    kind: str,
) -> None:
    """In the middle of a layer of its second chunk, or from some decode step on, an allocation fails at the
    rank whenever it computes the request. A whole layer is one call of the kernels: there is no middle."""
    in_layers = ({"prefill": 3, "decode": 6} if tp == 1 else {"prefill": 13, "decode": 33})[kind]
    after = in_layers if phase == "layers" else {"prefill": 1, "decode": 3}[kind]
    point = f"rank.{phase}.{kind}.{rank}.{POISON_SLOT}"
    rule = FaultRule(point, "raise", str(tmp_path / "marker"), after, FOREVER)
    outputs, failed = replicas(tp, pp, links).run(rule)
    assert failed == {POISON}
    others = {name: tokens for name, tokens in expected.items() if name[0] != POISON}
    assert {name: tokens for name, tokens in outputs.items() if name[0] != POISON} == others
    reported = outputs.get((POISON, 0), b"")
    assert expected[POISON, 0].startswith(reported), "no token of a failed step is reported"
    assert replicas(tp, pp, links).run() == (expected, set()), "the ranks serve on"


@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 2, 1), (2, 2, 2)])
def test_memory_that_lacks_once_fails_nobody(
    replicas: MakeReplica,
    expected: dict[tuple[str, int], bytes],
    tmp_path: Path,
    tp: int,
    pp: int,
    rank: int,
) -> None:
    """The step is computed again in halves, and each of them fits."""
    rule = FaultRule(f"rank.layers.decode.{rank}", "raise", str(tmp_path / "marker"), 45)
    assert replicas(tp, pp, "here").run(rule) == (expected, set())
    assert (tmp_path / "marker").exists()


class FirstFails(Faults):
    """Lets the first computation of a chunk beside a decode fail, and notes what is computed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[str] = []

    @property
    def armed(self) -> bool:
        return True

    def at(self, point: str) -> bool:
        kind = next((kind for kind in ("prefill", "decode") if point == f"rank.embedding.{kind}.0"), None)
        if kind is not None:
            self.points.append(kind)
        if self.points == ["prefill", "decode"]:
            raise MemoryError("too large together")
        return False


def test_what_decodes_is_computed_before_a_chunk_when_a_step_is_computed_again(model_dir: Path) -> None:
    """Where memory lacks, the newest sequences are those that fail."""
    faults = FirstFails()
    engine = LocalEngine(model_dir, CONFIG, 60, faults=[faults])
    faults.points.clear()
    prompt, other = draw(18), draw(20, seed=1)
    (runner,) = engine.runners
    runner.steps.run(step(entry(1, 0, prompt, (0, 1), [1]), starts=[started(1, prompt)]))
    faults.points.clear()
    plan = step(entry(2, 0, other, (2, 3), [2]), starts=[started(2, other)])
    report = runner.steps.run(replace(plan, decodes=packed([1])))
    assert not report.failed
    assert faults.points == ["prefill", "decode", "decode", "prefill"]
    engine.close()


def test_when_every_entry_fails_the_ranks_serve_on(
    replicas: MakeReplica, expected: dict[tuple[str, int], bytes], tmp_path: Path
) -> None:
    """Whatever rank 3 decodes fails there, also in the plans that are out by then."""
    replica = replicas(2, 2, "here")
    rule = FaultRule("rank.layers.decode.3", "raise", str(tmp_path / "marker"), 1, FOREVER)
    outputs, failed = replica.run(rule)
    assert failed == {request.request_id for request in REQUESTS}
    assert all(expected[name].startswith(tokens) for name, tokens in outputs.items())
    assert replica.run() == (expected, set())


@pytest.mark.parametrize("links", ["here", ""])
def test_a_rank_that_fails_in_a_chunk_of_several_tiles_adds_all_that_the_others_wait_for(
    model_dir: Path, tmp_path: Path, links: str
) -> None:
    """600 rows are three tiles; the rank fails in the second of them."""
    config = EngineConfig(block_tokens=BLOCK, max_batch_tokens=640, chunk_tokens=600, max_sequences=8)
    replica = Replica(model_dir, 2, 1, links, config)
    requests = [ask("first", 20, 3), ask(POISON, 600, 3)]
    expected, _ = replica.run(None, requests)
    point = f"rank.layers.prefill.1.{POISON_SLOT}"
    outputs, failed = replica.run(FaultRule(point, "raise", str(tmp_path / "m"), 7, FOREVER), requests)
    assert failed == {POISON}
    assert outputs == {("first", 0): expected["first", 0]}
    assert replica.run(None, requests) == (expected, set())
    replica.engine.close()


@pytest.mark.parametrize("links", slow_but(["here", ""], "here"))
def test_a_rank_that_fails_adds_the_squares_of_row_norms_that_the_others_wait_for(
    tmp_path: Path, links: str
) -> None:
    """In float32, before the sums of each layer of a model in bfloat16. The rank fails at each point of its
    two layers, wherever that leaves it among these sums."""
    write_random_checkpoint(tmp_path / "model", "olmo2", seed=3, dtype="bfloat16")
    config = CONFIG.model_copy(update={"deterministic": True})
    replica = Replica(tmp_path / "model", 2, 1, links, config, torch.bfloat16)
    requests = [ask("first", 20, 6), ask(POISON, 30, 6)]
    expected, _ = replica.run(None, requests)
    point = f"rank.layers.decode.1.{POISON_SLOT}"
    for after in range(1, 12):
        rule = FaultRule(point, "raise", str(tmp_path / f"{after}"), after, FOREVER)
        outputs, failed = replica.run(rule, requests)
        assert failed == {POISON}
        assert outputs["first", 0] == expected["first", 0]
    assert replica.run(None, requests) == (expected, set())
    replica.engine.close()


def test_sampling_that_cannot_begin_fails_its_request(
    replicas: MakeReplica, expected: dict[tuple[str, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_sampler = Sampler.start
    (poison,) = (request for request in REQUESTS if request.request_id == POISON)
    last_of_poison = int.from_bytes(poison.prompt[-4:], "little")

    def start(self: Sampler, start: SlotStart) -> None:
        if start.samples[0].last_token == last_of_poison:
            raise ValueError("these tokens have no penalties")
        of_sampler(self, start)

    monkeypatch.setattr(Sampler, "start", start)
    replica = replicas(2, 2, "here")
    outputs, failed = replica.run()
    assert failed == {POISON}
    assert outputs == {name: tokens for name, tokens in expected.items() if name[0] != POISON}
    assert "these tokens have no penalties" in replica.engine.failures[POISON].reason
    monkeypatch.undo()
    assert replica.run() == (expected, set())


def test_an_error_that_the_device_does_not_survive_ends_the_rank() -> None:
    containment = Containment(torch.device("cpu"))
    with pytest.raises(torch.AcceleratorError):
        containment.attempt(lambda: _raise(torch.AcceleratorError("an illegal memory access")))
    with pytest.raises(RankDiedError):
        containment.attempt(lambda: _raise(RankDiedError("another rank is gone")))
    with pytest.raises(AssertionError):
        containment.attempt(lambda: _raise(AssertionError("a bug of ours")))


def test_a_device_that_cannot_be_used_any_more_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that looks harmless, after which nothing can be computed."""
    containment = Containment(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "fill_", lambda *_: _raise(torch.AcceleratorError("sticky")))
    with pytest.raises(torch.AcceleratorError, match="sticky"):
        containment.attempt(lambda: _raise(RuntimeError("out of workspace")))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is computed, and refuses to give memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(("empty", "ones", "zeros", "add", "clone")) and not name.endswith("_"):
            raise torch.OutOfMemoryError(name)
        self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_looking_whether_the_device_computes_takes_no_memory() -> None:
    """A failed attempt holds its own while the device is looked at."""
    containment = Containment(torch.device("cpu"))
    with Operations() as operations:
        assert containment.attempt(lambda: torch.empty(1 << 20)) is None
        containment.touch_device()
    assert containment.reason.startswith("OutOfMemoryError")
    assert operations.names == ["fill_", "_local_scalar_dense"] * 2


def test_what_takes_little_memory_is_tried_twice() -> None:
    containment = Containment(torch.device("cpu"))
    errors = [torch.OutOfMemoryError("first"), None, torch.OutOfMemoryError("second"), ValueError("third")]

    def work() -> int:
        error = errors.pop(0)
        if error is not None:
            raise error
        return 7

    assert containment.retry_after_freeing_cache(work) == 7
    with pytest.raises(ValueError, match="third"):
        containment.retry_after_freeing_cache(work)


def _raise(error: BaseException) -> None:
    raise error
