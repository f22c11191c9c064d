"""Where the attempts of a request go, and with what: replicas to go round, routes to ask for, submissions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.errors import PoisonRequestError
from cluster.gateway.sample_output import Sample
from cluster.text.preprocess import PreparedRequest
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.backoff import backoff_s
from kvtransfer.messages import ReplicaIdentity
from router.messages import RouteRequest
from workers.messages import HandOverTarget, IsolationReport, SampleState, Submission

_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


def backoff(num_failures: int) -> float:
    """Seconds before the next attempt, after so many that failed."""
    return backoff_s(num_failures + 1, _BACKOFF_S, MAX_BACKOFF_S)


class RetryPolicy:
    """Replicas that the next attempts go round."""

    def __init__(self) -> None:
        self._excluded: set[str] = set()
        self._avoided: set[str] = set()
        self._cut_off: set[str] = set()
        self._forgiven: set[ReplicaIdentity] = set()
        self._num_no_routes = 0

    def exclude(self, replicas: Iterable[ReplicaIdentity]) -> None:
        """They failed: until no other is left."""
        self._excluded.update(replica.replica_id for replica in replicas)

    def avoid(self, replica_id: str) -> None:
        """It had no room: for the next attempt only."""
        self._avoided.add(replica_id)

    def cut_off(self, replica_id: str) -> None:
        """A prefill replica had no way to a decode replica; without another, the latter goes on alone."""
        self._cut_off.add(replica_id)

    def forgive(self, replica: ReplicaIdentity) -> bool:
        """Whether an attempt that ended because this replica leaves does not count: the first one."""
        is_first = replica not in self._forgiven
        self._forgiven.add(replica)
        return is_first

    def routed(self) -> None:
        """There is a new attempt."""
        self._avoided.clear()
        self._num_no_routes = 0

    def relent(self) -> float:
        """No place is left: allow them all, but for the one side of a broken path instead of the other.
        Returned is for how long to wait before."""
        had_exclusions = bool(self._excluded or self._avoided)
        self._excluded.clear()
        self._avoided.clear()
        self._excluded, self._cut_off = self._cut_off, self._excluded
        pause_s = 0.0 if had_exclusions and self._num_no_routes == 0 else backoff(self._num_no_routes)
        self._num_no_routes += 1
        return pause_s

    def ids(self) -> tuple[str, ...]:
        return tuple(sorted(self._excluded | self._avoided))


def route_request(
    plan: PreparedRequest, unfinished: Sequence[Sample], excluded: tuple[str, ...]
) -> RouteRequest:
    """For what is left of the request."""
    longest = max(sample.num_tokens for sample in unfinished)
    shortest = min(sample.num_tokens for sample in unfinished)
    return RouteRequest(
        request_id=plan.request_id,
        tenant=plan.tenant,
        block_keys=plan.block_keys,
        num_tokens=len(plan.prompt) // TOKEN_BYTES + longest,
        max_new_tokens=max(1, plan.sampling.max_tokens - shortest),
        num_samples=len(unfinished),
        excluded=excluded,
        pinned_prefill=plan.pinned_prefill,
        pinned_decode=plan.pinned_decode,
    )


def by_submission(unfinished: Sequence[Sample]) -> list[list[Sample]]:
    """Samples without any output together, each other one by itself."""
    fresh = [sample for sample in unfinished if not sample.output]
    groups = [[sample] for sample in unfinished if sample.output]
    return [fresh, *groups] if fresh else groups


def submission(
    plan: PreparedRequest,
    group: Sequence[Sample],
    number: int,
    target: HandOverTarget | None,
    now: float,
    *,
    suspect: bool = False,
) -> Submission:
    """The samples of `group`, as they are now."""
    for sample in group:
        sample.begin_attempt()
    deadline_at = plan.deadline_at
    return Submission(
        request_id=plan.request_id,
        attempt=number,
        tenant=plan.tenant,
        priority=plan.priority,
        prompt=plan.prompt,
        block_keys=plan.block_keys,
        samples=tuple(SampleState(sample.index, sample.seed, bytes(sample.output)) for sample in group),
        sampling=plan.sampling,
        decode=target,
        deadline_s=None if deadline_at is None else max(0.0, deadline_at - now),
        suspect=suspect,
    )


# ----------------------------------------------------------------------------------------------
# Whether a request breaks the replicas that run it: what is known of that, and what follows (sans-I/O).
#
# A replica that dies or breaks takes along whatever runs there, and cannot tell the culprit from its
# neighbours. So all that were in flight become suspects. Where they are submitted again, a suspect runs alone
# until it has survived some steps; then it is cleared. What breaks while it runs alone is evidence::
#
#     innocent --in flight when a replica broke--> suspect --again, running alone--> poison: INTERNAL
#         ^                                           |
#         +---------------- cleared ------------------+

# As many replicas may break under a request that is not cleared in between.
_NUM_BREAKS = 2
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
