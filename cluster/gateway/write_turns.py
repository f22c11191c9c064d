"""Whose output a gateway writes next, of all streams that have some, and how long messages wait."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvtransfer.common.clock import Clock, thread_cpu_s

# Turns given at once, before the event loop looks for frames and calls again.
AT_ONCE = 8
# The most that output waits for its turn because the gateway is busy.
MOST_PAUSE_S = 0.25
# The share of a core from which on the event loop is busy, measured over spans of this length.
_BUSY_SHARE = 0.85
_SPAN_S = 0.05
# In a span in which the event loop is busy, the pause grows by the first and the second; in another one it
# shrinks to the third.
_GROWTH, _STEP_S, _SHRINKAGE = 1.5, 0.01, 0.8
# How often turns are given while there is a pause; a shorter pause is none.
_TICK_S = 0.005


class WaitingWriter(Protocol):
    """A stream that has output to write."""

    def give_turn(self) -> None:
        """Let it write one message, with all output that has come by then."""


class WritePause:
    """How long output waits for its turn: 0 while the event loop's thread has time left. While it is busy,
    longer and longer, up to `MOST_PAUSE_S`."""

    def __init__(self, clock: Clock, cpu_s: Callable[[], float] = thread_cpu_s) -> None:
        """`cpu_s` returns the processor time that this thread has used."""
        self.pause_s = 0.0
        self._clock = clock
        self._cpu_s = cpu_s
        # The time of the last look, and the processor time used until then.
        self._last: tuple[float, float] | None = None

    def look(self) -> None:
        """Adapt the pause, once a span. Always called on the thread of the event loop."""
        now = self._clock.now()
        if self._last is None:
            self._last = now, self._cpu_s()
            return
        elapsed_s = now - self._last[0]
        if elapsed_s < _SPAN_S:
            return
        cpu_s = self._cpu_s()
        is_busy = cpu_s - self._last[1] > _BUSY_SHARE * elapsed_s
        self._last = now, cpu_s
        if is_busy:
            self.pause_s = min(MOST_PAUSE_S, _GROWTH * self.pause_s + _STEP_S)
        else:
            self.pause_s *= _SHRINKAGE ** (elapsed_s / _SPAN_S)
            if self.pause_s < _TICK_S:
                self.pause_s = 0.0


class WriteTurns:
    """Gives the streams of a gateway turns to write, in the order in which they asked.

    A message costs a gateway several times what the tokens in it cost. If every frame of a replica woke the
    writers of all its streams, a busy gateway would write a message for each token, and new calls and frames
    would get what is left. Here output waits, within `MOST_PAUSE_S`, while the gateway is busy. What waits is
    merged, so messages become fewer and longer just as far as time is short.
    """

    def __init__(self, pause: WritePause, clock: Clock) -> None:
        self._pause = pause
        self._clock = clock
        self._waiting: deque[WaitingWriter] = deque()
        self._is_advancing = False
        self._advanced_at = 0.0
        # While there is a pause, turns are given in rounds, each to all that wait when it begins: how many
        # these were, and how many of them are left.
        self._num_in_round = self._num_left = 0

    @property
    def pause_s(self) -> float:
        """How long the last of a round waits now."""
        self._pause.look()
        return self._pause.pause_s

    def ask(self, writer: WaitingWriter) -> None:
        """Give the writer a turn, behind all that wait for theirs."""
        self._waiting.append(writer)
        if not self._is_advancing:
            self._is_advancing = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        self._pause.look()
        for _ in range(self._num_due()):
            self._waiting.popleft().give_turn()
        self._is_advancing = bool(self._waiting)
        if self._is_advancing:
            loop = asyncio.get_running_loop()
            if self._pause.pause_s:
                loop.call_later(_TICK_S, self._advance)
            else:
                loop.call_soon(self._advance)

    def _num_due(self) -> int:
        """Return how many have their turns now: with a pause so many that a round takes as long as that, also
        where the event loop is late."""
        num_waiting, pause_s, now = len(self._waiting), self._pause.pause_s, self._clock.now()
        elapsed_s, self._advanced_at = now - self._advanced_at, now
        if not pause_s:
            self._num_left = 0
            return min(AT_ONCE, num_waiting)
        if not self._num_left:
            self._num_in_round = self._num_left = num_waiting
            elapsed_s = _TICK_S
        share = min(max(elapsed_s, _TICK_S) / pause_s, 1.0)
        num_due = min(math.ceil(self._num_in_round * share), self._num_left)
        self._num_left -= num_due
        return num_due
