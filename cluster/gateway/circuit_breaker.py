"""Circuit breakers (sans-I/O): which replicas the requests of a gateway avoid, because they fail or stand
still.

A slow replica progresses, and the router prices what it takes. One that is stopped does not: nothing comes
from it although replicas report several times a second, or it reports that its ranks make no progress.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from kvtransfer.common.health import Backoff
from kvtransfer.messages import ReplicaIdentity

# Failures in a row that open a breaker.
NUM_FAILURES = 3
# A replica from which nothing has come for this time is stopped, and so is one whose ranks have made no
# progress for this time by its own reports.
SILENT_S = 1.0
STALLED_S = 1.0
# The pause of an open breaker, doubled with every opening in a row; a breaker that has been closed for
# `FORGET_S` starts again.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
FORGET_S = 60.0
# How often silence is counted, and the most that one turn may count: while this process did not run, incoming
# messages were not read.
TURN_S = 0.1
_MAX_TURN_S = 2 * TURN_S
NOTE = "circuit breaker"

_log = logging.getLogger(__name__)


class BreakerState(StrEnum):
    """See `CircuitBreaker`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """The breaker of one life of a replica, shared by all requests of a gateway::

                   failures in a row, or it is stopped           the pause is over, and it is not stopped
        CLOSED ------------------------------------------> OPEN -----------------------------------> HALF_OPEN
          ^                                                 ^                                           | |
          |                                                 +-- the probe failed, or it is stopped -----+ |
          +-- after failures: the probe succeeded; after a stop alone: a report shows progress -----------+

    Failures are those that are the replica's own fault. A probe is an ordinary request, one at a time: it
    succeeds when the replica has computed or taken over its prompt. When its attempt ends before, wherever
    that was, another request may be the probe. Attempts that began before the breaker
    opened change nothing when they end.
    """

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        # The cause of the opening; "" while the breaker is closed.
        self.reason = ""
        self.is_stopped = False
        self._needs_probe = False
        # The request that is the probe; "" when there is none.
        self.probe = ""
        self._num_failures = 0
        self._ends_at = 0.0
        self._closed_at = 0.0
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    @property
    def is_usable(self) -> bool:
        """Whether requests may be placed on the replica like on any other."""
        if self.state is BreakerState.HALF_OPEN:
            return self._needs_probe and not self.probe
        return self.state is BreakerState.CLOSED

    @property
    def note(self) -> str:
        """Say why the replica is avoided; "" while it is not."""
        return f"{NOTE} {self.state}: {self.reason}" if self.reason else ""

    def failed(self, request_id: str, reason: str, now: float) -> None:
        """Record a failure of this request, or ("") of the replica as a whole."""
        if self.state is BreakerState.CLOSED:
            self._num_failures += 1
            if self._num_failures < NUM_FAILURES:
                return
            reason = f"{self._num_failures} failures in a row, the last one: {reason}"
        elif self.state is BreakerState.OPEN or request_id not in ("", self.probe):
            return
        self._needs_probe = True
        self._open(reason, now)

    def succeeded(self, request_id: str, now: float) -> None:
        """Record that the replica has computed or taken over the prompt of this request."""
        if self.state is BreakerState.CLOSED:
            self._num_failures = 0
        elif self.state is BreakerState.HALF_OPEN and self.probe == request_id:
            self._close(now)

    def stopped(self, reason: str, now: float) -> None:
        """Record that the replica stands still; may be repeated while it does."""
        if not self.is_stopped:
            self.is_stopped = True
            self._open(reason, now)

    def progressed(self, now: float) -> None:
        """Record a report that does not say that the replica stands still."""
        self.is_stopped = False
        if self.state is BreakerState.HALF_OPEN and not self._needs_probe:
            self._close(now)

    def submitted(self, request_id: str) -> None:
        """Record that this request was sent to the replica."""
        if self.state is BreakerState.HALF_OPEN and self._needs_probe and not self.probe:
            self.probe = request_id

    def released(self, request_id: str) -> None:
        """Record that the attempt of this request is over, whatever ended it."""
        if self.probe == request_id:
            self.probe = ""

    def advance(self, now: float) -> None:
        """Let time pass."""
        if self.state is BreakerState.OPEN and not self.is_stopped and now >= self._ends_at:
            self.state = BreakerState.HALF_OPEN

    def _open(self, reason: str, now: float) -> None:
        if self.state is BreakerState.CLOSED and now >= self._closed_at + FORGET_S:
            self._backoff.reset()
        self.state, self.reason, self.probe = BreakerState.OPEN, reason, ""
        self._num_failures = 0
        self._ends_at = now + self._backoff.failed()

    def _close(self, now: float) -> None:
        self.state, self.reason, self.probe = BreakerState.CLOSED, "", ""
        self._needs_probe = False
        self._num_failures = 0
        self._closed_at = now


class UsableReplicas(Protocol):
    """The part of `router.service.RouterService` that breakers need."""

    def set_usable(self, replica_id: str, is_usable: bool) -> None:
        """Choose the replica only where nothing else is left, or like any other again."""


@dataclass(slots=True)
class _Watched:
    """A replica with its breaker, and the time for which it has stood still."""

    identity: ReplicaIdentity
    breaker: CircuitBreaker
    is_connected: bool = True
    silent_s: float = 0.0
    stalled_s: float = 0.0
    # The router's view of the replica.
    is_usable: bool = True


class CircuitBreakers:
    """The breakers of all replicas that a gateway knows, and the clocks of their silence.

    Silence is counted in turns of `advance` rather than by the clock: it is not the replica's while this
    process itself does not run. A life keeps its breaker when its Link breaks; a later life gets a new one.
    """

    def __init__(
        self,
        router: UsableReplicas,
        on_transition: Callable[[ReplicaIdentity, CircuitBreaker], None],
        now: float,
    ) -> None:
        """`on_transition` is called after every change of a breaker's state, or of its reason."""
        self._router = router
        self._on_transition = on_transition
        self._watched: dict[str, _Watched] = {}
        self._advanced_at = now

    def of(self, replica: ReplicaIdentity) -> CircuitBreaker | None:
        """Return the breaker of this life of the replica."""
        watched = self._find(replica)
        return None if watched is None else watched.breaker

    def silent_s(self, replica: ReplicaIdentity) -> float:
        """Return for how long nothing has come from this life of the replica."""
        watched = self._find(replica)
        return 0.0 if watched is None else watched.silent_s

    def stalled_s(self, replica: ReplicaIdentity) -> float:
        """Return for how long its ranks have made no progress, by its last report."""
        watched = self._find(replica)
        return 0.0 if watched is None else watched.stalled_s

    # -------------------------------------------------------------------- from the connections

    def joined(self, replica: ReplicaIdentity) -> None:
        """Watch a replica whose Link has begun, which the router takes for usable."""
        watched = self._find(replica)
        if watched is None:
            self._watched[replica.replica_id] = _Watched(replica, CircuitBreaker())
            return
        watched.is_connected = watched.is_usable = True
        watched.silent_s = watched.stalled_s = 0.0
        self._show(watched)

    def left(self, replica: ReplicaIdentity, reason: str, now: float) -> None:
        """Record that the Link to this life of the replica has ended."""
        if (watched := self._find(replica)) is not None:
            watched.is_connected = False
            self._change(watched, lambda breaker: breaker.failed("", reason, now))

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone for good."""
        self._watched.pop(replica_id, None)

    def heard(self, replica: ReplicaIdentity) -> None:
        """Record that a frame has come from the replica."""
        if (watched := self._find(replica)) is not None:
            watched.silent_s = 0.0

    def reported(self, replica: ReplicaIdentity, stalled_s: float, now: float) -> None:
        """Take the ranks' progress from a load report."""
        watched = self._find(replica)
        if watched is None:
            return
        watched.stalled_s = stalled_s
        if stalled_s >= STALLED_S:
            reason = f"its ranks have made no progress for {stalled_s:.1f} s"
            self._change(watched, lambda breaker: breaker.stopped(reason, now))
        elif watched.breaker.reason:
            self._change(watched, lambda breaker: breaker.progressed(now))

    def submitted(self, replica: ReplicaIdentity, request_id: str) -> None:
        """Record that a request was sent to the replica, or will be handed over to it."""
        watched = self._find(replica)
        if watched is not None and watched.breaker.reason:
            self._change(watched, lambda breaker: breaker.submitted(request_id))

    def advance(self, now: float) -> None:
        """Count a turn of silence, and let pauses end."""
        elapsed_s = min(now - self._advanced_at, _MAX_TURN_S)
        self._advanced_at = now
        for watched in self._watched.values():
            if watched.is_connected:
                watched.silent_s += elapsed_s
                if watched.silent_s >= SILENT_S and not watched.breaker.is_stopped:
                    reason = f"nothing was heard for {watched.silent_s:.1f} s"
                    self._change(watched, partial(CircuitBreaker.stopped, reason=reason, now=now))
            if watched.breaker.reason:
                self._change(watched, lambda breaker: breaker.advance(now))

    # ------------------------------------------------------------------------- from the requests

    def failed(self, replica: ReplicaIdentity, request_id: str, reason: str, now: float) -> None:
        """Record that a request failed there by the replica's own fault."""
        if (watched := self._find(replica)) is not None:
            self._change(watched, lambda breaker: breaker.failed(request_id, reason, now))

    def succeeded(self, replica: ReplicaIdentity, request_id: str, now: float) -> None:
        """Record that the replica has computed or taken over the prompt of this request."""
        if (watched := self._find(replica)) is not None:
            self._change(watched, lambda breaker: breaker.succeeded(request_id, now))

    def released(self, request_id: str) -> None:
        """Record that the attempt of a request is over; its findings on a replica were recorded before."""
        for watched in self._watched.values():
            if watched.breaker.probe == request_id:
                self._change(watched, lambda breaker: breaker.released(request_id))

    # ------------------------------------------------------------------------------------ private

    def _find(self, replica: ReplicaIdentity) -> _Watched | None:
        watched = self._watched.get(replica.replica_id)
        return watched if watched is not None and watched.identity == replica else None

    def _change(self, watched: _Watched, change: Callable[[CircuitBreaker], None]) -> None:
        breaker = watched.breaker
        before, reason = breaker.state, breaker.reason
        change(breaker)
        self._show(watched)
        if breaker.state is before and breaker.reason == reason:
            return
        level = logging.WARNING if breaker.state is BreakerState.OPEN else logging.INFO
        name = watched.identity.replica_id
        _log.log(level, "%s of %s: %s (%s)", NOTE, name, breaker.state, breaker.reason or reason)
        self._on_transition(watched.identity, breaker)

    def _show(self, watched: _Watched) -> None:
        """Let the router know whether the replica is usable, where that has changed."""
        if watched.is_usable != watched.breaker.is_usable and watched.is_connected:
            watched.is_usable = watched.breaker.is_usable
            self._router.set_usable(watched.identity.replica_id, watched.is_usable)
