"""Peer links: the engine core-to-engine core streams and, under them, the measured data connections between
ranks.

A replica opens one link to each decode replica it writes to, and accepts one from each replica that writes to
it. A link to a decode replica is usable when the compatibility records agree and every rank
has connected and measured its lanes; its `PrefillSide` is notified then, and when the link fails.

    unknown --ensure--> connecting --PeerHello equal--> measuring --PeerConnected of every rank--> ready
       ^                    |                               |                                       |
       +-- cooling down <---+-------------------------------+------ link or path lost --------------+

While it cools down, `ensure` reports the last reason at once; each failure in a row doubles the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.blocks.layout import (
    BlockLayout,
    PlannedPiece,
    intersect,
    landing_shards,
    plan_pieces,
)
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import backoff_s
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.config import TransferConfig
from kvtransfer.errors import IncompatibleError, TransferError, shown
from kvtransfer.messages import CompatibilityRecord, RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.peer_messages import PeerHello, PeerRefusal, PeerStopping
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.stream import FrameStream, open_link
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import ClosePeer, ConnectPeer, Lane
from kvtransfer.transfer_reports import LanePath, PeerConnected, PeerConnectFailed, PeerLost
from workers.interfaces import EngineControl, PrefillSide, RankChannel
from workers.messages.link import HandOverTarget
from workers.messages.peer_link import PEER_CODEC, PeerLinkMessage
from workers.stats_record import PathMeasure

_HELLO_TIMEOUT_S = 10.0
# The most ranks of a peer: planning takes as many steps as the product of both sides' ranks.
_MAX_RANKS = 1024
# The most bytes of a decode replica's answer: the block ids of a landing, or the endpoints of its ranks.
_MAX_ANSWER_BYTES = 16 << 20
_MAX_REFUSAL_CHARS = 2000

_log = logging.getLogger("tandem.peers")


@dataclass(slots=True)
class _DecodePeer:
    target: HandOverTarget
    side: PrefillSide
    connection_id: bytes
    stream: FrameStream | None = None
    # The lanes that each rank of ours has connected and measured.
    paths: dict[int, tuple[LanePath, ...]] = field(default_factory=dict)
    ready_at: float | None = None


@dataclass(slots=True)
class _PeerFailure:
    reason: str
    num_failures: int
    delay_s: float
    ends_at: float


class DecodeSide(Protocol):
    """The receiver of KV (`KvReceiver`): is notified when a writer's link opens (and which pieces of every
    block of each group of layers it will write into which of our ranks), its messages, and when the link
    ends."""

    def writer_joined(
        self, writer: ReplicaIdentity, pieces: Sequence[Sequence[tuple[int, Shard]]]
    ) -> None: ...
    def message(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None: ...
    def writer_lost(self, writer: ReplicaIdentity) -> None: ...


class Peers:
    """Holds the links of one engine core. After every event that they have passed on they call `wake`."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        compatibility: CompatibilityRecord,
        ranks: tuple[RankEndpoints, ...],
        config: TransferConfig,
        trust: Trust,
        clock: Clock,
        channel: RankChannel,
        control: EngineControl,
    ) -> None:
        """`ranks` are all of ours in rank order."""
        self._identity = identity
        self._compatibility = compatibility
        self._ranks = ranks
        self._config = config
        self._trust = trust
        self._clock = clock
        self._channel = channel
        self._control = control
        self._decode_peers: dict[ReplicaIdentity, _DecodePeer] = {}
        self._cooling: dict[ReplicaIdentity, _PeerFailure] = {}
        self._writers: dict[ReplicaIdentity, FrameStream] = {}
        self._tasks = SupervisedTasks(control.fail)

    # ------------------------------------------------------------------------ links to decode replicas

    def ensure(self, target: HandOverTarget, side: PrefillSide) -> None:
        """Open a link to `target` unless there is one (or one is being opened). `peer_failed` is called at
        once, before this returns, when the last attempt failed a short while ago."""
        if target.identity in self._decode_peers:
            return
        cooling = self._cooling.get(target.identity)
        left_s = 0.0 if cooling is None else cooling.ends_at - self._clock.now()
        if cooling is not None and left_s > 0:
            reason = f"{cooling.reason} (tried again in {left_s:.1f} s)"
            side.peer_failed(target.identity, reason)
            self._control.wake()
            return
        peer = self._decode_peers[target.identity] = _DecodePeer(target, side, draw_id())
        self._tasks.spawn(self._run_link(peer), f"peer {target.identity.replica_id}")

    def forget_others(self, peers: Sequence[ReplicaIdentity]) -> None:
        """Forget the failures of peers other than these: there are only these now."""
        self._cooling = {identity: it for identity, it in self._cooling.items() if identity in peers}

    def connection(self, peer: ReplicaIdentity) -> bytes | None:
        """Return the id of the measured data connection to `peer`; None while there is none."""
        link = self._decode_peers.get(peer)
        return link.connection_id if link is not None and link.ready_at is not None else None

    def send_to_reader(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Send a message to a decode replica; dropped when the link is gone (its loss is reported by
        `on_failed`)."""
        link = self._decode_peers.get(peer)
        if link is not None and link.stream is not None:
            link.stream.send(PEER_CODEC.encode(message))

    def path_report(self, rank: int, report: PeerConnected | PeerConnectFailed | PeerLost) -> None:
        """Take one rank's news about its lanes to a peer."""
        peer = next(
            (item for item in self._decode_peers.values() if item.connection_id == report.connection_id), None
        )
        if peer is None:
            return
        if not isinstance(report, PeerConnected):
            self._fail(peer, f"rank {rank}: {report.reason}")
            return
        self._log_paths(peer, rank, report.paths)
        peer.paths[rank] = report.paths
        if peer.ready_at is None and len(peer.paths) == len(self._ranks):
            peer.ready_at = self._clock.now()
            peer.side.peer_ready(peer.target.identity)
            self._control.wake()

    def paths(self) -> tuple[PathMeasure, ...]:
        """Return the measured paths, one for each lane, for reports; for a peer that no way leads to now, one
        that has no transport but the reason."""
        measured = tuple(
            PathMeasure(
                peer=peer.target.identity,
                rank=rank,
                peer_rank=path.peer_rank,
                transport=path.transport,
                gb_s=path.gb_s,
                latency_us=path.latency_us,
                device=path.device,
                instead_of=path.instead_of,
            )
            for peer in self._decode_peers.values()
            for rank, paths in sorted(peer.paths.items())
            for path in paths
        )
        missing = tuple(
            PathMeasure(identity, 0, 0, transport="", gb_s=0.0, latency_us=0.0, instead_of=cooling.reason)
            for identity, cooling in self._cooling.items()
            if self.connection(identity) is None
        )
        return measured + missing

    def _log_paths(self, peer: _DecodePeer, rank: int, paths: tuple[LanePath, ...]) -> None:
        """Log each path at join, and what has changed when a lane failed over later."""
        earlier = peer.paths.get(rank)
        for path in paths:
            if earlier is not None and path in earlier:
                continue
            is_as_wanted = earlier is None and not path.instead_of
            _log.log(
                logging.INFO if is_as_wanted else logging.WARNING,
                "%s rank %d %s to %s rank %d over %s on %s: %.2f GB/s, %.0f us%s",
                self._identity.replica_id,
                rank,
                "writes" if earlier is None else "has failed over and writes",
                peer.target.identity.replica_id,
                path.peer_rank,
                path.transport,
                path.device,
                path.gb_s,
                path.latency_us,
                f"; not as wanted: {path.instead_of}" if path.instead_of else "",
            )

    async def _run_link(self, peer: _DecodePeer) -> None:
        try:
            stream = peer.stream = await open_link(
                peer.target.address,
                "peer",
                self._trust,
                self._identity.replica_id,
                max_bytes=_MAX_ANSWER_BYTES,
            )
            stream.send(PEER_CODEC.encode(self._hello()))
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = await stream.receive()
            self._check_hello(peer, None if hello is None else PEER_CODEC.decode(hello))
            while (frame := await stream.receive()) is not None:
                message = PEER_CODEC.decode_known(frame)
                if message is None:
                    continue
                if isinstance(message, PeerStopping):
                    self._fail(peer, "it stops", is_expected=True)
                    return
                peer.side.message(peer.target.identity, message)
                self._control.wake()
            self._fail(peer, "the peer link closed")
        except TransferError as error:
            self._fail(peer, str(error))
        except TimeoutError:
            self._fail(peer, f"no answer within {_HELLO_TIMEOUT_S} s")

    def _check_hello(self, peer: _DecodePeer, hello: PeerLinkMessage | None) -> None:
        if isinstance(hello, PeerRefusal):
            raise IncompatibleError(shown(hello.reason, _MAX_REFUSAL_CHARS))
        if not isinstance(hello, PeerHello):
            raise IncompatibleError("the peer did not introduce itself")
        if hello.identity != peer.target.identity:
            raise IncompatibleError(f"expected {peer.target.identity}, found {hello.identity}")
        self._check_compatibility(hello)
        groups = self._plan(self._ranks, hello.ranks)
        for own in self._ranks:
            lanes = (
                Lane(hello.ranks[target], piece, group)
                for group, pieces in enumerate(groups)
                for source, target, piece in pieces
                if source == own.rank
            )
            connect = ConnectPeer(
                connection_id=peer.connection_id,
                writer=self._identity,
                peer=hello.identity,
                lanes=tuple(lanes),
                transports=self._config.transports,
                min_gb_s=self._config.min_gb_s,
                refuse_slow=self._config.below_floor == "refuse",
            )
            self._channel.send_to(own.rank, connect)

    def _fail(self, peer: _DecodePeer, reason: str, *, is_expected: bool = False) -> None:
        """Close the link to a peer and report the failure; `is_expected`: the peer has said that it stops."""
        if self._decode_peers.get(peer.target.identity) is not peer:
            return
        _log.log(
            logging.INFO if is_expected else logging.WARNING,
            "%s lost its way to %s: %s",
            self._identity.replica_id,
            peer.target.identity.replica_id,
            reason,
        )
        del self._decode_peers[peer.target.identity]
        self._cool_down(peer, reason)
        if peer.stream is not None:
            peer.stream.close()
        self._channel.send(ClosePeer(peer.connection_id))
        peer.side.peer_failed(peer.target.identity, reason)
        self._control.wake()

    def _cool_down(self, peer: _DecodePeer, reason: str) -> None:
        """Wait twice as long as the last time, unless the path was good for longer than that."""
        now, identity = self._clock.now(), peer.target.identity
        longest_s = self._config.max_cool_down_s
        earlier = self._cooling.pop(identity, None)
        num_failures = 1
        if earlier is not None and (peer.ready_at is None or now - peer.ready_at <= earlier.delay_s):
            num_failures += earlier.num_failures
        delay_s = backoff_s(num_failures, self._config.cool_down_s, longest_s)
        self._cooling = {key: it for key, it in self._cooling.items() if now < it.ends_at + longest_s}
        self._cooling[identity] = _PeerFailure(reason, num_failures, delay_s, now + delay_s)

    # ------------------------------------------------------------------------------ links of writers

    async def serve(self, stream: FrameStream, side: DecodeSide) -> None:
        """Serve an accepted Peer link until it ends."""
        frame = await stream.receive()
        hello = None if frame is None else PEER_CODEC.decode(frame)
        if not isinstance(hello, PeerHello):
            return
        try:
            self._check_compatibility(hello)
            groups = self._plan(hello.ranks, self._ranks)
        except IncompatibleError as error:
            stream.send(PEER_CODEC.encode(PeerRefusal(str(error))))
            await stream.receive()
            return
        writer = hello.identity
        earlier = self._writers.pop(writer, None)
        if earlier is not None:  # the writer lost it before this side has seen its end
            earlier.close()
            side.writer_lost(writer)
        self._writers[writer] = stream
        stream.send(PEER_CODEC.encode(self._hello()))  # before anything that `side` sends
        side.writer_joined(writer, [[(target, piece) for _, target, piece in it] for it in groups])
        try:
            while (frame := await stream.receive()) is not None and self._writers.get(writer) is stream:
                if (message := PEER_CODEC.decode_known(frame)) is not None:
                    side.message(writer, message)
                    self._control.wake()
        finally:
            if self._writers.get(writer) is stream:
                del self._writers[writer]
                side.writer_lost(writer)
                self._control.wake()

    def _check_compatibility(self, hello: PeerHello) -> None:
        ours = self._compatibility
        differences = ours.differences(hello.compatibility)
        if differences:
            raise IncompatibleError("; ".join(differences))
        if [item.rank for item in hello.ranks] != list(range(len(hello.ranks))):
            raise IncompatibleError("the peer did not introduce its ranks in order")
        if not 0 < len(hello.ranks) <= _MAX_RANKS:
            raise IncompatibleError(f"the peer has {len(hello.ranks)} ranks; 1 to {_MAX_RANKS} are possible")
        for item in hello.ranks:
            if intersect(item.shard, ours.shard) != item.shard:
                raise IncompatibleError(f"rank {item.rank} of the peer holds {item.shard} of {ours.shard}")

    def send_to_writer(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Send a message to a replica that writes here; dropped when its link is gone."""
        stream = self._writers.get(writer)
        if stream is not None:
            stream.send(PEER_CODEC.encode(message))

    def _plan(
        self, writer: Sequence[RankEndpoints], target: Sequence[RankEndpoints]
    ) -> list[list[PlannedPiece]]:
        """Plan who sends what of the blocks of each group of layers: the same pieces, where they have layers
        of the group."""
        targets = [(item.rank, item.shard) for item in target]
        if self._compatibility.is_given_on:
            targets = landing_shards(targets)
        pieces = plan_pieces([(item.rank, item.shard) for item in writer], targets)
        layouts = [
            BlockLayout.of(self._compatibility, self._compatibility.shard, group)
            for group in range(len(self._compatibility.groups) or 1)
        ]
        return [[it for it in pieces if layout.num_layers(it.piece)] for layout in layouts]

    def _hello(self) -> PeerHello:
        return PeerHello(self._identity, self._compatibility, self._ranks)

    async def close(self) -> None:
        """Close all links, after a `PeerStopping` to the writers."""
        for stream in self._writers.values():
            stream.send(PEER_CODEC.encode(PeerStopping()))
        for stream in [*self._writers.values(), *(p.stream for p in self._decode_peers.values() if p.stream)]:
            stream.close()
        await self._tasks.close()
