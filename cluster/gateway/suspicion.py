"""Whether a request breaks the replicas that run it: what is known of that, and what follows (sans-I/O).

A replica that dies or breaks takes along whatever runs there, and cannot tell the culprit from its
neighbours. So all that were in flight become suspects. Where they are submitted again, a suspect runs alone
until it has survived some steps; then it is cleared. What breaks while it runs alone is evidence::

    innocent --in flight when a replica broke--> suspect --again, running alone--> poison: INTERNAL
        ^                                           |
        +---------------- cleared ------------------+
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.errors import PoisonRequestError
from kvtransfer.messages import ReplicaIdentity
from workers.messages import IsolationReport

_NUM_BREAKS = 2
"""As many replicas may break under a request that is not cleared in between."""
_MAX_REASON_CHARS = 300


class Suspicion:
    """Of one request.

    What breaks under a suspect is told by the replica, where that still can. When it is gone as a whole, a
    request that was not a suspect there may have been the cause, and a suspect only if it had begun to run
    alone, or was cleared.
    """

    def __init__(self, max_attempts: int) -> None:
        """In all, fewer than `max_attempts` replicas may break under it, cleared in between or not. As many
        that break for other reasons are forgiven."""
        self._max_breaks = max(max_attempts, _NUM_BREAKS)
        self._num_forgivable = max_attempts
        self._breaks: list[str] = []
        self._num_since_cleared = 0
        self._forgiven: set[ReplicaIdentity] = set()
        self._uncleared: set[int] = set()
        self._alone: set[tuple[ReplicaIdentity, int]] = set()

    @property
    def is_suspect(self) -> bool:
        """Whether its next submission is to run alone at first."""
        return self._num_since_cleared > 0

    def routed(self, numbers: Iterable[int]) -> None:
        """A new attempt, whose submissions have these numbers."""
        self._uncleared = set(numbers) if self.is_suspect else set()
        self._alone.clear()

    def isolated(self, replica: ReplicaIdentity, report: IsolationReport) -> None:
        """A submission of the running attempt begins to run alone there, or is cleared."""
        if not report.is_cleared:
            self._alone.add((replica, report.attempt))
            return
        self._alone.discard((replica, report.attempt))
        self._uncleared.discard(report.attempt)
        if not self._uncleared:
            self._num_since_cleared = 0

    def may_have_broken(self, replica: ReplicaIdentity) -> bool:
        """Whether a replica that is gone, and had the request, may be so because of it."""
        return not self._uncleared or any(alone == replica for alone, _ in self._alone)

    def broke(self, reason: str) -> PoisonRequestError | None:
        """A replica, named in `reason`, broke, maybe because of the request. The error when that is once too
        often."""
        self._breaks.append(reason[:_MAX_REASON_CHARS])
        self._num_since_cleared += 1
        if self._num_since_cleared < _NUM_BREAKS and len(self._breaks) < self._max_breaks:
            return None
        told = "; then ".join(self._breaks[-_NUM_BREAKS:])
        return PoisonRequestError(
            f"not tried again, because replicas broke while they ran this request: {told}"
        )

    def forgives(self, replica: ReplicaIdentity) -> bool:
        """Whether an attempt that ended because of this replica does not count: the first one, within
        limits."""
        is_forgiven = replica not in self._forgiven and len(self._forgiven) < self._num_forgivable
        self._forgiven.add(replica)
        return is_forgiven
