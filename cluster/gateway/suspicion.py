"""Whether a request breaks the replicas that run it (sans-I/O)."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.errors import PoisonRequestError
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import IsolationReport

# The number of replicas that may break under a request that is not cleared in between.
_NUM_BREAKS = 2
_MAX_REASON_CHARS = 300


class Suspicion:
    """Whether a request breaks the replicas that run it::

        innocent --in flight when a replica broke--> suspect --again, running alone--> poison: INTERNAL
            ^                                           |
            +---------------- cleared ------------------+

    A replica that dies or breaks takes along whatever runs there, and nothing shows which request was the
    cause. So all that were in flight become suspects. Where they are submitted again, a suspect runs alone
    until it has survived some steps; then it is cleared. What breaks while it runs alone is evidence.

    A replica that can still report names the suspects under which it broke. When it is gone as a whole, a
    request that was not a suspect there may have been the cause, and a suspect only if it had begun to run
    alone, or was cleared.

    The same goes for a replica that stands still. While it can report, it names the requests of the step that
    hangs, and only these are suspects at the first such replica. One that is silent says nothing about its
    requests: the first time they are taken for innocent, so that they do not run one after the other for the
    sake of a process or a host that was stopped.
    """

    def __init__(self, max_attempts: int) -> None:
        """Allow fewer than `max_attempts` replicas to break under the request in all, cleared in between or
        not; as many that break for other reasons are forgiven."""
        self._max_breaks = max(max_attempts, _NUM_BREAKS)
        self._num_forgivable = max_attempts
        self._breaks: list[str] = []
        self._num_since_cleared = 0
        self._forgiven: set[ReplicaIdentity] = set()
        self._uncleared: set[int] = set()
        self._alone: set[tuple[ReplicaIdentity, int]] = set()
        self._stalled: set[ReplicaIdentity] = set()
        self._stopped: set[ReplicaIdentity] = set()

    @property
    def is_suspect(self) -> bool:
        """Whether the next submission must run alone at first."""
        return self._num_since_cleared > 0

    def routed(self, numbers: Iterable[int]) -> None:
        """Begin an attempt, whose submissions have these numbers."""
        self._uncleared = set(numbers) if self.is_suspect else set()
        self._alone.clear()
        self._stalled.clear()

    def isolated(self, replica: ReplicaIdentity, report: IsolationReport) -> None:
        """Record that a submission of the running attempt begins to run alone there, or is cleared."""
        if not report.is_cleared:
            self._alone.add((replica, report.attempt))
            return
        self._alone.discard((replica, report.attempt))
        self._uncleared.discard(report.attempt)
        if not self._uncleared:
            self._num_since_cleared = 0

    def stalled(self, replica: ReplicaIdentity) -> None:
        """Record that the running attempt is in a step with which no rank of the replica progresses."""
        self._stalled.add(replica)

    def has_left(self, replica: ReplicaIdentity) -> bool:
        """Return whether the request has left this replica already, because it stood still."""
        return replica in self._stopped

    def stopped(self, replica: ReplicaIdentity) -> bool:
        """Record that the request leaves a replica that stands still. Returns whether it may be the cause."""
        self._stopped.add(replica)
        is_suspect = replica in self._stalled or len(self._stopped) > 1
        return is_suspect and self.may_have_broken(replica)

    def may_have_broken(self, replica: ReplicaIdentity) -> bool:
        """Return whether a replica that is gone, and had the request, may be so because of the request."""
        return not self._uncleared or any(alone == replica for alone, _ in self._alone)

    def broke(self, reason: str) -> PoisonRequestError | None:
        """Record that a replica, named in `reason`, may have broken because of the request. Returns the error
        when that is once too often."""
        self._breaks.append(reason[:_MAX_REASON_CHARS])
        self._num_since_cleared += 1
        if self._num_since_cleared < _NUM_BREAKS and len(self._breaks) < self._max_breaks:
            return None
        reasons = "; then ".join(self._breaks[-_NUM_BREAKS:])
        return PoisonRequestError(
            f"not tried again, because replicas broke while they ran this request: {reasons}"
        )

    def forgives(self, replica: ReplicaIdentity) -> bool:
        """Return whether an attempt that ended because of this replica does not count: the first one, within
        limits."""
        is_forgiven = replica not in self._forgiven and len(self._forgiven) < self._num_forgivable
        self._forgiven.add(replica)
        return is_forgiven
