"""From constraints to grammars, and those that are refused within their bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import until, write_model
from llguidance import LLMatcher, LLTokenizer
from patience import WAIT_S
from slow_cases import slow_but

from cluster.errors import GrammarError, UnavailableError
from cluster.text.grammar_orders import OutputConstraint
from cluster.text.grammars import GrammarCompiler, Vocabulary
from cluster.text.tag_grammar import Tag
from workers.messages.sampling import MAX_GRAMMAR_BYTES, Grammar
from workers.model.model_config import read_model_config

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DEEP = '{"allOf": [' * 3000 + "{}" + "]}" * 3000


class Scene:
    """A compiler for a small model, and what its grammars allow."""

    def __init__(self, folder: Path, timeout_s: float = 20.0) -> None:
        config = read_model_config(folder)
        vocabulary = Vocabulary(folder / "tokenizer.json", config.vocab_size, tuple(config.eos_token_ids))
        self.compiler = GrammarCompiler(vocabulary, timeout_s=timeout_s)
        self._tokenizer = LLTokenizer(
            str(vocabulary.tokenizer), n_vocab=vocabulary.size, eos_token=list(vocabulary.end_token_ids)
        )

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether the text is complete by the grammar."""
        matcher = LLMatcher(self._tokenizer, grammar.text)
        return matcher.consume_tokens(self._tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(write_model(tmp_path / "model"))
    yield made
    await made.compiler.close()


def schema(value: Any) -> OutputConstraint:
    return OutputConstraint("json_schema", json.dumps(value))


TAGS = OutputConstraint("structural_tags", tags=(Tag("<f=x>", json.dumps(NAMED), "</f>"),), triggers=("<f=",))
GOOD: dict[str, tuple[OutputConstraint, tuple[str, ...], tuple[str, ...]]] = {
    "a schema": (schema(NAMED), ('{"a": 1}', '{"a":1}'), ("{}", '{"a": "x"}', '{"a": 1')),
    "any object": (OutputConstraint("json_object"), ('{"x": [1, {}]}',), ("[]", "1")),
    "a regular expression": (OutputConstraint("regex", "[a-c]{2}"), ("ab",), ("a", "abc", "xx")),
    "choices": (OutputConstraint("choice", choices=("yes", 'no "q"')), ("yes", 'no "q"'), ("no",)),
    "GBNF": (OutputConstraint("grammar", 'root ::= "a" | "b" root'), ("a", "bba"), ("b",)),
    "Lark": (OutputConstraint("grammar", 'start: "x"+'), ("x", "xxx"), ("", "y")),
    "tags": (TAGS, ("free text", 'so: <f=x>{"a": 1}</f> and'), ("so: <f=x>{}</f>", "so: <f=y>{}</f>")),
}
BAD: dict[str, tuple[OutputConstraint, str]] = {
    "no JSON": (OutputConstraint("json_schema", "{"), "Expecting"),
    "a number": (schema(3), "an object"),
    "an unsupported keyword": (schema({"not": {"type": "string"}}), "not"),
    "an unknown format": (schema({"type": "string", "format": "nonsense"}), "nonsense"),
    "a schema elsewhere": (schema({"$ref": "http://127.0.0.1:1/x"}), "not present"),
    "endless recursion": (
        schema({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
        "no output satisfies it",
    ),
    "deep nesting": (OutputConstraint("json_schema", DEEP), "recursion"),
    "no regular expression": (OutputConstraint("regex", "("), "regex"),
    "looking ahead": (OutputConstraint("regex", "a(?=b)"), "regex"),
    "an unknown rule": (OutputConstraint("grammar", "start: nobody"), "nobody"),
    "a tag without trigger": (
        OutputConstraint("structural_tags", tags=(Tag("<a>", "{}", ""),), triggers=("<b",)),
        "none of the triggers",
    ),
    "a trigger without tag": (
        OutputConstraint("structural_tags", tags=(Tag("<a>", "{}", ""),), triggers=("<a", "<b")),
        "'<b' begins no tag",
    ),
    "too long": (OutputConstraint("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "bytes"),
}


@pytest.mark.parametrize("what", GOOD)
async def test_a_grammar_takes_what_was_demanded_and_nothing_else(scene: Scene, what: str) -> None:
    constraint, right, wrong = GOOD[what]
    grammar = await scene.compiler.make(constraint)
    assert grammar.find_problem() == ""
    assert [text for text in right if not scene.takes(grammar, text)] == []
    assert [text for text in wrong if scene.takes(grammar, text)] == []


@pytest.mark.parametrize("what", BAD)
async def test_what_makes_no_grammar_is_refused_with_the_reason(scene: Scene, what: str) -> None:
    constraint, reason = BAD[what]
    with pytest.raises(GrammarError, match=reason) as caught:
        await scene.compiler.make(constraint)
    assert caught.value.logged == "the constraint was refused"
    assert await scene.compiler.make(schema(NAMED))


def intersection(num_parts: int) -> OutputConstraint:
    """Return a grammar that the library compiles in exponential time."""
    parts = " & ".join(f"/.*a{index}.*/" for index in range(num_parts))
    return OutputConstraint("grammar", f"start: X\nX: {parts}")


HOSTILE = {
    "an exponential intersection": intersection(60),
    "nested repetition": OutputConstraint("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "deep Lark": OutputConstraint("grammar", "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "deep GBNF": OutputConstraint("grammar", "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000),
    "so many rules": OutputConstraint(
        "grammar", "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(14_000)) + 'r14000: "a"\n'
    ),
    "a product of alternatives": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(9)]}
                for i in range(9)
            ]
        }
    ),
    "definitions of definitions": schema(
        {
            "$defs": {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(6_000)}
            | {"d6000": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    ),
}


# The next one is made by a new process: some cases are enough for the fast tests.
@pytest.mark.parametrize(
    "what", slow_but(HOSTILE, "nested repetition", "so many rules", "a product of alternatives")
)
async def test_a_hostile_grammar_is_refused_and_the_next_one_made(scene: Scene, what: str) -> None:
    assert len(HOSTILE[what].text) < MAX_GRAMMAR_BYTES
    with pytest.raises(GrammarError) as caught:
        await scene.compiler.make(HOSTILE[what], "hostile")
    assert len(str(caught.value)) < 1000
    assert scene.takes(await scene.compiler.make(schema(NAMED), "other"), '{"a": 1}')


@pytest.mark.parametrize(
    "constraint",
    [
        schema({"type": "string", "minLength": 10**9, "maxLength": 10**9}),
        schema({"type": "array", "items": {"type": "array"}, "minItems": 10**9}),
        OutputConstraint("regex", "(a{1000}){100}"),
    ],
)
async def test_what_no_output_is_long_enough_for_costs_nothing(
    scene: Scene, constraint: OutputConstraint
) -> None:
    assert not scene.takes(await scene.compiler.make(constraint), "a" * 2000)
    assert not scene.compiler._tenant_to_watched


async def test_a_long_enumeration_is_made(scene: Scene) -> None:
    grammar = await scene.compiler.make(schema({"enum": [f"value {at}" for at in range(12_000)]}))
    assert scene.takes(grammar, '"value 11999"')
    assert not scene.takes(grammar, '"value 12000"')


async def test_a_tenant_whose_grammars_take_long_delays_no_other(scene: Scene) -> None:
    await scene.compiler.make(schema(NAMED))
    slow = [asyncio.create_task(scene.compiler.make(intersection(60 + at), "slow")) for at in range(100)]
    watched = scene.compiler._tenant_to_watched
    await until(lambda: "slow" in watched, "the first has broken the short bound", 4 * WAIT_S)
    for at in range(20):
        assert await scene.compiler.make(OutputConstraint("regex", f"a{{{at}}}"), "other")
        assert await scene.compiler.make(OutputConstraint("regex", f"b{{{at}}}"), "another")
    assert sum(task.done() for task in slow) <= 2
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.slow
async def test_a_tenant_is_watched_until_it_has_behaved(scene: Scene) -> None:
    with pytest.raises(GrammarError):
        await scene.compiler.make(intersection(60), "slow")
    at = 0
    while "slow" in scene.compiler._tenant_to_watched:
        at += 1
        await scene.compiler.make(OutputConstraint("regex", f"a{{{at}}}"), "slow")
    assert at == 20


async def test_options_of_the_library_in_a_schema_are_ignored(scene: Scene) -> None:
    lax = {**NAMED, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    grammar = await scene.compiler.make(schema(lax))
    assert not scene.takes(grammar, '{\n\n"a": 1}')


async def test_a_grammar_is_made_once_for_all_who_wait(scene: Scene) -> None:
    async with asyncio.TaskGroup() as group:
        made = [group.create_task(scene.compiler.make(schema(NAMED))) for _ in range(8)]
        left = group.create_task(scene.compiler.make(schema(NAMED)))
        await asyncio.sleep(0)
        left.cancel()
    assert len({id(grammar.result().text) for grammar in made}) == 1
    assert len(scene.compiler._results) == 1


async def test_one_that_a_slow_host_did_not_make_in_time_is_made_the_next_time(tmp_path: Path) -> None:
    scene = Scene(write_model(tmp_path / "model"))
    await scene.compiler.make(schema(NAMED))
    scene.compiler._quick.timeout_s = 0.0
    with pytest.raises(UnavailableError, match="did not end within 0 s"):
        await scene.compiler.make(OutputConstraint("regex", "ab"))
    scene.compiler._quick.timeout_s = 20.0
    assert scene.takes(await scene.compiler.make(OutputConstraint("regex", "ab")), "ab")
    await scene.compiler.close()
