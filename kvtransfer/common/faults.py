"""Named points in the protocol where a test may kill, stop or corrupt; in production they do nothing.

A point is declared by calling `faults.at("name")`. The rules come from the configuration's `debug.faults`
(off by default). A rule fires in one process of the whole cluster: the first that creates its marker file
acts, and writes its process id there, so that a test knows which process it stopped. It fires there once, or
`times` times.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence

from kvtransfer.codec import Part


class FaultRule(Part, frozen=True):
    """At the `after`-th passage of `point`, and at the next ones until it has been done `times` times, do
    `action` ("kill", "stop", "corrupt", or "raise": a MemoryError)."""

    point: str
    action: str
    marker: str
    after: int = 1
    times: int = 1


class Faults:
    """Applies the rules of one process; without rules a point costs one dictionary look-up."""

    def __init__(self, rules: Sequence[FaultRule] = ()) -> None:
        self._rules: dict[str, list[FaultRule]] = {}
        self._num_passages: dict[str, int] = {}
        self._own_markers: set[str] = set()
        for rule in rules:
            self._rules.setdefault(rule.point, []).append(rule)

    @property
    def armed(self) -> bool:
        """Whether any rule is set: then transports go block by block, through every point."""
        return bool(self._rules)

    def at(self, point: str) -> bool:
        """Pass `point`. True when the caller must corrupt its data (flip one bit). Raises MemoryError if a
        rule requires it."""
        rules = self._rules.get(point)
        if rules is None:
            return False
        count = self._num_passages[point] = self._num_passages.get(point, 0) + 1
        return any(self._fire(rule) for rule in rules if rule.after <= count < rule.after + rule.times)

    def _fire(self, rule: FaultRule) -> bool:
        if rule.marker not in self._own_markers:
            try:
                marker = os.open(rule.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                return False
            os.write(marker, str(os.getpid()).encode())
            os.close(marker)
            self._own_markers.add(rule.marker)
        if rule.action == "raise":
            raise MemoryError(f"a fault was injected at {rule.point}")
        if rule.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule.action == "stop":
            # To this thread: sent to the process, another thread takes it and this one runs on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return rule.action == "corrupt"
