"""The port of a gateway for the other gateways of its application."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from cluster.errors import StartError
from cluster.gateway.fleet.messages import (
    ANSWER_CODEC,
    FLEET_PROTOCOL,
    MAX_QUERY_BYTES,
    PLACEMENT_CODEC,
    PLACEMENT_PROTOCOL,
    FleetHello,
    FleetRefusal,
    FollowPlacements,
    Hello,
    PlacementsRefused,
    decode_query,
)
from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import FrameStream, frame_stream
from kvtransfer.rpc.trust import Trust

_BACKLOG = 128
_STOP_S = 0.5

# Serves a stream whose hello was accepted, until it ends.
ServeStream = Callable[[FrameStream], Awaitable[None]]


class GatewayPort:
    """Takes connections that prove the cluster secret, and passes each on by its hello, which must name this
    gateway and its protocol. `start` listens, `stop` ends all connections."""

    def __init__(
        self,
        gateway_id: str,
        serve_queries: ServeStream,
        serve_placements: ServeStream,
        trust: Trust,
        clock: Clock,
    ) -> None:
        self._gateway_id = gateway_id
        self._serve_queries = serve_queries
        self._serve_placements = serve_placements
        self._trust = trust
        self._clock = clock
        self._listener: ProvenListener | None = None
        self._streams: set[FrameStream] = set()
        self._tasks = SupervisedTasks()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen, and return the port (a free one when `port` is 0); `StartError` when it is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise StartError(
                f"gateway.fleet_port: the gateway cannot listen on {host}:{port} for the others: "
                f"{error.strerror or error}; choose another port, or 0 for a free one"
            ) from error
        port = int(sock.getsockname()[1])
        self._listener = ProvenListener(
            sock, self._trust, self._serve, self._tasks.spawn, self._clock, "fleet"
        )
        return port

    async def stop(self) -> None:
        """End all connections, and take no more."""
        if self._listener is not None:
            self._listener.close()
        for stream in self._streams:
            stream.abort()
        await self._tasks.wait(_STOP_S)
        await self._tasks.close()

    async def _serve(self, sock: socket.socket, name: str) -> None:
        stream = await frame_stream(
            sock, name, self._trust.server_tls(sock), has_heartbeat=True, max_bytes=MAX_QUERY_BYTES
        )
        self._streams.add(stream)
        try:
            hello = decode_query(await stream.next_frame())
            if isinstance(hello, FleetHello | FollowPlacements):
                await self._serve_stream(hello, stream)
            stream.close()
            await stream.wait_closed()
        finally:
            stream.abort()
            self._streams.discard(stream)

    async def _serve_stream(self, hello: Hello, stream: FrameStream) -> None:
        """Serve a stream by its hello, or refuse it."""
        wants_queries = isinstance(hello, FleetHello)
        protocol = FLEET_PROTOCOL if wants_queries else PLACEMENT_PROTOCOL
        if (hello.protocol, hello.gateway_id) == (protocol, self._gateway_id):
            await (self._serve_queries if wants_queries else self._serve_placements)(stream)
            return
        kind = "fleet" if wants_queries else "placement"
        reason = f"this is gateway {self._gateway_id} with {kind} protocol {protocol}"
        if wants_queries:
            stream.send(ANSWER_CODEC.encode(FleetRefusal(reason)))
        else:
            stream.send(PLACEMENT_CODEC.encode(PlacementsRefused(reason)))
