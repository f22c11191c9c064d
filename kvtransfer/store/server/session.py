"""An engine core's session with the owner, over the connection that the engine core has opened."""

from __future__ import annotations

import logging

from kvtransfer.common.tasks import Spawn
from kvtransfer.errors import PeerGoneError
from kvtransfer.rpc.stream import FrameStream
from kvtransfer.store.messages.engine_session import EngineHello
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, TO_OWNER_CODEC, FromOwner
from kvtransfer.store.record import Writer
from kvtransfer.store.server.arena_manager import ArenaManager
from kvtransfer.store.server.node import StoreNode
from kvtransfer.store.server.session_decisions import SessionDecisions
from kvtransfer.store.server.writer_process import writer_of

_MAX_UNSENT_BYTES = 64 << 20

_log = logging.getLogger("tandem.store")


class EngineSession(SessionDecisions):
    """The session of one engine core, from its hello to the end of its connection."""

    def __init__(
        self,
        hello: EngineHello,
        stream: FrameStream,
        arena_manager: ArenaManager,
        node: StoreNode,
        spawn: Spawn,
    ) -> None:
        def writer(rank: int) -> Writer | None:
            process_id = arena_manager.writer_of(hello.session, rank)
            return None if process_id is None else writer_of(process_id, hello.session)

        super().__init__(hello, writer, node, spawn)
        self._stream = stream
        self._is_closed = False

    def send(self, message: FromOwner) -> None:
        """Queue a message; an engine core that does not read loses its connection."""
        self._stream.send(FROM_OWNER_CODEC.encode(message))
        if self._stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
            _log.error(
                "engine core %s does not read: its connection is closed", self._hello.replica.replica_id
            )
            self.close()

    def close(self) -> None:
        """End the connection; `serve` returns. Messages that were received and not yet handled are void: the
        engine core may have connected again, and an old commit must not apply to its new grants."""
        self._is_closed = True
        self._stream.abort()

    async def serve(self) -> None:
        """Answer until the connection ends (`PeerGoneError`) or breaks the protocol (`WireError`)."""
        self.begin()
        try:
            while True:
                frame = await self._stream.next_frame()
                if self._is_closed:
                    raise PeerGoneError("its connection was closed")
                if (message := TO_OWNER_CODEC.decode_known(frame)) is not None:
                    self.handle(message)
        finally:
            self._stream.abort()
            self.end()
