"""Notices when another rank of the stage ends, while this rank's own thread waits for the device."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Mapping


class PeerWatch:
    """Calls `on_end(rank)`, on a thread of its own, when the process of a rank has ended or left. `sockets`
    lead to the ranks, nothing is ever sent over them, and the kernel closes those of a process that dies."""

    def __init__(self, sockets: Mapping[int, socket.socket], on_end: Callable[[int], None]) -> None:
        self._ranks = {sock.fileno(): rank for rank, sock in sockets.items()}
        self._sockets = list(sockets.values())
        self._on_end = on_end
        self._closed, self._close = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more, and close the sockets: this rank has left."""
        os.close(self._close)
        self._thread.join()
        os.close(self._closed)
        for sock in self._sockets:
            sock.close()

    def _watch(self) -> None:
        ends = select.poll()
        for descriptor in (self._closed, *self._ranks):
            ends.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in ends.poll():
                if descriptor == self._closed:
                    return
                ends.unregister(descriptor)
                self._on_end(self._ranks[descriptor])
