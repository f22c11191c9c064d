"""What becomes of JSON schemas before grammars are made of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import write_model
from llguidance import LLMatcher, LLTokenizer

from cluster.errors import GrammarError
from cluster.text.grammar_orders import OutputConstraint
from cluster.text.grammars import GrammarCompiler, Vocabulary
from cluster.text.json_schemas import prepared, without_notes
from workers.model.model_config import read_model_config

LARGEST = 2**53 - 1
NULLABLE = [{"type": ["string", "null"], "maxLength": 3}, {"type": ["integer", "null"]}]


class Compiler:
    """Makes grammars for a small model, and says which texts they take."""

    def __init__(self, folder: Path) -> None:
        config = read_model_config(folder)
        found = Vocabulary(folder / "tokenizer.json", config.vocab_size, tuple(config.eos_token_ids))
        self.grammars = GrammarCompiler(found, timeout_s=20.0)
        self._tokenizer = LLTokenizer(
            str(found.tokenizer), n_vocab=found.size, eos_token=list(found.end_token_ids)
        )

    async def taken(self, schema: Any, texts: tuple[str, ...]) -> list[str]:
        made = await self.grammars.make(OutputConstraint("json_schema", json.dumps(schema)))
        return [text for text in texts if self._takes(made.text, text)]

    def _takes(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        return matcher.consume_tokens(self._tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.fixture
async def compiler(tmp_path: Path) -> AsyncIterator[Compiler]:
    made = Compiler(write_model(tmp_path / "model"))
    yield made
    await made.grammars.close()


LONG_NAME = "n" * 65
ENDLESS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "an integer": (
        {"type": "integer"},
        ("0", "-7", str(LARGEST), str(-LARGEST)),
        (str(LARGEST + 1), "1" * 17, "1.0"),
    ),
    "an integer with an end": ({"type": "integer", "minimum": 3}, ("3", str(LARGEST)), ("2", "9" * 17)),
    "a number with ends": (
        {"type": "number", "exclusiveMinimum": -2, "maximum": 0.5},
        ("-1.9", "0", "0.5", "-1.123456789"),
        ("-2", "0.6", "0.1234567891"),
    ),
    "a number within fine ends": (
        {"type": "number", "minimum": 1e-9, "maximum": 3e-9},
        ("0.0000000015",),
        ("0.1",),
    ),
    "a number": ({"type": "number"}, ("1.5e-300", "0." + "1" * 30), ("1.",)),
    "beyond what readers keep": ({"type": "integer", "minimum": 10**17}, ("1" + "0" * 17,), ("3",)),
    "names of a map": (
        {"type": "object", "additionalProperties": {"type": "null"}},
        ('{"é\\n": null}', '{"a": null, "b": null}'),
        ('{"' + LONG_NAME + '": null}', '{"a": 1}'),
    ),
    "names beside others": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "null"},
        },
        ('{"a": 1}', '{"' + LONG_NAME + '": null}'),
        ('{"a": null}',),
    ),
    "names where they cannot be bounded": (
        {
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "allOf": [{"type": "object", "additionalProperties": True}, {"additionalProperties": {}}],
        },
        ('{"a": 1}',),
        ("{}",),
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_might_never_end_is_bounded(compiler: Compiler, what: str) -> None:
    schema, right, wrong = ENDLESS[what]
    assert await compiler.taken(schema, right + wrong) == list(right)


async def test_nullable_alternatives_are_exclusive(compiler: Compiler) -> None:
    """Null conforms to both, and so to neither alone."""
    texts = ('"abc"', "12", "null", '"abcd"')
    assert await compiler.taken({"oneOf": NULLABLE}, texts) == ['"abc"', "12"]
    third = [*NULLABLE, {"type": "boolean"}]
    assert await compiler.taken({"oneOf": third}, ("true", "null", "1")) == ["true", "1"]
    one = [{"type": ["string", "null"], "maxLength": 3}, {"type": "integer"}]
    assert await compiler.taken({"oneOf": one}, texts) == ['"abc"', "12", "null"]


async def test_alternatives_that_overlap_otherwise_are_refused(compiler: Compiler) -> None:
    with pytest.raises(GrammarError, match="oneOf"):
        await compiler.taken({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ())


async def test_a_count_of_open_names_is_refused(compiler: Compiler) -> None:
    """A name may come twice; both are one property."""
    open_names = {"type": "object", "additionalProperties": {"type": "null"}}
    with pytest.raises(GrammarError, match="minProperties 2 counts names that the schema leaves open"):
        await compiler.taken({**open_names, "minProperties": 2}, ())
    assert await compiler.taken({**open_names, "minProperties": 1}, ("{}", '{"a": null}')) == ['{"a": null}']


def test_a_lenient_reader_ignores_what_is_not_supported() -> None:
    schema = {"type": "object", "minProperties": 5}
    assert prepared(schema, is_lenient=True) == schema


def test_names_are_no_keywords() -> None:
    schema = {"properties": {"title": {"title": "t", "type": "null"}, "oneOf": {"type": "integer"}}}
    assert without_notes(schema) == {"properties": {"title": {"type": "null"}, "oneOf": {"type": "integer"}}}
    bounded = prepared(schema)["properties"]
    assert bounded["title"] == schema["properties"]["title"]
    assert bounded["oneOf"] == {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}
