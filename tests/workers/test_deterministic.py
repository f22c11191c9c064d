"""Deterministic mode: a sequence's logits are the same bits, whatever is computed beside it and however it is
cut into chunks; whole engines give a request the same tokens in any company and after any interruption; and
where that cannot be had, a rank does not start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_kernels import BEST_ISA, TILED_KERNELS, kernels_of
from local_engine import LocalEngine, draw, packed
from msgspec.structs import replace
from optional_programs import needs_compiler
from runner_parts import ON_CPU
from slow_cases import slow_rows_but
from torch import Tensor

from kvtransfer.common.clock import ManualClock
from workers.config import EngineConfig
from workers.errors import WorkerError
from workers.messages.link import SampleState, Submission
from workers.messages.sampling import SamplingParams, TokenLogprob
from workers.model import native
from workers.model.attention.choice import choose_attention
from workers.model.attention.cpu_backend import CpuAttention
from workers.model.attention.interface import AttentionBackend, SequenceSpan, StepInput
from workers.model.attention.kinds_backend import KindsAttention
from workers.model.decoder import Decoder, load_decoder
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity
from workers.scheduler.step import StepOutcome

BLOCK = 16
NUM_TOKENS = 90
BLOCKS = (31, 4, 12, 9, 2, 17)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 40},
    "gemma4_text": {
        "sliding_window": 40,
        "global_head_dim": 48,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 7,
        "vocab_size_per_layer_input": 256,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    },
    "gpt_oss": {"sliding_window": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Model:
    """A decoder and its KV, with kernels for one instruction set."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self.decoder: Decoder = load_decoder(model_dir, dtype, torch.device("cpu"))
        config = self.decoder.config
        self.tokens = torch.from_numpy(np.random.default_rng(5).integers(0, config.vocab_size, NUM_TOKENS))
        cells = config.kv_cells
        self._shape = (96, cells.num_layers, cells.num_kinds, cells.num_cells, BLOCK, cells.width)
        self._dtype = dtype

    def attention(self) -> AttentionBackend:
        """Attention over stale memory."""
        kv = torch.full(self._shape, float("nan"), dtype=self._dtype)
        backend = choose_attention(self.decoder.attention_shape, kv, is_deterministic=True)
        parts = backend.backends if isinstance(backend, KindsAttention) else [backend]
        assert all(isinstance(part, CpuAttention) for part in parts)
        return backend

    def logits(self, chunks: Sequence[int], others: Sequence[int] = ()) -> Tensor:
        """Compute the sequence's logits in chunks of these lengths, each in a step beside other sequences of
        these lengths."""
        attention, rows, at = self.attention(), [], 0
        for length in chunks:
            span = SequenceSpan(at, length, BLOCKS)
            beside = [SequenceSpan(0, other, range(32 + 4 * n, 36 + 4 * n)) for n, other in enumerate(others)]
            middle = len(beside) // 2
            spans = [*beside[:middle], span, *beside[middle:]]
            parts = [self.tokens[s.start : s.start + s.num_tokens] for s in spans]
            first = sum(s.num_tokens for s in beside[:middle])
            hidden = self.decoder.forward(torch.cat(parts), StepInput.of(spans, BLOCK), attention)
            rows.append(self.decoder.logits(hidden)[first : first + length])
            at += length
        return torch.cat(rows)


@pytest.mark.parametrize("name", TILED_KERNELS)
@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_rows_but(
        itertools.product(FAMILIES, [torch.bfloat16, torch.float32]),
        *((family, torch.bfloat16) for family in FAMILIES),
        ("qwen3", torch.float32),
    ),
)
def test_logits_are_the_same_bits(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, name: str
) -> None:
    kernels = kernels_of(name)
    monkeypatch.setattr(native, "load", lambda: kernels)
    model = Model(make_checkpoint(family, seed=4, head_dim=32, **FAMILIES[family]), dtype)
    torch.set_num_threads(1)
    whole = model.logits([NUM_TOKENS])
    assert not bool(whole.isnan().any())
    torch.set_num_threads(2)
    chunked = [7, 33, 1, 24, 25]
    ways = {
        "by two threads": model.logits([NUM_TOKENS]),
        "in chunks": model.logits(chunked),
        "token by token": model.logits([40] + [1] * (NUM_TOKENS - 40)),
        "in a batch of 16": model.logits(chunked, others=[1, 5, 1, 17, 1, 1, 30, 2, 1, 1, 9, 1, 1, 3, 1]),
    }
    for way, logits in ways.items():
        assert torch.equal(logits, whole), way


# ------------------------------------------------------------------------------------------ whole engines


# Log-probabilities show differences that are too small to change a token.
SAMPLINGS = (
    SamplingParams(num_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.95, num_logprobs=0, ignore_eos=True),
    SamplingParams(ignore_eos=True),
)
# Tokens with the log-probabilities that were asked for.
Answer = list[tuple[int, TokenLogprob | None]]


def ask(number: int) -> Submission:
    """One of 16 requests; the first one decodes across the end of attention's first piece of 512 keys."""
    num_prompt = 500 if number == 0 else 3 + 37 * number % 150
    return Submission(
        request_id=f"r{number}",
        attempt=1,
        tenant="",
        sharing_group="",
        priority=0,
        prompt=packed(draw(num_prompt, seed=number)),
        root_key=b"",
        block_keys=(),
        samples=(SampleState(0, 31 + number),),
        sampling=replace(SAMPLINGS[number % len(SAMPLINGS)], max_tokens=48 + number % 3),
        decode=None,
        deadline_s=None,
        is_private=True,  # nothing is found in a cache: all KV is computed
    )


REQUESTS = tuple(map(ask, range(16)))


class Engines:
    """Engines of one checkpoint for one instruction set, and the answer that each request has alone."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._made: list[LocalEngine] = []
        self.first = self.make()
        self.expected: dict[str, Answer] = {}
        for request in REQUESTS:
            self.expected |= answers(self.first, [request])

    def make(self, num_blocks: int = 200, **options: Any) -> LocalEngine:
        """An engine with these settings."""
        settings = {"max_batch_tokens": 512, "chunk_tokens": 512, "max_sequences": 16, **options}
        config = EngineConfig(block_tokens=BLOCK, deterministic=True, **settings)
        engine = LocalEngine(self._model_dir, config, num_blocks, stages=[(0, 3)], dtype=torch.bfloat16)
        self._made.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.close()


# Logits are the same bits with every instruction set, and engines have no code of one.
@pytest.fixture(scope="module", params=BEST_ISA)
def engines(request: pytest.FixtureRequest, make_checkpoint: Any) -> Iterator[Engines]:
    kernels = kernels_of(request.param)
    model_dir = make_checkpoint(
        "qwen3",
        seed=8,
        dtype="bfloat16",
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=352,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=2000,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: kernels)
        made = Engines(model_dir)
        assert made.first.runners[0].attention.name == f"cpu {request.param.value}"
        yield made
        made.close()


def advance(engine: LocalEngine, found: dict[str, Answer]) -> StepOutcome | None:
    """Settle a step and keep its tokens; None when the engine has nothing to do."""
    outcome = engine.step()
    if outcome is not None:
        assert not outcome.failures
        for delta in outcome.tokens:
            tokens = np.frombuffer(delta.tokens, dtype="<u4").tolist()
            found.setdefault(delta.request_id, []).extend(itertools.zip_longest(tokens, delta.logprobs))
    return outcome


def answers(engine: LocalEngine, requests: Sequence[Submission]) -> dict[str, Answer]:
    """What the engine answers when all requests arrive at once."""
    found: dict[str, Answer] = {}
    for request in requests:
        engine.scheduler.submit(request, 0.0)
    while advance(engine, found) is not None:
        pass
    return found


@needs_compiler
def test_the_answers_differ_from_each_other(engines: Engines) -> None:
    """Else the tests below would compare little."""
    for request in REQUESTS:
        answer = engines.expected[request.request_id]
        assert len(answer) == request.sampling.max_tokens
        assert len({token for token, _ in answer}) > 3
    assert len({token for answer in engines.expected.values() for token, _ in answer}) > 100


@needs_compiler
def test_a_request_in_a_batch_has_the_answer_that_it_has_alone(engines: Engines) -> None:
    engine = engines.make(num_threads=2)
    assert answers(engine, REQUESTS[::-1]) == engines.expected
    assert max(len(plan.sample_slots) for plan in engine.plans) == 16


@needs_compiler
@pytest.mark.parametrize(("chunk_tokens", "max_batch_tokens"), [(24, 40), (200, 512)])
def test_chunks_of_other_lengths(engines: Engines, chunk_tokens: int, max_batch_tokens: int) -> None:
    engine = engines.make(chunk_tokens=chunk_tokens, max_batch_tokens=max_batch_tokens)
    assert answers(engine, REQUESTS) == engines.expected
    lengths = [entry.num_tokens for plan in engine.plans for entry in plan.entries]
    assert max(lengths) == min(chunk_tokens, max_batch_tokens)


@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_a_resumed_request_continues_with_the_same_tokens(engines: Engines, num_tokens: int) -> None:
    """Prompt and output so far are computed as one prompt."""
    resumed = []
    for request in REQUESTS:
        output = packed([token for token, _ in engines.expected[request.request_id][:num_tokens]])
        resumed.append(replace(request, samples=(replace(request.samples[0], output=output),)))
    rest = {name: answer[num_tokens:] for name, answer in engines.expected.items()}
    assert answers(engines.first, resumed) == rest
    for request in resumed[: len(SAMPLINGS)]:
        name = request.request_id
        assert answers(engines.first, [request]) == {name: rest[name]}


@needs_compiler
def test_a_moved_request_continues_with_the_same_tokens(engines: Engines) -> None:
    """Every request moves while it decodes, after one token or up to ten."""
    source, target = engines.first, engines.make(num_threads=2)
    migration, found = source.scheduler.migration, dict[str, Answer]()
    for request in REQUESTS:
        source.scheduler.submit(request, 0.0)
    name_to_stop: dict[str, int] = {}  # where it is held: how many of its tokens have KV then
    num_moved = 0
    while (outcome := advance(source, found)) is not None:
        for number, (name, answer) in enumerate(found.items()):
            if name not in name_to_stop and len(answer) > number % 10:
                position = migration.position((name, 1))
                assert position is not None
                assert migration.hold_at((name, 1), position.num_tokens)
                name_to_stop[name] = position.num_tokens
        for chunk in outcome.migrating:
            if chunk.num_computed_tokens == name_to_stop[chunk.request_id]:
                assert source.move(chunk.request_id, chunk.num_computed_tokens, target)
                num_moved += 1
        advance(target, found)
    assert num_moved == len(REQUESTS)
    while advance(target, found) is not None:
        pass
    assert found == engines.expected


@needs_compiler
@pytest.mark.parametrize("num_blocks", [60, 138])
def test_a_preempted_request_continues_with_the_same_tokens(engines: Engines, num_blocks: int) -> None:
    """Its KV, that of its output included, is computed again."""
    engine = engines.make(num_blocks, chunk_tokens=100)
    assert answers(engine, REQUESTS) == engines.expected
    assert engine.scheduler.life.num_preemptions > 1
    num_prompt_tokens = sum(len(request.prompt) // 4 for request in REQUESTS)
    assert sum(entry.num_tokens for plan in engine.plans for entry in plan.entries) > num_prompt_tokens


# ------------------------------------------------------------------------------------------------ refusals


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "broken", "remedy"),
    [
        (torch.float16, None, "set dtype: bf16 or fp32"),
        (torch.bfloat16, "load", "install a C\\+\\+ compiler"),
        (torch.bfloat16, "isa", "no AVX2"),
    ],
)
def test_a_rank_does_not_start_without_it(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, broken: str | None, remedy: str
) -> None:
    if broken == "load":
        monkeypatch.setattr(native, "load", lambda: None)
    if broken == "isa":
        monkeypatch.setattr("workers.model.make_linear.usable_isas", tuple)
    with pytest.raises(WorkerError, match=f"deterministic: .*{remedy}"):
        ModelRunner(
            CheckpointFolder(make_checkpoint("qwen3")),
            ON_CPU._replace(dtype=dtype, is_deterministic=True),
            RankCapacity(BLOCK, 8 * BLOCK),
            ManualClock(5.0),
        )
