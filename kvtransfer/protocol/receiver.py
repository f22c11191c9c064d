"""Landings, the decode side: who may write incoming KV into which blocks, and until when (sans-I/O).

The engine core passes in messages, reports and the time, and carries out the returned actions.

    LandingRequest -> WAITING --grant--> OPEN --HandOver, every rank has verified--> (landed, forgotten)
                        |                 |
                     refused           aborted (cancel, deadline, lease, peer lost, writer's abort, nonsense)
                                          |
                                     QUARANTINED --WriterStopped | closed at every rank, and every one-sided
                                                   connection that a rank had let in is gone--> freed

A landing's blocks return to the pool only when no writer can touch them any more; no timer ends quarantine.
It has blocks in each group of layers, which share its fate: all are there, or it waits. A group with a window
has those that are needed to continue behind the sequence, and no others; one with a state has a single block,
for the state behind the last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvtransfer.blocks.group_prefix import GroupSource, Prefix, first_needed_block, match_prefix
from kvtransfer.common.group_shares import Claimant, ShareClaim
from kvtransfer.config import TransferConfig
from kvtransfer.messages import BlockSpan, ReplicaIdentity, Shard
from kvtransfer.peer_messages import (
    LandingAbort,
    LandingGrant,
    LandingProgress,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    WriterStopped,
)
from kvtransfer.protocol.actions import Landed, LandingAction, Lost, LostCause, ToRank, ToRanks, ToWriter
from kvtransfer.protocol.gate import RecentIds
from kvtransfer.protocol.landing_overtaking import may_pass
from kvtransfer.protocol.landing_part import LandingPart, num_valid_tokens
from kvtransfer.protocol.state_part import StatePart
from kvtransfer.protocol.verification import AwaitedBlocks, Lanes, ManifestError, Verification
from kvtransfer.transfer_orders import CloseLanding, OpenLanding
from kvtransfer.transfer_reports import LandingClosed, Verified, WriterGone

_LANDING_PER_PRIORITY_S = 10.0  # in which a waiting landing gains one level of priority
_MAX_TRIES = 16  # that find too few free blocks at a time: each has its prefix looked up


class _State(Enum):
    WAITING = "waiting"
    OPEN = "open"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Landing:
    request: LandingRequest
    writer: ReplicaIdentity
    lanes: Sequence[Lanes]  # of each group
    arrived_at: float
    blocked_at: float = math.inf  # since when it is first in the queue and finds too few free blocks
    state: _State = _State.WAITING
    parts: tuple[LandingPart, ...] = ()  # from its grant on, by group
    pieces: Verification = field(init=False)  # from its grant on
    lease_end: float = 0.0
    num_tokens_computed: int = 0
    handed_over: bool = False
    num_tokens: int = 0  # whose KV was handed over
    closed_ranks: set[int] = field(default_factory=set)
    connections: set[tuple[int, bytes]] = field(default_factory=set)  # in quarantine: what may still write


class LandingTable:
    """Tracks all landings of one decode replica; see the drawing at the top of this module."""

    def __init__(
        self,
        config: TransferConfig,
        pool: BlockSource,
        block_tokens: int,
        num_ranks: int,
        group_pools: Sequence[GroupSource] = (),
    ) -> None:
        """`group_pools` have the blocks of the groups of layers behind the first."""
        self._config = config
        self._pool = pool
        self._group_pools = group_pools
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        self._landings: dict[bytes, _Landing] = {}
        self._ended = RecentIds()  # what ranks still report of these is not about a later landing
        self._writers: dict[ReplicaIdentity, tuple[Lanes, ...]] = {}
        self._seconds_per_grant = 0.0
        self._last_grant_at = 0.0
        # Whether the last `grant` has left landings that wait for the share of their group.
        self.has_claims = False
        self._refusal = ""

    @property
    def num_waiting(self) -> int:
        return self._num_in(_State.WAITING)

    @property
    def num_open(self) -> int:
        return self._num_in(_State.OPEN)

    def _num_in(self, state: _State) -> int:
        landings = self._landings
        return sum(landing.state is state for landing in landings.values()) if landings else 0

    def num_of(self, group: str | None) -> int:
        """Return the number of landings of this sharing group (None: all) that wait or are open."""
        return sum(
            group is None or landing.request.facts.sharing_group == group
            for landing in self._landings.values()
            if landing.state in (_State.WAITING, _State.OPEN)
        )

    @property
    def num_references(self) -> int:
        """Block references that open landings hold."""
        return sum(parts[0].num_references for parts in self._open_parts())

    @property
    def num_group_references(self) -> tuple[int, ...]:
        """Block references that open landings hold in each group of layers behind the first."""
        opened = list(self._open_parts())
        return tuple(
            sum(parts[group].num_references for parts in opened)
            for group in range(1, 1 + len(self._group_pools))
        )

    def is_open(self, writer: ReplicaIdentity, landing_id: bytes) -> bool:
        landing = self._of(writer, landing_id)
        return landing is not None and landing.state is _State.OPEN

    # ------------------------------------------------------------------------------------- messages

    def writer_joined(
        self, writer: ReplicaIdentity, pieces: Sequence[Iterable[tuple[int, Shard]]]
    ) -> list[LandingAction]:
        """Note that a writer's link opened, and which pieces (rank of ours, piece) it will write of every
        block of each group of layers. Its reports on the landings in quarantine may have been lost with its
        last link: they are aborted again."""
        assert len(pieces) == 1 + len(self._group_pools)
        self._writers[writer] = tuple(map(Lanes, pieces))
        return [
            ToWriter(writer, LandingAbort(landing.request.landing_id, "the peer link was lost", False))
            for landing in self._of_writer(writer)
        ]

    def request(
        self, writer: ReplicaIdentity, request: LandingRequest, now: float, *, idle: bool
    ) -> list[LandingAction]:
        """Queue or refuse the landing of a prefill replica. `idle`: nothing runs here that could need the
        growth reserve."""
        if request.landing_id in self._landings:  # its blocks must not be forgotten
            return []
        num_keys, num_full = len(request.block_keys), request.num_tokens // self._block_tokens
        if request.num_tokens < 1 or request.num_samples < 1 or num_keys > num_full:
            reason = f"{request.num_samples} samples, {request.num_tokens} tokens, {num_keys} block keys"
            return [self._refuse(writer, request, reason, retry_after_s=0.0)]
        needed, group = (
            self._num_blocks(request.num_tokens) + request.num_samples,
            request.facts.sharing_group,
        )
        if needed > self._pool.num_total:
            reason = f"the prompt needs {needed} blocks, this replica has {self._pool.num_total}"
            return [self._refuse(writer, request, reason, retry_after_s=0.0)]
        for pool in self._group_pools:
            most = self._num_group_blocks(request, pool) + request.num_samples
            if most > pool.num_total:
                what = "a recurrent state" if pool.has_states else f"a window of {pool.window} tokens"
                reason = f"{what} needs {most} blocks, of {pool.num_total}"
                return [self._refuse(writer, request, reason, retry_after_s=0.0)]
        if self._num_blocks(request.num_tokens + 1) > self._pool.limit(group):
            share = f"{self._pool.limit(group)} are the share of sharing group {group!r} (device_kv_share)"
            reason = f"the prompt and a new token need {needed} blocks, {share}"
            return [self._refuse(writer, request, reason, retry_after_s=0.0)]
        num_waiting, num_ahead = self.num_waiting, self._num_ahead(group)
        wait_s = self._seconds_per_grant * (num_ahead + 1)
        refusal = "a landing of this id has ended" if request.landing_id in self._ended else self._refusal
        if refusal:
            return [self._refuse(writer, request, refusal, retry_after_s=0.0)]
        if num_waiting >= self._config.landing_queue:
            return [self._refuse(writer, request, "the landing queue is full", wait_s)]
        if num_ahead and self._has_full_queue(group):
            return [self._refuse(writer, request, f"the landing queue of {group!r} is full", wait_s)]
        if request.deadline_s is not None and num_ahead and wait_s > request.deadline_s:
            reason = f"a wait of about {wait_s:.1f} s would miss the deadline in {request.deadline_s:.1f} s"
            return [self._refuse(writer, request, reason, wait_s)]
        self._landings[request.landing_id] = _Landing(request, writer, self._writers[writer], now)
        return self.grant(now, idle=idle)

    def grant(self, now: float, *, idle: bool) -> list[LandingAction]:
        """Open as many waiting landings as fit, oldest and most urgent first; see `may_pass`. Landings of a
        sharing group that has too little left of its share wait, in order, and hold back no other landing."""
        waiting = [item for item in self._landings.values() if item.state is _State.WAITING]
        waiting.sort(
            key=lambda item: (
                -(item.request.facts.priority + (now - item.arrived_at) / _LANDING_PER_PRIORITY_S),
                item.arrived_at,
            )
        )
        actions: list[LandingAction] = []
        blocked: list[_Landing] = []
        held_groups: dict[str, ShareClaim] = {}
        for landing in waiting:
            group = landing.request.facts.sharing_group
            if group in held_groups:
                continue
            if self._pool.has_limit(group) and self._lacks_share(landing):
                num_blocks = self._num_blocks(landing.request.num_tokens)
                held_groups[group] = ShareClaim(landing.arrived_at, num_blocks)
                continue
            if not self._open(landing, now, idle=idle):
                blocked.append(landing)
                blocked[0].blocked_at = min(blocked[0].blocked_at, now)
                share = self._share(blocked[0].request)
                if len(blocked) == _MAX_TRIES or not may_pass(share, now - blocked[0].blocked_at):
                    break
                continue
            actions += self._granted(landing)
        self.has_claims = bool(held_groups)
        self._pool.claim("landings", held_groups)
        return actions

    def manifest(self, writer: ReplicaIdentity, manifest: Manifest, now: float) -> list[LandingAction]:
        """Order the verification of written pieces, where they lie."""
        landing = self._of(writer, manifest.landing_id)
        if landing is None or landing.state is not _State.OPEN:
            return []
        try:
            orders = landing.pieces.announce(manifest)
        except ManifestError as error:
            return self.abort(manifest.landing_id, str(error), "message")
        landing.lease_end = now + self._config.landing_lease_s
        return [ToRank(rank, order) for rank, order in orders.items()]

    def progress(self, writer: ReplicaIdentity, progress: LandingProgress, now: float) -> None:
        """Renew the lease: the writer is alive and working."""
        landing = self._of(writer, progress.landing_id)
        if landing is not None:
            landing.lease_end = now + self._config.landing_lease_s
            landing.num_tokens_computed = progress.num_tokens_computed

    def hand_over(
        self, writer: ReplicaIdentity, landing_id: bytes, name: tuple[str, int], num_tokens: int, now: float
    ) -> list[LandingAction]:
        """Take the sequence state of attempt `name`, which came with `num_tokens` tokens whose KV was to
        land."""
        landing = self._of(writer, landing_id)
        if landing is None:  # aborted, and freed since: its writer must know
            return [ToWriter(writer, LandingAbort(landing_id, "there is no such landing", False))]
        if landing.state is not _State.OPEN:
            return []
        wanted = landing.request
        fits = num_tokens == wanted.num_tokens or (wanted.is_growing and 0 < num_tokens < wanted.num_tokens)
        if _name(landing) != (landing_id, *name) or not fits:
            reason = f"{num_tokens} tokens of {name} are not what was to land here"
            return self.abort(landing_id, reason, "message")
        landing.handed_over, landing.num_tokens = True, num_tokens
        landing.lease_end = now + self._config.landing_lease_s
        return self._land(landing)

    def aborted_by_writer(self, writer: ReplicaIdentity, abort: LandingAbort) -> list[LandingAction]:
        """End the landing that the prefill side gave up."""
        landing = self._of(writer, abort.landing_id)
        if landing is None:
            return []
        if not abort.writers_stopped:
            return self.abort(abort.landing_id, abort.reason, "writer")
        actions: list[LandingAction] = (
            [Lost(*_name(landing), abort.reason, "writer")] if landing.state is _State.OPEN else []
        )
        if landing.state is not _State.WAITING:
            actions.append(ToRanks(CloseLanding(abort.landing_id)))
        self._free(landing)
        return actions

    def writer_stopped(self, writer: ReplicaIdentity, message: WriterStopped) -> None:
        """End the quarantine: the writer has acknowledged its stop."""
        landing = self._of(writer, message.landing_id)
        if landing is not None and landing.state is _State.QUARANTINED:
            self._free(landing)

    # ---------------------------------------------------------------------------------- rank reports

    def verified(self, rank: int, report: Verified) -> list[LandingAction]:
        """Take the answer of a rank to its oldest unanswered `VerifyOrder`."""
        landing = self._landings.get(report.landing_id)
        if landing is None or landing.state is not _State.OPEN:
            return []
        landing.pieces.answered(rank, report)
        return self._land(landing)

    def closed(self, rank: int, report: LandingClosed) -> None:
        """Note that a rank accepts nothing more for the landing, which is freed when all ranks have reported
        so and no one-sided writer is left."""
        landing = self._landings.get(report.landing_id)
        if landing is not None and landing.state is _State.QUARANTINED:
            landing.closed_ranks.add(rank)
            landing.connections.update((rank, connection) for connection in report.connections)
            self._free_if_unreachable(landing)

    def writer_gone(self, rank: int, report: WriterGone) -> None:
        """Take the proof that nothing is written into the rank over a connection any more. It ends quarantine
        only: an open landing is aborted when the Peer link ends, and the rank's answer then leaves this
        connection out."""
        for landing in self._of_writer(report.writer):
            if landing.state is _State.QUARANTINED and (rank, report.connection) in landing.connections:
                landing.connections.discard((rank, report.connection))
                self._free_if_unreachable(landing)

    # ------------------------------------------------------------------------------------- our side

    def refuse_all(self, reason: str) -> list[LandingAction]:
        """Grant nothing from now on; landings that are open continue."""
        self._refusal = reason
        waiting = [item for item in self._landings.values() if item.state is _State.WAITING]
        return [action for item in waiting for action in self.abort(item.request.landing_id, reason)]

    def abort(self, landing_id: bytes, reason: str, cause: LostCause = "cancelled") -> list[LandingAction]:
        """End a landing from this side (cancel, deadline, lease, nonsense from the peer)."""
        landing = self._landings.get(landing_id)
        if landing is None or landing.state is _State.QUARANTINED:
            return []
        if landing.state is _State.WAITING:
            del self._landings[landing_id]
            return [self._refuse(landing.writer, landing.request, reason, 0.0)]
        for part in landing.parts:
            part.quarantine()
        landing.state = _State.QUARANTINED
        return [
            Lost(*_name(landing), reason, cause),
            ToRanks(CloseLanding(landing_id)),
            ToWriter(landing.writer, LandingAbort(landing_id, reason, writers_stopped=False)),
        ]

    def cancel(self, request_id: str, attempt: int) -> list[LandingAction]:
        """Abort every landing for this attempt of a request."""
        return [
            action
            for landing in list(self._landings.values())
            if (landing.request.request_id, landing.request.attempt) == (request_id, attempt)
            for action in self.abort(landing.request.landing_id, "cancelled")
        ]

    def writer_lost(self, writer: ReplicaIdentity) -> list[LandingAction]:
        """Note that the Peer link ended. That is no proof of death: open landings go to quarantine."""
        self._writers.pop(writer, None)
        actions: list[LandingAction] = []
        for landing in self._of_writer(writer):
            if landing.state is _State.WAITING:
                del self._landings[landing.request.landing_id]
            else:
                actions += self.abort(landing.request.landing_id, "the peer link was lost", "link")
        return actions

    def expire(self, now: float) -> list[LandingAction]:
        """Abort landings without progress and refuse those whose deadline passed while they waited."""
        actions: list[LandingAction] = []
        for landing in list(self._landings.values()):
            request = landing.request
            if landing.state is _State.OPEN and now > landing.lease_end:
                done = f"{landing.num_tokens_computed} of {request.num_tokens} tokens were computed"
                reason = f"no progress for {self._config.landing_lease_s} s: {done}"
                actions += self.abort(request.landing_id, reason, "progress")
            elif (
                landing.state is _State.WAITING
                and request.deadline_s is not None
                and now > landing.arrived_at + request.deadline_s
            ):
                actions += self.abort(
                    request.landing_id, "the deadline passed while waiting for free blocks", "progress"
                )
        return actions

    def check(self) -> None:
        """Assert that no landing holds anything that its state does not allow."""
        for landing in self._landings.values():
            if landing.state is _State.WAITING:
                assert not landing.parts
            if landing.state is _State.QUARANTINED:
                assert not any(part.held for part in landing.parts)

    # -------------------------------------------------------------------------------------- private

    def _num_ahead(self, group: str) -> int:
        """Return the number of waiting landings that a new one of this group would wait for: not those of
        other groups with a limit, which may wait for their own share."""
        return sum(each == group or not self._pool.has_limit(each) for each in self._waiting_groups())

    def _has_full_queue(self, group: str) -> bool:
        """Whether as many landings of a group with a limit wait as are its share of the queue."""
        if not self._pool.has_limit(group):
            return False
        most = self._config.landing_queue * self._pool.limit(group) // self._pool.num_total
        return sum(each == group for each in self._waiting_groups()) >= max(1, most)

    def _waiting_groups(self) -> Iterator[str]:
        for landing in self._landings.values():
            if landing.state is _State.WAITING:
                yield landing.request.facts.sharing_group

    def _lacks_share(self, landing: _Landing) -> bool:
        """Return whether its group has too little left of its share for a waiting landing, and for the growth
        of the sequences that the group runs here. A landing that is the group's only one needs space for the
        next token."""
        request = landing.request
        group, held = request.facts.sharing_group, self._match(request).block_ids
        num_blocks = self._num_blocks(request.num_tokens)
        num_needed = num_blocks - len(held) + self._pool.num_to_use(held)
        reserve = self._num_blocks(request.num_tokens + 1) - num_blocks
        if self._pool.num_used_by(group):
            growth = int(self._config.growth_reserve * self._pool.limit(group))
            reserve = max(growth, request.num_samples)
        num_left = self._pool.num_left(group)
        num_left -= self._pool.num_claimed("sequences", group, landing.arrived_at)
        return num_left - num_needed < reserve

    def _open(self, landing: _Landing, now: float, *, idle: bool) -> bool:
        landing.parts = self._take_blocks(landing.request, busy=not idle or self.num_open > 0)
        if not landing.parts:
            return False
        landing.pieces = Verification(
            [
                AwaitedBlocks(lanes, part.first, part.written)
                for lanes, part in zip(landing.lanes, landing.parts, strict=True)
            ]
        )
        landing.state = _State.OPEN
        landing.lease_end = now + self._config.landing_lease_s
        if landing.arrived_at < now and self._last_grant_at:
            gap = now - max(self._last_grant_at, landing.arrived_at)
            self._seconds_per_grant = 0.7 * self._seconds_per_grant + 0.3 * gap
        self._last_grant_at = now
        return True

    def _take_blocks(self, request: LandingRequest, *, busy: bool) -> tuple[LandingPart, ...]:
        """Take the blocks of each group for a landing; none at all where one has too few free."""
        prefix, num_blocks = self._match(request), self._num_blocks(request.num_tokens)
        num_held, held = len(prefix.block_ids), iter(prefix.windows)
        parts = [LandingPart(self._pool, 0, prefix.block_ids, num_held, [])]
        for pool in self._group_pools:
            if pool.has_states:
                parts.append(StatePart(pool, pool.window, [], num_blocks - 1, []))
                continue
            first = max(self._first_of(request, pool), num_held)
            parts.append(LandingPart(pool, pool.window, list(next(held).block_ids), first, []))
        sources: tuple[BlockSource | GroupSource, ...] = (self._pool, *self._group_pools)
        for source, part in zip(sources, parts, strict=True):
            source.acquire(part.held)
        for source, part in zip(sources, parts, strict=True):
            reserve = int(self._config.growth_reserve * source.num_total) if busy else 0
            if source.num_free - (num_blocks - part.first) < max(reserve, request.num_samples):
                for taken in parts:
                    taken.release()
                return ()
        full, *windowed = parts
        full.written = self._pool.allocate(num_blocks - full.first, request.facts.sharing_group)
        for pool, part in zip(self._group_pools, windowed, strict=True):
            part.written = pool.allocate(num_blocks - part.first)
        return tuple(parts)

    def _granted(self, landing: _Landing) -> list[LandingAction]:
        full, *windows = landing.parts
        landing_id, block_ids = landing.request.landing_id, tuple(full.written)
        written = tuple(BlockSpan(part.first, tuple(part.written)) for part in windows)
        opened = OpenLanding(landing_id, landing.writer, block_ids, tuple(it.block_ids for it in written))
        grant = LandingGrant(landing_id, len(full.held) * self._block_tokens, block_ids, written)
        return [ToRanks(opened), ToWriter(landing.writer, grant)]

    def _land(self, landing: _Landing) -> list[LandingAction]:
        pieces, (full, *windows) = landing.pieces, landing.parts
        if not landing.handed_over or pieces.is_pending:
            return []
        landing_id, block_tokens = landing.request.landing_id, self._block_tokens
        self._ended.add(landing_id)
        num_tokens = num_valid_tokens(landing.parts, pieces, landing.num_tokens, block_tokens)
        # What the whole sequence does not need may have changed while it was written.
        num_bad = pieces.num_bad_pieces(
            [part.first_needed(landing.num_tokens, block_tokens) for part in landing.parts]
        )
        block_ids, num_held_tokens = (*full.held, *full.written), len(full.held) * block_tokens
        passed_on = tuple(part.pass_on(num_tokens, block_tokens) for part in windows)
        del self._landings[landing_id]
        return [
            ToRanks(CloseLanding(landing_id)),
            ToWriter(landing.writer, LandingResult(landing_id, num_tokens, num_bad)),
            Landed(landing_id, block_ids, num_tokens, num_held_tokens, num_bad, passed_on),
        ]

    def _match(self, request: LandingRequest) -> Prefix:
        """Find what is cached here of the sequence, and what groups with a window need of it. The state comes
        from elsewhere."""
        least, windows = self._least_tokens(request), [it for it in self._group_pools if not it.has_states]
        return match_prefix(self._pool, windows, request.block_keys, self._block_tokens, least)

    def _least_tokens(self, request: LandingRequest) -> int:
        """Return the least number of tokens with which the sequence may be handed over."""
        return len(request.block_keys) * self._block_tokens if request.is_growing else request.num_tokens

    def _first_of(self, request: LandingRequest, pool: GroupSource) -> int:
        """Return the first block that may be needed in a group to continue behind the sequence."""
        return first_needed_block(self._least_tokens(request), pool.window, self._block_tokens)

    def _num_group_blocks(self, request: LandingRequest, pool: GroupSource) -> int:
        """Return the most blocks that a landing takes in a group with a window or a state."""
        if pool.has_states:
            return 1
        return self._num_blocks(request.num_tokens) - self._first_of(request, pool)

    def _share(self, request: LandingRequest) -> float:
        """Return which part of a pool a landing needs, of the pool of which it needs the most."""
        shares = [self._num_group_blocks(request, it) / it.num_total for it in self._group_pools]
        return max([self._num_blocks(request.num_tokens) / self._pool.num_total, *shares])

    def _open_parts(self) -> Iterator[tuple[LandingPart, ...]]:
        for landing in self._landings.values():
            if landing.state is _State.OPEN:
                yield landing.parts

    def _free_if_unreachable(self, landing: _Landing) -> None:
        if len(landing.closed_ranks) == self._num_ranks and not landing.connections:
            self._free(landing)

    def _free(self, landing: _Landing) -> None:
        for part in landing.parts:
            if landing.state is _State.OPEN:
                part.release()
            else:
                part.release_quarantine()
        self._ended.add(landing.request.landing_id)
        del self._landings[landing.request.landing_id]

    def _refuse(
        self, writer: ReplicaIdentity, request: LandingRequest, reason: str, retry_after_s: float
    ) -> ToWriter:
        return ToWriter(writer, LandingRefusal(request.landing_id, reason, retry_after_s))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _of(self, writer: ReplicaIdentity, landing_id: bytes) -> _Landing | None:
        landing = self._landings.get(landing_id)
        return landing if landing is not None and landing.writer == writer else None

    def _of_writer(self, writer: ReplicaIdentity) -> Iterator[_Landing]:
        return iter([item for item in self._landings.values() if item.writer == writer])


def _name(landing: _Landing) -> tuple[bytes, str, int]:
    return landing.request.landing_id, landing.request.request_id, landing.request.attempt


class BlockSource(Protocol):
    """The part of the block pool that a landing needs (see `workers.scheduler.block_pool.BlockPool`)."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_total(self) -> int: ...
    def has_limit(self, group: str) -> bool: ...
    def limit(self, group: str) -> int: ...
    def num_used_by(self, group: str) -> int: ...
    def num_left(self, group: str) -> int: ...
    def num_to_use(self, block_ids: Sequence[int]) -> int: ...
    def claim(self, by: Claimant, claims: Mapping[str, ShareClaim]) -> None: ...
    def num_claimed(self, by: Claimant, group: str, since: float) -> int: ...
    def match(self, keys: Sequence[bytes]) -> list[int]: ...
    def acquire(self, block_ids: Sequence[int]) -> None: ...
    def allocate(self, num_blocks: int, group: str) -> list[int]: ...
    def release(self, block_ids: Sequence[int]) -> None: ...
    def quarantine(self, block_ids: Sequence[int]) -> None: ...
    def release_quarantine(self, block_ids: Sequence[int]) -> None: ...
