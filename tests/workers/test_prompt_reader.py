"""Log-probabilities of prompts and embeddings, read by whole engines of one rank and of several, against
transformers on the same random checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine import BLOCK, SEEDED, LocalEngine, draw, packed, submitted
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.faults import FaultRule, Faults
from workers.config import EngineConfig
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams
from workers.rank.device_queue import CpuQueue

CONFIG = EngineConfig(block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=40, max_sequences=8)
STAGES = {1: [(0, 2)], 2: [(0, 1), (1, 2)]}
NUM_TOP = 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


class Reference:
    """What transformers makes of prompts."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def logprobs(self, prompt: bytes) -> Tensor:
        """[num_tokens, vocab_size]: row i is what the tokens up to i say of the next one."""
        with torch.inference_mode():
            logprobs: Tensor = self._model(_ids(prompt)).logits[0].log_softmax(-1)
        return logprobs

    def embedding(self, prompt: bytes) -> Tensor:
        with torch.inference_mode():
            embedding: Tensor = self._model.model(_ids(prompt)).last_hidden_state[0, -1]
        return embedding


def _ids(prompt: bytes) -> Tensor:
    return torch.tensor([np.frombuffer(prompt, "<u4").astype(np.int64).tolist()])


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@pytest.fixture
def engines() -> Iterator[list[LocalEngine]]:
    made: list[LocalEngine] = []
    yield made
    for engine in made:
        engine.close()


def ask(
    name: str, prompt: Sequence[int], *, n: int = 1, max_tokens: int = 6, num_top: int | None = None
) -> Submission:
    tokens = packed(prompt)
    return submitted(
        name,
        tokens,
        replace(SEEDED, max_tokens=max_tokens, ignore_eos=True, num_prompt_logprobs=num_top),
        n=n,
    )


def embed(name: str, prompt: Sequence[int]) -> Submission:
    return replace(ask(name, prompt), sampling=SamplingParams(max_tokens=1), pooling="last")


def check_logprobs(engine: LocalEngine, asked: Submission, reference: Reference) -> None:
    """Every token of the prompt but the first has its log-probability, once and in order, and the likeliest
    ones are those of transformers."""
    read = engine.prompt_logprobs.get(asked.request_id, [])
    ids = np.frombuffer(asked.prompt, "<u4").tolist()
    assert [index for index, _ in read] == list(range(1, len(ids)))
    expected = reference.logprobs(asked.prompt)
    num_top = asked.sampling.num_prompt_logprobs
    assert num_top is not None
    for (index, found), row in zip(read, expected, strict=False):
        assert found.logprob == pytest.approx(row[ids[index]].item(), abs=2e-4)
        assert len(found.top) == num_top
        assert [value for _, value in found.top] == sorted((value for _, value in found.top), reverse=True)
        for (token, value), best in zip(found.top, row.topk(num_top).values.tolist(), strict=True):
            assert value == pytest.approx(best, abs=2e-4)
            assert value == pytest.approx(row[token].item(), abs=2e-4)


def check_embedding(engine: LocalEngine, asked: Submission, reference: Reference) -> None:
    (vector,) = engine.embeddings[asked.request_id]
    np.testing.assert_allclose(vector, reference.embedding(asked.prompt).numpy(), atol=2e-4)


SCORED = (
    ask("scored", draw(100, seed=1), num_top=NUM_TOP),
    ask("forks", draw(33, seed=2), n=2, num_top=0),
    ask("short", draw(2, seed=3), num_top=NUM_TOP),
    ask("lone", draw(1, seed=4), num_top=NUM_TOP),
)
EMBEDDED = (
    embed("embedded", draw(90, seed=5)),
    embed("word", draw(1, seed=6)),
    embed("full", draw(41, seed=7)),
)
# None of their tokens may depend on what is read of others.
OTHERS = (ask("plain", draw(70, seed=8)), ask("two", draw(20, seed=9), n=2))


# Of "scored", when one other request comes before it. No prompt of the warm-up is in it.
SCORED_SLOT = 1


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[tuple[str, int], bytes]:
    """Outputs of all that generate, where nothing is read."""
    engine = LocalEngine(model_dir, CONFIG, 80)
    plain = [replace(it, sampling=replace(it.sampling, num_prompt_logprobs=None)) for it in SCORED]
    outputs = engine.run([*plain, *OTHERS])
    assert not engine.prompt_logprobs
    engine.close()
    return outputs


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_mixed_batch_is_read_as_transformers_reads_it(
    model_dir: Path,
    reference: Reference,
    expected: dict[tuple[str, int], bytes],
    engines: list[LocalEngine],
    tp: int,
    pp: int,
    rows: int,
) -> None:
    """In pieces of `rows` positions (0: as many as fit), and nobody's tokens are others for it."""
    engine = LocalEngine(model_dir, CONFIG, 80, tp=tp, stages=STAGES[pp])
    engines.append(engine)
    for runner in engine.runners:
        runner.steps._reader.rows_of_piece = rows or runner.steps.rows_of_piece
    outputs = engine.run([*SCORED, *EMBEDDED, *OTHERS])
    assert outputs == expected
    assert not engine.failures
    for asked in SCORED:
        check_logprobs(engine, asked, reference)
    for asked in EMBEDDED:
        check_embedding(engine, asked, reference)
    assert set(engine.prompt_logprobs) == {"scored", "forks", "short"}
    assert set(engine.embeddings) == {asked.request_id for asked in EMBEDDED}


@pytest.mark.parametrize(("chunk", "batch"), [(1, 16), (16, 16), (17, 50), (128, 256)])
def test_chunks_of_any_size(
    model_dir: Path, reference: Reference, engines: list[LocalEngine], chunk: int, batch: int
) -> None:
    config = EngineConfig(
        block_tokens=BLOCK, max_batch_tokens=batch, chunk_tokens=max(chunk, BLOCK), max_sequences=8
    )
    engine = LocalEngine(model_dir, config, 80)
    engines.append(engine)
    engine.run([*SCORED, *EMBEDDED])
    for asked in SCORED:
        check_logprobs(engine, asked, reference)
    for asked in EMBEDDED:
        check_embedding(engine, asked, reference)


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_that_stay_on_the_device(
    model_dir: Path,
    reference: Reference,
    expected: dict[tuple[str, int], bytes],
    engines: list[LocalEngine],
    tp: int,
) -> None:
    engine = LocalEngine(model_dir, CONFIG, 80, tp=tp, queue=CpuQueue())
    engines.append(engine)
    assert engine.run([*SCORED, *EMBEDDED, *OTHERS]) == expected
    for asked in SCORED:
        check_logprobs(engine, asked, reference)
    for asked in EMBEDDED:
        check_embedding(engine, asked, reference)


def test_a_scored_prompt_takes_nothing_from_the_cache_and_an_embedded_one_does(
    model_dir: Path, reference: Reference, engines: list[LocalEngine]
) -> None:
    engine = LocalEngine(model_dir, CONFIG, 80)
    engines.append(engine)
    prompt = draw(64, seed=11)
    cached: dict[str, int] = {}

    def run(asked: Submission) -> None:
        engine.scheduler.submit(asked, 0.0)
        while (outcome := engine.step()) is not None:
            cached.update({done.request_id: done.num_cached_tokens for done in outcome.prompts})

    scored, embedded = ask("scored", prompt, num_top=1), embed("embedded", prompt)
    for asked in (ask("first", prompt), scored, embedded):
        run(asked)
    assert cached == {"first": 0, "scored": 0, "embedded": 48}
    check_logprobs(engine, scored, reference)
    check_embedding(engine, embedded, reference)


def test_preempted_prompts_are_read_once_and_in_order(
    model_dir: Path, reference: Reference, engines: list[LocalEngine]
) -> None:
    """The device is small: prompts are preempted between chunks, and so is what decodes after them."""
    engine = LocalEngine(model_dir, CONFIG, 12)
    engines.append(engine)
    asked = [ask(f"r{number}", draw(60, seed=number), max_tokens=40, num_top=2) for number in range(4)]
    outputs = engine.run(asked)
    assert engine.scheduler.life.num_preemptions > 0
    assert len(outputs) == 4
    for each in asked:
        check_logprobs(engine, each, reference)


def test_a_prompt_that_is_preempted_after_a_chunk_is_read_on_from_there(
    model_dir: Path, reference: Reference, engines: list[LocalEngine]
) -> None:
    """Of what was read before, whole blocks may be cached; the rest is computed, also where it is cached, and
    read only where it was not read before."""
    config = EngineConfig(block_tokens=BLOCK, max_batch_tokens=37, chunk_tokens=37, max_sequences=8)
    engine = LocalEngine(model_dir, config, 40)
    engines.append(engine)
    engine.run([ask("before", (prompt := draw(100, seed=1)), max_tokens=1)])
    asked = ask("scored", prompt, num_top=NUM_TOP)
    engine.scheduler.submit(asked, 0.0)
    engine.step()
    life = engine.scheduler.life
    (sequence,) = life.running
    assert 0 < sequence.request.num_scored_tokens < 100
    life.preempt(sequence)
    while engine.step() is not None:
        pass
    check_logprobs(engine, asked, reference)
    entries = [entry for plan in engine.plans for entry in plan.entries]
    read = [(entry.start, entry.targets.start) for entry in entries if entry.targets is not None]
    assert read == [(0, 0), (37, 37), (64, 74)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("after", [2, 3])
def test_a_prompt_that_cannot_be_read_fails_alone(
    model_dir: Path,
    reference: Reference,
    expected: dict[tuple[str, int], bytes],
    engines: list[LocalEngine],
    tmp_path: Path,
    tp: int,
    pp: int,
    after: int,
) -> None:
    """In its second chunk, or a later one, at the last rank: the others hear of it and go on."""
    last = tp * pp - 1
    rule = FaultRule(
        f"rank.reading.prefill.{last}.{SCORED_SLOT}", "raise", str(tmp_path / "m"), after, 1 << 30
    )
    faults = [Faults([rule] if rank == last else []) for rank in range(tp * pp)]
    engine = LocalEngine(model_dir, CONFIG, 80, tp=tp, stages=STAGES[pp], faults=faults)
    engines.append(engine)
    engine.scheduler.life._free_slots.sort(reverse=True)
    outputs = engine.run([*OTHERS[:1], *SCORED, *EMBEDDED, *OTHERS[1:]])
    assert set(engine.failures) == {"scored"}
    assert {name: tokens for name, tokens in outputs.items() if name[0] != "scored"} == {
        name: tokens for name, tokens in expected.items() if name[0] != "scored"
    }
    for asked in SCORED[1:]:
        check_logprobs(engine, asked, reference)
    for asked in EMBEDDED:
        check_embedding(engine, asked, reference)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_piece_that_fails_is_read_in_halves(
    model_dir: Path,
    reference: Reference,
    expected: dict[tuple[str, int], bytes],
    engines: list[LocalEngine],
    tmp_path: Path,
    tp: int,
) -> None:
    """Where memory lacked once, nobody fails, and nothing is read twice or left out."""
    rule = FaultRule(f"rank.reading.prefill.{tp - 1}.{SCORED_SLOT}", "raise", str(tmp_path / "m"), 2, 1)
    faults = [Faults([rule] if rank == tp - 1 else []) for rank in range(tp)]
    engine = LocalEngine(model_dir, CONFIG, 80, tp=tp, faults=faults)
    engines.append(engine)
    engine.scheduler.life._free_slots.sort(reverse=True)
    assert engine.run([*OTHERS[:1], *SCORED, *OTHERS[1:]]) == expected
    assert (tmp_path / "m").exists()
    assert not engine.failures
    for asked in SCORED:
        check_logprobs(engine, asked, reference)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.num_bytes = max(self.num_bytes, made.numel() * made.element_size())
        return made


def test_logits_are_computed_in_pieces(model_dir: Path, tmp_path: Path, engines: list[LocalEngine]) -> None:
    """2000 positions of a vocabulary of 40,000 would have logits of 320 MB."""
    write_random_checkpoint(tmp_path, "llama", seed=3, vocab_size=40_000)
    config = EngineConfig(block_tokens=BLOCK, max_batch_tokens=2048, chunk_tokens=2048, max_sequences=2)
    engine = LocalEngine(tmp_path, config, 140)
    engines.append(engine)
    (runner,) = engine.runners
    engine.scheduler.submit(ask("long", draw(2000), max_tokens=1, num_top=20), 0.0)
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_targets == 1999
    with Largest() as largest:  # type: ignore[no-untyped-call]
        report = runner.steps.run(plan)
    assert largest.num_bytes <= 16 << 20
    (read,) = report.prompt_logprobs
    assert (read.logprobs.num_tokens, read.logprobs.num_bytes) == (1999, 1999 * (4 + 20 * 8))
