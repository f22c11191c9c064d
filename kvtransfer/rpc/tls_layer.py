"""Speak mutual TLS on a stream of an event loop."""

from __future__ import annotations

import asyncio
import ssl
from typing import cast

from kvtransfer.rpc.tls_errors import lost_in_handshake, refusal

_BUFFER_BYTES = 64 << 10
# Bytes encrypted before they are passed on.
_FLUSH_BYTES = 1 << 20


class TlsLayer(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of a connection's transport, and itself the transport of the protocol above. asyncio's own
    has no half-close, on which the end of a stream of frames rests, drops the alert that says why a
    certificate was refused, and does not count what waits to be sent."""

    def __init__(self, context: ssl.SSLContext, above: asyncio.BufferedProtocol, name: str) -> None:
        """`name` is the peer, for errors."""
        super().__init__()
        self._above = above
        self._name = name
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self.is_server)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._below: asyncio.Transport
        self._is_open = False
        # Done when the handshake is; `ProofError` or `PeerGoneError` when it failed.
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The error that broke TLS after that.
        self.error: ssl.SSLError | None = None

    # ----------------------------------------------------------------------- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._handshake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(memoryview(self._buffer)[:nbytes])
        if not self._is_open:
            self._handshake()
        if self._is_open:
            self._deliver()

    def eof_received(self) -> bool | None:
        return self._above.eof_received() if self._is_open else False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self._above.connection_lost(self.error or exc)
        elif not self.opened.done():
            self.opened.set_exception(lost_in_handshake(self._name))

    # ---------------------------------------------------------------------- called by the protocol above

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[self._tls.write(view) :]
            except ssl.SSLError as error:
                self._break(error)
            if self._outgoing.pending >= _FLUSH_BYTES or not view:
                self._flush()

    def write_eof(self) -> None:
        self._below.write_eof()

    def close(self) -> None:
        self._below.close()

    def abort(self) -> None:
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._below.get_extra_info(name, default)

    # ---------------------------------------------------------------------------------------- private

    def _handshake(self) -> None:
        if self.opened.done():
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._below.close()
            self.opened.set_exception(refusal(error, self._name))
        else:
            self._flush()
            self._is_open = True
            self.opened.set_result(None)
            self._above.connection_made(self)

    def _deliver(self) -> None:
        try:
            while count := self._read_into(memoryview(self._above.get_buffer(-1))):
                self._above.buffer_updated(count)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._break(error)

    def _read_into(self, buffer: memoryview) -> int:
        """Return the number of bytes; 0: the other side has ended TLS."""
        count = self._tls.read(len(buffer), buffer)
        assert isinstance(count, int), "read into a buffer"
        return count

    def _flush(self) -> None:
        if (data := self._outgoing.read()) and not self._below.is_closing():
            self._below.write(data)

    def _break(self, error: ssl.SSLError) -> None:
        self.error = error
        self._flush()
        self._below.abort()
