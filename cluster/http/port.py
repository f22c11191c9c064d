"""A gateway's listening for HTTP: TLS with certificates that are renewed, bounds of the bytes that a client
may send before anybody looks at them, and a port that the next gateway takes over. For the console and the
API alike."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http import HttpVersion10, RawRequestMessage
from aiohttp.http_exceptions import LineTooLong

from cluster.admission.caller_limits import CallerLimits
from cluster.api.grpc_server import Certificate, check_free
from cluster.errors import OverloadedError, StartError

# How long a connection's handlers may take to end when the port is closed.
_STOP_S = 1.0
# How long the rest of a refused request is read and thrown away, so that the client sees the answer.
_LINGER_S = 2.0
_MAX_HEADERS = 100
# What aiohttp says where there are more.
# What is wrong with a request of HTTP 0.9, which knew neither headers nor statuses.
VERSIONLESS = "the request line names no version of HTTP; send HTTP/1.1"
_TOO_MANY_HEADERS = "Too many headers received"
# The time until a silent client is probed, the time between probes, and the number of answers that may be
# missing: a client that has vanished is gone after the same time as over gRPC.
_PROBE_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 10, 5, 2


class HttpBounds(NamedTuple):
    """The limits of a connection before a request of it is served."""

    # The request line and each header.
    max_header_bytes: int
    # The limit without a complete request.
    idle_timeout_s: float


# Makes the answer to a malformed request, by its status and its fault.
Refuse = Callable[[int, str], web.Response]


def refused_in_words(status: int, problem: str) -> web.Response:
    """Return the answer for people."""
    return web.Response(status=status, text=problem)


class ListenAddress(NamedTuple):
    """The address of a server. `field` is the setting of the port, for errors."""

    host: str
    port: int
    field: str
    # Whether a server that starts shares the port with the one that it replaces.
    takes_over: bool


class HttpPort:
    """Serves one application from `start` to `stop`. Requests are not logged: headers carry credentials.

    `cancels_handlers`: a handler ends when its client goes.
    `refuse` answers what no handler gets to see.
    """

    def __init__(
        self,
        app: web.Application,
        address: ListenAddress,
        *,
        bounds: HttpBounds,
        certificate: Certificate | None,
        cancels_handlers: bool = False,
        refuse: Refuse = refused_in_words,
    ) -> None:
        self._address = address
        self._certificate = certificate
        self._may_share = address.takes_over and address.port != 0
        self._site: web.TCPSite | None = None
        self._runner = _Runner(
            app,
            refuse,
            access_log=None,
            logger=_quiet_logger(),
            handler_cancellation=cancels_handlers,
            shutdown_timeout=_STOP_S,
            keepalive_timeout=bounds.idle_timeout_s,
            lingering_time=_LINGER_S,
            max_line_size=bounds.max_header_bytes,
            max_field_size=bounds.max_header_bytes,
            max_headers=_MAX_HEADERS,
            # A small body that becomes a large one is not worth having.
            auto_decompress=False,
        )

    async def start(self, *, is_shared: bool = False) -> int:
        """Listen, and return the port; `StartError` when it is taken. `is_shared`: the gateway that this one
        takes over from listens there."""
        await self._runner.setup()
        tls = None if self._certificate is None else self._certificate.ssl_context()
        host, port = self._address.host, self._address.port
        try:
            if self._may_share and not is_shared:
                check_free(host, port)
            self._site = web.TCPSite(self._runner, host, port, reuse_port=self._may_share, ssl_context=tls)
            await self._site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(
                f"{self._address.field}: cannot listen on {host}:{port}: {error.strerror or error}; "
                "choose another port, 0 for a free one, or null for none"
            ) from error
        return int(self._runner.addresses[0][1])

    def num_connections(self) -> int:
        """Return the number of clients that are connected now."""
        server = self._runner.server
        return 0 if server is None else len(server.connections)

    async def stop_accepting(self) -> None:
        """Take no new connection; those that are open stay."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def stop(self) -> None:
        """End all requests and connections."""
        await self._runner.cleanup()


class _Runner(web.AppRunner):
    """Runs an application on connections of our own."""

    def __init__(self, app: web.Application, refuse: Refuse, **options: Any) -> None:
        super().__init__(app, **options)
        self._refuse = refuse

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._refuse, self._kwargs)


class _Server(web.Server):
    """Makes the connections."""

    def __init__(self, made: web.Server, refuse: Refuse, options: dict[str, Any]) -> None:
        factory = made.request_factory

        def make(
            message: RawRequestMessage, payload: Any, connection: web.RequestHandler, *parts: Any
        ) -> web.BaseRequest:
            """Return a request, with a version that its answer can have."""
            assert isinstance(connection, _Connection)
            connection.is_versionless = message.version < HttpVersion10
            if connection.is_versionless:
                message = message._replace(version=HttpVersion10)
            return factory(message, payload, connection, *parts)

        super().__init__(made.request_handler, request_factory=make, **options)
        self._refuse = refuse

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._refuse, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """Answers input that is no request, or a request with too much in its headers."""

    def __init__(self, server: web.Server, refuse: Refuse, **options: Any) -> None:
        super().__init__(server, **options)
        self._refuse = refuse
        # Callers whose requests have come over the connection.
        self._parties: dict[str, CallerLimits] = {}
        # The present request named no version.
        self.is_versionless = False
        # The connection exceeds a caller's limit.
        self.is_surplus = False

    def own(self, party: str, limits: CallerLimits) -> None:
        """Count it as a connection of this caller until it ends; `OverloadedError` where there are too
        many."""
        if party in self._parties:
            return
        try:
            limits.connect(party, id(self))
        except OverloadedError:
            self.is_surplus = True
            raise
        self._parties[party] = limits

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        while self._parties:
            party, limits = self._parties.popitem()
            limits.disconnect(party, id(self))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status != HTTPStatus.BAD_REQUEST or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        problem = "this is no request over HTTP"
        if isinstance(exc, LineTooLong) or message == _TOO_MANY_HEADERS:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            limits = f"{self.max_field_size} bytes of a header or the path, or {_MAX_HEADERS} headers"
            problem = f"the request has more than {limits}"
        response = self._refuse(status, problem)
        response.force_close()
        return response


def own_connection(request: web.Request, party: str, limits: CallerLimits) -> None:
    """Count the connection of a request as one of this caller until it ends; raise `OverloadedError` where
    the caller has too many."""
    connection = request.protocol
    assert isinstance(connection, _Connection)
    connection.own(party, limits)


def is_versionless(request: web.Request) -> bool:
    """Whether the request line named no version that has statuses."""
    connection = request.protocol
    return isinstance(connection, _Connection) and connection.is_versionless


def ends_connection(request: web.Request) -> bool:
    """Whether the connection must end with the answer: the rest of the body is not read, or the caller has
    too many."""
    connection = request.protocol
    is_surplus = isinstance(connection, _Connection) and connection.is_surplus
    return is_surplus or not request.content.is_eof()


def watch_peer(transport: Any) -> None:
    """Let the kernel find out that a client has vanished without a word."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _NUM_PROBES),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _quiet_logger() -> logging.Logger:
    """Return aiohttp's logger without lines that strangers cause: bad requests are answered, not logged."""
    logger = logging.getLogger("tandem.http")
    if not logger.filters:
        logger.addFilter(_is_of_ours)
    return logger


def _is_of_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, web.HTTPException) and type(error).__module__.partition(".")[0] != "aiohttp"
