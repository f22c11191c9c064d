"""What the router knows of each replica's load: the last report, and what was routed there since.

The service tells the book of every report and every step of a request; policies read `LoadState`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from router.messages import ReplicaLoad

# A request is taken to be in the first report that arrives this long after it was routed (or, for a
# hand-over, after its first token): the way to the replica plus the way back, with room.
REPORT_LAG_S = 0.02
# A request without news for this long no longer counts as load: its end was lost.
PHANTOM_S = 300.0
_NO_RATES: Mapping[str, float] = MappingProxyType({})


class LoadState(NamedTuple):
    """A replica's load as of now. `num_total_blocks` 0: no report yet. Rates 0: not yet measured."""

    replica_id: str
    role: str
    # Prompt tokens accepted there (or on the way there) and not yet computed.
    backlog_tokens: int
    # Sequences that decode there, wait there, or are on their way there.
    num_sequences: int
    # Blocks free for another request; may be negative when more is on its way than fits.
    num_free_blocks: int
    num_total_blocks: int
    prefill_tok_s: float
    decode_step_s: float
    transfer_tok_s: float
    reported_at: float
    # By tier of the node's store; a tier without measure is absent or 0.
    load_tok_s: Mapping[str, float] = _NO_RATES
    # The longest context that it can serve alone, host memory included; 0: not known.
    max_local_tokens: int = 0


@dataclass(slots=True, eq=False)
class Placement:
    """A request on its way: computed at `compute_id`, then handed over to `decode_id` ("": it stays). Of a
    stream that moves to `decode_id` nothing is left to compute (`compute_id` "")."""

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
class _Tally:
    """Placements and their sums, kept as they come and go."""

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


@dataclass(slots=True, eq=False)
class _Page:
    """The book's page of one replica: its report, and three tallies of what the report does not show.

    computing   to be computed here             until the first report after it, or its first token
    staying     computed here and kept here     until the first report after it, or its end
    expected    handed over to here             until the first report after its hand-over, or its end
    """

    identity: ReplicaIdentity
    role: str
    report: ReplicaLoad | None = None
    computing: _Tally = field(default_factory=_Tally)
    staying: _Tally = field(default_factory=_Tally)
    expected: _Tally = field(default_factory=_Tally)
    state: LoadState | None = None

    def cover(self, until: float) -> None:
        """Drop what a report of that time shows: routed by then, or (expected) handed over by then."""
        for tally in (self.computing, self.staying):
            for request_id in [key for key, item in tally.placements.items() if item.routed_at <= until]:
                tally.drop(request_id)
        joined = [
            key
            for key, item in self.expected.placements.items()
            if item.prefilled_at is not None and item.prefilled_at <= until
        ]
        for request_id in joined:
            self.expected.drop(request_id)

    def forget(self, request_id: str) -> None:
        for tally in (self.computing, self.staying, self.expected):
            tally.drop(request_id)
        self.state = None


class LoadTracker:
    """Reports and deltas of all replicas. Every method ignores what it does not know."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pages: dict[str, _Page] = {}
        self._placements: dict[str, Placement] = {}

    def add_replica(self, identity: ReplicaIdentity, role: str) -> None:
        """A replica, or its new role. A new epoch starts an empty page."""
        page = self._pages.get(identity.replica_id)
        if page is not None and page.identity.epoch == identity.epoch:
            page.role, page.state = role, None
            return
        self.remove_replica(identity.replica_id)
        self._pages[identity.replica_id] = _Page(identity, role)

    def remove_replica(self, replica_id: str) -> None:
        self._pages.pop(replica_id, None)

    def on_load(self, load: ReplicaLoad) -> None:
        """Take a report, and drop the deltas that it covers. An older one, or of another life, is ignored."""
        page = self._pages.get(load.identity.replica_id)
        if page is None or page.identity.epoch != load.identity.epoch:
            return
        if page.report is not None and load.received_at < page.report.received_at:
            return
        page.report, page.state = load, None
        page.cover(load.received_at - REPORT_LAG_S)

    def on_routed(self, placement: Placement) -> None:
        """Count the request at once where it goes; an earlier attempt of it no longer counts."""
        self.on_finished(placement.request_id)
        self._sweep()
        self._placements[placement.request_id] = placement
        if (page := self._pages.get(placement.compute_id)) is not None:
            page.computing.add(placement)
            if not placement.decode_id:
                page.staying.add(placement)
            page.state = None
        if (page := self._pages.get(placement.decode_id)) is not None:
            page.expected.add(placement)
            page.state = None

    def on_prefilled(self, request_id: str) -> Placement | None:
        """The first token is there: nothing is left to compute. Returns the placement, the first time."""
        placement = self._placements.get(request_id)
        if placement is None or placement.prefilled_at is not None:
            return None
        placement.prefilled_at = self._clock.now()
        if (page := self._pages.get(placement.compute_id)) is not None:
            page.computing.drop(request_id)
            page.state = None
        return placement

    def on_finished(self, request_id: str) -> None:
        """The request has ended, in whichever way."""
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            for replica_id in (placement.compute_id, placement.decode_id):
                if (page := self._pages.get(replica_id)) is not None:
                    page.forget(request_id)

    def state(self, replica_id: str) -> LoadState:
        """The replica's load as of now; the replica must be known."""
        page = self._pages[replica_id]
        if page.state is None:
            page.state = _state_of(page)
        return page.state

    @property
    def num_placements(self) -> int:
        """Requests routed and not finished."""
        return len(self._placements)

    def check(self) -> None:
        """Assert that tallies and sums agree and hold no finished request."""
        for page in self._pages.values():
            for tally in (page.computing, page.staying, page.expected):
                items = tally.placements.values()
                assert tally.num_prefill_tokens == sum(item.num_prefill_tokens for item in items)
                assert tally.num_new_blocks == sum(item.num_new_blocks for item in items)
                assert tally.num_sequences == sum(item.num_sequences for item in items)
                assert all(self._placements.get(item.request_id) is item for item in items)

    def _sweep(self) -> None:
        """Drop what has had no news for `PHANTOM_S`. A long answer loses nothing by it: its sequence has
        been in its replica's own reports since it joined."""
        oldest = self._clock.now() - PHANTOM_S
        while self._placements:
            placement = next(iter(self._placements.values()))
            if placement.routed_at > oldest:
                return
            self.on_finished(placement.request_id)


def _state_of(page: _Page) -> LoadState:
    """Report plus deltas.

    Landings in the report and expected requests overlap (an expected request becomes a landing shortly
    before its hand-over), and nobody says which are the same. So the larger count is taken for sequences;
    for blocks, the share of the expected requests beyond the reported landings still needs its blocks.
    """
    report = page.report
    if report is None:
        report = ReplicaLoad(page.identity, float("-inf"), 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    expected, staying = page.expected, page.staying
    num_new_blocks = staying.num_new_blocks
    if len(expected.placements) > report.num_landings:
        not_landed = 1.0 - report.num_landings / len(expected.placements)
        num_new_blocks += round(not_landed * expected.num_new_blocks)
    num_coming = max(report.num_landings, expected.num_sequences) + staying.num_sequences
    return LoadState(
        replica_id=page.identity.replica_id,
        role=page.role,
        backlog_tokens=report.num_backlog_tokens + page.computing.num_prefill_tokens,
        num_sequences=report.num_running + report.num_waiting + num_coming,
        num_free_blocks=report.num_free_blocks - num_new_blocks,
        num_total_blocks=report.num_total_blocks,
        prefill_tok_s=report.prefill_tok_s,
        decode_step_s=report.decode_step_s,
        transfer_tok_s=report.transfer_tok_s,
        reported_at=report.received_at,
        load_tok_s=report.load_tok_s,
        max_local_tokens=report.max_local_tokens,
    )
