"""Sessions of the console that were ended: never accepted again, whatever others do meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from callers import key_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slow_cases import examples

from cluster.errors import UnauthenticatedError
from cluster.identity.authenticator import Authenticator
from cluster.identity.config import AuthConfig
from cluster.identity.ended_sessions import MAX_ENDED_OF_KEY, MAX_KEYS, EndedSession, EndedSessions
from cluster.identity.sessions import Sessions
from kvtransfer.common.clock import ManualClock
from kvtransfer.rpc.trust import Trust

LIFETIME_S = 100.0


class Console:
    """Two gateways over one file of keys, which tell each other what ends; their clocks are one."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(start_s=1000.0)
        keys = folder / "keys.yaml"
        self.operator = key_of(keys, "staff", "operator")
        self.viewer = key_of(keys, "staff", "viewer")
        self._config = AuthConfig(mode="required", keys_file=keys, session_s=LIFETIME_S)
        self._trust = Trust.draw()
        self.gateways = [self.another(), self.another()]

    def another(self) -> Sessions:
        return Sessions(self._trust, Authenticator(self._config, self.clock), self.clock)

    def sign_in(self, key: str) -> str:
        return self.gateways[0].begin(key).cookie

    def sign_out(self, cookie: str) -> None:
        ended = self.gateways[0].end(cookie)
        for other in self.gateways[1:]:
            other.forget(ended)

    def accepts(self, cookie: str) -> list[bool]:
        return [accepts(each, cookie) for each in self.gateways]


def accepts(sessions: Sessions, cookie: str) -> bool:
    try:
        sessions.identify(cookie)
    except UnauthenticatedError:
        return False
    return True


def test_no_number_of_sign_ins_makes_an_ended_session_valid(tmp_path: Path) -> None:
    console = Console(tmp_path)
    ended = console.sign_in(console.operator)
    live = console.sign_in(console.operator)
    console.sign_out(ended)
    for number in range(5 * MAX_ENDED_OF_KEY):
        console.clock.advance(0.001)
        console.sign_out(console.sign_in(console.viewer))
        if number % 100 == 0:
            assert console.accepts(ended) == [False, False]
    assert console.accepts(ended) == [False, False]
    assert console.accepts(live) == [True, True]  # another key's sessions do not end it
    for _ in range(MAX_ENDED_OF_KEY):  # those of its own key do, when so many have
        assert console.accepts(live) == [True, True]
        console.clock.advance(0.001)
        console.sign_out(console.sign_in(console.operator))
    assert console.accepts(ended) == console.accepts(live) == [False, False]


def test_a_gateway_that_starts_later_takes_no_session_that_may_have_ended(tmp_path: Path) -> None:
    console = Console(tmp_path)
    ended, live = console.sign_in(console.operator), console.sign_in(console.operator)
    console.sign_out(ended)
    console.clock.advance(1.0)
    restarted = console.another()
    assert not accepts(restarted, ended)
    assert not accepts(restarted, live)
    assert accepts(restarted, console.sign_in(console.operator))


def test_a_clock_that_was_set_back_neither_revives_a_session_nor_keeps_anybody_out(tmp_path: Path) -> None:
    console = Console(tmp_path)
    ended = console.sign_in(console.operator)
    console.sign_out(ended)
    console.clock.advance(LIFETIME_S + 1)  # it is over by itself, and forgotten
    console.sign_out(console.sign_in(console.operator))
    console.clock.advance(-LIFETIME_S - 500)
    assert console.accepts(ended) == [False, False]
    assert console.accepts(console.sign_in(console.operator)) == [True, True]


def test_memory_is_bounded_for_any_number_of_keys() -> None:
    ended = EndedSessions()
    made = [
        EndedSession(f"{key}-{number}".encode(), 1e9, f"key-{key}", 10.0 * key + number)
        for key in range(MAX_KEYS + 50)
        for number in range(3)
    ]
    for each in made:
        ended.add(each, 0.0)
    assert (ended.num_keys(), ended.num_remembered()) == (MAX_KEYS, 3 * MAX_KEYS)
    assert all(ended.includes(it.key_id, it.session_id, it.began_at) for it in made)
    assert not ended.includes("key-1049", b"other", 10_500.0)


class EndedMachine(RuleBasedStateMachine):
    """Sessions of several keys begin and end in any order, with a memory of three for each of four keys."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = EndedSessions(max_of_key=3, max_keys=4)
        self.now = 0.0
        self.num_begun = 0
        self.live: list[EndedSession] = []
        self.dead: list[EndedSession] = []
        self.was_set_back = False

    @initialize(lifetimes=st.lists(st.sampled_from([5.0, 50.0]), min_size=1, max_size=2))
    def choose_lifetimes(self, lifetimes: list[float]) -> None:
        self.lifetimes = lifetimes

    @rule(key=st.integers(0, 6), seconds=st.sampled_from([0.0, 1.0, 3.0]))
    def begin(self, key: int, seconds: float) -> None:
        self.now += seconds
        self.num_begun += 1
        lifetime = self.lifetimes[self.num_begun % len(self.lifetimes)]
        session = EndedSession(b"%d" % self.num_begun, self.now + lifetime, f"key-{key}", self.now)
        self.live.append(session)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.live:
            session = data.draw(st.sampled_from(self.live))
            self.live.remove(session)
            self.dead.append(session)
            self.ended.add(session, self.now)

    @rule(seconds=st.sampled_from([-20.0, 2.0, 60.0]))
    def set_clock(self, seconds: float) -> None:
        self.now += seconds
        self.was_set_back = self.was_set_back or seconds < 0

    @invariant()
    def an_ended_session_is_never_accepted(self) -> None:
        for each in self.dead:
            assert self._is_refused(each)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.ended.num_keys() <= 4
        assert self.ended.num_remembered() <= 4 * 3

    @invariant()
    def a_live_session_ends_early_only_by_many_ends_of_its_own_key_or_by_many_keys(self) -> None:
        if self.was_set_back or len({it.key_id for it in self.dead}) > 4 or len(set(self.lifetimes)) > 1:
            return
        for each in self.live:
            later = [it for it in self.dead if it.key_id == each.key_id and it.began_at >= each.began_at]
            if each.ends_at > self.now and len(later) <= 3:
                assert not self._is_refused(each)

    def _is_refused(self, session: EndedSession) -> bool:
        return self.ended.includes(session.key_id, session.session_id, session.began_at)


EndedMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
test_ended_sessions = EndedMachine.TestCase


@pytest.mark.parametrize("began_at", [float("inf"), float("-inf"), float("nan"), 0.0])
def test_what_another_gateway_sends_cannot_make_a_session_valid(began_at: float) -> None:
    ended = EndedSessions(max_of_key=2, max_keys=2)
    first = EndedSession(b"first", 1e9, "key", 5.0)
    ended.add(first, 0.0)
    for number in range(10):
        ended.add(EndedSession(b"%d" % number, 1e9, "key", began_at), 0.0)
        ended.add(EndedSession(b"%d" % number, 1e9, f"key-{number}", began_at), 0.0)
    assert ended.includes("key", b"first", 5.0)
