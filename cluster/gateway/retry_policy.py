"""Decide which replicas the next attempt of a request avoids, and when it begins (sans-I/O)."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.errors import (
    FieldViolation,
    GrammarError,
    InvalidRequestError,
    InvalidToolsError,
    RequestError,
)
from cluster.text.preprocess import PreparedRequest
from kvtransfer.common.health import backoff_s
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import RequestFailed

_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


def backoff(num_failures: int) -> float:
    """Return the seconds before the next attempt, after this many that failed."""
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


def refusal_of(failure: RequestFailed, prepared: PreparedRequest) -> RequestError | None:
    """Return the error of a request that no replica can serve; None: another one may."""
    if failure.code == "invalid":
        return InvalidRequestError(FieldViolation("prompt", failure.reason))
    if failure.code == "grammar":
        return (InvalidToolsError if prepared.is_grammar_of_tools else GrammarError)(failure.reason)
    return None
