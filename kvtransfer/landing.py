"""Landings, the decode side: who may write incoming KV into which blocks, and until when (sans-I/O).

The brain feeds in messages, reports and the time, and carries out the returned actions.

    LandingRequest -> WAITING --grant--> OPEN --HandOver, all pieces verified--> (landed, forgotten)
                        |                 |
                     refused           aborted (cancel, deadline, lease, peer lost, writer's abort)
                                          |
                                     QUARANTINED --WriterStopped | no one-sided writer | WriterGone--> freed

A landing's blocks return to the pool only when no writer can touch them any more; no timer ends quarantine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvtransfer.config import TransferConfig
from kvtransfer.messages import (
    CloseLanding,
    LandingAbort,
    LandingClosed,
    LandingGrant,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    OpenLanding,
    PeerMessage,
    PieceCheck,
    ReplicaIdentity,
    TransferOrder,
    Verified,
    VerifyOrder,
    WriterStopped,
)

_AGING_S = 10.0
"""A waiting landing gains one level of priority in this time."""


class BlockSource(Protocol):
    """What a landing needs of the block pool (see `workers.engine.blocks.BlockPool`)."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_total(self) -> int: ...
    def match(self, keys: Sequence[bytes]) -> list[int]: ...
    def acquire(self, block_ids: Sequence[int]) -> None: ...
    def allocate(self, num_blocks: int) -> list[int]: ...
    def release(self, block_ids: Sequence[int]) -> None: ...
    def quarantine(self, block_ids: Sequence[int]) -> None: ...
    def release_quarantine(self, block_ids: Sequence[int]) -> None: ...


class ToWriter(NamedTuple):
    """Action: send `message` on the Peer link of `writer`."""

    writer: ReplicaIdentity
    message: PeerMessage


class ToRanks(NamedTuple):
    """Action: send `order` to every rank of this replica."""

    order: TransferOrder


class Landed(NamedTuple):
    """Action: join the sequence. `block_ids` cover the whole prompt; their references pass to the caller.
    The KV of the first `num_valid_tokens` tokens is held or verified."""

    landing_id: bytes
    block_ids: tuple[int, ...]
    num_valid_tokens: int
    num_held_tokens: int
    num_bad_pieces: int


class Lost(NamedTuple):
    """Action: an open landing ended here without hand-over (for the caller's records)."""

    landing_id: bytes
    request_id: str
    attempt: int
    reason: str


Action = ToWriter | ToRanks | Landed | Lost


class _State(Enum):
    WAITING = "waiting"
    OPEN = "open"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Landing:
    request: LandingRequest
    writer: ReplicaIdentity
    arrived_at: float
    state: _State = _State.WAITING
    held: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    lease_end: float = 0.0
    pending: deque[tuple[int, ...]] = field(default_factory=deque)
    """Block indices of each `VerifyOrder` that is not answered yet."""
    good: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    handed_over: bool = False
    num_closed_ranks: int = 0


class LandingBook:
    """All landings of one decode replica; see the module's drawing."""

    def __init__(
        self, config: TransferConfig, pool: BlockSource, block_tokens: int, num_ranks: int = 1
    ) -> None:
        self._config = config
        self._pool = pool
        self._block_tokens = block_tokens
        self._num_ranks = num_ranks
        self._landings: dict[bytes, _Landing] = {}
        self._seconds_per_grant = 0.0
        self._last_grant_at = 0.0
        self.num_refused = 0

    @property
    def num_waiting(self) -> int:
        return sum(landing.state is _State.WAITING for landing in self._landings.values())

    @property
    def num_open(self) -> int:
        return sum(landing.state is _State.OPEN for landing in self._landings.values())

    @property
    def num_references(self) -> int:
        """Block references that open landings hold."""
        return sum(
            len(item.held) + len(item.blocks) for item in self._landings.values() if item.state is _State.OPEN
        )

    # ------------------------------------------------------------------------------------- messages

    def request(
        self, writer: ReplicaIdentity, request: LandingRequest, now: float, *, idle: bool
    ) -> list[Action]:
        """A prefill replica wants a place. `idle`: nothing runs here that could need the growth reserve."""
        needed = self._num_blocks(request.num_tokens) + 1
        if needed > self._pool.num_total:
            reason = f"the prompt needs {needed} blocks, this replica has {self._pool.num_total}"
            return [self._refuse(writer, request, reason, retry_after_s=0.0)]
        num_waiting = self.num_waiting
        wait_s = self._seconds_per_grant * (num_waiting + 1)
        if num_waiting >= self._config.landing_queue:
            return [self._refuse(writer, request, "the landing queue is full", wait_s)]
        if request.deadline_s is not None and num_waiting and wait_s > request.deadline_s:
            reason = f"a wait of about {wait_s:.1f} s would miss the deadline in {request.deadline_s:.1f} s"
            return [self._refuse(writer, request, reason, wait_s)]
        self._landings[request.landing_id] = _Landing(request, writer, now)
        return self.grant(now, idle=idle)

    def grant(self, now: float, *, idle: bool) -> list[Action]:
        """Open as many waiting landings as fit, oldest and most urgent first."""
        waiting = [item for item in self._landings.values() if item.state is _State.WAITING]
        waiting.sort(
            key=lambda item: (-(item.request.priority + (now - item.arrived_at) / _AGING_S), item.arrived_at)
        )
        actions: list[Action] = []
        for landing in waiting:
            if not self._open(landing, now, idle=idle):
                break
            request = landing.request
            actions.append(ToRanks(OpenLanding(request.landing_id, landing.writer, tuple(landing.blocks))))
            num_held = len(landing.held) * self._block_tokens
            actions.append(
                ToWriter(landing.writer, LandingGrant(request.landing_id, num_held, tuple(landing.blocks)))
            )
        return actions

    def manifest(self, writer: ReplicaIdentity, manifest: Manifest, now: float) -> list[Action]:
        """Pieces are written: verify them where they lie."""
        landing = self._of(writer, manifest.landing_id)
        if landing is None or landing.state is not _State.OPEN:
            return []
        first, checks = len(landing.held), []
        for piece in manifest.pieces:
            if not 0 <= piece.block_index - first < len(landing.blocks):
                return self.abort(manifest.landing_id, f"manifest names block {piece.block_index}")
            block_id = landing.blocks[piece.block_index - first]
            checks.append(PieceCheck(block_id, piece.block_index, piece.shard, piece.checksum))
        landing.lease_end = now + self._config.landing_lease_s
        if not checks:
            return []
        landing.pending.append(tuple(check.block_index for check in checks))
        return [ToRanks(VerifyOrder(manifest.landing_id, tuple(checks)))]

    def progress(self, writer: ReplicaIdentity, landing_id: bytes, now: float) -> None:
        """The writer is alive and working: renew the lease."""
        landing = self._of(writer, landing_id)
        if landing is not None:
            landing.lease_end = now + self._config.landing_lease_s

    def verified(self, report: Verified) -> list[Action]:
        """A rank has summed the pieces of the oldest unanswered `VerifyOrder`."""
        landing = self._landings.get(report.landing_id)
        if landing is None or landing.state is not _State.OPEN:
            return []
        landing.bad.update(report.bad_block_indices)
        landing.good.update(landing.pending.popleft())
        return self._land(landing)

    def hand_over(self, writer: ReplicaIdentity, landing_id: bytes, now: float) -> list[Action] | None:
        """The sequence state arrived. None: there is no such landing (any more)."""
        landing = self._of(writer, landing_id)
        if landing is None or landing.state is not _State.OPEN:
            return None
        landing.handed_over = True
        landing.lease_end = now + self._config.landing_lease_s
        return self._land(landing)

    def aborted_by_writer(self, writer: ReplicaIdentity, abort: LandingAbort) -> list[Action]:
        """The prefill side gave up."""
        landing = self._of(writer, abort.landing_id)
        if landing is None:
            return []
        if not abort.writers_stopped:
            return self.abort(abort.landing_id, abort.reason)
        actions: list[Action] = [Lost(*_name(landing), abort.reason)] if landing.state is _State.OPEN else []
        if landing.state is not _State.WAITING:
            actions.append(ToRanks(CloseLanding(abort.landing_id)))
        self._free(landing)
        return actions

    def writer_stopped(self, writer: ReplicaIdentity, message: WriterStopped) -> None:
        """The acknowledgement that ends quarantine."""
        landing = self._of(writer, message.landing_id)
        if landing is not None and landing.state is _State.QUARANTINED:
            self._free(landing)

    # ---------------------------------------------------------------------------------- rank reports

    def closed(self, report: LandingClosed) -> None:
        """A rank accepts nothing more for the landing; without a one-sided writer that frees it."""
        landing = self._landings.get(report.landing_id)
        if landing is not None and landing.state is _State.QUARANTINED and not report.writer_may_write:
            landing.num_closed_ranks += 1
            if landing.num_closed_ranks == self._num_ranks:
                self._free(landing)

    def writer_gone(self, writer: ReplicaIdentity) -> list[Action]:
        """Proof that `writer` can no longer write (one rank a replica: every connection is closed)."""
        actions: list[Action] = []
        for landing in self._of_writer(writer):
            if landing.state is _State.OPEN:
                actions.append(Lost(*_name(landing), "the writer is gone"))
                actions.append(ToRanks(CloseLanding(landing.request.landing_id)))
            self._free(landing)
        return actions

    # ------------------------------------------------------------------------------------- our side

    def abort(self, landing_id: bytes, reason: str) -> list[Action]:
        """End a landing from this side (cancel, deadline, lease, nonsense from the peer)."""
        landing = self._landings.get(landing_id)
        if landing is None or landing.state is _State.QUARANTINED:
            return []
        if landing.state is _State.WAITING:
            del self._landings[landing_id]
            return [self._refuse(landing.writer, landing.request, reason, 0.0)]
        self._pool.release(landing.held)
        landing.held = []
        self._pool.quarantine(landing.blocks)
        landing.state = _State.QUARANTINED
        return [
            Lost(*_name(landing), reason),
            ToRanks(CloseLanding(landing_id)),
            ToWriter(landing.writer, LandingAbort(landing_id, reason, writers_stopped=False)),
        ]

    def cancel(self, request_id: str, attempt: int) -> list[Action]:
        """Abort whatever lands for this attempt of a request."""
        return [
            action
            for landing in list(self._landings.values())
            if (landing.request.request_id, landing.request.attempt) == (request_id, attempt)
            for action in self.abort(landing.request.landing_id, "cancelled")
        ]

    def writer_lost(self, writer: ReplicaIdentity) -> list[Action]:
        """The Peer link ended. That is no proof of death: open landings go to quarantine."""
        actions: list[Action] = []
        for landing in self._of_writer(writer):
            if landing.state is _State.WAITING:
                del self._landings[landing.request.landing_id]
            else:
                actions += self.abort(landing.request.landing_id, "the peer link was lost")
        return actions

    def expire(self, now: float) -> list[Action]:
        """Abort landings without progress and refuse those whose deadline passed while they waited."""
        actions: list[Action] = []
        for landing in list(self._landings.values()):
            request = landing.request
            if landing.state is _State.OPEN and now > landing.lease_end:
                actions += self.abort(request.landing_id, f"no progress for {self._config.landing_lease_s} s")
            elif (
                landing.state is _State.WAITING
                and request.deadline_s is not None
                and now > landing.arrived_at + request.deadline_s
            ):
                actions += self.abort(request.landing_id, "the deadline passed while waiting for room")
        return actions

    def check(self) -> None:
        """Assert that no landing holds what its state does not allow."""
        for landing in self._landings.values():
            if landing.state is _State.WAITING:
                assert not landing.held
                assert not landing.blocks
            if landing.state is _State.QUARANTINED:
                assert not landing.held

    # -------------------------------------------------------------------------------------- private

    def _open(self, landing: _Landing, now: float, *, idle: bool) -> bool:
        held = self._pool.match(landing.request.block_keys)
        num_needed = self._num_blocks(landing.request.num_tokens) - len(held)
        self._pool.acquire(held)
        busy = not idle or self.num_open > 0
        reserve = int(self._config.growth_reserve * self._pool.num_total) if busy else 0
        if self._pool.num_free - num_needed < max(reserve, landing.request.num_samples):
            self._pool.release(held)
            return False
        landing.held = held
        landing.blocks = self._pool.allocate(num_needed)
        landing.state = _State.OPEN
        landing.lease_end = now + self._config.landing_lease_s
        if landing.arrived_at < now and self._last_grant_at:
            gap = now - max(self._last_grant_at, landing.arrived_at)
            self._seconds_per_grant = 0.7 * self._seconds_per_grant + 0.3 * gap
        self._last_grant_at = now
        return True

    def _land(self, landing: _Landing) -> list[Action]:
        if not landing.handed_over or landing.pending:
            return []
        landing_id, num_held = landing.request.landing_id, len(landing.held)
        num_valid = num_held
        good = landing.good - landing.bad
        while num_valid in good:
            num_valid += 1
        num_tokens = min(num_valid * self._block_tokens, landing.request.num_tokens)
        del self._landings[landing_id]
        return [
            ToRanks(CloseLanding(landing_id)),
            ToWriter(landing.writer, LandingResult(landing_id, num_tokens, len(landing.bad))),
            Landed(
                landing_id,
                (*landing.held, *landing.blocks),
                num_tokens,
                num_held * self._block_tokens,
                len(landing.bad),
            ),
        ]

    def _free(self, landing: _Landing) -> None:
        if landing.state is _State.OPEN:
            self._pool.release(landing.held)
            self._pool.release(landing.blocks)
        elif landing.state is _State.QUARANTINED:
            self._pool.release_quarantine(landing.blocks)
        del self._landings[landing.request.landing_id]

    def _refuse(
        self, writer: ReplicaIdentity, request: LandingRequest, reason: str, retry_after_s: float
    ) -> ToWriter:
        self.num_refused += 1
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
