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

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from msgspec.structs import asdict, replace

from kvtransfer.common.clock import Clock
from kvtransfer.common.moving_average import kept_share, moving_average
from kvtransfer.messages import ReplicaIdentity
from router.messages import QueueState, ReplicaLoad
from router.rates import Rates, rates_of

# A request is taken to be in the first report that arrives this long after it was routed (or, for a
# hand-over, after its first token): the way to the replica and back, with a margin.
REPORT_LAG_S = 0.02
# The weight of the newest measurement in the correction of a replica's prefills, its most, the bounds of a
# measurement, and how long one is remembered: a replica that is sent nothing, because it was slow, is tried
# again. The correction is at least 1: a replica that is faster than it measures itself would draw all
# requests, and the others never be tried.
_CORRECTION_WEIGHT = 0.1
_MOST_CORRECTION = 4.0
_LEAST_RATIO = 0.1
_CORRECTION_MEMORY_S = 30.0
# The weight of the newest request in the mean time for which a sequence occupies a place.
_RESIDENCE_WEIGHT = 0.1
# Output tokens of a sequence, assumed until one has ended at the replica.
DEFAULT_OUTPUT_TOKENS = 64
# The number of running sequences from which on the blocks that they hold show how many fit.
_MIN_FITTING = 4
# A request that was sent, and without news for this long, is stale and no longer counts as load: the message
# of its end was lost.
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
    # Blocks free for another request, without those that gateways hold; negative when more is on its way than
    # fits.
    num_free_blocks: int
    rates: Rates
    # The parts of `backlog_tokens` and `num_sequences` that gateways still hold.
    num_queued_tokens: int = 0
    num_queued_sequences: int = 0
    # How many sequences can run there at once; 0 if unknown.
    num_places: float = 0.0
    # The time for which a sequence has such a place, from its first token to its end.
    residence_s: float = 0.0

    @property
    def num_sent_sequences(self) -> int:
        """The sequences that decode there, wait there, or are on their way there, without those that gateways
        hold."""
        return self.num_sequences - self.num_queued_sequences

    @property
    def place_s(self) -> float:
        """The time from one sequence that ends to the next, when all places are taken."""
        return self.residence_s / self.num_places if self.num_places else 0.0

    @property
    def submitted_place_wait_s(self) -> float:
        """The time until the sequences sent there have a place, and the next one too."""
        return self.place_wait(0.0)

    def queue(self, queued_part: float) -> float:
        """Return the time of the backlog, with that part of the tokens that gateways hold."""
        num_sent_tokens = self.backlog_tokens - self.num_queued_tokens
        return (num_sent_tokens + queued_part * self.num_queued_tokens) * self.rates.token_s

    def place_wait(self, queued_part: float) -> float:
        """Return the time until the sequences sent there, that part of those that gateways hold, and one
        sequence more have a place."""
        num_before = self.num_sent_sequences + queued_part * self.num_queued_sequences
        return max(0.0, num_before + 1 - self.num_places) * self.place_s

    def submitted_wait_s(self, num_queued_tokens: int) -> float:
        """Return how long a request would wait for all that was placed there, `num_queued_tokens` less."""
        queue_s = (self.backlog_tokens - num_queued_tokens) * self.rates.token_s
        return max(queue_s, self.submitted_place_wait_s)


@dataclass(slots=True, eq=False)
class Placement:
    """A routed request: computed at `compute_id`, then handed over to `decode_id` ("" if it stays there).

    For a stream that migrates to `decode_id`, `compute_id` is "": nothing is left to compute. `gateway_id` is
    "" for a placement of this gateway. `block_keys` are those that later requests will find.
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
    gateway_id: str = ""
    # It waits in its gateway, and its replicas know nothing of it.
    is_queued: bool = False
    # The times to compute it, before any correction, and to load its stored blocks; 0: not known.
    prefill_s: float = 0.0
    load_s: float = 0.0
    # The time until it is computed, as predicted when it was sent.
    wait_s: float = 0.0


class PlacementObserver(Protocol):
    """Hears of this gateway's own placements: `cluster.gateway.fleet.placement_feed.PlacementFeed`."""

    def on_routed(self, placement: Placement) -> None:
        """Handle that the request is counted, in place of an earlier placement of it."""

    def on_prefilled(self, placement: Placement) -> None:
        """Handle that nothing is left to compute."""

    def on_finished(self, placement: Placement) -> None:
        """Handle that the request is not counted any more."""


@dataclass(slots=True, eq=False)
class _Pending:
    """Placements that a replica's report does not show yet, and their running sums."""

    placements: set[Placement] = field(default_factory=set)
    num_prefill_tokens: int = 0
    num_sequences: int = 0
    # The parts of these sums from placements that are held.
    num_queued_tokens: int = 0
    num_queued_sequences: int = 0
    # The parts from placements that are not held: only sent requests take blocks.
    num_sent: int = 0
    num_new_blocks: int = 0

    def add(self, placement: Placement) -> None:
        self.placements.add(placement)
        self._count(placement, 1)

    def drop(self, placement: Placement) -> None:
        if placement in self.placements:
            self.placements.remove(placement)
            self._count(placement, -1)

    def _count(self, placement: Placement, sign: int) -> None:
        self.num_prefill_tokens += sign * placement.num_prefill_tokens
        self.num_sequences += sign * placement.num_sequences
        if placement.is_queued:
            self.num_queued_tokens += sign * placement.num_prefill_tokens
            self.num_queued_sequences += sign * placement.num_sequences
        else:
            self.num_sent += sign
            self.num_new_blocks += sign * placement.num_new_blocks

    def check(self) -> None:
        """Assert that the sums are those of the placements."""
        items = self.placements
        held, sent = [it for it in items if it.is_queued], [it for it in items if not it.is_queued]
        assert self.num_prefill_tokens == sum(item.num_prefill_tokens for item in items)
        assert self.num_sequences == sum(item.num_sequences for item in items)
        assert self.num_queued_tokens == sum(item.num_prefill_tokens for item in held)
        assert self.num_queued_sequences == sum(item.num_sequences for item in held)
        assert self.num_sent == len(sent)
        assert self.num_new_blocks == sum(item.num_new_blocks for item in sent)


@dataclass(slots=True, eq=False)
class _ReplicaLoad:
    """One replica's report, and three sets of placements that the report does not show.

    computing   to be computed here             until the first report after it, or its first token
    staying     computed here and kept here     until the first report after it, or its end
    expected    handed over to here             until the first report after its hand-over, or its end
    """

    identity: ReplicaIdentity
    role: str
    # The ids of changed replicas: one set for all replicas.
    changed: set[str]
    report: ReplicaLoad | None = None
    computing: _Pending = field(default_factory=_Pending)
    staying: _Pending = field(default_factory=_Pending)
    expected: _Pending = field(default_factory=_Pending)
    # None: it is made again when it is asked for, and the id is in `changed`.
    state: CurrentLoad | None = None
    # The logarithm of the times that prefills took there over those predicted, and when that was measured.
    log_ratio: float = 0.0
    measured_at: float = float("-inf")
    # The mean time from first tokens to ends; 0: not measured.
    residence_s: float = 0.0
    # The mean of the sequences that it decodes, or decoded last.
    context_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.touch()

    def touch(self) -> None:
        """Note that the load has changed."""
        self.state = None
        self.changed.add(self.identity.replica_id)

    @property
    def pending(self) -> tuple[_Pending, _Pending, _Pending]:
        return self.computing, self.staying, self.expected

    @property
    def covered_until(self) -> float:
        """The time up to which the last report shows all placements; -inf before the first."""
        return float("-inf") if self.report is None else self.report.received_at - REPORT_LAG_S

    def correction(self, now: float) -> float:
        """Return the ratio of the time that a prefill takes there to the prediction of its coefficients."""
        if self.log_ratio <= 0.0:
            return 1.0
        kept = kept_share(now - self.measured_at, _CORRECTION_MEMORY_S)
        return min(math.exp(kept * self.log_ratio), _MOST_CORRECTION)

    def correct(self, placement: Placement, took_s: float, now: float) -> None:
        """Note when a request's first token came: after what lay before it, which the replica's rate of
        tokens predicts, the rest is due to its own prefill. It counts by the part that this is of the whole.
        """
        if placement.prefill_s <= 0:
            return
        ratio = (took_s - placement.wait_s) / placement.prefill_s
        log_ratio = math.log(min(max(ratio, _LEAST_RATIO), 1.0 / _LEAST_RATIO))
        weight = _CORRECTION_WEIGHT * placement.prefill_s / (placement.wait_s + placement.prefill_s)
        known = self.log_ratio * kept_share(now - self.measured_at, _CORRECTION_MEMORY_S)
        self.log_ratio, self.measured_at = known + weight * (log_ratio - known), now
        self.touch()

    def cover(self) -> None:
        """Drop the placements that the last report shows: routed by then or, if expected, handed over by
        then."""
        until = self.covered_until
        for pending in (self.computing, self.staying):
            for placement in [it for it in pending.placements if not it.is_queued and it.routed_at <= until]:
                pending.drop(placement)
        for placement in [item for item in self.expected.placements if _has_joined(item, until)]:
            self.expected.drop(placement)

    def count(self, placement: Placement) -> None:
        """Add the placement where the last report does not show it."""
        until = self.covered_until
        is_shown = placement.routed_at <= until and not placement.is_queued
        if placement.compute_id == self.identity.replica_id and not is_shown:
            if placement.prefilled_at is None:
                self.computing.add(placement)
            if not placement.decode_id:
                self.staying.add(placement)
        if placement.decode_id == self.identity.replica_id and not _has_joined(placement, until):
            self.expected.add(placement)
        self.touch()

    def forget(self, placement: Placement) -> None:
        for pending in self.pending:
            pending.drop(placement)
        self.touch()


class _GatewayPlacements:
    """The placements of one gateway by request: those that it holds, and those that were sent, the oldest
    first."""

    def __init__(self) -> None:
        self._held: dict[str, Placement] = {}
        self._sent: dict[str, Placement] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._sent)

    def __iter__(self) -> Iterator[Placement]:
        return chain(self._sent.values(), self._held.values())

    def find(self, request_id: str) -> Placement | None:
        return self._sent.get(request_id) or self._held.get(request_id)

    def add(self, placement: Placement) -> None:
        (self._held if placement.is_queued else self._sent)[placement.request_id] = placement

    def pop(self, request_id: str) -> Placement | None:
        return self._sent.pop(request_id, None) or self._held.pop(request_id, None)

    def oldest_sent(self) -> Placement | None:
        return next(iter(self._sent.values()), None)


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
        self._replicas: dict[str, _ReplicaLoad] = {}
        self._changed: set[str] = set()
        # The placements by gateway id.
        self._own = _GatewayPlacements()
        self._placements: dict[str, _GatewayPlacements] = {"": self._own}

    def add_replica(self, identity: ReplicaIdentity, role: str) -> None:
        """Add a replica, or change its role. A new epoch starts without report and placements, except those
        of other gateways: their news may have come before the replica's."""
        replica = self._replicas.get(identity.replica_id)
        if replica is not None and replica.identity.epoch == identity.epoch:
            replica.role = role
            replica.touch()
            return
        self.remove_replica(identity.replica_id)
        self._replicas[identity.replica_id] = replica = _ReplicaLoad(identity, role, self._changed)
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
        replica.report = load
        if load.num_running:
            replica.context_tokens = load.num_context_tokens / load.num_running
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
        placements = self._placements.setdefault(placement.gateway_id, _GatewayPlacements())
        self._drop_stale(placements)
        placements.add(placement)
        if not placement.gateway_id and not placement.is_queued:
            self._predict(placement)
        self._count(placement)
        if self._observer is not None and not placement.gateway_id:
            self._observer.on_routed(placement)

    def on_prefilled(
        self, request_id: str, gateway_id: str = "", prefilled_at: float | None = None
    ) -> Placement | None:
        """Note the first token (None: now): nothing is left to compute. Returns the placement at the first
        call."""
        placement = self.find(request_id, gateway_id)
        if placement is None or placement.prefilled_at is not None:
            return None
        placement.prefilled_at = self._clock.now() if prefilled_at is None else prefilled_at
        if (replica := self._replicas.get(placement.compute_id)) is not None:
            replica.computing.drop(placement)
            replica.touch()
            if not gateway_id:
                replica.correct(placement, placement.prefilled_at - placement.routed_at, self._clock.now())
        if (replica := self._replicas.get(placement.decode_id)) is not None:
            if _has_joined(placement, replica.covered_until):
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
            replica.state = _state_of(replica, self._reports, self._clock.now())
        return replica.state

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
            for pending in replica.pending:
                pending.check()
                for item in pending.placements:
                    assert self.find(item.request_id, item.gateway_id) is item
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

    def _drop_stale(self, placements: _GatewayPlacements) -> None:
        """Drop requests that were sent, and without news since for `STALE_REQUEST_S`. A long answer loses
        nothing by it: its sequence has been in its replica's own reports since it joined."""
        oldest = self._clock.now() - STALE_REQUEST_S
        while (placement := placements.oldest_sent()) is not None and placement.routed_at <= oldest:
            self.on_finished(placement.request_id, placement.gateway_id)


def _has_joined(placement: Placement, until: float) -> bool:
    """Whether the request was handed over by then."""
    return placement.prefilled_at is not None and placement.prefilled_at <= until


def _state_of(replica: _ReplicaLoad, others: Callable[[], Iterable[ReplicaLoad]], now: float) -> CurrentLoad:
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
    if expected.num_sent > report.num_landings:
        not_landed = 1.0 - report.num_landings / expected.num_sent
        num_new_blocks += round(not_landed * expected.num_new_blocks)
    num_expected = expected.num_sequences - expected.num_queued_sequences
    num_coming = (
        max(report.num_landings, num_expected) + expected.num_queued_sequences + staying.num_sequences
    )
    num_sequences = report.num_running + report.num_waiting + num_coming
    backlog_tokens = report.num_backlog_tokens + replica.computing.num_prefill_tokens
    num_queued_sequences = staying.num_queued_sequences + expected.num_queued_sequences
    num_sent = num_sequences - num_queued_sequences
    rates = rates_of(report, num_sent, replica.correction(now), others, replica.context_tokens)
    num_places = _num_places(report) if replica.role != "prefill" else 0.0
    # The arguments are positional, as those of `Rates`.
    return CurrentLoad(
        replica.role,
        report,
        backlog_tokens,
        num_sequences,
        report.num_free_blocks - num_new_blocks,
        rates,
        replica.computing.num_queued_tokens,
        num_queued_sequences,
        num_places,
        replica.residence_s or DEFAULT_OUTPUT_TOKENS * rates.step_s,
    )


def _num_places(report: ReplicaLoad) -> float:
    """Return how many sequences can run at once: the most that the replica takes, or as many as its blocks
    hold, by those that run."""
    num_used = report.num_total_blocks - report.num_free_blocks
    if report.num_running < _MIN_FITTING or num_used <= 0:
        return report.max_sequences
    return min(report.max_sequences, report.num_running * report.num_total_blocks / num_used)
