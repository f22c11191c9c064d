"""Retries of a request: which replicas to avoid, and whether the request itself breaks them (sans-I/O)."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.errors import PoisonRequestError
from kvtransfer.common.health import backoff_s
from kvtransfer.messages import ReplicaIdentity
from workers.messages import IsolationReport

_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
# As many replicas may break under a request that is not cleared in between.
_NUM_BREAKS = 2
_MAX_REASON_CHARS = 300


def backoff(num_failures: int) -> float:
    """Return the seconds before the next attempt, after so many that failed."""
    return backoff_s(num_failures + 1, _BACKOFF_S, MAX_BACKOFF_S)


class RetryPolicy:
    """The replicas that the next attempts of a request avoid."""

    def __init__(self) -> None:
        self._excluded: set[str] = set()
        self._avoided: set[str] = set()
        self._cut_off: set[str] = set()
        self._forgiven: set[ReplicaIdentity] = set()
        self._num_no_routes = 0

    def exclude(self, replicas: Iterable[ReplicaIdentity]) -> None:
        """Exclude replicas that failed, until no other is left."""
        self._excluded.update(replica.replica_id for replica in replicas)

    def avoid(self, replica_id: str) -> None:
        """Exclude a replica that had no capacity from the next attempt only."""
        self._avoided.add(replica_id)

    def cut_off(self, replica_id: str) -> None:
        """Record that a prefill replica has no path to a decode replica; without another decode replica, that
        one continues alone."""
        self._cut_off.add(replica_id)

    def forgive(self, replica: ReplicaIdentity) -> bool:
        """Return whether an attempt that ended because this replica leaves does not count: the first one."""
        is_first = replica not in self._forgiven
        self._forgiven.add(replica)
        return is_first

    def routed(self) -> None:
        """Begin a new attempt."""
        self._avoided.clear()
        self._num_no_routes = 0

    def relent(self) -> float:
        """Allow all replicas, because no place is left, but for the one side of a broken path instead of the
        other. Returns the seconds to wait before."""
        had_exclusions = bool(self._excluded or self._avoided)
        self._excluded.clear()
        self._avoided.clear()
        self._excluded, self._cut_off = self._cut_off, self._excluded
        pause_s = 0.0 if had_exclusions and self._num_no_routes == 0 else backoff(self._num_no_routes)
        self._num_no_routes += 1
        return pause_s

    def excluded(self) -> tuple[str, ...]:
        """Return the ids of the replicas that the next attempt must avoid."""
        return tuple(sorted(self._excluded | self._avoided))


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

    @property
    def is_suspect(self) -> bool:
        """Whether the next submission must run alone at first."""
        return self._num_since_cleared > 0

    def routed(self, numbers: Iterable[int]) -> None:
        """Begin an attempt, whose submissions have these numbers."""
        self._uncleared = set(numbers) if self.is_suspect else set()
        self._alone.clear()

    def isolated(self, replica: ReplicaIdentity, report: IsolationReport) -> None:
        """Record that a submission of the running attempt begins to run alone there, or is cleared."""
        if not report.is_cleared:
            self._alone.add((replica, report.attempt))
            return
        self._alone.discard((replica, report.attempt))
        self._uncleared.discard(report.attempt)
        if not self._uncleared:
            self._num_since_cleared = 0

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
