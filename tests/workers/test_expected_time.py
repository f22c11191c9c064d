"""What steps should have taken between two moments, against a list of all steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduler.expected_time import ExpectedTime

# Times: from one batch of steps to the next, of each of its steps, and how much longer that really takes.
BATCHES = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 10)), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@given(BATCHES, st.integers(0, 200))
def test_the_difference_is_the_time_of_the_steps_between(
    batches: list[tuple[int, list[tuple[int, int]]]], arrived: int
) -> None:
    """Steps follow each other without a pause in a batch. One arrives in a step, between two, or in none."""
    work, now = ExpectedTime(), 0
    mark: float | None = None
    # When each step began and ended, and what it should have taken.
    steps: list[tuple[int, int, int]] = []
    for pause, batch in batches:
        for index, (expected, excess) in enumerate(batch):
            began = now + (0 if index else pause)
            if mark is None and not index and arrived < began:
                mark = work.at(arrived)
            work.begun(began)
            now = began + expected + excess
            if mark is None and arrived < now:
                mark = work.at(arrived)
            work.done(expected, now, is_last=index + 1 == len(batch))
            steps.append((began, now, expected))
    if mark is None:
        return
    # Of the step in which it arrived, what had passed is left out.
    passed = next((arrived - began for began, end, _ in steps if began <= arrived < end), 0)
    later = sum(expected for _, end, expected in steps if end > arrived)
    assert work.at(now) - mark == pytest.approx(later - passed)


def test_steps_that_take_as_long_as_expected_fill_the_time() -> None:
    work = ExpectedTime()
    work.begun(1.0)
    moments = [2.0, 2.5, 5.0]
    marks = [work.at(1.0)]
    for begin, end in pairwise([1.0, *moments]):
        work.begun(begin)
        marks.append(work.at((begin + end) / 2))
        work.done(end - begin, end, is_last=end == moments[-1])
    assert [work.at(9.0) - mark for mark in marks] == pytest.approx([4.0, 3.5, 2.75, 1.25])
