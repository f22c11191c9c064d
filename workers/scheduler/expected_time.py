"""The time that the steps of a replica should take, by the replica's own measurements."""

from __future__ import annotations


class ExpectedTime:
    """The sum of these times over all steps that are done, and how far the step that runs has come.

    The difference between two moments is the time in which a replica would have done what it did between
    them, had nothing but steps delayed it. A request that takes longer than that from its arrival to its
    first token was held up by something else: the replica is slower than it measures itself. One that shared
    its steps with others was not.
    """

    def __init__(self) -> None:
        self._done_s = 0.0
        # When the step that runs began; None: none runs.
        self._began_at: float | None = None

    def begun(self, now: float) -> None:
        """Note that a step is on its way; those behind it begin when it is done."""
        if self._began_at is None:
            self._began_at = now

    def done(self, expected_s: float, now: float, *, is_last: bool) -> None:
        """Note that a step is done that should have taken so long; `is_last`: no other is on its way."""
        self._done_s += expected_s
        self._began_at = None if is_last else now

    def at(self, now: float) -> float:
        """Return the sum at this moment."""
        return self._done_s + (0.0 if self._began_at is None else now - self._began_at)
