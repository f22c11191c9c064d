"""How a gateway listens: the options of its gRPC server, certificates that may be renewed while it runs, a
port that the next gateway takes over, and a port for probes that speak no TLS."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import grpc
import grpc.aio
import psutil
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import InvalidVersion, load_pem_x509_certificates
from grpc_health.v1 import health, health_pb2_grpc

from cluster.config import GatewayConfig
from cluster.errors import StartError
from cluster.identity.config import AuthConfig
from kvtransfer.common.os_errors import os_reason

_LOOKAHEAD_BYTES = 64 << 10
_log = logging.getLogger("tandem.gateway")


def open_server(
    gateway: GatewayConfig, interceptors: Sequence[grpc.aio.ServerInterceptor], max_message_bytes: int
) -> grpc.aio.Server:
    """Return a gRPC server that does not listen yet."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", int(gateway.takes_over)),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # The bytes that a call may send before its message is requested. By default gRPC raises this limit,
        # by its measurements of the network, to megabytes for each call; once the message is requested, all
        # of it may come.
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
    ]
    if gateway.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", max(round(gateway.max_connection_age_s * 1e3), 1)))
    return grpc.aio.server(interceptors=interceptors, options=options)


class ClientPort:
    """The port of a gateway's gRPC server, from `bind` on."""

    def __init__(self, number: int, descriptors: set[int]) -> None:
        self.number = number
        self._descriptors = descriptors

    def stop_accepting(self) -> None:
        """Take no new connection; open ones stay. gRPC itself can only end both, and then fails calls that
        arrive at that time."""
        for descriptor in self._descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as listener:
                listener.shutdown(socket.SHUT_RDWR)
        self._descriptors = set()

    def num_connections(self) -> int:
        """Return the number of clients that are connected now."""
        return sum(
            connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == self.number
            for connection in psutil.Process().net_connections("tcp")
        )


def bind(
    server: grpc.aio.Server,
    gateway: GatewayConfig,
    port: int,
    certificate: Certificate | None,
    *,
    is_shared: bool = False,
) -> ClientPort:
    """Give `server` its port (0: a free one), with TLS where there is a certificate.

    `is_shared`: an older gateway of the application listens there, and this one takes over from it. Raises
    `StartError` when anybody else does.
    """
    place = f"{gateway.host}:{port}"
    try:
        if gateway.takes_over and port and not is_shared:
            check_free(gateway.host, port)
        before = _listeners()
        if certificate is None:
            number = int(server.add_insecure_port(place))
        else:
            number = int(server.add_secure_port(place, certificate.credentials()))
    except (OSError, RuntimeError) as error:
        raise StartError(f"the gateway cannot listen on {place}: {_TAKEN}") from error
    return ClientPort(number, {fd for fd, port in _listeners() - before if port == number})


def check_free(host: str, port: int) -> None:
    """Raise `OSError` when anybody listens there: a port that is shared on purpose would not say so."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()


def open_certificate(
    gateway: GatewayConfig, auth: AuthConfig, name: Literal["inference", "admin"]
) -> Certificate | None:
    """Return the certificate of the port with this name; None where it speaks no TLS. `StartError` when a
    file cannot be read."""
    if gateway.tls_cert_file is None or gateway.tls_key_file is None:
        return None
    clients = auth.certificates
    ca_file = clients.ca_file if clients is not None and name in clients.ports else None
    return Certificate(gateway.tls_cert_file, gateway.tls_key_file, ca_file)


async def open_health(
    gateway: GatewayConfig, servicer: health.aio.HealthServicer, *, is_shared: bool = False
) -> grpc.aio.Server | None:
    """Start and return the server of `health_port`; None when there shall be none. `is_shared` as for
    `bind`."""
    if gateway.health_port is None:
        return None
    server = grpc.aio.server(options=[("grpc.so_reuseport", int(gateway.takes_over))])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    place = f"{gateway.host}:{gateway.health_port}"
    try:
        if gateway.takes_over and gateway.health_port and not is_shared:
            check_free(gateway.host, gateway.health_port)
        server.add_insecure_port(place)
    except (OSError, RuntimeError) as error:
        raise StartError(f"the gateway cannot serve its health on {place}: {_TAKEN}") from error
    await server.start()
    return server


class Certificate:
    """A PEM chain and its key in files that are replaced on renewal; with `ca_file`, clients must show
    certificates of these authorities."""

    def __init__(self, cert_file: Path, key_file: Path, ca_file: Path | None = None) -> None:
        self._files = {"gateway.tls_cert_file": cert_file, "gateway.tls_key_file": key_file}
        if ca_file is not None:
            self._files["auth.certificates.ca_file"] = ca_file
        self._current = self._read()
        _check_pair(*self._current[:2])
        # The configuration that the server was given last.
        self._given = self._current

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials whose every handshake calls `_changed`, so that a renewed certificate is used
        without a restart."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._changed,
            require_client_authentication="auth.certificates.ca_file" in self._files,
        )

    def chain(self) -> str:
        """Read the files, and return the PEM of the certificate chain that the next handshake shows."""
        self._refresh()
        return self._current[0].decode("ascii", "replace")

    def pair(self) -> tuple[bytes, bytes]:
        """Return the PEM of the chain and of its key, as the files were when they were read last."""
        return self._current[0], self._current[1]

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context of a server other than gRPC's, which uses a renewed certificate as well."""
        context, given = self._ssl_context(), self._current

        def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            nonlocal context, given
            self._refresh()
            if self._current != given:
                try:
                    context, given = self._ssl_context(), self._current
                except StartError as error:  # replaced once more since they were read
                    _log.error("the certificate in use stays: %s", error)
            connection.context = context

        context.sni_callback = renew
        return context

    def _ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        cert_file, key_file, *ca_files = self._files.values()
        try:
            context.load_cert_chain(cert_file, key_file)
            for ca_file in ca_files:
                context.load_verify_locations(ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise StartError(f"gateway.tls_cert_file, gateway.tls_key_file: {error}") from error
        return context

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the contents of the files where they are new and complete; None: keep those that were given
        last."""
        self._refresh()
        if self._current == self._given:
            return None
        self._given = self._current
        return self._configuration()

    def _refresh(self) -> None:
        """Take over the content of the files now, where it is complete."""
        try:
            now = self._read()
            if now == self._current:
                return
            _check_pair(*now[:2])
        except StartError as error:
            _log.error("the certificate in use stays: %s", error)
            return
        _log.info("a renewed certificate is used from now on")
        self._current = now

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key, *authorities = self._current
        return grpc.ssl_server_certificate_configuration([(key, cert)], b"".join(authorities) or None)

    def _read(self) -> tuple[bytes, ...]:
        texts = []
        for field, path in self._files.items():
            try:
                texts.append(path.read_bytes())
            except OSError as error:
                raise StartError(f"{field}: {os_reason(error)}") from error
            if b"-----BEGIN " not in texts[-1]:
                raise StartError(f"{field}: {path} holds no PEM")
        return tuple(texts)


def _check_pair(cert: bytes, key: bytes) -> None:
    """Raise `StartError` unless the key is that of the certificate, which it is not while only one of the two
    files is replaced already."""
    try:
        chain, private = load_pem_x509_certificates(cert), load_pem_private_key(key, None)
        is_pair = chain[0].public_key() == private.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidVersion) as error:
        raise StartError(f"gateway.tls_cert_file, gateway.tls_key_file: {error}") from error
    if not is_pair:
        raise StartError("gateway.tls_key_file: it is not the key of gateway.tls_cert_file")


_TAKEN = "the port is taken, or the address is not one of this host"


def _listeners() -> set[tuple[int, int]]:
    """Return (file descriptor, port) of each socket on which this process listens."""
    return {
        (connection.fd, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
