"""TLS with a certificate on both sides, for connections whose peer has proven the secret.

The certificates are read from files again when these have changed, for the connections that come after. A
connection ends as it does without TLS, by the end of its stream: frames say themselves where they end, so
TLS's own end (close_notify) would add nothing.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from typing import NamedTuple

from kvtransfer.codec import Part
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import TransferError, TrustError
from kvtransfer.rpc.tls_errors import lost_in_handshake, refusal
from kvtransfer.rpc.tls_socket import TlsSocket

_FIELDS = ("cert_file", "key_file", "ca_file")

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
        certificate and that of its key, the files read before stay in use."""
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
    """Return a value that differs when a file has changed."""
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


def welcome_failure(cause: BaseException | None, name: str) -> TransferError:
    """Return the error of a client that saw the connection end, by this cause, after its own part of the TLS
    handshake and before the server's welcome."""
    return refusal(cause, name) if isinstance(cause, ssl.SSLError) else lost_in_handshake(name)
