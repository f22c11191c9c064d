"""Track each replica's load: its last report, plus what was routed there since.

The service passes every report and every step of a request to the `LoadTracker`. Policies read `CurrentLoad`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from router.messages import ReplicaLoad

# A request is taken to be in the first report that arrives this long after it was routed (or, for a
# hand-over, after its first token): the way to the replica and back, with a margin.
REPORT_LAG_S = 0.02
# A request without news for this long is stale and no longer counts as load: the message of its end was lost.
STALE_REQUEST_S = 300.0


class CurrentLoad(NamedTuple):
    """A replica's load as of now: its last report, with the requests that the report does not show added.
    Before the first report, the report's counts and rates are 0 and `received_at` is -inf."""

    role: str
    report: ReplicaLoad
    # Prompt tokens accepted there (or on the way there) and not yet computed.
    backlog_tokens: int
    # Sequences that decode there, wait there, or are on their way there.
    num_sequences: int
    # Blocks free for another request; may be negative when more is on its way than fits.
    num_free_blocks: int


@dataclass(slots=True, eq=False)
class Placement:
    """A routed request: computed at `compute_id`, then handed over to `decode_id` ("" if it stays there).

    For a stream that migrates to `decode_id`, `compute_id` is "": nothing is left to compute.
    """

    request_id: str
    compute_id: str
    decode_id: str
    block_keys: tuple[bytes, ...]
    num_prefill_tokens: int
    num_new_blocks: int
    num_sequences: int
    routed_at: float
    prefilled_at: float | None = None


@dataclass(slots=True, eq=False)
class _Pending:
    """Placements that a replica's report does not show yet, and their running sums."""

    placements: dict[str, Placement] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_new_blocks: int = 0
    num_sequences: int = 0

    def add(self, placement: Placement) -> None:
        self.placements[placement.request_id] = placement
        self._count(placement, 1)

    def drop(self, request_id: str) -> None:
        placement = self.placements.pop(request_id, None)
        if placement is not None:
            self._count(placement, -1)

    def _count(self, placement: Placement, sign: int) -> None:
        self.num_prefill_tokens += sign * placement.num_prefill_tokens
        self.num_new_blocks += sign * placement.num_new_blocks
        self.num_sequences += sign * placement.num_sequences

    def check(self) -> None:
        """Assert that the sums are those of the placements."""
        items = self.placements.values()
        assert self.num_prefill_tokens == sum(item.num_prefill_tokens for item in items)
        assert self.num_new_blocks == sum(item.num_new_blocks for item in items)
        assert self.num_sequences == sum(item.num_sequences for item in items)


@dataclass(slots=True, eq=False)
class _ReplicaLoad:
    """One replica's report, and three sets of placements that the report does not show.

    computing   to be computed here             until the first report after it, or its first token
    staying     computed here and kept here     until the first report after it, or its end
    expected    handed over to here             until the first report after its hand-over, or its end
    """

    identity: ReplicaIdentity
    role: str
    report: ReplicaLoad | None = None
    computing: _Pending = field(default_factory=_Pending)
    staying: _Pending = field(default_factory=_Pending)
    expected: _Pending = field(default_factory=_Pending)
    state: CurrentLoad | None = None

    @property
    def pending(self) -> tuple[_Pending, _Pending, _Pending]:
        return self.computing, self.staying, self.expected

    def cover(self, until: float) -> None:
        """Drop what a report of that time shows: routed by then or, if expected, handed over by then."""
        for pending in (self.computing, self.staying):
            for request_id in [key for key, item in pending.placements.items() if item.routed_at <= until]:
                pending.drop(request_id)
        joined = [
            key
            for key, item in self.expected.placements.items()
            if item.prefilled_at is not None and item.prefilled_at <= until
        ]
        for request_id in joined:
            self.expected.drop(request_id)

    def forget(self, request_id: str) -> None:
        for pending in self.pending:
            pending.drop(request_id)
        self.state = None


class LoadTracker:
    """The reports and pending placements of all replicas. Every method ignores what is unknown."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replicas: dict[str, _ReplicaLoad] = {}
        self._placements: dict[str, Placement] = {}

    def add_replica(self, identity: ReplicaIdentity, role: str) -> None:
        """Add a replica, or change its role. A new epoch starts without report and placements."""
        replica = self._replicas.get(identity.replica_id)
        if replica is not None and replica.identity.epoch == identity.epoch:
            replica.role, replica.state = role, None
            return
        self.remove_replica(identity.replica_id)
        self._replicas[identity.replica_id] = _ReplicaLoad(identity, role)

    def remove_replica(self, replica_id: str) -> None:
        """Forget a replica and its load."""
        self._replicas.pop(replica_id, None)

    def on_load(self, load: ReplicaLoad) -> None:
        """Take a report, and drop the placements that it covers. Ignores older reports and other epochs."""
        replica = self._replicas.get(load.identity.replica_id)
        if replica is None or replica.identity.epoch != load.identity.epoch:
            return
        if replica.report is not None and load.received_at < replica.report.received_at:
            return
        replica.report, replica.state = load, None
        replica.cover(load.received_at - REPORT_LAG_S)

    def on_routed(self, placement: Placement) -> None:
        """Count the request at once at its replicas, in place of an earlier attempt of the same request."""
        self.on_finished(placement.request_id)
        self._drop_stale()
        self._placements[placement.request_id] = placement
        if (replica := self._replicas.get(placement.compute_id)) is not None:
            replica.computing.add(placement)
            if not placement.decode_id:
                replica.staying.add(placement)
            replica.state = None
        if (replica := self._replicas.get(placement.decode_id)) is not None:
            replica.expected.add(placement)
            replica.state = None

    def on_prefilled(self, request_id: str) -> Placement | None:
        """Note the first token: nothing is left to compute. Returns the placement at the first call."""
        placement = self._placements.get(request_id)
        if placement is None or placement.prefilled_at is not None:
            return None
        placement.prefilled_at = self._clock.now()
        if (replica := self._replicas.get(placement.compute_id)) is not None:
            replica.computing.drop(request_id)
            replica.state = None
        return placement

    def on_finished(self, request_id: str) -> None:
        """Stop counting the request, however it ended."""
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            for replica_id in (placement.compute_id, placement.decode_id):
                if (replica := self._replicas.get(replica_id)) is not None:
                    replica.forget(request_id)

    def state(self, replica_id: str) -> CurrentLoad:
        """Return the load as of now of a known replica."""
        replica = self._replicas[replica_id]
        if replica.state is None:
            replica.state = _state_of(replica)
        return replica.state

    @property
    def num_placements(self) -> int:
        """Number of requests that are routed and not finished."""
        return len(self._placements)

    def check(self) -> None:
        """Assert that placements and sums agree, and that no finished request is left."""
        for replica in self._replicas.values():
            for pending in replica.pending:
                pending.check()
                items = pending.placements.values()
                assert all(self._placements.get(item.request_id) is item for item in items)

    def _drop_stale(self) -> None:
        """Drop requests without news for `STALE_REQUEST_S`. A long answer loses nothing by it: its sequence
        has been in its replica's own reports since it joined."""
        oldest = self._clock.now() - STALE_REQUEST_S
        while self._placements:
            placement = next(iter(self._placements.values()))
            if placement.routed_at > oldest:
                return
            self.on_finished(placement.request_id)


def _state_of(replica: _ReplicaLoad) -> CurrentLoad:
    """Add the pending placements to the report.

    Landings in the report and expected requests overlap (an expected request becomes a landing shortly
    before its hand-over), and no message identifies which are the same. The larger count is therefore taken
    for sequences; for blocks, the share of the expected requests beyond the reported landings still needs its
    blocks.
    """
    report = replica.report
    if report is None:
        report = ReplicaLoad(replica.identity, float("-inf"), 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    expected, staying = replica.expected, replica.staying
    num_new_blocks = staying.num_new_blocks
    if len(expected.placements) > report.num_landings:
        not_landed = 1.0 - report.num_landings / len(expected.placements)
        num_new_blocks += round(not_landed * expected.num_new_blocks)
    num_coming = max(report.num_landings, expected.num_sequences) + staying.num_sequences
    return CurrentLoad(
        role=replica.role,
        report=report,
        backlog_tokens=report.num_backlog_tokens + replica.computing.num_prefill_tokens,
        num_sequences=report.num_running + report.num_waiting + num_coming,
        num_free_blocks=report.num_free_blocks - num_new_blocks,
    )
