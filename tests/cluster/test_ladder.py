"""The rungs of a gateway under load: each transition by a virtual clock, and any sequence of pressures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.admission.ladder import RELEASE_PART, RELEASE_S, THRESHOLDS, Ladder, Rung

Change = tuple[Rung, Rung]


def make_ladder() -> tuple[Ladder, list[Change]]:
    changes: list[Change] = []
    return Ladder(lambda before, rung, pressure: changes.append((before, rung))), changes


@pytest.mark.parametrize("rung", list(THRESHOLDS))
def test_each_rung_is_climbed_at_its_threshold_and_left_after_a_while_below(rung: Rung) -> None:
    ladder, changes = make_ladder()
    threshold = THRESHOLDS[rung]
    ladder.update(threshold - 0.01, 0.0)
    assert ladder.rung == rung - 1
    ladder.update(threshold, 0.1)
    assert ladder.rung is rung
    ladder.update(RELEASE_PART * threshold, 0.2)  # not below
    ladder.update(RELEASE_PART * threshold, 100.0)
    assert ladder.rung is rung
    below = RELEASE_PART * threshold - 0.001
    ladder.update(below, 200.0)
    ladder.update(below, 200.0 + RELEASE_S - 0.01)
    assert ladder.rung is rung
    ladder.update(below, 200.0 + RELEASE_S)
    assert ladder.rung == rung - 1
    assert changes[-2:] == [(Rung(rung - 1), rung), (rung, Rung(rung - 1))]


def test_pressure_between_restarts_the_time_below() -> None:
    ladder, _ = make_ladder()
    ladder.update(0.5, 0.0)
    ladder.update(0.1, 1.0)
    ladder.update(0.35, 5.0)  # above 0.8 x 0.4
    ladder.update(0.1, 5.5)
    ladder.update(0.1, 5.5 + RELEASE_S - 0.01)
    assert ladder.rung == 1
    ladder.update(0.1, 5.5 + RELEASE_S)
    assert ladder.rung == 0


@given(st.floats(0, 10))
def test_it_climbs_as_far_as_the_pressure_goes_at_once(pressure: float) -> None:
    ladder, changes = make_ladder()
    ladder.update(pressure, 0.0)
    expected = max([Rung.NORMAL, *(rung for rung, threshold in THRESHOLDS.items() if pressure >= threshold)])
    assert ladder.rung is expected
    assert len(changes) == (expected is not Rung.NORMAL)


class AnyPressures(RuleBasedStateMachine):
    """Against what was seen: how long the pressure has been too low for the rung."""

    def __init__(self) -> None:
        super().__init__()
        self.ladder, self.changes = make_ladder()
        self.now = 0.0
        self.seen: list[tuple[float, float]] = []

    @rule(pressure=st.floats(0, 1.5), wait_s=st.floats(0.0, 4.0))
    def update(self, pressure: float, wait_s: float) -> None:
        self.now += wait_s
        before = self.ladder.rung
        self.ladder.update(pressure, self.now)
        after = self.ladder.rung
        higher = max([Rung.NORMAL, *(rung for rung, least in THRESHOLDS.items() if pressure >= least)])
        self.seen.append((self.now, pressure))
        if higher > before:
            assert after is higher
        elif after is not before:
            assert after == before - 1
            calm = [at for at, each in self.seen if each >= RELEASE_PART * THRESHOLDS[before]]
            assert self.now - max(calm, default=0.0) >= RELEASE_S
        assert (before is after) == (
            not self.changes or self.changes[-1] != (before, after) or before is after
        )

    @rule()
    def calm_down(self) -> None:
        """From any rung a calm gateway is back to normal within so many seconds of every rung."""
        for _ in range(2 * len(THRESHOLDS)):
            self.now += RELEASE_S
            self.ladder.update(0.0, self.now)
        self.seen.append((self.now, 0.0))
        assert self.ladder.rung is Rung.NORMAL

    @invariant()
    def changes_are_a_chain(self) -> None:
        rung = Rung.NORMAL
        for before, after in self.changes:
            assert before is rung
            assert after is not before
            rung = after
        assert rung is self.ladder.rung


TestAnyPressures = AnyPressures.TestCase
