"""Track each replica's load: its last report, plus what was routed there since, here and at other gateways.

The service passes every report and every step of a request to the `LoadTracker`. Policies read
`CurrentLoad`.

Placements of other gateways arrive later than they were made, so one rule holds for all placements, by the
time at which they were *made*, converted to the own clock: a report covers what was made `REPORT_LAG_S`
before the report arrived.

    made       report arrived       heard      covered, because the report shows the request:
      |-- more than REPORT_LAG_S --|   |       on arrival. It is kept for its end, but never counted.
      |-- less --|                     |       by the next report. Until then it may be counted twice.

What is not covered is counted, so no request is left out for longer than its news travels. One that a
report shows is counted twice for at most one period of reports, as an own placement is. A time converted
between clocks is late by as long as the news travelled, never early, and so errs on the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import asdict, replace

from kvtransfer.common.clock import Clock
from kvtransfer.common.moving_average import moving_average
from kvtransfer.messages import ReplicaIdentity
from router.current_load import CurrentLoad
from router.messages import QueueState, ReplicaLoad
from router.placements import GatewayPlacements, Placement, PlacementObserver, PlacementSums
from router.tracked_replica import TrackedReplica, has_joined, state_of

# The weight of the newest request in the mean time for which a sequence occupies a place.
_RESIDENCE_WEIGHT = 0.1
# The weight of the newest report in the mean context of a sequence, and by which factor this has to change
# before other loads are computed by it.
_CONTEXT_WEIGHT = 0.02
_CONTEXT_CHANGE = 1.5
# A request that was sent, and without news for this long, is stale and no longer counts as load: the message
# of its end was lost.
STALE_REQUEST_S = 300.0


class LoadTracker:
    """The reports of all replicas, and the pending placements of this gateway and of the others. Every method
    ignores what is unknown.

    Methods with a `gateway_id` count a placement of that gateway; "": of this one. `observer` hears of those
    of this gateway alone.
    """

    def __init__(
        self,
        clock: Clock,
        observer: PlacementObserver | None = None,
        on_dropped: Callable[[Placement], None] = lambda placement: None,
    ) -> None:
        """`on_dropped` hears of every placement that is forgotten or replaced, of any gateway."""
        self._clock = clock
        self._observer = observer
        self._on_dropped = on_dropped
        self._replicas: dict[str, TrackedReplica] = {}
        self._changed: set[str] = set()
        # The mean tokens of a sequence that decodes, and the value that is used until that has changed.
        self._context_tokens = self._used_context_tokens = 0.0
        # The placements by gateway id.
        self._own = GatewayPlacements()
        self._placements: dict[str, GatewayPlacements] = {"": self._own}

    def add_replica(self, identity: ReplicaIdentity, role: str) -> None:
        """Add a replica, or change its role. A new epoch starts without report and placements, except those
        of other gateways: their news may have come before the replica's."""
        replica = self._replicas.get(identity.replica_id)
        if replica is not None and replica.identity.epoch == identity.epoch:
            replica.role = role
            replica.touch()
            return
        self.remove_replica(identity.replica_id)
        self._replicas[identity.replica_id] = replica = TrackedReplica(identity, role, self._changed)
        for gateway_id, placements in self._placements.items():
            for placement in placements if gateway_id else ():
                replica.count(placement)

    def remove_replica(self, replica_id: str) -> None:
        """Forget a replica and its load."""
        self._replicas.pop(replica_id, None)
        self._changed.discard(replica_id)

    def on_load(self, load: ReplicaLoad) -> None:
        """Take a report, and drop the placements that it covers. Ignores older reports and other epochs."""
        replica = self._replicas.get(load.identity.replica_id)
        if replica is None or replica.identity.epoch != load.identity.epoch:
            return
        if replica.report is not None and load.received_at < replica.report.received_at:
            return
        if load.num_backlog_tokens or replica.report is None:
            replica.note_prompts(load.received_at)
        replica.report = load
        if load.num_running and replica.role != "prefill":
            self._note_context(load.num_context_tokens / load.num_running)
        replica.touch()
        replica.cover()

    def on_queue(self, identity: ReplicaIdentity, queue: QueueState, received_at: float) -> None:
        """Take the changes since the last report, of which the rest still holds. Ignored before it."""
        replica = self._replicas.get(identity.replica_id)
        if replica is not None and replica.report is not None and identity.epoch == replica.identity.epoch:
            self.on_load(replace(replica.report, received_at=received_at, **asdict(queue)))

    def on_submitted(self, request_id: str) -> Placement | None:
        """Note that a request that was held has been sent to its replicas. Returns its placement."""
        placement = self._own.find(request_id)
        if placement is None or not placement.is_queued:
            return None
        self._forget(placement)
        self._own.pop(request_id)
        placement.is_queued, placement.routed_at = False, self._clock.now()
        self._own.add(placement)
        self._predict(placement)
        self._count(placement)
        if self._observer is not None:
            self._observer.on_routed(placement)
        return placement

    def suspend(self, request_id: str) -> Placement | None:
        """Leave a placement of this gateway out of all loads until `resume`, or until it is replaced; returns
        it."""
        placement = self._own.find(request_id)
        if placement is not None:
            self._forget(placement)
        return placement

    def resume(self, placement: Placement) -> None:
        """Count a placement again that was left out."""
        self._count(placement)

    def on_routed(self, placement: Placement) -> None:
        """Count the request at once at its replicas, in place of an earlier attempt of the same request. What
        their reports show already is not counted again."""
        self.on_finished(placement.request_id, placement.gateway_id)
        placements = self._placements.setdefault(placement.gateway_id, GatewayPlacements())
        self._drop_stale(placements)
        placements.add(placement)
        if not placement.gateway_id and not placement.is_queued:
            self._predict(placement)
        self._count(placement)
        if self._observer is not None and not placement.gateway_id:
            self._observer.on_routed(placement)

    def on_prefilled(
        self,
        request_id: str,
        gateway_id: str = "",
        prefilled_at: float | None = None,
        *,
        steps_s: float = 0.0,
    ) -> Placement | None:
        """Note the first token (None: now): nothing is left to compute. The steps until then should have
        taken `steps_s`; 0: not known. Returns the placement at the first call."""
        placement = self.find(request_id, gateway_id)
        if placement is None or placement.prefilled_at is not None:
            return None
        placement.prefilled_at = self._clock.now() if prefilled_at is None else prefilled_at
        if (replica := self._replicas.get(placement.compute_id)) is not None:
            replica.computed(placement)
            if not gateway_id:
                took_s = placement.prefilled_at - placement.routed_at
                replica.correct(placement, took_s, self._clock.now(), steps_s)
        if (replica := self._replicas.get(placement.decode_id)) is not None:
            if has_joined(placement, replica.covered_until):
                replica.expected.drop(placement)
            replica.touch()
        if self._observer is not None and not gateway_id:
            self._observer.on_prefilled(placement)
        return placement

    def on_finished(self, request_id: str, gateway_id: str = "") -> None:
        """Stop counting the request, however it ended."""
        placements = self._placements.get(gateway_id)
        placement = placements.pop(request_id) if placements is not None else None
        if placement is not None:
            self._forget(placement)
            self._on_dropped(placement)
            self._measure_residence(placement)
            if self._observer is not None and not gateway_id:
                self._observer.on_finished(placement)

    def remove_gateway(self, gateway_id: str) -> None:
        """Forget the placements of another gateway that left or is not heard any more."""
        assert gateway_id
        for placement in self._placements.pop(gateway_id, ()):
            self._forget(placement)
            self._on_dropped(placement)

    def placement(self, request_id: str) -> Placement | None:
        """Return where this gateway has placed the request."""
        return self._own.find(request_id)

    def find(self, request_id: str, gateway_id: str) -> Placement | None:
        """Return where a gateway has placed the request."""
        placements = self._placements.get(gateway_id)
        return None if placements is None else placements.find(request_id)

    def own_placements(self) -> Iterator[Placement]:
        """Return the placements of this gateway: the sent ones, the oldest first, and the held ones."""
        return iter(self._own)

    def state(self, replica_id: str) -> CurrentLoad:
        """Return the load as of now of a known replica."""
        replica = self._replicas[replica_id]
        if replica.state is None:
            now = self._clock.now()
            replica.state = state_of(
                replica, replica.report, replica.sums, self._reports, now, self._used_context_tokens
            )
        return replica.state

    def sent_backlog_tokens(self, replica_id: str, limited_group: str) -> int:
        """Return the prompt tokens that a known replica has to compute before a request of that group (""
        for one without a limit), without what gateways hold. What this gateway has sent of other groups with
        a limit does not count: where it waits for its group's share, the replica lets others pass."""
        state = self.state(replica_id)
        others = [
            it.num_prefill_tokens
            for it in self._replicas[replica_id].limited
            if it.limited_group != limited_group
        ]
        return max(0, state.backlog_tokens - state.num_queued_tokens - sum(others))

    def state_with(
        self,
        replica_id: str,
        sums: tuple[PlacementSums, PlacementSums, PlacementSums],
        *,
        counts_report: bool,
    ) -> CurrentLoad:
        """Return the load of a known replica with other placements than those that its report does not show:
        to be computed, staying and expected there. Without `counts_report` the replica counts as idle in its
        report, of which the rest stays: sizes and rates."""
        replica = self._replicas[replica_id]
        report = replica.report
        if report is not None and not counts_report:
            idle = QueueState(0, 0, 0, 0, report.num_total_blocks)
            report = replace(report, **asdict(idle))
        now, context_tokens = self._clock.now(), self._used_context_tokens
        return state_of(replica, report, sums, self._reports, now, context_tokens)

    def take_changed(self) -> Sequence[str]:
        """Return the replicas whose load has changed since the last call."""
        changed = tuple(self._changed)
        self._changed.clear()
        return changed

    @property
    def num_placements(self) -> int:
        """Number of requests that are routed and not finished, of all gateways."""
        return sum(map(len, self._placements.values()))

    def check(self) -> None:
        """Assert that placements and sums agree, and that no finished request is left."""
        for replica in self._replicas.values():
            for sums in replica.sums:
                sums.check()
                for item in sums.placements:
                    assert self.find(item.request_id, item.gateway_id) is item
            for item in replica.limited:
                assert self.placement(item.request_id) is item
                assert item.prefilled_at is None
        for placements in self._placements.values():
            sent_at = [it.routed_at for it in placements if not it.is_queued and not it.gateway_id]
            assert sent_at == sorted(sent_at)
        assert self._changed <= self._replicas.keys()

    def _reports(self) -> Iterator[ReplicaLoad]:
        return (it.report for it in self._replicas.values() if it.report is not None)

    def _predict(self, placement: Placement) -> None:
        """Note when it will be computed: after the requests sent there before it, and a step that runs."""
        if placement.compute_id in self._replicas:
            state = self.state(placement.compute_id)
            placement.wait_s = max(state.queue(0.0), placement.load_s)
            if state.report.num_running:
                placement.wait_s += state.rates.present_step_s / 2

    def _note_context(self, num_tokens: float) -> None:
        """Note the mean of the sequences that a replica decodes. Replicas that decode none are all taken to
        get the same, or idle ones would cost unlike by what they did last, and not take turns."""
        self._context_tokens = mean = moving_average(self._context_tokens, num_tokens, _CONTEXT_WEIGHT)
        used = self._used_context_tokens
        if not used / _CONTEXT_CHANGE <= mean <= used * _CONTEXT_CHANGE:
            self._used_context_tokens = mean
            for replica in self._replicas.values():
                replica.touch()

    def _count(self, placement: Placement) -> None:
        for replica_id in (placement.compute_id, placement.decode_id):
            if (replica := self._replicas.get(replica_id)) is not None:
                replica.count(placement)

    def _forget(self, placement: Placement) -> None:
        for replica_id in (placement.compute_id, placement.decode_id):
            if (replica := self._replicas.get(replica_id)) is not None:
                replica.forget(placement)

    def _measure_residence(self, placement: Placement) -> None:
        replica = self._replicas.get(placement.decode_id or placement.compute_id)
        if replica is not None and placement.prefilled_at is not None:
            took_s = self._clock.now() - placement.prefilled_at
            replica.residence_s = moving_average(replica.residence_s, took_s, _RESIDENCE_WEIGHT)
            replica.touch()

    def _drop_stale(self, placements: GatewayPlacements) -> None:
        """Drop requests that were sent, and without news since for `STALE_REQUEST_S`. A long answer loses
        nothing by it: its sequence has been in its replica's own reports since it joined."""
        oldest = self._clock.now() - STALE_REQUEST_S
        while (placement := placements.oldest_sent()) is not None and placement.routed_at <= oldest:
            self.on_finished(placement.request_id, placement.gateway_id)
