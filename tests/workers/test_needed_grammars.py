"""Grammars of the requests that are here: compiled once while somebody needs them, tenant by tenant in turn,
and released with the last one, whatever comes and goes in between."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.errors import QueueFullError
from workers.messages.link import SampleState, Submission
from workers.messages.rank_channel import CompileGrammar, GrammarCompiled, ReleaseGrammar
from workers.messages.sampling import Grammar, SamplingParams
from workers.scheduler.needed_grammars import KEPT_FOR_OTHERS, MAX_GRAMMARS, NeededGrammars
from workers.scheduler.sequence import Request

GRAMMARS = [None, *(Grammar.of(f"start: /a{number}/") for number in range(3))]


def submission(name: int, grammar: Grammar | None, tenant: str = "") -> Submission:
    return Submission(
        request_id=str(name),
        attempt=0,
        tenant=tenant,
        sharing_group="",
        priority=0,
        prompt=bytes(8),
        root_key=b"",
        block_keys=(),
        samples=(SampleState(0, 1), SampleState(1, 2)),
        sampling=SamplingParams(),
        decode=None,
        deadline_s=None,
        grammar=grammar,
    )


def request(name: int, grammar: Grammar | None, tenant: str = "") -> Request:
    return Request(submission(name, grammar, tenant), name, 0.0, 5)


def compiled_orders(needed: NeededGrammars) -> list[Grammar]:
    return [order.grammar for order in needed.take_orders() if isinstance(order, CompileGrammar)]


@example([("arrive", 2), ("leave", 0), ("arrive", 1), ("arrive", 2), ("answer", True)])
@example([("arrive", 2), ("leave", 0), ("arrive", 1), ("arrive", 2), ("answer", False)])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(0, len(GRAMMARS) - 1)),
            st.tuples(st.just("leave"), st.integers(0, 20)),
            st.tuples(st.just("answer"), st.booleans()),
        ),
        max_size=60,
    )
)
def test_a_rank_that_carries_out_the_orders_has_what_is_needed(events: list[tuple[str, int]]) -> None:
    needed = NeededGrammars()
    here: list[Request] = []
    kept: set[bytes] = set()  # at the rank
    unanswered: list[bytes] = []
    ordered: set[bytes] = set()  # since they were last needed by nobody
    ready: set[bytes] = set()  # as the requests that are here have been told
    for number, (event, value) in enumerate(events):
        if event == "arrive":
            here.append(request(number, GRAMMARS[value], "ab"[number % 2]))
            needed.arrive(here[-1])
        elif event == "leave" and here:
            needed.leave(here.pop(value % len(here)))
        elif event == "answer" and unanswered:
            digest = unanswered.pop(0)
            refused = needed.compiled(GrammarCompiled(digest, "" if value else "too complex"))
            with_it = [it for it in here if (it.submission.grammar or Grammar("", b"")).digest == digest]
            if digest in unanswered or digest not in ordered:  # released since, and to be compiled again
                with_it = []
            assert refused == ([] if value else with_it)
            for one in refused:
                here.remove(one)
                needed.leave(one)
            if value and with_it:
                ready.add(digest)
        for order in needed.take_orders():
            if isinstance(order, CompileGrammar):
                assert order.grammar.digest not in kept
                kept.add(order.grammar.digest)
                ordered.add(order.grammar.digest)
                unanswered.append(order.grammar.digest)
            else:
                assert isinstance(order, ReleaseGrammar)
                kept.remove(order.digest)
                ordered.remove(order.digest)
                ready.discard(order.digest)
        digests = {it.submission.grammar.digest for it in here if it.submission.grammar is not None}
        assert kept == digests & ordered
        assert kept == digests or len(unanswered) == 2, "nothing waits while the rank could have it"
        assert len(unanswered) <= 2
        assert len(needed) == len(digests)
        for one in here:
            grammar = one.submission.grammar
            waits = grammar is not None and grammar.digest not in ready
            assert [it.awaits_grammar for it in one.sequences] == [waits, waits]


def test_one_grammar_too_many_is_refused_and_one_that_is_here_is_not() -> None:
    needed = NeededGrammars()
    made = [Grammar.of(f"start: /b{number}/") for number in range(MAX_GRAMMARS + 1)]
    for number, grammar in enumerate(made[:-1]):
        needed.arrive(request(number, grammar, "ab"[number % 2]))
    needed.check_limit(submission(9000, made[0]))
    needed.check_limit(submission(9001, None))
    with pytest.raises(QueueFullError, match="256 grammars are in use"):
        needed.check_limit(submission(9002, made[-1]))


def test_one_tenant_leaves_a_part_to_the_others() -> None:
    needed = NeededGrammars()
    made = [Grammar.of(f"start: /b{number}/") for number in range(MAX_GRAMMARS - KEPT_FOR_OTHERS + 1)]
    here = [request(number, grammar, "greedy") for number, grammar in enumerate(made[:-1])]
    for one in here:
        needed.arrive(one)
    with pytest.raises(QueueFullError, match="192 grammars of this tenant"):
        needed.check_limit(submission(9000, made[-1], "greedy"))
    needed.check_limit(submission(9001, made[-1], "other"))
    needed.leave(here[0])
    needed.check_limit(submission(9002, made[-1], "greedy"))


def test_tenants_take_turns() -> None:
    """A tenant with many grammars delays another one by those that the rank has, not by those that wait."""
    needed = NeededGrammars()
    many = [Grammar.of(f"start: /m{number}/") for number in range(10)]
    other, shared = Grammar.of("start: /other/"), many[8]
    for number, grammar in enumerate(many):
        needed.arrive(request(number, grammar, "many"))
    orders = compiled_orders(needed)
    assert orders == many[:2]
    needed.arrive(request(100, other, "other"))
    needed.arrive(request(101, shared, "other"))
    assert compiled_orders(needed) == [], "the rank has enough"
    while len(orders) < 11:
        needed.compiled(GrammarCompiled(orders[-2].digest))
        orders += compiled_orders(needed)
    assert orders[:6] == [*many[:3], other, many[3], shared]
    assert sorted(orders, key=str) == sorted([*many, other], key=str)


def test_what_a_sender_gets_wrong_is_named() -> None:
    assert Grammar.of("start: /a/").find_problem() == ""
    assert Grammar("start: /a/", b"").find_problem().startswith("digest")
    assert Grammar.of("ä" * (1 << 18)).find_problem().startswith("text: 524288 bytes")
