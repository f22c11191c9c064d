"""The other gateways of the roster: who each one is, and how a stream to it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from cluster.gateway.fleet.messages import (
    FLEET_PROTOCOL,
    MAX_ANSWER_BYTES,
    MAX_PLACEMENT_FRAME_BYTES,
    PLACEMENT_PROTOCOL,
    QUERY_CODEC,
    FleetHello,
    FollowPlacements,
    Hello,
)
from cluster.roster.messages import GatewayRecord
from kvtransfer.rpc.stream import FrameStream, open_tcp
from kvtransfer.rpc.trust import Trust


class PeerGateway:
    """One life of another gateway, at its address. A stream to it raises `TransferError` when it fails."""

    def __init__(self, record: GatewayRecord, own_id: str, trust: Trust) -> None:
        self.gateway_id = record.gateway_id
        self._record = record
        self._own_id = own_id
        self._trust = trust

    def is_at(self, record: GatewayRecord) -> bool:
        """Whether this is the same life of the gateway, at the same address."""
        return (record.epoch, record.fleet) == (self._record.epoch, self._record.fleet)

    async def open_queries(self) -> FrameStream:
        """Open a stream for queries to the gateway."""
        return await self._open(FleetHello(FLEET_PROTOCOL, self.gateway_id), MAX_ANSWER_BYTES)

    async def open_placements(self) -> FrameStream:
        """Open a stream on which the gateway sends its placements."""
        return await self._open(
            FollowPlacements(PLACEMENT_PROTOCOL, self.gateway_id), MAX_PLACEMENT_FRAME_BYTES
        )

    async def _open(self, hello: Hello, max_bytes: int) -> FrameStream:
        stream = await open_tcp(
            self._record.fleet, self._trust, self._own_id, has_heartbeat=True, max_bytes=max_bytes
        )
        stream.send(QUERY_CODEC.encode(hello))
        return stream


class KnownPeer(Protocol):
    """What is kept of another gateway while it lives."""

    @property
    def peer(self) -> PeerGateway: ...


P = TypeVar("P", bound=KnownPeer)


class PeerGateways(Generic[P]):
    """What is kept of each other gateway, by id: begun when the roster first lists the gateway, and ended
    when it has left or has another life or address."""

    def __init__(
        self, own_id: str, trust: Trust, begin: Callable[[PeerGateway], P], end: Callable[[P], None]
    ) -> None:
        self.by_id: dict[str, P] = {}
        self._own_id = own_id
        self._trust = trust
        self._begin = begin
        self._end = end

    def update(self, gateways: Iterable[GatewayRecord]) -> None:
        """Take the gateways of the roster, from which this one is left out."""
        records = {it.gateway_id: it for it in gateways if it.gateway_id != self._own_id}
        for gateway_id, known in list(self.by_id.items()):
            if gateway_id not in records or not known.peer.is_at(records[gateway_id]):
                del self.by_id[gateway_id]
                self._end(known)
        for gateway_id, record in records.items():
            if gateway_id not in self.by_id:
                self.by_id[gateway_id] = self._begin(PeerGateway(record, self._own_id, self._trust))
