"""Streams that go on at another replica while they run: finished blocks first, then the state.

    Move --> QUEUED --in turn--> ASKED --granted--> COPYING --held, all is written--> HANDED --joined--> moved
               ^                   |                   |                                |
               +--- once more -----+-- too late, preempted, part of it in host memory   +-- target lost:
                                   |                   |                                |   fails, "leaving"
                                   +--- no room, aborted, push failed, peer lost -------+-- aborted there
                                                       v
                                           (it goes on here, its gateway hears why)

The sequence decodes until what is finished has been written; then it is held with its next token: it stands
still only while its last blocks and its state are on their way. Which token that is follows from the speed of
the transfer: a landing is asked for with more room than that takes. Called by the engine core, on its loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer.common.clock import Clock
from kvtransfer.messages import LandingRequest, ReplicaIdentity
from kvtransfer.protocol.actions import HandOverReady, PushEnded
from kvtransfer.rpc.handshake import draw_id
from workers.disagg.kv_sender import KvSender, RequestKey
from workers.messages import HandOver, HandOverTarget, Move, MoveEnded, RequestFailed
from workers.replica.gateway_links import GatewayKey, Gateways
from workers.scheduler.migration import Position
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import ChunkDone

# How long a landing may wait for room at the target; then the gateway chooses again.
ROOM_S = 2.0
# A landing has room for what is decoded in this time, beside the time that the copy takes.
AHEAD_S = 0.25
MAX_TRIES = 4
# A sequence that has fewer tokens to go ends here sooner than it moves.
_LEAST_LEFT = 4
_ASSUMED_STEP_S = 0.03
_ASSUMED_GB_S = 1.0

_log = logging.getLogger("tandem.moving")


class _State(Enum):
    QUEUED = auto()
    ASKED = auto()
    COPYING = auto()
    HANDED = auto()
    # Given up; what is being written for it is being stopped.
    ENDING = auto()


@dataclass(slots=True)
class _Move:
    gateway: GatewayKey
    target: HandOverTarget
    state: _State = _State.QUEUED
    num_tries: int = 0
    # Tokens that the landing has room for.
    capacity: int = 0
    # It is settled with how many tokens the sequence stops here.
    is_stopping: bool = False
    again: bool = False


class MigrationManager:
    """All moves away from one replica, `most` under way at a time; see the module's drawing.

    `on_ended(key)`: the request goes on elsewhere. `on_failed(failure)`: nobody knows whether it does.
    """

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        scheduler: Scheduler,
        outbound: KvSender,
        gateways: Gateways,
        clock: Clock,
        most: int,
        token_bytes: int,
        decode_step_s: Callable[[], float],
        on_ended: Callable[[RequestKey], None],
        on_failed: Callable[[RequestFailed], None],
        wake: Callable[[], None],
    ) -> None:
        """`token_bytes` is the KV of one token; `decode_step_s` the measured time of a step (0: not yet)."""
        self._identity = identity
        self._scheduler = scheduler
        self._outbound = outbound
        self._gateways = gateways
        self._clock = clock
        self._most = most
        self._token_bytes = token_bytes
        self._decode_step_s = decode_step_s
        self._on_ended = on_ended
        self._on_failed = on_failed
        self._wake = wake
        self._moves: dict[RequestKey, _Move] = {}
        self.num_moved = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._moves)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._moves

    # --------------------------------------------------------------------------------- gateway, engine

    def ask(self, gateway: GatewayKey, move: Move) -> None:
        """Move this request when its turn comes. What is not here (any more) has been answered already."""
        key = move.request_id, move.attempt
        if key in self._moves or not self._scheduler.is_here(*key):
            return
        self._moves[key] = _Move(gateway, move.target)
        if move.target.identity == self._identity:
            self._fail(key, "it runs there already")
        self._wake()

    def pump(self) -> None:
        """After every turn of the engine core: begin what may begin, take back what the scheduler has changed."""
        num_free = self._most - sum(move.state is not _State.QUEUED for move in self._moves.values())
        for key, move in list(self._moves.items()):
            if move.state is _State.QUEUED and num_free > 0 and key in self._moves:
                num_free -= self._begin(key, move)
            elif move.state is _State.ASKED:
                position = self._scheduler.migration.position(key)
                if position is None or position.num_tokens > move.capacity:
                    self._try_again(key, move, "no room in time")
            elif move.state is _State.COPYING and not self._scheduler.migration.is_on_its_way(key):
                self._try_again(key, move, "its blocks were needed")

    def progress(self, chunk: ChunkDone) -> None:
        """A sequence that moves has KV of one more token."""
        key = chunk.request_id, chunk.attempt
        move = self._moves.get(key)
        if move is not None and move.state is _State.COPYING:
            self._outbound.computed(key, chunk.num_computed_tokens, chunk.block_ids)

    def forget(self, key: RequestKey) -> bool:
        """The request is over here. Whether a landing of it may have to be given back."""
        return self._moves.pop(key, None) is not None

    # ------------------------------------------------------------------------------- from the transfer

    def granted(self, key: RequestKey) -> None:
        """There is room at the target: write what is finished."""
        move = self._moves[key]
        if move.state is not _State.ASKED:
            return
        if not self._scheduler.migration.hold_at(key, move.capacity):
            self._try_again(key, move, "no room in time")
            return
        move.state = _State.COPYING
        position = self._scheduler.migration.position(key)
        assert position is not None
        self._outbound.computed(key, position.num_settled, position.block_ids)
        self.pushed(key)

    def pushed(self, key: RequestKey) -> None:
        """Something is written. When nothing is left that can be, the sequence stops with its next token."""
        move = self._moves[key]
        if move.state is not _State.COPYING or move.is_stopping or not self._outbound.has_caught_up(key):
            return
        position = self._scheduler.migration.position(key)
        if position is not None and position.num_tokens < move.capacity:
            move.is_stopping = self._scheduler.migration.hold_at(key, position.num_tokens)
            self._outbound.end_at(key, position.num_tokens)

    def hand_over(self, ready: HandOverReady) -> HandOver:
        """Everything is written, the sequence is held: its state."""
        key = ready.request_id, ready.attempt
        move = self._moves[key]
        move.state = _State.HANDED
        return HandOver(
            ready.landing_id,
            self._scheduler.migration.state(key, self._clock.now()),
            *move.gateway,
            ready.num_moved_bytes,
            ready.transport,
            ready.push_started_at,
            ready.push_seconds,
        )

    def ended(self, ended: PushEnded) -> None:
        """The landing is over: joined at the target, or not."""
        key = ended.request_id, ended.attempt
        move = self._moves[key]
        if not ended.error:
            del self._moves[key]
            self.num_moved += 1
            self._scheduler.finish_hand_over(*key)
            self._gateways.post(move.gateway, MoveEnded(*key, move.target.identity))
            self._on_ended(key)
        elif move.again:
            self._scheduler.migration.resume(key)
            self._moves[key] = _Move(move.gateway, move.target, num_tries=move.num_tries)
        else:
            self._fail(key, ended.reason)
        self._wake()

    def peer_lost(self, peer: ReplicaIdentity, reason: str) -> None:
        """No way to this replica, before what is written there is stopped. A state that was sent may have
        arrived: then the sequence must not go on here as well, and its gateway decides."""
        for key, move in list(self._moves.items()):
            if move.target.identity != peer:
                continue
            if move.state is _State.HANDED:
                del self._moves[key]
                self.num_failed += 1
                self._scheduler.cancel(*key)
                lost = f"the way to {peer.replica_id} was lost with its state on it: {reason}"
                self._on_failed(RequestFailed(*key, "leaving", lost))
            elif move.state is _State.QUEUED:
                self._fail(key, reason)

    # ---------------------------------------------------------------------------------------- private

    def _begin(self, key: RequestKey, move: _Move) -> bool:
        """Ask for a landing, if there is a path and the sequence can move now."""
        target = move.target
        connection_id = self._outbound.peers.connection(target.identity)
        if connection_id is None:
            self._outbound.peers.ensure(target)
            return False
        position = self._scheduler.migration.position(key)
        if position is None or position.most_tokens - position.num_tokens < _LEAST_LEFT:
            return False
        move.state = _State.ASKED
        move.num_tries += 1
        move.capacity = self._capacity(position, move.num_tries)
        submission = self._scheduler.migration.submission(key)
        request = LandingRequest(
            landing_id=draw_id(),
            request_id=submission.request_id,
            attempt=submission.attempt,
            tenant=submission.tenant,
            priority=submission.priority,
            block_keys=self._scheduler.migration.block_keys(key),
            num_tokens=move.capacity,
            num_samples=1,
            deadline_s=ROOM_S,
            is_growing=True,
        )
        self._outbound.ask(request, target.identity, connection_id)
        return True

    def _capacity(self, position: Position, num_tries: int) -> int:
        """Room for the tokens of now and for those that are decoded until they are written."""
        gb_s = self._outbound.book.counters.gb_s or _ASSUMED_GB_S
        copy_s = position.num_tokens * self._token_bytes * self._most / gb_s / 1e9
        wanted_s = (AHEAD_S + copy_s) * (1 << (num_tries - 1))
        num_ahead = math.ceil(wanted_s / (self._decode_step_s() or _ASSUMED_STEP_S))
        return min(position.num_tokens + max(num_ahead, _LEAST_LEFT), position.most_tokens)

    def _try_again(self, key: RequestKey, move: _Move, reason: str) -> None:
        """Give the landing back and ask for another one, a few times."""
        move.state, move.again = _State.ENDING, move.num_tries < MAX_TRIES
        self._scheduler.migration.resume(key)
        self._outbound.stop(key, reason)

    def _fail(self, key: RequestKey, reason: str) -> None:
        move = self._moves.pop(key)
        self.num_failed += 1
        self._scheduler.migration.resume(key)
        _log.info("%s attempt %d stays here: %s", *key, reason, extra={"request_id": key[0]})
        self._gateways.post(move.gateway, MoveEnded(*key, move.target.identity, reason))
