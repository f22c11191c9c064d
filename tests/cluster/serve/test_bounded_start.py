"""A start of Ray that never returns ends the process, with the reason."""

from __future__ import annotations

import threading

import pytest
from patience import WAIT_S

from cluster.serve.bounded_start import bounded_start


@pytest.mark.parametrize(
    ("is_interrupted", "bounds", "said"),
    [
        (False, {"start_s": 0.2}, "Ray did not answer within 0.2 s"),
        (True, {"interrupted_s": 0.2}, "interrupted while waiting for Ray"),
    ],
)
def test_a_start_that_hangs_is_ended_with_its_reason(
    is_interrupted: bool, bounds: dict[str, float], said: str
) -> None:
    interrupted, ended, reasons = threading.Event(), threading.Event(), list[str]()

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    if is_interrupted:
        interrupted.set()
    with bounded_start(interrupted, end=end, **bounds):
        assert ended.wait(WAIT_S)
    assert len(reasons) == 1
    assert reasons[0].startswith(said)


def test_a_start_that_returns_ends_nothing() -> None:
    reasons: list[str] = []
    with bounded_start(threading.Event(), end=reasons.append):
        pass
    assert reasons == []
