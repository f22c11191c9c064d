"""How a gateway listens: the options of its gRPC server, certificates that may be renewed while it runs, and
a port for probes that speak no TLS."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from cluster.config import GatewayConfig
from cluster.errors import StartError

_log = logging.getLogger("tandem.gateway")


def open_server(gateway: GatewayConfig) -> grpc.aio.Server:
    """A gRPC server that listens nowhere yet."""
    options = [
        ("grpc.max_receive_message_length", gateway.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
    if gateway.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", max(round(gateway.max_connection_age_s * 1e3), 1)))
    return grpc.aio.server(options=options)


def bind(server: grpc.aio.Server, gateway: GatewayConfig) -> int:
    """Give `server` its port, with TLS where the configuration names a certificate; `StartError` when the
    port is taken or the certificate cannot be read."""
    place = f"{gateway.host}:{gateway.port}"
    credentials = _credentials(gateway)
    try:
        if credentials is None:
            return int(server.add_insecure_port(place))
        return int(server.add_secure_port(place, credentials))
    except RuntimeError as error:
        raise StartError(f"the gateway cannot listen on {place}: {_TAKEN}") from error


async def open_health(gateway: GatewayConfig, servicer: health.aio.HealthServicer) -> grpc.aio.Server | None:
    """The server of `health_port`, started; None when there shall be none."""
    if gateway.health_port is None:
        return None
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    place = f"{gateway.host}:{gateway.health_port}"
    try:
        server.add_insecure_port(place)
    except RuntimeError as error:
        raise StartError(f"the gateway cannot serve its health on {place}: {_TAKEN}") from error
    await server.start()
    return server


class Certificate:
    """A PEM chain and its key in files that whoever renews them replaces."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self._files = {"tls_cert_file": cert_file, "tls_key_file": key_file}
        self._current = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Every handshake asks `_changed`, so that a renewed certificate is used without a restart."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._changed, require_client_authentication=False
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold now, where it is new and complete; None: go on with what was last given."""
        try:
            now = self._read()
        except StartError as error:
            _log.error("the certificate in use stays: %s", error)
            return None
        if now == self._current:
            return None
        self._current = now
        _log.info("a renewed certificate is used from now on")
        return self._configuration()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key = self._current
        return grpc.ssl_server_certificate_configuration([(key, cert)])

    def _read(self) -> tuple[bytes, bytes]:
        texts = []
        for field, path in self._files.items():
            try:
                texts.append(path.read_bytes())
            except OSError as error:
                raise StartError(f"gateway.{field}: {error}") from error
            if b"-----BEGIN " not in texts[-1]:
                raise StartError(f"gateway.{field}: {path} holds no PEM")
        return texts[0], texts[1]


_TAKEN = "the port is taken, or the address is not one of this host"


def _credentials(gateway: GatewayConfig) -> grpc.ServerCredentials | None:
    if gateway.tls_cert_file is None or gateway.tls_key_file is None:
        return None
    return Certificate(gateway.tls_cert_file, gateway.tls_key_file).credentials()
