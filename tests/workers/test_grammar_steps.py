"""Outputs that follow grammars beside others, through whole steps: on one rank and several, with tokens that
pass through the host and tokens that stay on the device, preempted, forked and moved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_harness import choice
from llguidance import LLMatcher
from local_engine import BLOCK, LocalEngine, draw, packed, submitted
from msgspec.structs import replace
from tokenizers import Tokenizer

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import EngineConfig
from workers.messages.link import Submission
from workers.messages.rank_channel import GrammarCompiled
from workers.messages.sampling import Grammar, SamplingParams
from workers.rank.device_queue import CpuQueue

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"
END = 0
CONFIG = EngineConfig(block_tokens=BLOCK, max_batch_tokens=96, chunk_tokens=40, max_sequences=12)
DIGITS = Grammar.of(LLMatcher.grammar_from_regex("[0-9]{3}-[a-f]{2,9}!"))
OBJECT = Grammar.of(
    LLMatcher.grammar_from_json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 22, 333]}},
            "required": ["name", "size"],
            "additionalProperties": False,
        },
        overrides={"whitespace_flexible": False},
    )
)
COLOUR = choice(["red", "green", "greenish blue"])
Outputs = dict[tuple[str, int], bytes]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3, tokenizer_from=TINY)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def ask(
    name: str, num_prompt: int, grammar: Grammar | None = None, *, n: int = 1, **sampling: Any
) -> Submission:
    prompt = packed(draw(num_prompt, seed=num_prompt))
    params = SamplingParams(**{"temperature": 1.1, "max_tokens": 60 if grammar else 25, **sampling})
    return submitted(name, prompt, params, n=n, grammar=grammar)


FREE = (ask("free", 20, ignore_eos=True), ask("penalized", 50, ignore_eos=True, repetition_penalty=1.2))
BOUND = (
    ask("digits", 33, DIGITS),
    ask("object", 70, OBJECT, n=3),
    ask("colour", 5, COLOUR, temperature=0.0),
    ask("again", 64, DIGITS, repetition_penalty=1.3, num_logprobs=2),
    ask("late", 41, COLOUR, min_tokens=50),
)
MIXED = (FREE[0], BOUND[0], BOUND[1], FREE[1], *BOUND[2:])


def make(model_dir: Path, num_blocks: int = 90, **how: Any) -> LocalEngine:
    return LocalEngine(model_dir, CONFIG, num_blocks, end_ids=(END,), **how)


def run(engine: LocalEngine, submissions: tuple[Submission, ...]) -> Outputs:
    outputs = engine.run(submissions)
    assert engine.failures == {}
    assert engine.pool.num_referenced == 0
    engine.close()
    return outputs


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Outputs:
    return run(make(model_dir), MIXED)


def text_of(tokenizer: Tokenizer, output: bytes) -> str:
    """Return the text before the end token, with which the output ends."""
    ids = np.frombuffer(output, "<u4").tolist()
    assert ids[-1] == END
    text = tokenizer.decode(ids[:-1])
    assert isinstance(text, str)
    return text


def test_outputs_follow_their_grammars(expected: Outputs, tokenizer: Tokenizer) -> None:
    for name in ("digits", "again"):
        assert re.fullmatch("[0-9]{3}-[a-f]{2,9}!", text_of(tokenizer, expected[name, 0]))
    for sample in range(3):
        value = json.loads(text_of(tokenizer, expected["object", sample]))
        assert set(value) == {"name", "size"}
        assert len(value["name"]) <= 6
        assert value["size"] in (1, 22, 333)
    for name in ("colour", "late"):
        assert text_of(tokenizer, expected[name, 0]) in ("red", "green", "greenish blue")
    assert len({expected["object", sample] for sample in range(3)}) > 1


def test_those_without_a_grammar_have_the_tokens_that_they_have_alone(
    model_dir: Path, expected: Outputs
) -> None:
    for submission in FREE:
        assert run(make(model_dir), (submission,)).items() <= expected.items()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"queue": CpuQueue()}, id="device"),
        pytest.param({"tp": 2}, id="tp"),
        pytest.param({"tp": 2, "queue": CpuQueue()}, id="device-tp"),
        pytest.param({"stages": ((0, 1), (1, 2))}, id="pp"),
    ],
)
def test_every_shape_gives_the_same_tokens(model_dir: Path, expected: Outputs, how: dict[str, Any]) -> None:
    assert run(make(model_dir, **how), MIXED) == expected


@pytest.mark.parametrize("queue", [None, CpuQueue()], ids=["host", "device"])
def test_preempted_outputs_are_replayed(model_dir: Path, expected: Outputs, queue: CpuQueue | None) -> None:
    engine = make(model_dir, queue=queue)
    for submission in MIXED:
        engine.scheduler.submit(submission, 0.0)
    outputs: Outputs = {}
    while (outcome := engine.step()) is not None:
        assert outcome.failures == []
        for delta in outcome.tokens:
            name = delta.request_id, delta.sample
            outputs[name] = outputs.get(name, b"") + delta.tokens
        with_output = [it for it in engine.scheduler.life.running if it.num_output_tokens > 1]
        if with_output and len(engine.plans) % 3 == 0:
            engine.scheduler.life.preempt(with_output[len(engine.plans) % len(with_output)])
    assert outputs == expected
    assert engine.scheduler.life.num_preemptions > 5
    started = [start for plan in engine.plans for start in plan.starts if start.grammar]
    assert any(sample.mask_digest and sample.output for start in started for sample in start.samples)
    engine.close()


def test_nothing_is_sampled_before_the_grammar_is_ready(model_dir: Path, expected: Outputs) -> None:
    engine = make(model_dir)
    engine.compiles = False
    for submission in MIXED:
        engine.scheduler.submit(submission, 0.0)
    outputs: Outputs = {}

    def settle() -> bool:
        outcome = engine.step()
        for delta in outcome.tokens if outcome is not None else ():
            name = delta.request_id, delta.sample
            outputs[name] = outputs.get(name, b"") + delta.tokens
            assert bool(delta.mask_digest) == (delta.request_id not in ("free", "penalized"))
        return outcome is not None

    while settle():
        pass
    assert set(outputs) == {("free", 0), ("penalized", 0)}
    computed = {it.num_scheduled for it in engine.scheduler.life.running}
    assert computed == {32, 69, 4, 63, 40}, "all of their prompts but the last token"
    engine.compiles = True
    while settle():
        pass
    assert outputs == expected
    assert engine.scheduler.is_idle
    engine.close()


def test_a_refused_grammar_ends_its_requests_alone(model_dir: Path) -> None:
    engine = make(model_dir)
    engine.compiles = False
    for submission in (MIXED[0], BOUND[0], BOUND[3], BOUND[1]):
        engine.scheduler.submit(submission, 0.0)
    assert engine.step() is not None
    assert len(engine.scheduler.life.grammars.take_orders()) == 2
    engine.scheduler.grammar_compiled(GrammarCompiled(DIGITS.digest, "too complex"))
    failures = {it.request_id: it for it in engine.scheduler.take_failures()}
    assert set(failures) == {"digits", "again"}
    assert {(it.code, it.reason) for it in failures.values()} == {("grammar", "its grammar: too complex")}
    engine.scheduler.grammar_compiled(GrammarCompiled(OBJECT.digest, "no memory", is_transient=True))
    (refused,) = engine.scheduler.take_failures()
    assert (refused.code, refused.retry_after_s > 0) == ("refused", True)
    while engine.step() is not None:
        pass
    assert engine.scheduler.is_idle
    engine.close()


@pytest.fixture
def pair(model_dir: Path) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    engines = make(model_dir), make(model_dir)
    yield engines
    for engine in engines:
        engine.close()


def move_after(here: LocalEngine, there: LocalEngine, num_tokens: int) -> bytes:
    """Run the object's first sample here until it has so many tokens, then there. Returns all its tokens."""
    submission = replace(BOUND[1], samples=BOUND[1].samples[:1])
    num_prompt = len(submission.prompt) // 4
    here.scheduler.submit(submission, 0.0)
    output, key = b"", ("object", 1)
    while len(output) < 4 * num_tokens:
        outcome = here.step()
        assert outcome is not None
        output += b"".join(delta.tokens for delta in outcome.tokens)
    position = here.scheduler.migration.position(key)
    assert position is not None
    assert here.scheduler.migration.hold_at(key, position.num_tokens)
    while (outcome := here.step()) is not None:
        output += b"".join(delta.tokens for delta in outcome.tokens)
    held = len(output) // 4 + num_prompt - 1
    assert here.move("object", held, there)
    while (outcome := there.step()) is not None:
        output += b"".join(delta.tokens for delta in outcome.tokens)
        assert outcome.failures == []
    return output


def test_a_stream_that_moves_continues_with_the_same_tokens(
    pair: tuple[LocalEngine, LocalEngine], expected: Outputs
) -> None:
    assert move_after(*pair, 4) == expected["object", 0]


def test_a_state_that_differs_fails_the_attempt(model_dir: Path) -> None:
    engine = make(model_dir)
    submission = ask("digits", 33, DIGITS)
    (output,) = engine.run((submission,)).values()
    resumed = replace(submission.samples[0], output=output[:12], mask_digest=bytes(8))
    engine.run((replace(submission, samples=(resumed,), attempt=2),))
    failure = engine.failures["digits"]
    assert (failure.code, "other tokens" in failure.reason) == ("internal", True)
    resumed = replace(resumed, mask_digest=b"")
    (rest,) = engine.run((replace(submission, samples=(resumed,), attempt=3),)).values()
    assert output[:12] + rest == output
    engine.close()
