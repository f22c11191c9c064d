"""The engine with tokens, tables and sampling parameters on the device, against transformers and against the
engine on a CPU, whose tokens pass through the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grammar_harness import END, OTHER_END, TOKENS, choice, small_grammars
from msgspec.structs import replace
from runner_parts import ON_CPU, by_kernels

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock
from workers.messages.rank_channel import (
    BatchEntry,
    BlockCopy,
    SlotSample,
    SlotStart,
    StepPlan,
    StepReport,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.rank import device_sampler
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity
from workers.rank.sampler import Logprobs

BLOCK = 16
VOCAB = 128
MAX_SEQUENCES = 4
GREEDY = SamplingParams()

Make = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with QK norms, a window in some layers, and grouped heads."""
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "qwen3", seed=3, vocab_size=VOCAB)
    return path


@pytest.fixture(autouse=True)
def _small_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: rows of logits are two pieces."""
    from workers.model.cuda import sampling

    if device.type == "cpu":
        monkeypatch.setattr(sampling, "_PIECE", 64)
        monkeypatch.setattr(sampling, "_CANDIDATES", 16)


@pytest.fixture
def make(model_dir: Path, device: torch.device) -> Iterator[Make]:
    """Makes runners on the device, with graphs of some sizes."""
    runners: list[ModelRunner] = []

    def make(
        *,
        graphs: Sequence[int] = (),
        num_offload_tokens: int = 0,
        grammars: CompiledGrammars | None = None,
    ) -> ModelRunner:
        runner = ModelRunner(
            CheckpointFolder(model_dir),
            by_kernels(device),
            RankCapacity(
                BLOCK,
                20 * BLOCK,
                MAX_SEQUENCES,
                num_offload_tokens=num_offload_tokens,
                offload_mode="in_place",
            ),
            ManualClock(5.0),
            grammars=grammars,
        )
        runners.append(runner)
        runner.steps.record_graphs(graphs)
        return runner

    yield make
    for runner in runners:
        runner.close()


def draw(num_tokens: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, num_tokens).tolist()
    return tokens


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def starting(slot: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, seed: int = 7) -> SlotStart:
    sample = SlotSample(slot, seed, prompt[-1])
    return SlotStart(sampling, (sample,), packed(prompt) if sampling.penalizes_prompt else b"")


def chunk(slot: int, start: int, tokens: Sequence[int], *samples: int) -> BatchEntry:
    return BatchEntry(slot, start, len(tokens), packed(tokens), samples)


def table(slot: int, *block_ids: int, first: int = 0) -> TableChange:
    return TableChange(slot, first, packed(block_ids))


def decode(*slots: int, **changes: object) -> StepPlan:
    return StepPlan(9, decodes=packed(slots), **changes)  # type: ignore[arg-type]


ONE, TWO, THREE = draw(18, 1), draw(40, 2), draw(5, 3)
SEEDED = SamplingParams(temperature=1.3)
FILTERED = SamplingParams(temperature=1.1, top_k=20, top_p=0.9, repetition_penalty=1.3, num_logprobs=2)
BIASED = SamplingParams(temperature=0.9, min_p=0.02, logit_bias={5: 2.0, 9: -3.0}, min_tokens=3)

# Prompts in chunks beside sequences that decode, a fork whose last block is copied, a table that grows, a
# slot that is freed and taken again, and steps in which all decode.
PLANS = (
    StepPlan(
        1,
        starts=(starting(0, ONE, SEEDED), starting(1, ONE, SEEDED, seed=8)),
        tables=(table(0, 0, 1), table(1, 0, 2)),
        entries=(chunk(0, 0, ONE, 0, 1),),
    ),
    StepPlan(
        2,
        starts=(starting(2, TWO, FILTERED),),
        tables=(table(2, 5, 7, 6),),
        copies=(BlockCopy(1, 2),),
        entries=(chunk(2, 0, TWO[:27]),),
        decodes=packed([0, 1]),
    ),
    StepPlan(3, entries=(chunk(2, 27, TWO[27:], 2),), decodes=packed([1])),
    decode(0, 2, 1),
    StepPlan(
        6,
        free_slots=(0,),
        starts=(starting(3, THREE, BIASED),),
        tables=(table(3, 0),),
        entries=(chunk(3, 0, THREE, 3),),
        decodes=packed([2, 1]),
    ),
    decode(1, 2, 3),
    StepPlan(
        8,
        free_slots=(2,),
        starts=(starting(0, THREE[:1]),),
        tables=(table(0, 9),),
        entries=(chunk(0, 0, THREE[:1], 0),),
    ),
    *([decode(0, 1, 3)] * 3),
    decode(0, 3, 1, tables=(table(3, 10, first=1),)),
    decode(3, 1),
    decode(1),
)


def tokens_of(reports: Sequence[StepReport]) -> list[list[int]]:
    assert not any(report.failed for report in reports)
    return [np.frombuffer(report.tokens, "<u4").tolist() for report in reports]


@pytest.fixture(scope="module")
def expected(model_dir: Path, device: torch.device) -> list[StepReport]:
    """What the engine on a CPU computes."""
    runner = ModelRunner(
        CheckpointFolder(model_dir), ON_CPU, RankCapacity(BLOCK, 20 * BLOCK, MAX_SEQUENCES), ManualClock(5.0)
    )
    reports = [runner.steps.run(plan) for plan in PLANS]
    runner.close()
    return reports


@pytest.mark.parametrize("graphs", [(), (2, 4)], ids=["eager", "graphs"])
def test_tokens_are_those_of_the_engine_on_a_cpu(
    make: Make, expected: list[StepReport], graphs: tuple[int, ...]
) -> None:
    """With every step launched before the one before is collected. With graphs, steps that decode are
    replayed with rows of padding."""
    runner = make(graphs=graphs)
    tickets = [runner.steps.launch(plan) for plan in PLANS]
    reports = [runner.steps.collect(ticket) for ticket in tickets]
    assert tokens_of(reports) == tokens_of(expected)
    for report, reference in zip(reports, expected, strict=True):
        assert [it.row for it in report.logprobs] == [it.row for it in reference.logprobs]
        for one, other in zip(report.logprobs, reference.logprobs, strict=True):
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
            assert [id_ for id_, _ in one.logprob.top] == [id_ for id_, _ in other.logprob.top]


def test_logits_are_those_of_transformers(make: Make, model_dir: Path) -> None:
    """Of a prompt in two chunks beside another one, and of the tokens after it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    runner = make()
    plans = [
        StepPlan(
            1,
            starts=(starting(0, ONE), starting(1, TWO)),
            tables=(table(0, 3, 1), table(1, 5, 7, 6)),
            entries=(chunk(0, 0, ONE, 0), chunk(1, 0, TWO[:27])),
        ),
        StepPlan(2, entries=(chunk(1, 27, TWO[27:], 1), chunk(0, 18, [77], 0))),
        StepPlan(3, entries=(chunk(1, 40, [33], 1), chunk(0, 19, [5], 0))),
    ]
    texts = [[ONE], [TWO, [*ONE, 77]], [[*TWO, 33], [*ONE, 77, 5]]]
    for plan, of_plan in zip(plans, texts, strict=True):
        logits = runner.steps.logits(plan).cpu()
        with torch.inference_mode():
            reference = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in of_plan])
        torch.testing.assert_close(logits, reference, atol=2e-4, rtol=1e-4)


def test_blocks_in_host_memory_are_read_by_steps_without_graphs(
    make: Make, expected: list[StepReport]
) -> None:
    """The first blocks of two sequences move to host memory before they decode."""
    runner = make(graphs=(4,), num_offload_tokens=4 * BLOCK)
    reports = [runner.steps.run(plan) for plan in PLANS[:3]]
    plan = decode(
        0, 2, 1,
        copies=(BlockCopy(0, 20), BlockCopy(5, 23)),
        tables=(table(0, 20), table(1, 20), table(2, 23)),
    )  # fmt: skip
    reports.append(runner.steps.run(plan))
    assert tokens_of(reports) == tokens_of(expected[:4])


def test_sampling_that_cannot_begin_fails_its_request_alone(make: Make, expected: list[StepReport]) -> None:
    """More biases than fit in a slot: the sequences beside it go on, by eager steps while its slot is
    not freed, and it may be taken again."""
    runner = make(graphs=(4,))
    reports = [runner.steps.run(plan) for plan in PLANS[:3]]
    many = SamplingParams(logit_bias={id_: 0.5 for id_ in range(VOCAB)})
    from workers.model.cuda import sampling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "MOST_BIASES", VOCAB - 1)
        plan = decode(
            0, 2, 1,
            starts=(starting(3, THREE, many),),
            tables=(table(3, 4),),
            entries=(chunk(3, 0, THREE, 3),),
        )  # fmt: skip
        failed = runner.steps.run(plan)
    assert [(entry.index, "logit biases" in entry.reason) for entry in failed.failed] == [(0, True)]
    assert np.frombuffer(failed.tokens, "<u4")[1:].tolist() == tokens_of(expected)[3]
    assert not runner.steps.run(decode(free_slots=(3,))).failed
    again = StepPlan(
        10,
        starts=(starting(3, THREE),),
        tables=(table(3, 4),),
        entries=(chunk(3, 0, THREE, 3),),
    )
    assert not runner.steps.run(again).failed
    assert tokens_of(reports) == tokens_of(expected[:3])


ASKING = tuple(
    SamplingParams(temperature=1.1, repetition_penalty=1.4, frequency_penalty=0.3, num_logprobs=1 + index)
    for index in range(3)
)
# Three sequences with penalties that ask for log-probabilities.
ASKING_PLANS = (
    StepPlan(
        1,
        starts=tuple(starting(slot, THREE, params, slot) for slot, params in enumerate(ASKING)),
        tables=tuple(table(slot, slot) for slot in range(3)),
        entries=tuple(chunk(slot, 0, THREE, slot) for slot in range(3)),
    ),
    *([decode(2, 0, 1)] * 4),
)


def lack_memory(patch: pytest.MonkeyPatch, most_rows: int) -> list[int]:
    """Let log-probabilities of more rows than that fail. Returns a list of how many were asked for."""
    asked: list[int] = []

    def begin(logits: torch.Tensor, rows: Any, num_top: Any) -> Logprobs:
        asked.append(len(logits))
        if len(logits) > most_rows:
            raise torch.OutOfMemoryError("too many rows of logits")
        return Logprobs(logits, rows, num_top)

    patch.setattr(device_sampler, "Logprobs", begin)
    return asked


@pytest.mark.parametrize("graphs", [(), (4,)], ids=["eager", "graphs"])
def test_tokens_are_counted_once_where_memory_for_log_probabilities_lacks(
    make: Make, monkeypatch: pytest.MonkeyPatch, graphs: tuple[int, ...]
) -> None:
    """A step is then computed, or what a graph computed is read, in parts."""
    whole = make(graphs=graphs)
    expected = [whole.steps.run(plan) for plan in ASKING_PLANS]
    asked = lack_memory(monkeypatch, most_rows=1)
    in_parts = make(graphs=graphs)
    found = [in_parts.steps.run(plan) for plan in ASKING_PLANS]
    assert set(asked) == {1, 2, 3}
    assert tokens_of(found) == tokens_of(expected)
    for report, other in zip(found, expected, strict=True):
        row_to_logprob = {it.row: it.logprob for it in report.logprobs}
        for row in other.logprobs:
            assert row_to_logprob[row.row].logprob == pytest.approx(row.logprob.logprob, abs=1e-4)


def test_a_graph_whose_log_probabilities_are_lost_has_computed_the_rest(make: Make) -> None:
    """Their sequences fail at this rank alone, and what is kept of them is that of the other ranks."""
    whole, lacking = make(graphs=(4,)), make(graphs=(4,))
    expected = [whole.steps.run(plan) for plan in ASKING_PLANS]
    found = [lacking.steps.run(plan) for plan in ASKING_PLANS[:2]]
    with pytest.MonkeyPatch.context() as patch:
        lack_memory(patch, most_rows=0)
        lost = lacking.steps.run(ASKING_PLANS[2])
    assert [entry.index for entry in lost.failed] == [0, 1, 2]
    assert "OutOfMemoryError: too many rows of logits" in lost.failed[0].reason
    assert not lost.logprobs
    found += [replace(lost, failed=()), *[lacking.steps.run(plan) for plan in ASKING_PLANS[3:]]]
    assert tokens_of(found) == tokens_of(expected)


def test_a_mask_comes_between_the_halves_of_a_step(make: Make) -> None:
    runner = make()
    for plan in PLANS[:3]:
        runner.steps.run(plan)
    masks = np.full((3, VOCAB // 32), 0xFFFFFFFF, np.uint32)
    masks[1] = 0
    masks[1, 77 // 32] = 1 << 77 % 32
    report = runner.steps.collect(runner.steps.sample(runner.steps.execute(PLANS[3]), masks))
    assert np.frombuffer(report.tokens, "<u4")[1] == 77


def test_outputs_follow_grammars_beside_steps_that_are_graphs(make: Make, tmp_path: Path) -> None:
    """Steps are launched before the one before is collected. A slot whose text can only end may end before
    its minimum of tokens, and steps in which no slot has a grammar are graphs again."""
    grammars = small_grammars(tmp_path, vocab_size=VOCAB)
    texts = ("abcab", "abba", "cabcab")
    grammar = choice(texts)
    grammars.compile(grammar)
    runner = make(graphs=(2,), grammars=grammars)
    sampling = SamplingParams(temperature=1.0, min_tokens=20)
    bound = replace(starting(1, TWO, sampling), grammar=grammar.digest)
    first = StepPlan(
        1,
        starts=(starting(0, ONE, SEEDED), bound),
        tables=(table(0, 0, 1), table(1, 3, 4, 5)),
        entries=(chunk(0, 0, ONE, 0), chunk(1, 0, TWO, 1)),
    )
    plans = [first, *([decode(0, 1)] * 8), decode(0, free_slots=(1,)), decode(0)]
    reports: list[StepReport] = []
    previous = None
    for plan in plans:
        ticket = runner.steps.launch(plan)
        if previous is not None:
            reports.append(runner.steps.collect(previous))
        previous = ticket
    assert previous is not None
    reports.append(runner.steps.collect(previous))
    tokens = tokens_of(reports)
    output = [of_step[1] for of_step in tokens[:9]]
    end = next(index for index, token in enumerate(output) if token in (END, OTHER_END))
    assert "".join(TOKENS[token] for token in output[:end]) in texts
    assert [len(report.masks) for report in reports[: end + 1]] == [1] * (end + 1)
    assert not any(report.masks for report in reports[end + 1 :])
    alone = make(graphs=(2,))
    free = [replace(first, starts=first.starts[:1], tables=first.tables[:1], entries=first.entries[:1])]
    free += [decode(0)] * 10
    assert [of_step[0] for of_step in tokens] == [
        of_step[0] for of_step in tokens_of([alone.steps.run(it) for it in free])
    ]
