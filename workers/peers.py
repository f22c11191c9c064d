"""Peer links: the brain-to-brain streams and, under them, the measured data connections between ranks.

A replica opens one link to each decode replica it writes to (`outbound`) and accepts one from each replica
that writes to it (`inbound`). An outbound link is usable when the compatibility records agree and the rank
has connected and measured its path; until then, and when it fails, whoever asked for it is told.

    unknown --ensure--> connecting --PeerHello equal--> measuring --PeerConnected--> ready
                            |                               |                         |
                            +------- failed (told once; the next ensure tries again) <-+ link or path lost
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.config import TransferConfig
from kvtransfer.errors import IncompatibleError, TransferError
from kvtransfer.messages import (
    ClosePeer,
    CompatibilityRecord,
    ConnectPeer,
    PeerConnected,
    PeerConnectFailed,
    PeerHello,
    PeerLost,
    PeerRefusal,
    RankEndpoints,
    ReplicaIdentity,
    TransferOrder,
)
from kvtransfer.secret import draw_id
from workers.links import FrameStream, open_stream
from workers.messages import PEER_CODEC, HandOverTarget, PathMeasure, PeerLinkMessage

_HELLO_TIMEOUT_S = 10.0

_log = logging.getLogger("tandem.peers")


@dataclass(slots=True)
class _Outbound:
    target: HandOverTarget
    connection_id: bytes
    stream: FrameStream | None = None
    path: PeerConnected | None = None


class PrefillSide(Protocol):
    """Whoever writes to peers: hears their messages, and the fate of `ensure`."""

    def message(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None: ...
    def peer_ready(self, peer: ReplicaIdentity) -> None: ...
    def peer_failed(self, peer: ReplicaIdentity, reason: str) -> None: ...


class DecodeSide(Protocol):
    """Whoever peers write to: hears their messages, and when a writer's link ends."""

    def message(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None: ...
    def writer_lost(self, writer: ReplicaIdentity) -> None: ...


class Peers:
    """The links of one brain. After every event it has passed on it calls `wake`."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        compatibility: CompatibilityRecord,
        ranks: tuple[RankEndpoints, ...],
        config: TransferConfig,
        secret: bytes,
        order: Callable[[TransferOrder], None],
        prefill_side: PrefillSide,
        decode_side: DecodeSide,
        wake: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` hears of errors of ours, after which nothing here may be trusted."""
        self._identity = identity
        self._compatibility = compatibility
        self._ranks = ranks
        self._config = config
        self._secret = secret
        self._order = order
        self._prefill_side = prefill_side
        self._decode_side = decode_side
        self._wake = wake
        self._on_error = on_error
        self._outbound: dict[ReplicaIdentity, _Outbound] = {}
        self._inbound: dict[ReplicaIdentity, FrameStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------- outbound

    def ensure(self, target: HandOverTarget) -> None:
        """Open a link to `target` unless there is one (or one is being opened)."""
        if target.identity not in self._outbound:
            peer = self._outbound[target.identity] = _Outbound(target, draw_id())
            self._spawn(self._run_outbound(peer), f"peer {target.identity.replica_id}")

    def connection(self, peer: ReplicaIdentity) -> bytes | None:
        """The id of the measured data connection to `peer`; None while there is none."""
        outbound = self._outbound.get(peer)
        return outbound.connection_id if outbound is not None and outbound.path is not None else None

    def send_outbound(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """To a decode replica; dropped when the link is gone (its loss is reported by `on_failed`)."""
        outbound = self._outbound.get(peer)
        if outbound is not None and outbound.stream is not None:
            outbound.stream.send(PEER_CODEC.encode(message))

    def path_report(self, report: PeerConnected | PeerConnectFailed | PeerLost) -> None:
        """The rank's news about a data connection."""
        peer = next(
            (item for item in self._outbound.values() if item.connection_id == report.connection_id), None
        )
        if peer is None:
            return
        if isinstance(report, PeerConnected):
            peer.path = report
            _log.info(
                "%s writes to %s over %s: %.2f GB/s, %.0f us",
                self._identity.replica_id,
                peer.target.identity.replica_id,
                report.transport,
                report.gb_s,
                report.latency_us,
            )
            self._prefill_side.peer_ready(peer.target.identity)
            self._wake()
        else:
            self._fail(peer, report.reason)

    def paths(self) -> tuple[PathMeasure, ...]:
        """The measured paths, for reports."""
        return tuple(
            PathMeasure(
                peer.target.identity,
                self._ranks[0].rank,
                peer.path.peer_rank,
                peer.path.transport,
                peer.path.gb_s,
                peer.path.latency_us,
            )
            for peer in self._outbound.values()
            if peer.path is not None
        )

    async def _run_outbound(self, peer: _Outbound) -> None:
        try:
            stream = peer.stream = await open_stream(
                peer.target.address, "peer", self._secret, self._identity.replica_id
            )
            stream.send(PEER_CODEC.encode(PeerHello(self._identity, self._compatibility, ())))
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = await stream.receive()
            self._check_hello(peer, None if hello is None else PEER_CODEC.decode(hello))
            while (frame := await stream.receive()) is not None:
                self._prefill_side.message(peer.target.identity, PEER_CODEC.decode(frame))
                self._wake()
            self._fail(peer, "the peer link closed")
        except TransferError as error:
            self._fail(peer, str(error))
        except TimeoutError:
            self._fail(peer, f"no answer within {_HELLO_TIMEOUT_S} s")

    def _check_hello(self, peer: _Outbound, hello: PeerLinkMessage | None) -> None:
        if isinstance(hello, PeerRefusal):
            raise IncompatibleError(hello.reason)
        if not isinstance(hello, PeerHello):
            raise IncompatibleError("the peer did not introduce itself")
        if hello.identity != peer.target.identity:
            raise IncompatibleError(f"expected {peer.target.identity}, found {hello.identity}")
        self._order(
            ConnectPeer(
                connection_id=peer.connection_id,
                writer=self._identity,
                peer=hello.identity,
                ranks=hello.ranks,
                transports=self._config.transports,
                min_gb_s=self._config.min_gb_s,
            )
        )

    def _fail(self, peer: _Outbound, reason: str) -> None:
        if self._outbound.get(peer.target.identity) is not peer:
            return
        _log.warning(
            "%s lost its way to %s: %s", self._identity.replica_id, peer.target.identity.replica_id, reason
        )
        del self._outbound[peer.target.identity]
        if peer.stream is not None:
            peer.stream.close()
        self._order(ClosePeer(peer.connection_id))
        self._prefill_side.peer_failed(peer.target.identity, reason)
        self._wake()

    # -------------------------------------------------------------------------------------- inbound

    async def serve(self, stream: FrameStream) -> None:
        """Handler of an accepted Peer link; runs until it ends."""
        frame = await stream.receive()
        hello = None if frame is None else PEER_CODEC.decode(frame)
        if not isinstance(hello, PeerHello):
            return
        differences = self._compatibility.differences(hello.compatibility)
        if differences:
            stream.send(PEER_CODEC.encode(PeerRefusal("; ".join(differences))))
            await stream.receive()
            return
        writer = hello.identity
        earlier = self._inbound.pop(writer, None)
        if earlier is not None:  # the writer lost it before this side has seen its end
            earlier.close()
            self._decode_side.writer_lost(writer)
        self._inbound[writer] = stream
        stream.send(PEER_CODEC.encode(PeerHello(self._identity, self._compatibility, self._ranks)))
        try:
            while (frame := await stream.receive()) is not None:
                self._decode_side.message(writer, PEER_CODEC.decode(frame))
                self._wake()
        finally:
            if self._inbound.get(writer) is stream:
                del self._inbound[writer]
                self._decode_side.writer_lost(writer)
                self._wake()

    def send_inbound(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """To a replica that writes here; dropped when its link is gone."""
        stream = self._inbound.get(writer)
        if stream is not None:
            stream.send(PEER_CODEC.encode(message))

    async def close(self) -> None:
        """Close all links."""
        for stream in [*self._inbound.values(), *(p.stream for p in self._outbound.values() if p.stream)]:
            stream.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
