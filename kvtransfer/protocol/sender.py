"""Landings, the prefill side: request a landing, push finished blocks, stop when ordered (sans-I/O).

    ASKED --LandingGrant--> OPEN --last push done and prompt complete--> HANDED --LandingResult--> (forgotten)
      |                      |                                             |
    LandingRefusal         abort, push failed, peer lost               (the same)
                             |
                          STOPPING --PushStopped of all ranks--> LandingAbort | WriterStopped sent, forgotten

While OPEN, every chunk that the engine reports is pushed at once, so that it moves while the next one is
computed. A sequence that moves while it decodes does the same block by block; "prompt" then means all its
tokens up to where it stops here. Every rank writes its part of a chunk and answers for itself. A rank that
does not acknowledge a stop in time must be killed (`KillRanks`): only then is it certain that nothing writes
any more.

Blocks of each group of layers are pushed by orders of their own. Those that the grant leaves out, or that the
sequence no longer has because they are behind its window, are not pushed. A state changes with every token:
it is pushed once, when the sequence rests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.common.moving_average import moving_average
from kvtransfer.config import TransferConfig
from kvtransfer.messages import BlockSpan, ReplicaIdentity
from kvtransfer.peer_messages import (
    LandingAbort,
    LandingGrant,
    LandingProgress,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    PeerMessage,
    WriterStopped,
)
from kvtransfer.protocol.actions import (
    Granted,
    HandOverReady,
    KillRanks,
    PushAction,
    Pushed,
    PushEnded,
    ToPeer,
    ToRanks,
)
from kvtransfer.transfer_orders import BlockMove, PushOrder, StopPush, TrafficClass
from kvtransfer.transfer_reports import PushDone, PushFailed, PushStopped

# Weight of the newest push in the moving average of rates.
_RATE_WEIGHT = 0.2


class _State(Enum):
    ASKED = "asked"
    OPEN = "open"
    HANDED = "handed"
    STOPPING = "stopping"


@dataclass(slots=True)
class _Order:
    """A push of blocks of one group of layers that not every rank has reported."""

    group: int
    # The ranks that have reported it.
    ranks: set[int] = field(default_factory=set)
    num_bytes: int = 0
    started_at: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Places:
    """The places that a grant has for blocks of one group of layers: `block_ids[i]` is for the block
    `first` + i. All before the block `next` are pushed, or behind their window."""

    group: int
    first: int
    block_ids: tuple[int, ...]
    next: int
    # Whether the last block takes the state behind the last token.
    has_state: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)

    def take(self, blocks: BlockSpan, end: int) -> tuple[BlockMove, ...]:
        """Return the moves of the blocks up to `end` that were not pushed, and that the sequence has."""
        begin, self.next = max(self.next, blocks.first), max(self.next, end)
        return tuple(
            BlockMove(
                src_block=blocks.block_ids[index - blocks.first],
                dst_block=self.block_ids[index - self.first],
                block_index=index,
            )
            for index in range(begin, end)
        )

    def take_state(self, blocks: BlockSpan) -> tuple[BlockMove, ...]:
        """Return the move of the state, which is the last of the blocks, into the place of the last block."""
        if self.next >= self.end:
            return ()
        self.next = self.end
        return (BlockMove(blocks.block_ids[-1], self.block_ids[-1], self.end - 1),)


@dataclass(slots=True)
class _Push:
    request: LandingRequest
    peer: ReplicaIdentity
    connection_id: bytes
    state: _State = _State.ASKED
    # The places of each group of layers, from the grant on.
    places: tuple[_Places, ...] = ()
    # The orders by push id.
    running: dict[int, _Order] = field(default_factory=dict)
    num_orders: int = 0
    num_computed_tokens: int = 0
    # The tokens with which it ends: those of the request, unless `end_at` has set fewer.
    num_tokens: int = 0
    prompt_done: bool = False
    num_moved_bytes: int = 0
    transports: set[str] = field(default_factory=set)
    started_at: float = 0.0
    push_seconds: float = 0.0
    # The time at which it was granted, or at which something of it was computed or pushed last.
    progress_at: float = 0.0
    asked_by_peer: bool = False
    stop_reason: str = ""
    stop_deadline: float = 0.0
    stopped_ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class PushCounters:
    """Totals for metrics."""

    num_bytes: Counter[TrafficClass] = field(default_factory=Counter)
    num_bytes_by_transport: Counter[str] = field(default_factory=Counter)
    # Each rank's pushes one after another: what writes at once counts twice.
    seconds_by_transport: dict[str, float] = field(default_factory=dict)
    # Moving average of the rate of pushes of at least 64 KiB, all ranks together, in 1e9 bytes a second.
    gb_s: float = 0.0

    def add(self, report: PushDone) -> None:
        """Count the bytes that a rank wrote."""
        self.num_bytes[report.traffic] += report.num_bytes
        if report.num_bytes:
            self.num_bytes_by_transport[report.transport] += report.num_bytes
            seconds = self.seconds_by_transport.get(report.transport, 0.0) + report.seconds
            self.seconds_by_transport[report.transport] = seconds


class SendTable:
    """Tracks all landings that one prefill replica writes; see the drawing at the top of this module."""

    def __init__(
        self, config: TransferConfig, block_tokens: int, num_ranks: int, has_states: Sequence[bool] = ()
    ) -> None:
        """`has_states` says of each group of layers behind the first whether it has states, or a window."""
        self._config = config
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        self._has_states = (False, *has_states)
        self._pushes: dict[bytes, _Push] = {}
        self._by_request: dict[tuple[str, int], bytes] = {}
        self._next_push_id = 0
        self._next_renewal_at = 0.0
        self.counters = PushCounters()

    @property
    def num_active(self) -> int:
        return len(self._pushes)

    # ---------------------------------------------------------------------------------- from the engine

    def ask(self, request: LandingRequest, peer: ReplicaIdentity, connection_id: bytes) -> list[PushAction]:
        """Request a landing at `peer`; `connection_id` is the measured data connection to it."""
        self._pushes[request.landing_id] = _Push(request, peer, connection_id, num_tokens=request.num_tokens)
        self._by_request[request.request_id, request.attempt] = request.landing_id
        return [ToPeer(peer, request)]

    def computed(
        self,
        request_id: str,
        attempt: int,
        num_computed_tokens: int,
        block_ids: Sequence[int],
        now: float,
        windows: Sequence[BlockSpan] = (),
    ) -> list[PushAction]:
        """Note that a chunk of the prompt is in the pool: push the blocks that are whole and not yet pushed.
        `windows` are the blocks that the sequence has now in each group behind the first."""
        push = self._find(request_id, attempt)
        if push is None or push.state is not _State.OPEN:
            return []
        push.progress_at = now
        push.num_computed_tokens = num_computed_tokens
        push.prompt_done = num_computed_tokens >= push.num_tokens
        if push.prompt_done:
            end = self._num_blocks(push.num_tokens)
        else:
            end = num_computed_tokens // self._block_tokens
        actions: list[PushAction] = []
        sources = BlockSpan(0, tuple(block_ids)), *windows
        for places, blocks in zip(push.places, sources, strict=True):
            if places.has_state:
                moves = places.take_state(blocks) if push.prompt_done else ()
            else:
                moves = places.take(blocks, min(end, places.end))
            actions += self._order(push, places.group, moves)
        return actions + self._ready(push)

    def has_caught_up(self, request_id: str, attempt: int) -> bool:
        """Whether the landing is open and all that was computed in whole blocks is written."""
        push = self._find(request_id, attempt)
        return push is not None and push.state is _State.OPEN and not push.running

    def end_at(self, request_id: str, attempt: int, num_tokens: int) -> None:
        """Set the end of a growing sequence (`LandingRequest.is_growing`) to `num_tokens` tokens, which fit
        its landing and are not computed yet."""
        push = self._find(request_id, attempt)
        assert push is not None
        assert push.num_computed_tokens < num_tokens <= push.request.num_tokens
        push.num_tokens = num_tokens

    def stop(self, request_id: str, attempt: int, reason: str, now: float) -> list[PushAction]:
        """End the landing from this side (cancel, deadline, preemption)."""
        push = self._find(request_id, attempt)
        return [] if push is None else self._stop(push, reason, now)

    # -------------------------------------------------------------------------------------- from the peer

    def granted(self, peer: ReplicaIdentity, grant: LandingGrant, now: float) -> list[PushAction]:
        """Open the landing: the prompt may be computed."""
        push = self._of(peer, grant.landing_id)
        if push is None or push.state is not _State.ASKED:
            return []
        first_block, num_cut_tokens = divmod(grant.num_held_tokens, self._block_tokens)
        granted = (BlockSpan(first_block, grant.block_ids), *grant.windows)
        num_blocks = self._num_blocks(push.request.num_tokens)
        fits = all(it.first >= 0 and it.first + len(it.block_ids) == num_blocks for it in granted)
        if num_cut_tokens or not fits or len(granted) != len(self._has_states):
            return self._stop(push, "the landing that was granted does not fit the prompt", now)
        push.state = _State.OPEN
        push.progress_at = now
        push.places = tuple(
            _Places(group, it.first, it.block_ids, it.first, has_state)
            for group, (it, has_state) in enumerate(zip(granted, self._has_states, strict=True))
        )
        return [Granted(push.request.request_id, push.request.attempt)]

    def refused(self, peer: ReplicaIdentity, refusal: LandingRefusal) -> list[PushAction]:
        """End a landing that was refused, or aborted while it waited at the decode side."""
        push = self._of(peer, refusal.landing_id)
        if push is None or push.state is not _State.ASKED:
            return []
        return [self._forget(push, "refused", refusal.reason, refusal.retry_after_s)]

    def aborted(self, peer: ReplicaIdentity, abort: LandingAbort, now: float) -> list[PushAction]:
        """Stop writing a landing that the decode side ended, and acknowledge that."""
        push = self._of(peer, abort.landing_id)
        if push is None:  # ended here already: nothing writes
            return [ToPeer(peer, WriterStopped(abort.landing_id))]
        push.asked_by_peer = True
        return self._stop(push, abort.reason, now)

    def request_of(self, landing_id: bytes) -> str:
        """Return the request whose KV is pushed there; "" when no push to the landing is going on."""
        push = self._pushes.get(landing_id)
        return push.request.request_id if push else ""

    def joined(self, peer: ReplicaIdentity, result: LandingResult, now: float) -> list[PushAction]:
        """End a landing whose sequence the decode side has joined."""
        push = self._of(peer, result.landing_id)
        if push is None:
            return []
        if push.running or not push.prompt_done:  # its blocks are still being read
            return self._stop(push, "the peer joined what was not handed over", now)
        return [self._forget(push, "", "")]

    def peer_lost(self, peer: ReplicaIdentity, now: float) -> list[PushAction]:
        """Note that the Peer link ended: stop every push over it."""
        actions: list[PushAction] = []
        for push in [item for item in self._pushes.values() if item.peer == peer]:
            actions += self._stop(push, f"the peer link to {peer.replica_id} was lost", now)
        return actions

    # ------------------------------------------------------------------------------------- from the ranks

    def push_done(self, rank: int, report: PushDone, now: float) -> list[PushAction]:
        """Send the sums of the pieces that a rank has written. The push is done when all ranks have
        reported."""
        self.counters.add(report)
        push = self._pushes.get(report.landing_id)
        if push is None or push.state is not _State.OPEN:
            return []
        push.progress_at = now
        order = push.running[report.push_id]
        order.ranks.add(rank)
        actions: list[PushAction] = []
        if report.pieces:
            order.num_bytes += report.num_bytes
            order.seconds = max(order.seconds, report.seconds)
            order.started_at = min(order.started_at or report.started_at, report.started_at)
            push.transports.update(report.transport.split("+"))
            actions.append(ToPeer(push.peer, Manifest(report.landing_id, report.pieces, order.group)))
        if len(order.ranks) < self._num_ranks:
            return actions
        del push.running[report.push_id]
        return [*actions, self._pushed(push, order), *self._ready(push)]

    def push_failed(self, rank: int, report: PushFailed, now: float) -> list[PushAction]:
        """Stop a landing that cannot be completed, because a push failed at a rank."""
        push = self._pushes.get(report.landing_id)
        if push is None or push.state is _State.STOPPING:
            return []
        return self._stop(push, f"rank {rank}: {report.reason}", now)

    def push_stopped(self, rank: int, report: PushStopped) -> list[PushAction]:
        """Take the fence of one rank; after the last one nothing of the landing is written any more."""
        push = self._pushes.get(report.landing_id)
        if push is None or push.state is not _State.STOPPING:
            return []
        push.stopped_ranks.add(rank)
        return self._acknowledge(push) if len(push.stopped_ranks) == self._num_ranks else []

    # ------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> list[PushAction]:
        """Call often: renews leases, and ends the ranks when one of them ignores a stop."""
        actions: list[PushAction] = []
        is_due = bool(self._pushes) and now >= self._next_renewal_at
        if is_due:
            self._next_renewal_at = now + self._config.landing_lease_s / 4
        for push in self._pushes.values():
            is_moving = now <= push.progress_at + self._config.landing_stall_s
            if is_due and is_moving and push.state in (_State.OPEN, _State.HANDED):
                progress = LandingProgress(push.request.landing_id, push.num_computed_tokens)
                actions.append(ToPeer(push.peer, progress))
            elif push.state is _State.STOPPING and now > push.stop_deadline:
                silent = sorted(set(range(self._num_ranks)) - push.stopped_ranks)
                reason = f"{_named(silent)} did not acknowledge a stop within {self._config.writer_ack_s} s"
                return [KillRanks(reason)]
        return actions

    # ---------------------------------------------------------------------------------------- private

    def _order(self, push: _Push, group: int, moves: tuple[BlockMove, ...]) -> list[PushAction]:
        if not moves:
            return []
        push.num_orders += 1
        self._next_push_id += 1
        push.running[self._next_push_id] = _Order(group)
        landing_id = push.request.landing_id
        order = PushOrder(self._next_push_id, push.connection_id, landing_id, moves, group=group)
        return [ToRanks(order)]

    def _pushed(self, push: _Push, order: _Order) -> Pushed:
        push.num_moved_bytes += order.num_bytes
        push.push_seconds += order.seconds
        push.started_at = push.started_at or order.started_at
        if order.num_bytes >= 1 << 16 and order.seconds > 0:
            counters, gb_s = self.counters, order.num_bytes / order.seconds / 1e9
            counters.gb_s = moving_average(counters.gb_s, gb_s, _RATE_WEIGHT)
        return Pushed(push.request.request_id, push.request.attempt, order.started_at, order.seconds)

    def _ready(self, push: _Push) -> list[PushAction]:
        if not push.prompt_done or push.running:
            return []
        push.state = _State.HANDED
        request = push.request
        return [
            HandOverReady(
                request.landing_id,
                request.request_id,
                request.attempt,
                push.peer,
                push.num_moved_bytes,
                "+".join(sorted(push.transports)),
                push.started_at,
                push.push_seconds,
            )
        ]

    def _stop(self, push: _Push, reason: str, now: float) -> list[PushAction]:
        if push.state is _State.STOPPING:
            return []
        push.stop_reason = reason
        if push.num_orders == 0:
            return self._acknowledge(push)
        push.state = _State.STOPPING
        push.stop_deadline = now + self._config.writer_ack_s
        return [ToRanks(StopPush(push.request.landing_id))]

    def _acknowledge(self, push: _Push) -> list[PushAction]:
        landing_id = push.request.landing_id
        message: PeerMessage
        if push.asked_by_peer:
            message = WriterStopped(landing_id)
        else:
            message = LandingAbort(landing_id, push.stop_reason, writers_stopped=True)
        return [ToPeer(push.peer, message), self._forget(push, "peer", push.stop_reason)]

    def _forget(self, push: _Push, error: str, reason: str, retry_after_s: float = 0.0) -> PushEnded:
        request = push.request
        del self._pushes[request.landing_id]
        del self._by_request[request.request_id, request.attempt]
        return PushEnded(request.request_id, request.attempt, error, reason, retry_after_s)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _find(self, request_id: str, attempt: int) -> _Push | None:
        landing_id = self._by_request.get((request_id, attempt))
        return None if landing_id is None else self._pushes[landing_id]

    def _of(self, peer: ReplicaIdentity, landing_id: bytes) -> _Push | None:
        push = self._pushes.get(landing_id)
        return push if push is not None and push.peer == peer else None


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
