"""The breaker of the index, by its own clock."""

from __future__ import annotations

import pytest

from kvtransfer.store.index.breaker import Breaker


@pytest.fixture
def breaker() -> Breaker:
    """Closed."""
    breaker = Breaker(budget=3, first_pause_s=1.0, longest_pause_s=5.0)
    breaker.probed(True, 0.0)
    return breaker


def test_it_is_open_until_the_first_probe_went_well() -> None:
    breaker = Breaker()
    assert breaker.is_open
    assert breaker.probe_in_s(100.0) == 0.0
    breaker.probed(True, 100.0)
    assert not breaker.is_open


def test_only_failures_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.failed(0.0)
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.is_open


def test_an_answer_that_comes_late_does_not_close_it(breaker: Breaker) -> None:
    breaker.trip(0.0)
    breaker.succeeded()
    assert breaker.is_open


def test_pauses_double_up_to_the_longest(breaker: Breaker) -> None:
    now = 10.0
    breaker.trip(now)
    pauses = []
    for _ in range(5):
        pauses.append(breaker.probe_in_s(now))
        now += pauses[-1]
        assert breaker.probe_in_s(now) == 0.0
        breaker.probed(False, now)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_after_it_was_closed_pauses_are_short_again(breaker: Breaker) -> None:
    breaker.trip(0.0)
    breaker.probed(False, 1.0)
    breaker.probed(True, 3.0)
    for _ in range(3):
        breaker.failed(50.0)
    assert breaker.probe_in_s(50.0) == 1.0


def test_what_fails_while_it_is_open_does_not_put_off_the_probe(breaker: Breaker) -> None:
    breaker.trip(0.0)
    breaker.failed(0.5)
    breaker.trip(0.9)
    assert breaker.probe_in_s(0.9) == pytest.approx(0.1)
