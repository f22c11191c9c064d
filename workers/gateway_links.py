"""Serves the Links that gateways open to a brain: who they are first, then their messages, until they end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtransfer.errors import TransferError
from workers.gateways import GatewayKey, Gateways
from workers.links import FrameStream
from workers.messages import LINK_DOWN_CODEC, GatewayHello, LinkDown, ReplicaHello

_log = logging.getLogger("tandem.brain")


class GatewayLinks:
    """`on_message` takes what gateways say. A gateway that sends nonsense loses its Link."""

    def __init__(
        self,
        gateways: Gateways,
        hello: Callable[[], ReplicaHello],
        on_message: Callable[[GatewayKey, LinkDown], None],
    ) -> None:
        self._gateways = gateways
        self._hello = hello
        self._on_message = on_message

    async def serve(self, stream: FrameStream) -> None:
        """One Link, until it ends."""
        frame = await stream.receive()
        hello = None if frame is None else LINK_DOWN_CODEC.decode(frame)
        if not isinstance(hello, GatewayHello):
            return
        key = hello.gateway_id, hello.epoch
        self._gateways.connected(key, stream)
        self._gateways.send(key, self._hello())
        try:
            while (frame := await stream.receive()) is not None:
                self._on_message(key, LINK_DOWN_CODEC.decode(frame))
        except TransferError as error:
            _log.warning("gateway %s sent nonsense: %s", hello.gateway_id, error)
        finally:
            self._gateways.disconnected(key, stream)
