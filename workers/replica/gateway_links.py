"""The links that gateways open to an engine core: who they are first, then their messages, until they end.

News are collected during a step and sent as one `StepFrame` per gateway by `flush`. The engine core waits for
a gateway without a link (not yet, or not any more) during a short grace period; then its requests are
cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.common.clock import Clock
from kvtransfer.errors import TransferError
from kvtransfer.messages import KvEvents, KvSnapshot
from kvtransfer.rpc.stream import FrameStream
from workers.messages import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    GatewayHello,
    GatewayKey,
    HandOverReport,
    IsolationReport,
    Leaving,
    LinkDown,
    LinkUp,
    LoadReport,
    MoveEnded,
    News,
    PrefillReport,
    ReplicaHello,
    RequestFailed,
    RoleChanged,
    StepFrame,
    TokenDelta,
)

GATEWAY_GRACE_S = 3.0
LOAD_PERIOD_S = 0.2

_log = logging.getLogger("tandem.engine_core")


@dataclass(slots=True)
class _Port:
    stream: FrameStream | None
    lost_at: float
    news: list[News] = field(default_factory=list)
    load_sent_at: float = 0.0


class GatewayLinks:
    """All gateways that this engine core knows, with the news that wait for each of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ports: dict[GatewayKey, _Port] = {}

    async def serve(
        self,
        stream: FrameStream,
        hello: Callable[[], ReplicaHello],
        on_message: Callable[[GatewayKey, LinkDown], None],
    ) -> None:
        """Serve one link until it ends, passing on its messages. A gateway that sends nonsense loses its
        link."""
        frame = await stream.receive()
        greeting = None if frame is None else LINK_DOWN_CODEC.decode(frame)
        if not isinstance(greeting, GatewayHello):
            return
        key = greeting.gateway_id, greeting.epoch
        self.connected(key, stream)
        self.send(key, hello())
        try:
            while (frame := await stream.receive()) is not None:
                on_message(key, LINK_DOWN_CODEC.decode(frame))
        except TransferError as error:
            _log.warning("gateway %s sent nonsense: %s", greeting.gateway_id, error)
        finally:
            self.disconnected(key, stream)

    def connected(self, key: GatewayKey, stream: FrameStream) -> None:
        """Take in the link that a gateway has opened, and close an older one of the same gateway."""
        port = self._ports.setdefault(key, _Port(None, 0.0))
        if port.stream is not None:
            port.stream.close()
        port.stream = stream

    def disconnected(self, key: GatewayKey, stream: FrameStream) -> None:
        """Begin the grace period of a gateway whose link has ended."""
        port = self._ports.get(key)
        if port is not None and port.stream is stream:
            port.stream = None
            port.lost_at = self._clock.now()

    def expired(self) -> list[GatewayKey]:
        """Forget, and return, gateways whose grace period is over."""
        now = self._clock.now()
        gone = [
            key
            for key, port in self._ports.items()
            if port.stream is None and now > port.lost_at + GATEWAY_GRACE_S
        ]
        for key in gone:
            del self._ports[key]
        return gone

    def post(self, key: GatewayKey, news: News) -> None:
        """Add to the next frame for this gateway."""
        port = self._ports.get(key)
        if port is None:
            port = self._ports[key] = _Port(None, self._clock.now())
        port.news.append(news)

    def flush(self, load: Callable[[], LoadReport]) -> None:
        """Send what was posted, one frame per gateway, with a report made by `load` when one is due."""
        now = self._clock.now()
        for port in self._ports.values():
            load_due = now >= port.load_sent_at + LOAD_PERIOD_S
            if port.stream is None or not (port.news or load_due):
                continue
            if load_due:
                port.load_sent_at = now
            port.stream.send(LINK_UP_CODEC.encode(_frame(port.news, load() if load_due else None)))
            port.news = []

    def broadcast(self, message: KvEvents | KvSnapshot | Leaving | RoleChanged) -> None:
        """Send to every connected gateway."""
        frame = LINK_UP_CODEC.encode(message)
        for port in self._ports.values():
            if port.stream is not None:
                port.stream.send(frame)

    def send(self, key: GatewayKey, message: LinkUp) -> None:
        """Send to one gateway, if it is connected."""
        port = self._ports.get(key)
        if port is not None and port.stream is not None:
            port.stream.send(LINK_UP_CODEC.encode(message))

    def close(self) -> None:
        """Close every link."""
        for port in self._ports.values():
            if port.stream is not None:
                port.stream.close()


def _frame(news: list[News], load: LoadReport | None) -> StepFrame:
    return StepFrame(
        deltas=tuple(item for item in news if isinstance(item, TokenDelta)),
        prefills=tuple(item for item in news if isinstance(item, PrefillReport)),
        hand_overs=tuple(item for item in news if isinstance(item, HandOverReport)),
        failures=tuple(item for item in news if isinstance(item, RequestFailed)),
        load=load,
        moves=tuple(item for item in news if isinstance(item, MoveEnded)),
        isolations=tuple(item for item in news if isinstance(item, IsolationReport)),
    )
