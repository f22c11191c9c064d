"""Masks of slots whose output follows a grammar: those that trying every token gives, through every schedule
of starts, steps, preemptions and hand-overs; and matchers that fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
import pytest
from grammar_harness import (
    END,
    LETTERS,
    MAX_SLOTS,
    OTHER_END,
    TOKENS,
    VOCABULARY,
    MatcherHarness,
    assert_allows,
    choice,
    members,
    packed,
    rows_of,
    small_grammars,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from llguidance import LLParserLimits
from slow_cases import examples

from workers.errors import GrammarRefusedError
from workers.grammar_limits import parser_limits
from workers.messages.rank_channel import CompileGrammar, GrammarCompiled
from workers.messages.sampling import Grammar, SamplingParams
from workers.rank import compiled_grammars
from workers.rank.compiled_grammars import CompiledGrammars, CompileThread
from workers.rank.device_queue import CopiedOut
from workers.rank.grammar_check_child import compile_grammar

TEXTS = st.sets(st.text(alphabet=LETTERS, min_size=1, max_size=7), min_size=1, max_size=5)


@pytest.fixture
def grammars(tmp_path: Path) -> CompiledGrammars:
    return small_grammars(tmp_path)


@pytest.fixture
def harness(grammars: CompiledGrammars) -> MatcherHarness:
    return MatcherHarness(grammars)


def compiled(harness: MatcherHarness, grammar: Grammar) -> Grammar:
    harness.grammars.compile(grammar)
    return grammar


def token(text: str) -> int:
    return TOKENS.index(text)


@dataclass(eq=False)
class Stream:
    """A sequence wherever it is."""

    texts: frozenset[str]
    grammar: Grammar
    output: list[int] = field(default_factory=list)
    digest: bytes = b""


class Schedules(RuleBasedStateMachine):
    """Two replicas. Streams start at either, decode in mixed steps beside free slots, leave their slots and
    come back to one at either side."""

    waiting = Bundle("waiting")
    running = Bundle("running")

    grammars: ClassVar[list[CompiledGrammars]] = []

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        self.harnesses = [MatcherHarness(each, threads) for threads, each in enumerate(self.grammars, 1)]
        self.slots: list[dict[int, Stream | None]] = [{}, {}]
        self.random = random.Random(seed)

    @rule(target=waiting, texts=TEXTS)
    def arrive(self, texts: set[str]) -> Stream:
        return Stream(frozenset(texts), choice(texts))

    @rule(target=running, stream=consumes(waiting), side=st.integers(0, 1))
    def start(self, stream: Stream, side: int) -> object:
        slot = self._free_slot(side)
        if slot is None:
            return multiple()
        harness = self.harnesses[side]
        harness.grammars.compile(stream.grammar)
        harness.start(slot, stream.grammar, stream.output, stream.digest)
        self.slots[side][slot] = stream
        return stream

    @rule(side=st.integers(0, 1))
    def start_free(self, side: int) -> None:
        slot = self._free_slot(side)
        if slot is not None:
            self.harnesses[side].start(slot, None)
            self.slots[side][slot] = None

    @rule(side=st.integers(0, 1), share=st.floats(0.2, 1.0))
    def step(self, side: int, share: float) -> None:
        here = self.slots[side]
        chosen = [slot for slot in sorted(here) if self.random.random() < share]
        self.random.shuffle(chosen)
        masks = self.harnesses[side].masks(chosen)
        streams = [here[slot] for slot in chosen]
        if masks is None:
            assert not any(streams)
            return
        assert masks.failed == ()
        digests = {it.row: it.digest for it in masks.digests}
        tokens: list[int] = []
        for row, stream in enumerate(streams):
            if stream is None:
                assert (masks.masks[row] == 0xFFFFFFFF).all()
                tokens.append(self.random.randrange(VOCABULARY))
                continue
            expected = assert_allows(masks.masks[row], stream.texts, stream.output)
            tokens.append(self.random.choice(sorted(expected)))
            has_ended = bool(stream.output) and stream.output[-1] in (END, OTHER_END)
            if not has_ended:
                stream.output.append(tokens[-1])
                stream.digest = digests[row]
        failed = self.harnesses[side].matchers.advance(rows_of(chosen), np.array(tokens))
        assert failed == ()

    @rule(target=waiting, stream=consumes(running))
    def leave(self, stream: Stream) -> object:
        """Preempted, migrated or cancelled; those that ended do not come back."""
        for side, slots in enumerate(self.slots):
            for slot in [slot for slot, here in slots.items() if here is stream]:
                self.harnesses[side].matchers.free(slot)
                del slots[slot]
        has_ended = bool(stream.output) and stream.output[-1] in (END, OTHER_END)
        return multiple() if has_ended else stream

    @invariant()
    def slots_without_grammars_are_not_bound(self) -> None:
        for side, slots in enumerate(getattr(self, "slots", ())):
            bound = [
                slot for slot in range(MAX_SLOTS) if self.harnesses[side].matchers.bind(np.array([slot]))
            ]
            assert bound == sorted(slot for slot, stream in slots.items() if stream is not None)

    def _free_slot(self, side: int) -> int | None:
        free = [slot for slot in range(MAX_SLOTS) if slot not in self.slots[side]]
        return self.random.choice(free) if free else None


def test_every_schedule_has_the_masks_of_trying_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedules, "grammars", [small_grammars(tmp_path) for _ in range(2)])
    how = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Schedules, settings=how)


@pytest.mark.parametrize("text", ['start: /a(b|c){1,3}/ "ca"', "start: A\nA: /[abc]+/ & ~/.*cc.*/"])
def test_a_mask_is_what_fresh_matchers_accept(harness: MatcherHarness, text: str) -> None:
    """For grammars of more texts than can be listed."""
    grammar = compiled(harness, Grammar.of(text))
    generator = random.Random(3)
    for slot in range(MAX_SLOTS):
        harness.start(slot, grammar)
        output: list[int] = []
        for _ in range(6):
            masks = harness.masks([slot])
            assert masks is not None
            fresh = compile_grammar(harness.grammars.tokenizer, text, parser_limits())
            assert fresh.consume_tokens(output)
            expected = {it for it in range(VOCABULARY) if fresh.deep_copy().consume_token(it)}
            found = members(masks.masks[0])
            assert found == expected or (found and found < expected and fresh.compute_ff_bytes())
            expected = found
            chosen = generator.choice(sorted(expected))
            harness.advance({slot: chosen})
            output.append(chosen)
            if chosen in (END, OTHER_END):
                break


def test_a_text_that_can_only_end_lets_end_tokens_come_early(harness: MatcherHarness) -> None:
    grammar = compiled(harness, choice(["a", "ab"]))
    sampling = SamplingParams(min_tokens=9)
    harness.start(2, grammar, sampling=sampling)
    harness.start(3, grammar, sampling=sampling)
    for slot, text in ((2, "a"), (3, "ab")):
        assert harness.masks([slot]) is not None
        harness.advance({slot: token(text)})
    assert harness.masks([2, 3]) is not None
    assert harness.lifted == [3], "slot 2 may still continue with b"
    harness.advance({2: token("b")})
    masks = harness.masks([2])
    assert harness.lifted == [3, 2]
    assert masks is not None
    assert members(masks.masks[0]) == {END, OTHER_END}


def test_a_stream_from_another_replica_is_compared(harness: MatcherHarness, tmp_path: Path) -> None:
    """Where the grammar allows something else than it did where the output comes from, the attempt fails
    before it samples."""
    grammar = compiled(harness, choice(["aab", "aac"]))
    harness.start(0, grammar)
    masks = harness.masks([0])
    assert masks is not None
    harness.advance({0: token("aa")})
    masks = harness.masks([0])
    assert masks is not None
    (digest,) = (it.digest for it in masks.digests)
    harness.advance({0: token("b")})
    output = [token("aa"), token("b")]
    harness.start(1, grammar, output, digest)
    other = compiled(harness, choice(["aab", "aaab"]))
    harness.start(2, other, output, digest)
    masks = harness.masks([1, 2])
    assert masks is not None
    assert members(masks.masks[0]) == {END, OTHER_END}
    (failure,) = masks.failed
    assert (failure.index, failure.code) == (1, "internal")
    assert [it.row for it in masks.digests] == [0]


def test_an_output_that_does_not_follow_the_grammar_fails_alone(harness: MatcherHarness) -> None:
    grammar = compiled(harness, choice(["abc"]))
    harness.start(0, grammar, [token("a"), token("c")])
    harness.start(1, grammar, [token("a")])
    masks = harness.masks([0, 1])
    assert masks is not None
    assert [(it.index, it.code) for it in masks.failed] == [(0, "grammar")]
    assert "could not follow the grammar" in masks.failed[0].reason
    assert_allows(masks.masks[1], ["abc"], [token("a")])


def test_a_token_against_the_grammar_is_reported_with_its_step(harness: MatcherHarness) -> None:
    grammar = compiled(harness, choice(["abc"]))
    harness.start(0, grammar)
    harness.start(1, grammar)
    assert harness.masks([0, 1]) is not None
    (failure,) = harness.matchers.advance(rows_of([0, 1]), np.array([token("a"), token("c")]))
    assert (failure.index, failure.code) == (1, "grammar")
    masks = harness.masks([0, 1])
    assert masks is not None
    assert [it.index for it in masks.failed] == [1]
    assert_allows(masks.masks[0], ["abc"], [token("a")])


def test_a_lexer_that_copies_have_worn_out_is_replaced(tmp_path: Path) -> None:
    """The states that others' outputs have led to are not held against those that come later."""
    harness = MatcherHarness(small_grammars(tmp_path, LLParserLimits(max_lexer_states=120)))
    grammar = compiled(harness, Grammar.of("start: /(a|b)*a(a|b){12}/"))
    generator = random.Random(0)
    failed = 0
    for _ in range(40):
        harness.start(0, grammar)
        for _ in range(6):
            masks = harness.masks([0])
            assert masks is not None
            if masks.failed:
                failed += 1
                break
            harness.advance({0: generator.choice([token("a"), token("b")])})
        harness.matchers.free(0)
    assert failed == 0
    harness.start(0, grammar)
    for _ in range(400):
        masks = harness.masks([0])
        assert masks is not None
        if masks.failed:
            break
        harness.advance({0: generator.choice([token("a"), token("b")])})
    assert masks is not None
    assert [it.code for it in masks.failed] == ["grammar"], "this one has met too many by itself"


def test_a_grammar_that_is_not_compiled_fails_the_slot(harness: MatcherHarness) -> None:
    harness.start(0, choice(["a"]))
    masks = harness.masks([0])
    assert masks is not None
    assert [it.code for it in masks.failed] == ["grammar"]


class LateEvent:
    """An event that has passed when it is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def query(self) -> bool:
        return self.num_waits > 0

    def synchronize(self) -> None:
        self.num_waits += 1


def under_way(tokens: Sequence[int]) -> tuple[CopiedOut, LateEvent]:
    import torch

    event, there = LateEvent(), torch.tensor(tokens, dtype=torch.int32)
    return CopiedOut(there, there, event), event


def test_tokens_on_a_device_are_waited_for_before_the_next_mask(harness: MatcherHarness) -> None:
    grammar = compiled(harness, choice(["abc", "ac"]))
    harness.start(4, grammar)
    harness.start(5, None)
    assert harness.masks([5, 4]) is not None
    copied, event = under_way([9, token("a")])
    (expected,) = harness.matchers.expect(copied, [rows_of([5, 4])])
    assert harness.masks([5]) is None
    assert event.num_waits == 0, "a step without grammars does not wait"
    masks = harness.masks([4])
    assert event.num_waits == 1
    assert masks is not None
    assert members(masks.masks[0]) == {token("b"), token("bc"), token("c")}
    assert harness.matchers.take([expected]) == ()
    wrong, _ = under_way([token("a")])
    bad = harness.matchers.expect(wrong, [rows_of([4])])
    assert [it.index for it in harness.matchers.take(bad)] == [0]
    assert event.num_waits == 1


def test_what_is_not_needed_is_forgotten(grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.rank.compiled_grammars.MAX_IDLE", 2)
    monkeypatch.setattr("workers.rank.compiled_grammars.MAX_IDLE_BYTES", 100)
    made = [choice([LETTERS[: 1 + index]]) for index in range(3)]
    for grammar in made:
        grammars.compile(grammar, num_bytes=30)
    assert grammars.num_compiled == 3, "all are needed"
    for grammar in made:
        grammars.release(grammar.digest)
    assert [grammars.find(grammar.digest) for grammar in made] == [False, True, True]
    grammars.compile(made[0], num_bytes=90)
    for grammar in made:
        grammars.release(grammar.digest)
    assert grammars.num_bytes <= 100


def test_packed_is_what_slots_are_started_with() -> None:
    assert packed([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


# ------------------------------------------------------------------------------------ panics of the library

PANIC: type[BaseException] = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


class Panicking:
    """A matcher, or what computes the masks of several, that panics whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        def panic(*args: object) -> None:
            raise PANIC("in the library")

        return panic


def failing(harness: MatcherHarness, slot: int) -> None:
    """Let the matcher of a slot, which has begun, panic from now on."""
    harness.matchers._slots[slot].matcher = Panicking()  # type: ignore[assignment]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_matcher_that_panics_ends_its_request_alone(grammars: CompiledGrammars, num_threads: int) -> None:
    harness = MatcherHarness(grammars, num_threads)
    slots = range(5)
    for slot in slots:
        harness.start(slot, compiled(harness, choice({"abc"})))
    assert harness.masks(slots) is not None
    failing(harness, 3)
    if num_threads > 1:  # it takes real matchers alone, and meets the panic of one in the middle of others
        harness.matchers._executor = Panicking()  # type: ignore[assignment]
    for _ in range(2):
        masks = harness.masks(slots)
        assert masks is not None
        assert [(it.index, it.code) for it in masks.failed] == [(3, "grammar")]
        for slot in (0, 1, 2, 4):
            assert_allows(masks.masks[slot], {"abc"}, [])


def test_a_matcher_that_panics_at_a_token_ends_its_request_alone(harness: MatcherHarness) -> None:
    for slot in (0, 1):
        harness.start(slot, compiled(harness, choice({"abc"})))
    assert harness.masks((0, 1)) is not None
    failing(harness, 1)
    failed = harness.matchers.advance(rows_of((0, 1)), np.array([token("a")] * 2))
    assert [(it.index, it.code) for it in failed] == [(1, "grammar")]
    masks = harness.masks((0,))
    assert masks is not None
    assert_allows(masks.masks[0], {"abc"}, [token("a")])


def test_a_panic_while_a_grammar_is_compiled_is_a_refusal(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = MatcherHarness(grammars)
    first = compiled(harness, choice({"a"}))
    monkeypatch.setattr(compiled_grammars, "compile_grammar", Panicking().compile)
    with pytest.raises(GrammarRefusedError, match="panic"):
        grammars.compile(choice({"b"}))
    monkeypatch.setitem(grammars._digest_to_compiled, first.digest, Worn())
    harness.start(0, first)
    masks = harness.masks((0,))
    assert masks is not None
    assert [it.code for it in masks.failed] == ["grammar"]


def test_the_thread_that_compiles_survives_a_panic(
    grammars: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: SimpleQueue[GrammarCompiled] = SimpleQueue()
    thread = CompileThread(grammars, reports.put)
    with monkeypatch.context() as context:
        context.setattr(compiled_grammars, "compile_grammar", Panicking().compile)
        thread.handle(CompileGrammar(choice({"a"})))
        assert "panic" in reports.get(timeout=60).error
    thread.handle(CompileGrammar(choice({"b"})))
    assert reports.get(timeout=60).error == ""
    thread.close()


class Worn:
    """A compiled grammar whose copies cannot be made."""

    is_worn = False
    prototype = Panicking()
