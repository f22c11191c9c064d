"""TLS with a certificate on both sides, for connections whose peer has proven the secret.

The certificates are read from files again when these have changed, for the connections that come after. A
connection ends as it does without TLS, by the end of its stream: frames say themselves where they end, so
TLS's own end (close_notify) would add nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from kvtransfer.codec import Part
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import PeerGoneError, ProofError, TransferError, TrustError

_FIELDS = ("cert_file", "key_file", "ca_file")
_BUFFER_BYTES = 64 << 10
# So much is encrypted before it is passed on.
_FLUSH_BYTES = 1 << 20

_log = logging.getLogger("tandem.tls")


class TlsFiles(Part, frozen=True):
    """The paths of PEM files: the chain of a process's certificate, its key, and the authority that has
    signed the certificates of all processes."""

    cert_file: str
    key_file: str
    ca_file: str


class _Contexts(NamedTuple):
    client: ssl.SSLContext
    server: ssl.SSLContext


class TlsContexts:
    """The contexts of both sides, as the files are now."""

    def __init__(self, files: TlsFiles) -> None:
        """`TrustError` names the file that cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._versions = self._refused = _versions(files)
        self._contexts = _load(files)

    @property
    def client(self) -> ssl.SSLContext:
        return self._current().client

    @property
    def server(self) -> ssl.SSLContext:
        return self._current().server

    def _current(self) -> _Contexts:
        """Read files that have changed. While they cannot be used, such as between the change of a
        certificate and that of its key, what was read before stays in use."""
        versions = _versions(self._files)
        with self._lock:
            if versions != self._versions:
                try:
                    self._contexts = _load(self._files)
                except TrustError as error:
                    if versions != self._refused:
                        _log.warning("the certificate that was read before stays in use: %s", error)
                    self._refused = versions
                else:
                    _log.info("the certificate was read again from %s", self._files.cert_file)
                    self._versions = versions
            return self._contexts


def _versions(files: TlsFiles) -> tuple[object, ...]:
    """Return what differs when a file has changed."""
    return tuple(_version(getattr(files, field)) for field in _FIELDS)


def _version(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_ino, found.st_size


def _load(files: TlsFiles) -> _Contexts:
    for field in _FIELDS:  # the errors of OpenSSL name no file
        try:
            with open(getattr(files, field), "rb"):
                pass
        except OSError as error:
            raise TrustError(f"inner_tls.{field}: {os_reason(error)}") from error
    client, server = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    client.check_hostname = False  # processes are known by the authority and the secret, wherever they run
    server.num_tickets = 0  # no connection is resumed
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslsocket_class = TlsSocket
        _use_files(context, files)
    return _Contexts(client, server)


def _use_files(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_verify_locations(files.ca_file)
    except (ssl.SSLError, OSError) as error:
        raise TrustError(f"inner_tls.ca_file: {files.ca_file} holds no certificate: {error}") from error
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password="")  # never asked of a terminal
    except (ssl.SSLError, OSError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise TrustError(
                f"inner_tls.key_file: {files.key_file} is not the key of inner_tls.cert_file"
            ) from error
        raise TrustError(
            f"inner_tls.cert_file: {files.cert_file}, or inner_tls.key_file: {files.key_file}, is no PEM "
            f"file of a certificate, or of a key without a password: {error}"
        ) from error


def refusal(error: ssl.SSLError, name: str) -> ProofError:
    """Return why TLS with `name` failed, with the setting to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProofError(
            f"the certificate of {name} is refused: {error.verify_message}; look at inner_tls.cert_file "
            "there and at inner_tls.ca_file here"
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return ProofError(f"{name} shows no certificate; look at inner_tls.cert_file there")
    if "alert" in reason:
        return ProofError(f"{name} refuses the certificate of inner_tls.cert_file here: {reason}")
    return ProofError(f"no TLS with {name}: {reason}")


def welcome_failure(cause: BaseException | None, name: str) -> TransferError:
    """Return the error of a client that saw the connection end, by this cause, after its own part of the TLS
    handshake and before the server's welcome."""
    return refusal(cause, name) if isinstance(cause, ssl.SSLError) else lost_in_handshake(name)


def lost_in_handshake(name: str) -> PeerGoneError:
    """Return the error of a connection that ended before both sides had accepted each other."""
    return PeerGoneError(
        f"{name} ended the connection in the TLS handshake; does it accept the certificate of "
        "inner_tls.cert_file here?"
    )


# ----------------------------------------------------------------------------------------------
# On blocking sockets.


class TlsSocket(ssl.SSLSocket):
    """A blocking socket for which `SSLContext.wrap_socket` calls this class. After `open`, one thread may
    receive while another one sends and a third shuts it down.

    OpenSSL must not be entered by two threads at once, nor hold up one while it waits for the other: so each
    call is made without waiting, under a lock, and waits are outside of it.
    """

    _calls: threading.Lock | None = None
    _patience_s: float | None = None

    def open(self, name: str, timeout_s: float) -> None:
        """Run the handshake with `name`. `ProofError` says whose certificate was refused, `PeerGoneError`
        that the connection ended."""
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
        """Send what goes without a wait. `BlockingIOError` when nothing does; the next call must then begin
        with the same bytes."""
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
        """Receive what is there, without a wait. `BlockingIOError` when nothing is."""
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
        """End the connection. Unlike the base class it keeps the TLS state, or another thread would take what
        is still to be received for plain bytes."""
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


# ----------------------------------------------------------------------------------------------
# On an event loop.


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
        # What broke TLS after that.
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
