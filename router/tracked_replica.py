"""One replica as the load tracker knows it: its report, and the placements that the report does not show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtransfer.common.moving_average import kept_share
from kvtransfer.messages import ReplicaIdentity
from router.current_load import CurrentLoad
from router.messages import ReplicaLoad
from router.placements import Placement, PlacementSums
from router.rates import rates_of

# A request is taken to be in the first report that arrives this long after it was routed (or, for a
# hand-over, after its first token): the way to the replica and back, with a margin.
REPORT_LAG_S = 0.02
# The weight of the newest measurement in the correction of a replica's prefills, its least and most, the
# bounds of a measurement, and how long one is remembered: a replica that is sent nothing, because it was
# slow, is tried again. A replica that is faster than it measures itself is not corrected: it would draw all
# requests, and the others never be tried. Neither is one that is hardly slower: its cost would differ from
# that of equal replicas by noise, and they would not take turns.
_CORRECTION_WEIGHT = 0.1
_LEAST_CORRECTION = 1.02
_MOST_CORRECTION = 4.0
_LEAST_RATIO = 0.1
_CORRECTION_MEMORY_S = 30.0
# Output tokens of a sequence, assumed until one has ended at the replica.
DEFAULT_OUTPUT_TOKENS = 64
# The number of running sequences from which on the blocks that they hold show how many fit.
_MIN_FITTING = 4


@dataclass(slots=True, eq=False)
class TrackedReplica:
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
    computing: PlacementSums = field(default_factory=PlacementSums)
    staying: PlacementSums = field(default_factory=PlacementSums)
    expected: PlacementSums = field(default_factory=PlacementSums)
    # What this gateway has sent of groups that may use only a part of the KV blocks, and what is not computed
    # yet: it may wait there for its group's share, and keeps no other group waiting.
    limited: set[Placement] = field(default_factory=set)
    # None: it is made again when it is asked for, and the id is in `changed`.
    state: CurrentLoad | None = None
    # When it last had prompts to compute, as far as this gateway knows, or was first heard.
    had_prompts_at: float = float("inf")
    # The logarithm of the times that prefills took there over those predicted, and when that was measured.
    log_ratio: float = 0.0
    measured_at: float = float("-inf")
    # The mean time from first tokens to ends; 0: not measured.
    residence_s: float = 0.0

    def __post_init__(self) -> None:
        self.touch()

    def touch(self) -> None:
        """Note that the load has changed."""
        self.state = None
        self.changed.add(self.identity.replica_id)

    @property
    def sums(self) -> tuple[PlacementSums, PlacementSums, PlacementSums]:
        """The three sets."""
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
        correction = min(math.exp(kept * self.log_ratio), _MOST_CORRECTION)
        return correction if correction >= _LEAST_CORRECTION else 1.0

    def correct(self, placement: Placement, took_s: float, now: float, steps_s: float = 0.0) -> None:
        """Note when a request's first token came: as late as what was computed there meanwhile explains, or
        later.

        What was computed meanwhile, for the request and for others before it and in the same steps, should
        have taken `steps_s`, by the replica's own measurements. If it took longer, the replica is slower than
        it measures itself. Where it does not say (0), what lay before the request is predicted by what was
        known of it. The rest is then due to its own prefill, and counts by the part which that is of all.
        """
        if placement.prefill_s <= 0:
            return
        weight = _CORRECTION_WEIGHT
        if steps_s > 0:
            ratio = took_s / steps_s
        else:
            ratio = (took_s - placement.wait_s) / placement.prefill_s
            weight *= placement.prefill_s / (placement.wait_s + placement.prefill_s)
        log_ratio = math.log(min(max(ratio, _LEAST_RATIO), 1.0 / _LEAST_RATIO))
        known = self.log_ratio * kept_share(now - self.measured_at, _CORRECTION_MEMORY_S)
        self.log_ratio, self.measured_at = known + weight * (log_ratio - known), now
        self.touch()

    def note_prompts(self, at: float) -> None:
        """Note that it has prompts to compute at this time."""
        if self.had_prompts_at == float("inf") or at > self.had_prompts_at:
            self.had_prompts_at = at

    def cover(self) -> None:
        """Drop the placements that the last report shows: routed by then or, if expected, handed over by
        then."""
        until = self.covered_until
        for sums in (self.computing, self.staying):
            for placement in [it for it in sums.placements if not it.is_queued and it.routed_at <= until]:
                sums.drop(placement)
        for placement in [item for item in self.expected.placements if has_joined(item, until)]:
            self.expected.drop(placement)

    def count(self, placement: Placement) -> None:
        """Add the placement where the last report does not show it."""
        until = self.covered_until
        is_open = placement.prefilled_at is None and not placement.is_queued
        if placement.limited_group and is_open and placement.compute_id == self.identity.replica_id:
            self.limited.add(placement)
        is_shown = placement.routed_at <= until and not placement.is_queued
        if placement.compute_id == self.identity.replica_id and not is_shown:
            if placement.prefilled_at is None:
                self.computing.add(placement)
                self.note_prompts(placement.routed_at)
            if not placement.decode_id:
                self.staying.add(placement)
        if placement.decode_id == self.identity.replica_id and not has_joined(placement, until):
            self.expected.add(placement)
        self.touch()

    def forget(self, placement: Placement) -> None:
        """Do not count the placement any more."""
        for sums in self.sums:
            sums.drop(placement)
        self.limited.discard(placement)
        self.touch()

    def computed(self, placement: Placement) -> None:
        """Note that nothing is left to compute of a placement."""
        if placement.prefilled_at is not None:
            self.note_prompts(placement.prefilled_at)
        self.computing.drop(placement)
        self.limited.discard(placement)
        self.touch()


def state_of(
    replica: TrackedReplica,
    report: ReplicaLoad | None,
    sums: tuple[PlacementSums, PlacementSums, PlacementSums],
    others: Callable[[], Iterable[ReplicaLoad]],
    now: float,
    context_tokens: float,
) -> CurrentLoad:
    """Add placements, to be computed, staying and expected there, to a report of the replica. A sequence has
    `context_tokens` where none runs.

    Landings in the report and expected requests overlap (an expected request becomes a landing shortly
    before its hand-over), and no message identifies which are the same. The larger count is therefore taken
    for sequences; for blocks, the share of the expected requests beyond the reported landings still needs its
    blocks.
    """
    computing, staying, expected = sums
    if report is None:
        report = ReplicaLoad(replica.identity, float("-inf"), 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    num_new_blocks = staying.num_new_blocks
    if expected.num_sent > report.num_landings:
        not_landed = 1.0 - report.num_landings / expected.num_sent
        num_new_blocks += round(not_landed * expected.num_new_blocks)
    num_expected = expected.num_sequences - expected.num_queued_sequences
    num_coming = (
        max(report.num_landings, num_expected) + expected.num_queued_sequences + staying.num_sequences
    )
    num_sequences = report.num_running + report.num_waiting + num_coming
    backlog_tokens = report.num_backlog_tokens + computing.num_prefill_tokens
    num_queued_sequences = staying.num_queued_sequences + expected.num_queued_sequences
    num_sent = num_sequences - num_queued_sequences
    rates = rates_of(report, num_sent, replica.correction(now), others, context_tokens)
    num_places = _num_places(report) if replica.role != "prefill" else 0.0
    # The arguments are positional, as those of `Rates`.
    return CurrentLoad(
        replica.role,
        report,
        backlog_tokens,
        num_sequences,
        report.num_free_blocks - num_new_blocks,
        rates,
        computing.num_queued_tokens,
        num_queued_sequences,
        num_places,
        replica.residence_s or DEFAULT_OUTPUT_TOKENS * rates.step_s,
        computing.num_handed_over,
        replica.had_prompts_at,
    )


def has_joined(placement: Placement, until: float) -> bool:
    """Whether the request was handed over by then."""
    return placement.prefilled_at is not None and placement.prefilled_at <= until


def _num_places(report: ReplicaLoad) -> float:
    """Return how many sequences can run at once: the most that the replica takes, or as many as its blocks
    hold, by those that run."""
    num_used = report.num_total_blocks - report.num_free_blocks
    if report.num_running < _MIN_FITTING or num_used <= 0:
        return report.max_sequences
    return min(report.max_sequences, report.num_running * report.num_total_blocks / num_used)
