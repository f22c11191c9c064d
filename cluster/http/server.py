"""The HTTP port of a gateway: its requests, their callers, and their handlers.

request --> guard (shape of errors) --> Authenticator --> ROUTE_ACCESS --> body, with its limits --> endpoint
                                                                                                     |
                                               InferenceServicer <-- HttpCall <----------------------+
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple

from aiohttp import web

from cluster.admission.quotas import Quotas
from cluster.admission.read_budget import ReadReservation
from cluster.api.authentication import set_caller
from cluster.api.call_reading import CallReading
from cluster.api.grpc_server import Certificate
from cluster.api.servicer import InferenceServicer
from cluster.config import LOOPBACK, ClusterConfig
from cluster.errors import (
    InternalError,
    OverloadedError,
    RequestError,
    UnauthenticatedError,
    UnknownModelError,
    is_failure,
    to_grpc_status,
)
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.http.call import AbortedCall, certificate_names, peer_of, shown_authorization
from cluster.http.endpoints import Endpoint, Endpoints, Method, Served
from cluster.http.errors import HttpProblem, anthropic_error, openai_error
from cluster.http.guards import refused_host
from cluster.http.kept_output import WholeAnswer
from cluster.http.port import (
    VERSIONLESS,
    HttpBounds,
    HttpPort,
    ListenAddress,
    ends_connection,
    is_versionless,
    own_connection,
    watch_peer,
)
from cluster.http.rate_limits import rate_limit_headers
from cluster.http.sse import send_whole
from cluster.identity.access_control import AccessControl
from cluster.identity.audit import NOBODY, AuditEntry
from cluster.identity.authenticator import HEADER, Credentials, require
from cluster.identity.identity import Identity, Role
from kvtransfer.common.clock import Clock

_log = logging.getLogger(__name__)

RouteAccess = Role | Literal["open"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The access that each route needs. A route that is registered without an entry here is an error at start.
ROUTE_ACCESS: Mapping[tuple[Method, str], RouteAccess] = {
    ("GET", "/health"): "open",
    # A path that load balancers and tools of other servers use.
    ("GET", "/ping"): "open",
    ("GET", "/version"): "open",
    ("GET", "/v1/models"): "user",
    # Names of models have slashes, as those of folders do.
    ("GET", "/v1/models/{model:.+}"): "user",
    ("POST", "/v1/chat/completions"): "user",
    ("POST", "/v1/completions"): "user",
    ("POST", "/v1/embeddings"): "user",
    ("POST", "/v1/responses"): "user",
    ("POST", "/v1/messages"): "user",
    ("POST", "/v1/messages/count_tokens"): "user",
    ("POST", "/tokenize"): "user",
    ("POST", "/detokenize"): "user",
}
# The steps by which the limit of a body grows where its length is not announced.
_PIECE_BYTES = 1 << 18
_ANTHROPIC = "/v1/messages"
# The answer for a model that the caller may not use: as if it were not there.
_UNKNOWN_MODEL = "the model does not exist, or you may not use it; GET /v1/models lists yours"
# Headers of every answer. There is none of CORS: pages of other sites read nothing here.
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Server": "tandem",
    "X-Content-Type-Options": "nosniff",
}


class HttpServices(NamedTuple):
    """The parts of its gateway that the HTTP port needs."""

    servicer: InferenceServicer
    connections: ReplicaConnections
    quotas: Quotas
    access: AccessControl
    reading: CallReading
    unread: UnreadOutput


def open_http(
    config: ClusterConfig, services: HttpServices, certificate: Certificate | None, clock: Clock
) -> HttpFront | None:
    """Return the server for HTTP, not yet listening; None where the configuration wants nothing."""
    port = config.gateway.http.port
    return None if port is None else HttpFront(config, port, services, certificate, clock)


class HttpFront:
    """Answers over HTTP from `start` to `stop`."""

    def __init__(
        self,
        config: ClusterConfig,
        port: int,
        services: HttpServices,
        certificate: Certificate | None,
        clock: Clock,
    ) -> None:
        gateway = config.gateway
        self._settings = gateway.http
        self._model_name = config.model_name
        self._connections = services.connections
        self._quotas = services.quotas
        self._access = services.access
        self._reading = services.reading
        self._clock = clock
        self._is_leaving = False
        # A page of another site, by a name of its own for this host, would reach a gateway that asks nobody
        # for credentials; a gateway that others reach asks.
        is_open = not services.access.authenticator.is_required and gateway.host in LOOPBACK
        names = (gateway.host, *gateway.console_hosts)
        self._names = frozenset(name.lower() for name in names) if is_open else None
        self._servicer = services.servicer
        self._endpoints = endpoints = Endpoints(
            services.servicer, self._model_name, gateway.http, services.unread, clock
        )
        app = web.Application(middlewares=[self._guard])
        for path, answer in (("/health", self._health), ("/ping", self._health), ("/version", _version)):
            assert ROUTE_ACCESS["GET", path] == "open"
            app.router.add_get(path, answer)
        for (method, path), endpoint in endpoints.routes().items():
            access = ROUTE_ACCESS[method, path]
            assert access != "open"
            handler = functools.partial(self._answer, access, endpoint)
            if method == "GET":
                app.router.add_get(path, handler)
            else:
                app.router.add_route(method, path, handler, expect_handler=_expect_later)
        self.app = app
        self._port = HttpPort(
            app,
            ListenAddress(gateway.host, port, "gateway.http.port", gateway.takes_over),
            bounds=HttpBounds(gateway.http.max_header_bytes, gateway.http.idle_timeout_s),
            certificate=certificate,
            cancels_handlers=True,
            refuse=_refused_unread,
        )

    async def start(self, *, is_shared: bool = False) -> int:
        """Listen, and return the port; `StartError` when it is taken. `is_shared`: the gateway that this one
        takes over from listens there."""
        return await self._port.start(is_shared=is_shared)

    def leave(self) -> None:
        """Send clients to the other gateways: the answers to probes announce it, and connections end with
        their requests."""
        self._is_leaving = True

    async def stop_accepting(self) -> None:
        """Take no new connection; those that are open stay."""
        await self._port.stop_accepting()

    def num_connections(self) -> int:
        """Return the number of clients that are connected now."""
        return self._port.num_connections()

    async def stop(self) -> None:
        """End all requests and connections."""
        await self._port.stop()
        self._endpoints.close()

    async def _health(self, request: web.Request) -> web.Response:
        if self._is_leaving or not self._connections.has_route():
            raise HttpProblem(503, "no request could be placed now", kind="server_error", code="unavailable")
        return web.Response()

    # -------------------------------------------------------------------------------- who may do what

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every refusal into an error of the API."""
        watch_peer(request.transport)
        response: web.StreamResponse
        try:
            if is_versionless(request):
                raise HttpProblem(400, VERSIONLESS)
            if self._names is not None and (
                problem := refused_host(request.headers.get("Host"), self._names)
            ):
                raise HttpProblem(421, problem)
            response = await handler(request)
        except HttpProblem as problem:
            response = _error(request, problem)
        except ConnectionError:
            raise  # the client is gone
        except web.HTTPException as error:
            unknown = HttpProblem(error.status, f"{error.reason}: {request.method} {request.path[:100]}")
            if "Allow" in error.headers:
                unknown.headers["Allow"] = error.headers["Allow"]
            response = _error(request, unknown)
        except BaseException as error:
            response = _broken(request, error)
        if response.prepared:
            return response
        try:
            return await self._send(request, response)
        except ConnectionError:
            raise
        except BaseException as error:
            return await self._send(request, _broken(request, error))

    async def _send(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send an answer of which nothing was sent."""
        response.headers.update(_HEADERS)
        if self._is_leaving or ends_connection(request):
            response.force_close()
        if isinstance(response, WholeAnswer):
            return await response.send(request, self._settings.write_timeout_s)
        if isinstance(response, web.Response):
            return await send_whole(request, response, self._settings.write_timeout_s)
        return response

    async def _answer(self, access: Role, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Answer callers who have the role."""
        arrived_at = self._clock.now()
        identity: Identity | None = None
        try:
            identity = self._identify(request)
            require(identity, access)
        except RequestError as error:
            self._record_refusal(request, identity, error)
            raise HttpProblem.of_call(AbortedCall.of(error)) from error
        set_caller(identity, arrived_at)

        def limits() -> dict[str, str]:
            return rate_limit_headers(self._quotas, identity.tenant, self._clock.now())

        try:
            own_connection(request, identity.party, self._reading.limits)
            with self._reading.call(identity) as reservation:
                body = b""
                if request.method == "POST":
                    if not identity.may_use(self._model_name):
                        raise UnknownModelError(_UNKNOWN_MODEL)
                    # A body that never arrives has its price, too.
                    await self._servicer.charge(identity.tenant)
                    reservation.is_paid = True
                    try:
                        body = await self._body(request, reservation)
                    except OverloadedError:
                        self._servicer.give_back_requests(identity.tenant)
                        raise
                return await endpoint(Served(request, body, limits))
        except (RequestError, AbortedCall) as error:
            call = error if isinstance(error, AbortedCall) else AbortedCall.of(error)
            problem = HttpProblem.of_call(call)
            problem.headers.update(limits())
            raise problem from error

    def _identify(self, request: web.Request) -> Identity:
        headers = request.headers
        if len(headers.getall("Authorization", ())) > 1:
            raise UnauthenticatedError("there is more than one Authorization header")
        shown = Credentials(shown_authorization(headers), certificate_names(request), HEADER)
        return self._access.authenticator.identify(shown)

    def _record_refusal(self, request: web.Request, identity: Identity | None, error: RequestError) -> None:
        self._access.audit.record(
            AuditEntry(
                who=identity.name if identity else NOBODY,
                tenant=identity.tenant if identity else "",
                method=_route_of(request),
                peer=peer_of(request),
                result=to_grpc_status(error).code.name,
                detail=str(error),
                kind="refusal",
            )
        )

    async def _body(self, request: web.Request, reservation: ReadReservation) -> bytes:
        """Return the body; refuse a wrong or long one before it is read, and one that comes too slowly."""
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # This also keeps out requests that pages of other sites may send without a preflight.
            raise HttpProblem(415, f"the Content-Type must be application/json, not {kind[:100]!r}")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HttpProblem(415, "the body must not be compressed; remove Content-Encoding")
        if (request.content_length or 0) > self._reading.max_body_bytes:
            raise self._too_long()
        await reservation.take(_PIECE_BYTES if request.content_length is None else request.content_length)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                body = await self._parts(request, reservation)
        except TimeoutError:
            raise HttpProblem(
                408, f"the body did not arrive within {self._settings.body_timeout_s:g} s", code="timeout"
            ) from None
        except web.RequestPayloadError as error:
            raise HttpProblem(400, f"the body cannot be read: {error}") from error
        reservation.shrink(len(body))
        return body

    async def _parts(self, request: web.Request, reservation: ReadReservation) -> bytes:
        """Read the body in parts, for each of which there is room."""
        parts, num_bytes = [], 0
        while part := await request.content.readany():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > self._reading.max_body_bytes:
                raise self._too_long()
            if num_bytes > reservation.num_bytes:
                await reservation.take(max(_PIECE_BYTES, num_bytes - reservation.num_bytes))
        return b"".join(parts)

    def _too_long(self) -> HttpProblem:
        most = self._reading.max_body_bytes
        return HttpProblem(
            413,
            f"the body is longer than {most} bytes (gateway.http.max_body_bytes)",
            code="request_too_large",
        )


async def _version(_: web.Request) -> web.Response:
    """Answer as vLLM does."""
    return web.json_response({"version": importlib.metadata.version("tandem-serve")})


async def _expect_later(request: web.Request) -> None:
    """Let the client wait with its body until it is known that it will be read."""


def _route_of(request: web.Request) -> str:
    """Return the path of the route, without the parts that the caller chose in it."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def _refused_unread(status: int, problem: str) -> web.Response:
    """Return the answer to input that is no request: its API is unknown."""
    body = openai_error(HttpProblem(status, problem))
    return web.Response(status=status, body=body, content_type="application/json", headers=_HEADERS)


def _broken(request: web.Request, error: BaseException) -> web.Response:
    """Return the answer to a request in which a fault was raised. Whatever it is, it is this request's alone.
    In the middle of an answer the connection is cut off."""
    if not is_failure(error):
        raise error
    _log.error("%s failed", request.path, exc_info=error)
    if request.writer.output_size:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the answer broke off") from error
    return _error(request, HttpProblem.of_call(AbortedCall.of(InternalError())))


def _error(request: web.Request, problem: HttpProblem) -> web.Response:
    encode = anthropic_error if request.path.startswith(_ANTHROPIC) else openai_error
    return web.Response(
        status=problem.status,
        body=encode(problem),
        content_type="application/json",
        headers=problem.headers,
    )
