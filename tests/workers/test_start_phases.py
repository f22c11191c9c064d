"""The phases of a rank's start."""

from __future__ import annotations

from kvtransfer.common.clock import ManualClock
from workers.rank.start_phases import StartPhases


def test_the_phases_of_a_start_and_their_progress() -> None:
    clock = ManualClock(10.0)
    phases = StartPhases(clock, began_at=7.0)
    for phase, seconds in (
        ("loading weights", 2.0),
        ("loading weights, 1 of 2 layers", 3.0),
        ("warming up", 1.0),
        ("loading weights", 0.5),
    ):
        phases.begin(phase)
        clock.advance(seconds)
    assert phases.seconds() == {"importing": 3.0, "loading weights": 5.0, "warming up": 1.0}
    phases.begin("ready")
    assert phases.seconds()["loading weights"] == 5.5
