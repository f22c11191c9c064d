"""Grammars are compiled within bounds of time and memory, whatever they are: by the thread that does it at a
rank, with its child process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from grammar_harness import END, OTHER_END, VOCABULARY, choice, small_grammars
from llguidance import LLMatcher
from patience import WAIT_S
from slow_cases import slow_but

from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import CompileGrammar, GrammarCompiled, GrammarOrder, ReleaseGrammar
from workers.messages.sampling import MAX_GRAMMAR_BYTES, Grammar
from workers.rank.compiled_grammars import CompiledGrammars, CompileThread
from workers.rank.grammar_check import GrammarChecker


def intersection(num_parts: int) -> str:
    """Return a grammar that the library compiles in exponential time, whatever its limits."""
    return "start: X\nX: " + " & ".join(f"/.*a{index}.*/" for index in range(num_parts))


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


HOSTILE = {
    "exponential intersection": intersection(60),
    "nested repetition": LLMatcher.grammar_from_regex("(" * 60_000 + "a" + ")" * 60_000),
    "deep Lark": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "deep JSON": '{"grammars":' + "[" * 100_000 + "]" * 100_000 + "}",
    "product of alternatives": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(9)]}
                for i in range(9)
            ]
        }
    ),
    "no text": schema({"$ref": "#"}),
    "syntax": "start: %",
    "unknown rule": "start: nothing",
    "wide rows": "start: " + " | ".join(f'"k{index}"' for index in range(20_000)),
    "empty": "",
}


class Thread:
    """The compiling thread and its answers."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self.grammars = grammars
        self.answers: SimpleQueue[GrammarCompiled] = SimpleQueue()
        self.thread = CompileThread(grammars, self.answers.put)

    def order(self, order: GrammarOrder) -> None:
        self.thread.handle(order)

    def compile(self, grammar: Grammar) -> GrammarCompiled:
        self.order(CompileGrammar(grammar))
        answer = self.answers.get(timeout=WAIT_S)
        assert answer.digest == grammar.digest
        return answer


@pytest.fixture
def thread(tmp_path: Path) -> Iterator[Thread]:
    made = Thread(small_grammars(tmp_path))
    yield made
    made.thread.close()


@pytest.mark.parametrize(
    "name", slow_but(HOSTILE, *(name for name in HOSTILE if name != "exponential intersection"))
)
def test_a_hostile_grammar_is_refused_and_the_next_one_compiled(thread: Thread, name: str) -> None:
    assert len(HOSTILE[name].encode()) <= MAX_GRAMMAR_BYTES
    clock = SystemClock()
    begun = clock.now()
    refused = thread.compile(Grammar.of(HOSTILE[name]))
    assert refused.error
    assert len(refused.error) <= 400
    assert not refused.is_transient
    assert clock.now() - begun < WAIT_S
    assert thread.compile(choice(["abc"])).error == ""


def test_the_child_does_not_outlive_its_time_when_nobody_waits(tmp_path: Path) -> None:
    """It limits itself: its parent may have ended."""
    grammars = small_grammars(tmp_path)
    checker = GrammarChecker(grammars.tokenizer_file, VOCABULARY, (END, OTHER_END), grammars.limits)
    assert checker.check(choice(["a"]).text).error == ""
    child = checker._child
    assert child is not None
    text = intersection(60).encode()
    assert child.stdin is not None
    child.stdin.write(len(text).to_bytes(4, "little") + text)
    assert child.wait(WAIT_S) < 0, "a signal has ended it"
    assert "does not compile" in checker.check(choice(["b"]).text).error
    assert checker.check(choice(["b"]).text).error == "", "another child has started"
    checker.close()


def test_a_child_that_loses_its_parent_ends(tmp_path: Path) -> None:
    grammars = small_grammars(tmp_path)
    checker = GrammarChecker(grammars.tokenizer_file, VOCABULARY, (END, OTHER_END), grammars.limits)
    assert checker.check(choice(["a"]).text).num_bytes > 0
    child = checker._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(WAIT_S) == 0
    checker.close()


def test_orders_are_carried_out_in_their_order(thread: Thread) -> None:
    grammar = choice(["ab"])
    for _ in range(2):
        thread.order(CompileGrammar(grammar))
        thread.order(ReleaseGrammar(grammar.digest))
        assert thread.answers.get(timeout=WAIT_S).digest == grammar.digest
    assert thread.compile(grammar).error == ""
    thread.order(ReleaseGrammar(b"unknown"))
    thread.compile(choice(["b"]))
    assert thread.grammars.num_compiled == 2


def test_a_model_without_a_tokenizer_refuses_grammars(thread: Thread, tmp_path: Path) -> None:
    bare = Thread(CompiledGrammars(tmp_path / "none", VOCABULARY, (END,)))
    try:
        assert "tokenizer.json" in bare.compile(choice(["a"])).error
    finally:
        bare.thread.close()


def test_a_model_without_an_end_token_refuses_grammars(thread: Thread, tmp_path: Path) -> None:
    endless = Thread(CompiledGrammars(tmp_path, VOCABULARY, ()))
    try:
        assert "no end token" in endless.compile(choice(["a"])).error
    finally:
        endless.thread.close()


def test_what_all_grammars_take_is_bounded(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choice(["a" * 50])
    assert thread.compile(first).error == ""
    monkeypatch.setattr("workers.rank.compiled_grammars.MAX_BYTES", thread.grammars.num_bytes)
    refused = thread.compile(choice(["b" * 50]))
    assert refused.is_transient
    assert "in use" in refused.error
    assert thread.compile(first).error == "", "it is there already"


def test_a_host_without_a_process_more_refuses_for_now(
    thread: Thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("workers.rank.grammar_check.sys.executable", str(tmp_path / "nowhere"))
    refused = thread.compile(choice(["c"]))
    assert refused.is_transient
    assert "did not start" in refused.error
    monkeypatch.undo()
    assert thread.compile(choice(["c"])).error == ""


def test_the_child_is_run_by_its_path(
    thread: Thread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have been given its modules by something else than the environment."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise RuntimeError('not the library')")
    assert "PYTHONPATH" not in os.environ
    assert thread.compile(choice(["ca"])).error == ""
