"""Speak mutual TLS on a blocking socket."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence

from kvtransfer.rpc.tls_errors import lost_in_handshake, refusal


class TlsSocket(ssl.SSLSocket):
    """A blocking socket for which `SSLContext.wrap_socket` calls this class. After `open`, one thread may
    receive while another one sends and a third shuts it down.

    OpenSSL must not be entered by two threads at once, nor hold up one while it waits for the other: so each
    call is made without waiting, under a lock, and waits are outside of it.
    """

    _calls: threading.Lock | None = None
    _patience_s: float | None = None

    def open(self, name: str, timeout_s: float) -> None:
        """Run the handshake with `name`. `ProofError` names the one whose certificate was refused,
        `PeerGoneError`: the connection ended."""
        self.settimeout(timeout_s)
        try:
            self.do_handshake()
        except ssl.SSLError as error:
            raise refusal(error, name) from error
        except OSError as error:
            raise lost_in_handshake(name) from error
        self.settimeout(0.0)
        self._calls = threading.Lock()

    def settimeout(self, value: float | None) -> None:
        """Bound every later wait; None: not at all."""
        if self._calls is None:
            super().settimeout(value)
        else:
            self._patience_s = value

    def recv_into(self, buffer: memoryview | bytearray, nbytes: int | None = None, flags: int = 0) -> int:  # type: ignore[override]
        assert self._calls is not None, "opened"
        while True:
            try:
                with self._calls:
                    return super().recv_into(buffer, nbytes)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        buffer = bytearray(buflen)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:  # type: ignore[override]
        view = memoryview(data)
        while view:
            view = view[self._send_some(view) :]
            if view:
                self._wait(select.POLLOUT)

    def sendmsg(  # type: ignore[override]
        self, buffers: Iterable[memoryview], ancdata: Sequence[object] = (), flags: int = 0
    ) -> int:
        """Send the bytes that go without a wait. `BlockingIOError` when none do; the next call must then
        begin with the same bytes."""
        num_sent = 0
        for view in buffers:
            count = self._send_some(view)
            num_sent += count
            if count < len(view):
                break
        if not num_sent:
            raise BlockingIOError
        return num_sent

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Iterable[memoryview], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[object], int, object]:
        """Receive the bytes that are there, without a wait. `BlockingIOError` when there are none."""
        assert self._calls is not None, "opened"
        num_received = 0
        try:
            for view in buffers:
                start = 0
                while start < len(view):
                    with self._calls:
                        count = super().recv_into(view[start:])
                    if count == 0:
                        return num_received, [], 0, None
                    start += count
                    num_received += count
        except ssl.SSLWantReadError:
            if not num_received:
                raise BlockingIOError from None
        return num_received, [], 0, None

    def shutdown(self, how: int) -> None:
        """End the connection. Unlike the base class it keeps the TLS state, or another thread would take the
        bytes still to be received for plain ones."""
        socket.socket.shutdown(self, how)

    def _send_some(self, view: memoryview) -> int:
        assert self._calls is not None, "opened"
        num_sent = 0
        try:
            while num_sent < len(view):
                with self._calls:
                    num_sent += super().send(view[num_sent:])
        except ssl.SSLWantWriteError:
            pass
        return num_sent

    def _wait(self, event: int) -> None:
        ready = select.poll()
        ready.register(self, event)
        if not ready.poll(None if self._patience_s is None else self._patience_s * 1e3):
            raise TimeoutError("timed out")
