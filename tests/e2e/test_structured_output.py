"""Outputs that follow JSON schemas, from real engine cores and ranks: complete and valid, handed over, moved
and resumed; and grammars that are refused while the replica serves on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from e2e_harness import SINGLE, E2eHarness, Heard, Replica, move, prompt, raw, started
from llguidance import LLMatcher
from msgspec.structs import replace
from tokenizers import Tokenizer

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.config import Parallel
from workers.messages.link import SampleState, Submission
from workers.messages.sampling import MAX_GRAMMAR_BYTES, Grammar
from workers.model.model_config import read_model_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"
ENDS = read_model_config(TINY).eos_token_ids
NUM_SCHEMAS = 200
MAX_TOKENS = 900
# Exponential to compile, whatever the library's limits.
HOSTILE = Grammar.of("start: X\nX: " + " & ".join(f"/.*a{index}.*/" for index in range(60)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structured")
    write_random_checkpoint(path, "llama", seed=3, tokenizer_from=TINY)
    return path


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(model_dir: Path) -> AsyncIterator[E2eHarness]:
    """Replicas p0 (prefill), d0 (decode), b0 (both)."""
    engine = {"kv_tokens": 1 << 15, "max_sequences": 16, "max_waiting": 512}
    async with E2eHarness(model_dir) as built:
        await built.add_all({"p0": "prefill", "d0": "decode", "b0": "both"}, engine=engine)
        yield built


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw a schema whose texts are bounded in length."""
    kinds = ["string", "pattern", "integer", "boolean", "null", "enum", "const"]
    kind = draw.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf", "ref"])
    match kind:
        case "string":
            return {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 9)}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(ab|c){1,3}$"]),
            }
        case "integer":
            low = draw.randrange(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(500)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": draw.sample(["red", "grün", 7, None, True, "a b", '"'], 3)}
        case "const":
            return {"const": draw.choice(["x", 3, False])}
        case "array":
            low = draw.randrange(3)
            items = schema(draw, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randrange(3)}
        case "anyOf":
            return {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]}
        case "ref":
            part = schema(draw, depth + 1)
            return (
                {
                    "$defs": {f"d{depth}": part},
                    "type": "object",
                    "properties": {"one": {"$ref": f"#/$defs/d{depth}"}},
                    "required": ["one"],
                    "additionalProperties": False,
                }
                if depth == 0
                else part
            )
        case _:
            names = draw.sample(["id", "name", "größe", "tags", "child"], draw.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: schema(draw, depth + 1) for name in names},
                "required": [name for name in names if draw.random() < 0.7],
                "additionalProperties": False,
            }


def compiled(value: dict[str, Any]) -> Grammar:
    text = LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False})
    return Grammar.of(text)


def ask(harness: E2eHarness, name: str, value: dict[str, Any] | None, **how: Any) -> Submission:
    grammar = None if value is None else compiled(value)
    given = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "ignore_eos": value is None, "seed": len(name)}
    made = harness.submission(name, how.pop("prompt", prompt(len(name), 40)), **(given | how))
    return replace(made, grammar=grammar)


def assert_valid(tokenizer: Tokenizer, heard: Heard, value: dict[str, Any], sample: int = 0) -> None:
    assert heard.failure is None, heard.failure
    assert heard.finish[sample] == "stop"
    tokens = heard.sequence(sample)
    assert tokens[-1] in ENDS
    jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), value)


# A text that takes long enough to move.
LONG: dict[str, Any] = {
    "type": "array",
    "items": {"type": "object", "properties": {"key": {"type": "string", "pattern": "^[a-z]{12}$"},
                                                 "size": {"type": "integer", "minimum": 0, "maximum": 999}},
              "required": ["key", "size"], "additionalProperties": False},
    "minItems": 25,
    "maxItems": 25,
}  # fmt: skip


async def test_random_schemas_give_complete_and_valid_outputs(
    harness: E2eHarness, tokenizer: Tokenizer
) -> None:
    """At a replica that does all and through a hand-over, many at a time, of one and of several samples."""
    draw = random.Random(17)
    schemas = [schema(draw) for _ in range(NUM_SCHEMAS)]
    at = harness.replicas

    async def one(number: int, value: dict[str, Any]) -> None:
        name = f"schema-{number}"
        remote = number % 3 == 0
        submission = ask(
            harness,
            name,
            value,
            prompt=prompt(number, 10 + number % 50),
            decode=at["d0"] if remote else None,
            num_samples=1 + number % 2,
            seed=number,
            min_tokens=number % 7,
        )
        heard = await harness.run(at["p0"] if remote else at["b0"], submission)
        for sample in range(len(submission.samples)):
            assert_valid(tokenizer, heard, value, sample)
        assert (heard.hand_over is not None) or not remote or len(heard.sequence()) == 1

    await asyncio.gather(*(one(number, value) for number, value in enumerate(schemas)))
    await harness.quiet()
    assert not len(at["b0"].core.scheduler.life.grammars)


async def test_free_requests_have_the_tokens_that_they_have_alone(harness: E2eHarness) -> None:
    at = harness.replicas["b0"]
    free = ask(harness, "free", None, max_tokens=60)
    alone = (await harness.run(at, free)).sequence()
    others = [ask(harness, f"beside-{number}", LONG, seed=number) for number in range(6)]
    for other in others:
        at.send(other)
    mixed = (await harness.run(at, replace(free, attempt=1))).sequence()
    assert mixed == alone
    await asyncio.gather(*(harness.ended(other) for other in others))


async def test_a_stream_that_moves_stays_valid_and_the_same(
    harness: E2eHarness, tokenizer: Tokenizer
) -> None:
    at = harness.replicas
    alone = (
        await harness.run(at["b0"], ask(harness, "moving-alone", LONG, prompt=prompt(5), seed=8))
    ).sequence()
    submission = ask(harness, "moving", LONG, prompt=prompt(5), seed=8)
    heard = await started(harness, at["d0"], submission, 20)
    move(submission, at["d0"], at["b0"])
    await harness.ended(submission)
    assert [ended.error for ended in heard.moves] == [""]
    assert heard.hand_over is not None
    assert heard.hand_over.first_index < len(alone)
    assert_valid(tokenizer, heard, LONG)
    assert heard.sequence() == alone
    await harness.quiet()


async def test_a_stream_that_is_resumed_stays_valid_and_the_same(
    harness: E2eHarness, tokenizer: Tokenizer
) -> None:
    """With the output so far, and with the digest of the last mask or without."""
    at = harness.replicas
    whole = ask(harness, "resumed", LONG, seed=4)
    expected = await harness.run(at["b0"], whole)
    assert_valid(tokenizer, expected, LONG)
    tokens = expected.sequence()
    for attempt, num_tokens in enumerate((1, 17, len(tokens) - 1), 1):
        output = raw(tokens[:num_tokens])
        again = replace(whole, attempt=attempt, samples=(SampleState(0, whole.samples[0].seed, output),))
        heard = await harness.run(at["d0"], again)
        assert heard.failure is None
        rest = [heard.tokens[0][index] for index in sorted(heard.tokens[0])]
        assert tokens[:num_tokens] + rest == tokens
        assert heard.finish[0] == "stop"


async def test_a_state_that_is_not_that_of_the_sender_fails_the_attempt(harness: E2eHarness) -> None:
    at = harness.replicas["b0"]
    whole = ask(harness, "differs", LONG, seed=4)
    tokens = (await harness.run(at, whole)).sequence()
    state = SampleState(0, whole.samples[0].seed, raw(tokens[:5]), mask_digest=bytes(8))
    heard = await harness.run(at, replace(whole, attempt=1, samples=(state,)))
    assert heard.failure is not None
    assert heard.failure.code == "internal"
    assert not heard.tokens


async def test_a_grammar_that_is_refused_ends_its_request_alone(
    harness: E2eHarness, tokenizer: Tokenizer
) -> None:
    """While others stream, and from there on."""
    at = harness.replicas["b0"]
    beside = ask(harness, "beside-hostile", LONG, seed=3)
    heard = await started(harness, at, beside, 3)
    refused = {
        "hostile": HOSTILE,
        "syntax": Grammar.of("start: %"),
        "beyond": Grammar.of("start: " + "a" * MAX_GRAMMAR_BYTES),
        "digest": Grammar("start: /a/", bytes(32)),
    }
    for name, grammar in refused.items():
        submission = replace(ask(harness, name, {"type": "null"}), grammar=grammar)
        failure = (await harness.run(at, submission)).failure
        assert failure is not None
        assert failure.code == ("grammar" if name in ("hostile", "syntax") else "invalid"), name
        assert failure.reason.removeprefix("its ").startswith("grammar"), failure.reason
    endless = replace(ask(harness, "endless", None), grammar=compiled(LONG))
    failure = (await harness.run(at, endless)).failure
    assert failure is not None
    assert "ignore_eos" in failure.reason
    await harness.ended(beside)
    assert_valid(tokenizer, heard, LONG)
    value = {"type": "boolean"}
    assert_valid(tokenizer, await harness.run(at, ask(harness, "after", value)), value)
    await harness.quiet()


@pytest.mark.parametrize(
    "parallel", [Parallel(pp=2, devices=("cpu", "cpu")), pytest.param(Parallel(tp=2), marks=pytest.mark.slow)]
)
async def test_only_the_rank_that_samples_needs_the_grammar(
    model_dir: Path, tokenizer: Tokenizer, parallel: Parallel
) -> None:
    async with E2eHarness(model_dir, parallel) as harness:
        replica: Replica = await harness.add("wide")
        assert parallel != SINGLE
        value = {"type": "array", "items": {"enum": ["one", 2]}, "minItems": 4, "maxItems": 9}
        runs = [harness.run(replica, ask(harness, f"wide-{number}", value)) for number in range(4)]
        for heard in await asyncio.gather(*runs):
            assert_valid(tokenizer, heard, value)
        await harness.quiet()
