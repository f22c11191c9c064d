"""The connections of a gateway to the replicas: follows the roster, keeps a link to each, feeds the router.

What concerns requests goes to `ConnectionEvents`; the rest (loads, KV events, leaving) is handled here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from msgspec.structs import replace

from cluster.gateway.circuit_breaker import TURN_S, CircuitBreaker, CircuitBreakers
from cluster.gateway.frame_parts import step_parts
from cluster.gateway.reported_load import routed_load, routed_queue
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import GatewayRecord, ReplicaRecord, RosterView, StoreRecord
from cluster.roster.state import RosterClient
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import Backoff
from kvtransfer.errors import PeerGoneError, TransferError, WireError
from kvtransfer.kv_events import KvEvents, KvSnapshot, KvSnapshotRequest
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream, open_link
from kvtransfer.rpc.trust import Trust
from router.membership import ROLES
from router.service import RouterService
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    Announce,
    CachePurged,
    Cancel,
    GatewayHello,
    HandOverTarget,
    Leaving,
    LinkDown,
    LinkUp,
    LoadReport,
    Move,
    PauseBatch,
    PurgeCache,
    ReplicaHello,
    RoleChanged,
    StepFrame,
    Submission,
)
from workers.stats_record import PathMeasure

_VIEW_TIMEOUT_S = 10.0
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_HELLO_TIMEOUT_S = 10.0
# An engine core reports several times a second. The Link of one that is silent for this long is closed.
SILENCE_S = 8.0
# Streams are resumed elsewhere when a replica has stood still for this time, and certainly not because of the
# network.
STREAMS_S = 2.0
# No submission is added when this number of bytes waits on a Link.
MAX_UNSENT_BYTES = 8 << 20

# A replica answers a purge between two steps.
_PURGE_S = 10.0

_log = logging.getLogger(__name__)


class ConnectionEvents(Protocol):
    """The receiver of the replicas' news: `cluster.gateway.request_manager.RequestManager`."""

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """Handle a replica's report of a step."""

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """Handle that the connection to this life of the replica has ended."""

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Handle whether streams may continue on this replica: not if it leaves, or its role is "prefill"."""

    def on_stopped(self, source: ReplicaIdentity, reason: str, includes_streams: bool) -> None:
        """Handle that a replica stands still, while another is usable: requests without a token there are
        placed again, and if it `includes_streams` the streams from there too. Repeated while that is so."""

    def on_breaker(self, source: ReplicaIdentity, breaker: CircuitBreaker) -> None:
        """Handle a change of the state of this replica's circuit breaker."""

    def on_members(self) -> None:
        """Handle that replicas came or left, so that the limits of serving may have changed."""


class ReplicaState(StrEnum):
    """The state of one replica, as this gateway sees it."""

    CONNECTING = "connecting"
    READY = "ready"
    LEAVING = "leaving"
    # It serves another model or block size than the others; see `note`.
    REFUSED = "refused"


@dataclass(slots=True)
class ReplicaView:
    """A gateway's knowledge of one replica of the roster. `hello` is None until it was connected."""

    record: ReplicaRecord
    state: ReplicaState = ReplicaState.CONNECTING
    note: str = ""
    # The reason why requests avoid the replica: the note of its circuit breaker.
    avoided: str = ""
    hello: ReplicaHello | None = None
    load: LoadReport | None = None
    load_at: float = 0.0
    paths: tuple[PathMeasure, ...] = ()
    stream: FrameStream | None = field(default=None, repr=False)
    # Purges that it has not answered yet, by number.
    purges: dict[int, asyncio.Future[CachePurged]] = field(default_factory=dict, repr=False)

    @property
    def epoch(self) -> int:
        """The epoch of the life that was connected last; 0 before the first."""
        return self.hello.identity.epoch if self.hello else 0

    @property
    def role(self) -> str:
        """The role that the replica has now."""
        return self.hello.role if self.hello else self.record.role

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be routed to the replica."""
        return self.state is ReplicaState.READY and self.stream is not None


class ReplicaConnections:
    """Roster, links and router of one gateway.

        roster.view --> one task per listed replica: connect -> hello -> snapshot -> frames ... -> lost
                              ^                                                          |
                              +------------- again after a pause, while listed ----------+

    A replica that is no longer listed keeps its link until that ends by itself: the roster may be wrong for
    a while, and the streams must not suffer from it.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        epoch: int,
        block_tokens: int,
        roster: RosterClient,
        router: RouterService,
        trust: Trust,
        clock: Clock,
        start_patience_s: float = 0.0,
    ) -> None:
        """`start_patience_s`: how long a request waits for the first replica where pools may have none;
        0: they always have some."""
        self.start_patience_s = start_patience_s
        self._hello = GatewayHello(gateway_id, epoch)
        self._block_tokens = block_tokens
        self._roster = roster
        self._router = router
        self._trust = trust
        self._clock = clock
        self._events: ConnectionEvents
        self._listed: frozenset[str] = frozenset()
        self._views: dict[str, ReplicaView] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self.breakers = CircuitBreakers(router.members, self._on_breaker, clock.now())
        self._num_purges = 0
        self.gateways: tuple[GatewayRecord, ...] = ()
        self.stores: tuple[StoreRecord, ...] = ()
        # The latest view of the roster.
        self.roster_view = RosterView(version=0)
        # The properties that the connected replicas agree on; those of the first one.
        self.compatibility: CompatibilityRecord | None = None
        # The bytes of KV of one token; 0 before the first replica has connected.
        self._token_bytes = 0
        self._pauses_batch = False
        # The least of the replicas connected so far that can serve alone; 0 before the first.
        self.max_context_tokens = 0
        # The least KV blocks of these replicas; 0 before the first.
        self.min_kv_blocks = 0

    def start(self, events: ConnectionEvents) -> None:
        """Follow the roster from now on, and report to `events`; must be called on the event loop."""
        self._events = events
        self._watching = [
            asyncio.create_task(self._watch(), name="roster-watch"),
            asyncio.create_task(self._watch_silence(), name="silence-watch"),
        ]

    async def stop(self) -> None:
        """Close every link."""
        tasks = [*self._tasks.values(), *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for view in self._views.values():
            if view.stream is not None:
                view.stream.close()

    def views(self) -> list[ReplicaView]:
        """Return all replicas of the roster, and those still connected, by id."""
        return [self._views[replica_id] for replica_id in sorted(self._views)]

    def find(self, replica_id: str) -> ReplicaView | None:
        """Return the listed or connected replica of this id."""
        return self._views.get(replica_id)

    def pool_of(self, replica_id: str) -> str:
        """Return the pool of the replica of this id; "" when it is not known any more."""
        view = self._views.get(replica_id)
        return view.record.pool if view else ""

    def token_bytes(self) -> int:
        """Return the bytes of KV of one token; 0 before the first replica has connected."""
        return self._token_bytes

    def target(self, replica_id: str) -> HandOverTarget | None:
        """Return the identity and address of the connected replica of this id; None when there is none."""
        view = self._views.get(replica_id)
        if view is None or view.stream is None or view.hello is None:
            return None
        return HandOverTarget(view.hello.identity, view.record.address)

    def has_route(self) -> bool:
        """Whether any request could be placed: a decode replica is a complete engine. Where pools may have no
        replica, one starts for the request."""
        if self.start_patience_s and self.compatibility is not None:
            return True
        return any(view.takes_requests and view.role != "prefill" for view in self._views.values())

    def is_connected(self) -> bool:
        """Whether there is a link to any replica, also one that leaves."""
        return any(view.stream is not None for view in self._views.values())

    def pause_batch(self, is_paused: bool) -> None:
        """Ask all replicas to leave the class `batch` out of their steps, or to run it again."""
        if is_paused != self._pauses_batch:
            self._pauses_batch = is_paused
            for view in self._views.values():
                _send(view.stream, PauseBatch(is_paused))

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        """Queue the message on the link to this life of the replica; False when there is none."""
        view = self._views.get(replica.replica_id)
        if view is None or view.hello is None or view.hello.identity != replica:
            return False
        is_behind = view.stream is not None and view.stream.num_unsent_bytes > MAX_UNSENT_BYTES
        if not isinstance(message, Submission):
            return not (is_behind and isinstance(message, Announce)) and _send(view.stream, message)
        if is_behind or not _send(view.stream, message):
            why = "does not read what waits for it" if is_behind else "its link is gone"
            self.breakers.failed(replica, message.request_id, why, self._clock.now())
            return False
        self.breakers.submitted(replica, message.request_id)
        if message.decode is not None:
            self.breakers.submitted(message.decode.identity, message.request_id)
        return True

    def release(self, request_id: str) -> None:
        """Note that the attempt of this request is over: it is the probe of no circuit breaker any more."""
        self.breakers.released(request_id)

    async def purge_caches(
        self, group: str | None, model: str | None, remaining_s: float | None
    ) -> list[admin_pb.ReplicaPurged]:
        """Purge the caches of this sharing group on replicas of models whose fingerprint begins so; None: of
        all.

        Each replica is listed with the outcome, or with the reason why that is not known.
        """
        limit_s = _PURGE_S if remaining_s is None else min(_PURGE_S, remaining_s / 2)
        views = [view for view in self.views() if _serves(view, model)]
        return list(await asyncio.gather(*(self._purge(view, group, limit_s) for view in views)))

    def purge(self, view: ReplicaView, group: str | None) -> asyncio.Future[CachePurged]:
        """Order a replica to purge its cached KV of the group (None: of all). The future has the answer, or
        `PeerGoneError` when there is no link to the replica or that ends first."""
        self._num_purges = number = self._num_purges + 1
        answer: asyncio.Future[CachePurged] = asyncio.get_running_loop().create_future()
        if _send(view.stream, PurgeCache(number, group)):
            view.purges[number] = answer
            # The purge is forgotten also when nobody waits any more.
            answer.add_done_callback(lambda _: view.purges.pop(number, None))
        else:
            answer.set_exception(PeerGoneError(view.note or "no link to it yet"))
        return answer

    async def _purge(self, view: ReplicaView, group: str | None, limit_s: float) -> admin_pb.ReplicaPurged:
        reply = admin_pb.ReplicaPurged(replica_id=view.record.identity.replica_id)
        try:
            async with asyncio.timeout(limit_s):
                purged = await self.purge(view, group)
        except PeerGoneError as error:
            reply.error = f"not purged for certain: {error}"
        except TimeoutError:
            reply.error = f"no answer within {limit_s:.1f} s; it may still do what was asked"
        else:
            reply.num_blocks, reply.num_held = purged.num_blocks, purged.num_held
            reply.num_requests = purged.num_requests
        return reply

    # ------------------------------------------------------------------------------------- roster

    async def _watch(self) -> None:
        version = -1
        while True:
            view = await self._roster.view(version, _VIEW_TIMEOUT_S if version >= 0 else 0.0)
            if view.version <= version:
                continue
            version = view.version
            self.gateways, self.stores, self.roster_view = view.gateways, view.stores, view
            self._update({record.identity.replica_id: record for record in view.replicas})

    def _update(self, records: dict[str, ReplicaRecord]) -> None:
        self._listed = frozenset(records)
        for replica_id, record in records.items():
            view = self._views.setdefault(replica_id, ReplicaView(record))
            view.record = record
            if view.stream is not None and view.epoch < record.identity.epoch:
                view.stream.close()  # replaced: what still answers there is of an earlier life
            if record.leaving and view.state is ReplicaState.READY:
                self._set_leaving(view)
            task = self._tasks.get(replica_id)
            if task is None or task.done():
                self._tasks[replica_id] = asyncio.create_task(
                    self._follow(replica_id), name=f"link {replica_id}"
                )
        self._events.on_members()

    # ------------------------------------------------------------------------------- stopped replicas

    async def _watch_silence(self) -> None:
        while True:
            await self._clock.sleep(TURN_S)
            self.breakers.advance(self._clock.now())
            for view in self.views():
                if view.stream is not None and view.hello is not None:
                    self._look_after(view, view.hello.identity, view.stream)

    def _look_after(self, view: ReplicaView, replica: ReplicaIdentity, stream: FrameStream) -> None:
        """Close the Link of a replica that was silent for too long; let requests leave one that stands
        still."""
        silent_s, stalled_s = self.breakers.silent_s(replica), self.breakers.stalled_s(replica)
        if silent_s >= SILENCE_S:
            view.note = f"nothing was heard for {SILENCE_S:g} s"
            stream.abort()
            return
        breaker = self.breakers.of(replica)
        if breaker is None or not breaker.is_stopped or not self._has_other(view):
            return
        is_dead = silent_s >= STREAMS_S and stream.is_acknowledged
        self._events.on_stopped(replica, breaker.reason, is_dead or stalled_s >= STREAMS_S)

    def _has_other(self, stopped: ReplicaView) -> bool:
        """Whether another replica that can serve alone, as each but a prefill replica can, is usable."""
        return any(
            view is not stopped and view.takes_requests and view.role != "prefill" and not view.avoided
            for view in self._views.values()
        )

    def _on_breaker(self, replica: ReplicaIdentity, breaker: CircuitBreaker) -> None:
        view = self._views.get(replica.replica_id)
        if view is None:
            return
        view.avoided = breaker.note
        if breaker.is_stopped and view.stream is not None:
            view.stream.ping()  # which the host of a process that is stopped acknowledges
        self._events.on_breaker(replica, breaker)

    # --------------------------------------------------------------------------------------- links

    async def _follow(self, replica_id: str) -> None:
        """Keep a link to the replica until the roster forgets it."""
        backoff = Backoff(_MIN_BACKOFF_S, _MAX_BACKOFF_S)
        view = self._views[replica_id]
        while replica_id in self._listed:
            try:
                stream = await open_link(view.record.address, "link", self._trust, self._hello.gateway_id)
            except TransferError as error:
                view.note = str(error)
                _log.info("no link to %s: %s", replica_id, error)
            else:
                if await self._serve_link(view, stream):
                    backoff.reset()
            await self._clock.sleep(backoff.failed())
        del self._views[replica_id], self._tasks[replica_id]
        self.breakers.forget(replica_id)

    async def _serve_link(self, view: ReplicaView, stream: FrameStream) -> bool:
        """Use the link until it ends. False when the replica did not become ready on it."""
        reason = "the link ended"
        try:
            hello = await self._greet(stream)
            if hello is None or not self._join(view, hello, stream):
                return False
            while (frame := await stream.receive()) is not None:
                self.breakers.heard(hello.identity)
                message = LINK_UP_CODEC.decode_known(frame)
                if isinstance(message, StepFrame):
                    await self._on_step(view, hello.identity, message)
                elif message is not None:
                    self._on_message(view, hello.identity, message)
            if self.breakers.silent_s(hello.identity) >= SILENCE_S:
                reason = view.note
                _log.warning("link to %s closed: %s", view.record.identity.replica_id, reason)
        except TransferError as error:
            reason = str(error)
            view.note = reason
            _log.warning("link to %s closed: %s", view.record.identity.replica_id, error)
        finally:
            stream.close()
            if view.stream is stream:
                self._leave(view, reason)
        return True

    async def _greet(self, stream: FrameStream) -> ReplicaHello | None:
        _send(stream, self._hello)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                frame = await stream.receive()
        except TimeoutError:
            return None
        message = None if frame is None else LINK_UP_CODEC.decode(frame)
        return message if isinstance(message, ReplicaHello) else None

    def _join(self, view: ReplicaView, hello: ReplicaHello, stream: FrameStream) -> bool:
        reason = self._refusal(view.record, hello)
        if reason:
            if view.note != reason:
                _log.error("replica %s is not used: %s", hello.identity.replica_id, reason)
            view.state, view.note = ReplicaState.REFUSED, reason
            return False
        if self.compatibility is None or not self.is_connected():
            self.compatibility = hello.compatibility
            self._token_bytes = hello.compatibility.token_bytes
            self.max_context_tokens = self.min_kv_blocks = 0
        if hello.role != "prefill":  # a prompt too long for a prefill replica is routed around it
            known = self.max_context_tokens or hello.max_context_tokens
            self.max_context_tokens = min(known, hello.max_context_tokens)
            num_blocks = hello.load.num_total_blocks
            self.min_kv_blocks = min(self.min_kv_blocks or num_blocks, num_blocks)
        view.hello, view.stream, view.note = hello, stream, ""
        view.state = ReplicaState.READY
        self._router.add_replica(hello.identity, hello.role)
        self.breakers.joined(hello.identity)
        breaker = self.breakers.of(hello.identity)
        view.avoided = "" if breaker is None else breaker.note
        self._on_load(view, hello.load)
        _send(stream, KvSnapshotRequest("connect", takes_parts=True))
        if self._pauses_batch:
            _send(stream, PauseBatch(True))
        if view.record.leaving:
            self._set_leaving(view)
        _log.info("link to %s is up: role %s", hello.identity.replica_id, hello.role)
        self._events.on_members()
        return True

    def _refusal(self, record: ReplicaRecord, hello: ReplicaHello) -> str:
        """Return why this replica cannot be used; "" when it can."""
        if hello.identity.replica_id != record.identity.replica_id:
            return f"its address answers as {hello.identity.replica_id}"
        if hello.role not in ROLES:
            return f"it has role {hello.role[:20]!r}, not one of {', '.join(ROLES)}"
        if hello.compatibility.block_tokens != self._block_tokens:
            return f"block_tokens {hello.compatibility.block_tokens}, configured {self._block_tokens}"
        if self.compatibility is None or not self.is_connected():
            return ""
        return "; ".join(self.compatibility.differences(hello.compatibility))

    def _leave(self, view: ReplicaView, reason: str) -> None:
        assert view.hello is not None
        identity = view.hello.identity
        view.stream = None
        view.state = ReplicaState.CONNECTING
        view.note = reason
        for answer in view.purges.values():
            if not answer.done():
                answer.set_exception(PeerGoneError(reason))
        self._router.remove_replica(identity.replica_id)
        self.breakers.left(identity, reason, self._clock.now())
        _log.info("link to %s is down: %s", identity.replica_id, reason)
        self._events.on_lost(identity, reason)
        self._events.on_members()

    def _set_leaving(self, view: ReplicaView) -> None:
        view.state = ReplicaState.LEAVING
        self._router.members.set_leaving(view.record.identity.replica_id)
        if view.hello is not None:
            self._events.on_streams(view.hello.identity, may_stay=False)

    def _set_role(self, view: ReplicaView, changed: RoleChanged) -> None:
        hello = view.hello
        if hello is None or changed.epoch <= hello.role_epoch:
            return
        view.hello = replace(hello, role=changed.role, role_epoch=changed.epoch)
        self._router.add_replica(hello.identity, changed.role)
        _log.info("%s has role %s from now on", hello.identity.replica_id, changed.role)
        may_stay = changed.role != "prefill" and view.state is not ReplicaState.LEAVING
        self._events.on_streams(hello.identity, may_stay=may_stay)
        self._events.on_members()

    # -------------------------------------------------------------------------------------- frames

    async def _on_step(self, view: ReplicaView, identity: ReplicaIdentity, frame: StepFrame) -> None:
        """Pass a frame on in parts, between which the event loop does other work."""
        _check_sender(frame, identity)
        if frame.load is not None:
            self._on_load(view, frame.load)
        elif frame.queue is not None:
            self._router.loads.on_queue(identity, routed_queue(frame.queue), self._clock.now())
        *first_parts, last = step_parts(frame)
        for part in first_parts:
            self._events.on_step(identity, part)
            await self._clock.sleep(0)
        self._events.on_step(identity, last)

    def _on_message(self, view: ReplicaView, identity: ReplicaIdentity, message: LinkUp) -> None:
        _check_sender(message, identity)
        if isinstance(message, KvEvents):
            in_order = self._router.tree.apply_events(message)
            if not in_order:
                self._ask_snapshot(view)
        elif isinstance(message, KvSnapshot):
            view.note = ""
            if self._router.tree.apply_snapshot(message) and message.next_part:
                _send(view.stream, KvSnapshotRequest("next", takes_parts=True, part=message.next_part))
        elif isinstance(message, Leaving):
            self._set_leaving(view)
            self._events.on_members()
        elif isinstance(message, RoleChanged):
            self._set_role(view, message)
        elif isinstance(message, CachePurged):
            answer = view.purges.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _ask_snapshot(self, view: ReplicaView) -> None:
        if view.note != "waits for a snapshot":  # one request at a time
            view.note = "waits for a snapshot"
            _send(view.stream, KvSnapshotRequest("gap", takes_parts=True))

    def _on_load(self, view: ReplicaView, load: LoadReport) -> None:
        view.load, view.load_at = load, self._clock.now()
        view.paths = load.paths
        self.breakers.reported(load.identity, load.stalled_s, view.load_at)
        self._router.loads.on_load(routed_load(load, view.hello, view.load_at))


def _serves(view: ReplicaView, model: str | None) -> bool:
    """Whether the replica may serve the model, as one that never was connected may."""
    if model is None or view.hello is None:
        return True
    return view.hello.compatibility.model_fingerprint.hex().startswith(model)


def _send(stream: FrameStream | None, message: LinkDown) -> bool:
    if stream is None or stream.closed:
        return False
    stream.send(LINK_DOWN_CODEC.encode(message))
    return True


def _check_sender(message: LinkUp, identity: ReplicaIdentity) -> None:
    """Raise `WireError`, which ends the Link, where a replica speaks for another one, or names no role."""
    about = identity
    if isinstance(message, StepFrame):
        about = identity if message.load is None else message.load.identity
    elif isinstance(message, KvEvents | KvSnapshot):
        about = message.publisher
    elif isinstance(message, RoleChanged) and message.role not in ROLES:
        raise WireError(f"role {message.role[:20]!r} is not one of {', '.join(ROLES)}")
    if about != identity:
        raise WireError(f"a {type(message).__name__} of {about.replica_id[:64]!r} came from another replica")
