"""Gateways exchange their placements, so that they do not all choose the replica that was free a moment ago.

    RouterService --PlacementObserver--> PlacementFeed --frames--> every gateway that follows this one
    RouterService <--placements--------- PeerPlacements <--frames-- every other gateway

A stream goes to the other gateway's port for gateways (`cluster.gateway.fleet.gateway_port`), which sends a
snapshot of its placements, and then what changes, within `BATCH_S` and new placements at once. When a stream
ends, this gateway forgets the placements of the other one and continues with its own view and with those
that it hears. It names the other gateway in its log, status and metrics, and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.gateway.fleet.messages import MAX_REASON_CHARS
from cluster.gateway.fleet.peer_gateway import PeerGateway, PeerGateways
from cluster.gateway.fleet.peer_placements import PeerPlacements
from cluster.gateway.fleet.placement_feed import PlacementFeed
from cluster.roster.messages import GatewayRecord
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import Backoff
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import TransferError, WireError
from kvtransfer.rpc.stream import FrameStream
from kvtransfer.rpc.trust import Trust
from router.service import RouterService

# A new placement is sent with all others of the same turn of the event loop, since other gateways may choose
# the same replica at the same time. First tokens and ends wait for this time so that others can go with them.
BATCH_S = 0.005
# How long a new gateway waits for the placements of the others before it serves.
SNAPSHOT_WAIT_S = 2.0
# A follower that leaves more than this unread is cut off, and gets a snapshot when it comes again.
_MAX_UNSENT_BYTES = 8 << 20
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """Another gateway, the placements heard of it, and why none are ("": it is heard)."""

    peer: PeerGateway
    placements: PeerPlacements
    reason: str = "not connected yet"
    has_failed: bool = False
    task: asyncio.Task[None] | None = None


class PlacementExchange:
    """Follows the placements of all other gateways, and sends this one's to those that follow it."""

    def __init__(
        self, gateway_id: str, router: RouterService, feed: PlacementFeed, trust: Trust, clock: Clock
    ) -> None:
        self._router = router
        self._feed = feed
        self._clock = clock
        self._followed = PeerGateways(gateway_id, trust, self._begin_following, self._end_following)
        # The streams on which this gateway's placements go out.
        self.followers: set[FrameStream] = set()
        # Set when one of the followed gateways became current or failed.
        self._news = asyncio.Event()
        self._tasks = SupervisedTasks()

    def start(self) -> None:
        """Send changes from now on; must be called on the event loop."""
        self._tasks.spawn(self._send_changes(), "placements")

    async def stop(self) -> None:
        """Follow nobody, and send nothing any more."""
        for stream in tuple(self.followers):
            stream.close()
        await self._tasks.close()
        self._followed.update(())

    def update(self, gateways: Iterable[GatewayRecord]) -> None:
        """Follow these gateways, except this one, from now on, and forget the placements of all others."""
        self._followed.update(it for it in gateways if it.fleet)
        self._router.set_shared(bool(self._followed.by_id))

    async def wait_current(self, limit_s: float) -> dict[str, str]:
        """Return when the snapshots of all followed gateways are here, or after `limit_s`; returns `missing`
        of that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.missing():
                    self._news.clear()
                    await self._news.wait()
        return self.missing()

    def missing(self) -> dict[str, str]:
        """Return why its placements are not known, by the id of each gateway that is not heard."""
        return {name: it.reason for name, it in sorted(self._followed.by_id.items()) if it.reason}

    @property
    def heard(self) -> list[str]:
        """The ids of the gateways whose placements are counted here."""
        return [name for name, it in self._followed.by_id.items() if not it.reason]

    @property
    def num_placements(self) -> int:
        """Number of requests of other gateways that are counted here."""
        return sum(it.placements.num_placements for it in self._followed.by_id.values())

    # --------------------------------------------------------------------------- what this gateway places

    async def serve(self, stream: FrameStream) -> None:
        """Send the placements of this gateway until the stream ends."""
        self._flush()
        for frame in self._feed.snapshot(self._router.own_placements()):
            stream.send(frame)
        self.followers.add(stream)
        try:
            if await stream.receive() is not None:
                raise WireError("a follower of placements has nothing to say")
        finally:
            self.followers.discard(stream)
            if not self.followers:
                self._feed.stop()

    async def _send_changes(self) -> None:
        while True:
            await self._feed.changed.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BATCH_S):
                    await self._feed.urgent.wait()
            self._flush()

    def _flush(self) -> None:
        frames = self._feed.take()
        for stream in tuple(self.followers):
            for frame in frames:
                stream.send(frame)
            if stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
                _log.warning("%s does not read the placements that it follows, and is cut off", stream.name)
                stream.abort()

    # -------------------------------------------------------------------------------- what others place

    def _begin_following(self, peer: PeerGateway) -> _Followed:
        followed = _Followed(peer, PeerPlacements(peer.gateway_id, self._router, self._clock))
        followed.task = self._tasks.spawn(self._follow(followed), f"placements of {peer.gateway_id}")
        return followed

    def _end_following(self, followed: _Followed) -> None:
        assert followed.task is not None
        followed.task.cancel()
        followed.placements.close()
        self._news.set()

    async def _follow(self, followed: _Followed) -> None:
        """Receive the placements of another gateway until this task is cancelled."""
        backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        name = followed.peer.gateway_id
        while True:
            try:
                await self._hear(followed, backoff)
                reason = "its stream ended"
            except TransferError as error:
                reason = str(error)[:MAX_REASON_CHARS]
            followed.placements.close()
            followed.reason = f"its placements are not heard: {reason}"
            if not followed.has_failed:
                _log.warning("gateway %s: %s; routing goes on without them", name, followed.reason)
            followed.has_failed = True
            self._news.set()
            await self._clock.sleep(backoff.failed())

    async def _hear(self, followed: _Followed, backoff: Backoff) -> None:
        stream = await followed.peer.open_placements()
        try:
            while (frame := await stream.receive()) is not None:
                followed.placements.on_frame(frame)
                if followed.placements.is_current and followed.reason:
                    if followed.has_failed:
                        _log.warning("gateway %s: its placements are heard again", followed.peer.gateway_id)
                    followed.reason, followed.has_failed = "", False
                    backoff.reset()
                    self._news.set()
        finally:
            stream.abort()
