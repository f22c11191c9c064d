"""Run the index server of an application that names none, for as long as `tandem serve` runs."""

from __future__ import annotations

import asyncio
import logging
import threading

from kvtransfer.common.clock import Clock
from kvtransfer.errors import StoreError
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index.redis_server import RedisServer

_log = logging.getLogger("tandem.store")


_WATCH_S = 0.5


class IndexServer:
    """Runs a Redis server from construction to `close`; one that dies is restarted at the same address.

    The stores notice its loss themselves, and announce all they hold to the new one.
    """

    def __init__(self, host: str, trust: Trust, clock: Clock) -> None:
        """`StoreError` when there is no server to start, or it does not start."""
        self._host = host
        self._trust = trust
        self._clock = clock
        self._ended = threading.Event()
        self._server = asyncio.run(RedisServer.start(host, trust, clock))
        # Without the password, which `index_url` adds.
        self.url = self._server.public_url
        self._watching = threading.Thread(target=self._watch, name="index-server", daemon=True)
        self._watching.start()

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        """End the server and wait for its end."""
        self._ended.set()
        self._watching.join()
        self._server.close()

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            if self._server.is_running:
                continue
            _log.warning("the index server ended; starting another at port %d", self._server.port)
            self._server.close()
            try:
                self._server = asyncio.run(
                    RedisServer.start(self._host, self._trust, self._clock, port=self._server.port)
                )
            except StoreError as error:
                _log.warning("no index server: %s", error)
