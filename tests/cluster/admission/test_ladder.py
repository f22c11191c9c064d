"""The rungs of a gateway under load: each transition by a virtual clock, and any sequence of pressures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.admission.flow import Flow
from cluster.admission.ladder import (
    AGAIN_S,
    IDLE_PRESSURE,
    IDLE_RELEASE_S,
    MOST_PATIENCE,
    RELEASE_PART,
    RELEASE_S,
    SMOOTHED_S,
    THRESHOLDS,
    Ladder,
    Pressure,
    Rung,
)

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


@pytest.mark.parametrize("rung", list(THRESHOLDS))
@pytest.mark.parametrize("pressure", [0.0, IDLE_PRESSURE + 0.01])
def test_a_rung_is_left_when_it_can_be_at_the_earliest(rung: Rung, pressure: float) -> None:
    ladder, _ = make_ladder()
    ladder.update(1.2, 0.0)
    assert ladder.earliest_exit_s(rung, 0.0) == RELEASE_S * (Rung.REFUSING - rung + 1)
    ladder.update(pressure, 1.0)
    told_s, now = ladder.earliest_exit_s(rung, 1.0), 1.0
    assert ladder.earliest_exit_s(rung, 1.5) == told_s - 0.5
    while ladder.rung >= rung:
        now += 0.125
        ladder.update(pressure, now)
    assert now - 1.0 == told_s
    assert ladder.earliest_exit_s(rung, now) == 0


def test_pressure_between_restarts_the_time_below() -> None:
    ladder, _ = make_ladder()
    ladder.update(0.5, 0.0)
    ladder.update(0.2, 1.0)
    ladder.update(0.35, 5.0)  # above 0.8 x 0.4
    ladder.update(0.2, 5.5)
    ladder.update(0.2, 5.5 + RELEASE_S - 0.01)
    assert ladder.rung == 1
    ladder.update(0.2, 5.5 + RELEASE_S)
    assert ladder.rung == 0


def test_every_rung_is_left_soon_where_nothing_waits() -> None:
    ladder, changes = make_ladder()
    ladder.update(5.0, 0.0)
    now = 10.0
    ladder.update(0.0, now)
    for _ in THRESHOLDS:
        ladder.update(0.0, now + IDLE_RELEASE_S - 0.01)
        before = ladder.rung
        now += IDLE_RELEASE_S
        ladder.update(0.0, now)
        assert ladder.rung == before - 1
    assert ladder.rung is Rung.NORMAL
    ladder.update(0.5, 100.0)
    ladder.update(0.0, 100.1)
    ladder.update(IDLE_PRESSURE, 101.0)  # something waits
    ladder.update(0.0, 101.1)
    assert changes[1 + len(THRESHOLDS) :] == [(Rung.NORMAL, Rung.BATCH_PAUSED)]


def left_after_s(ladder: Ladder, pressure: float, now: float) -> float:
    """From a rung of 0.5: how long it takes until that is left."""
    ladder.update(0.5, now)
    begun_at = now = now + 0.1
    ladder.update(pressure, now)
    while ladder.rung:
        now += 0.25
        ladder.update(pressure, now)
    return now - begun_at


@pytest.mark.parametrize(("pressure", "first_s"), [(0.2, RELEASE_S), (0.0, IDLE_RELEASE_S)])
def test_a_rung_that_is_needed_again_is_kept_longer(pressure: float, first_s: float) -> None:
    ladder, _ = make_ladder()
    now, times = 0.0, []
    for _ in range(6):
        times.append(left_after_s(ladder, pressure, now))
        now += 0.1 + times[-1] + 1.0
    assert times == pytest.approx([first_s * min(2**index, MOST_PATIENCE) for index in range(6)])
    now += AGAIN_S
    assert left_after_s(ladder, pressure, now) == pytest.approx(first_s)


def test_the_pressure_is_averaged_over_time() -> None:
    ladder, changes = make_ladder()
    pressure, flow = Pressure(ladder), Flow("a", "interactive")
    pressure.note(flow, 1.0, 0.0, 0.0)
    now = 0.0
    for index in range(200):  # single requests that wait long, or not at all
        now += 0.2
        pressure.note(flow, 1.0, 0.7 if index % 3 == 0 else 0.0, now)
    assert not changes
    for _ in range(10):
        now += SMOOTHED_S / 10
        pressure.note(flow, 1.0, 5.0, now)
    assert ladder.rung is Rung.REFUSING


@given(st.floats(0, 10))
def test_it_climbs_as_far_as_the_pressure_goes_at_once(pressure: float) -> None:
    ladder, changes = make_ladder()
    ladder.update(pressure, 0.0)
    expected = max([Rung.NORMAL, *(rung for rung, threshold in THRESHOLDS.items() if pressure >= threshold)])
    assert ladder.rung is expected
    assert len(changes) == (expected is not Rung.NORMAL)


class AnyPressures(RuleBasedStateMachine):
    """Against what was seen: how long the pressure has been too low for the rung, or next to none."""

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
            least = RELEASE_PART * THRESHOLDS[before]
            calm_s, idle_s = (
                self.now - max((at for at, each in self.seen if each >= bound), default=0.0)
                for bound in (least, IDLE_PRESSURE)
            )
            assert calm_s >= RELEASE_S or idle_s >= IDLE_RELEASE_S
        assert (before is after) == (
            not self.changes or self.changes[-1] != (before, after) or before is after
        )

    @rule()
    def calm_down(self) -> None:
        """From any rung a calm gateway is back to normal within so many seconds of every rung."""
        for _ in range(2 * len(THRESHOLDS)):
            self.now += IDLE_RELEASE_S * MOST_PATIENCE
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
