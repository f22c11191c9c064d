"""The console's HTTP server, in the gateway's event loop: the page, its JSON, orders, the gateway's metrics,
who is signed in, and which requests are refused."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web

from cluster.api.grpc_server import Certificate
from cluster.config import ClusterConfig
from cluster.console.console_data import ConsoleApi
from cluster.console.console_services import ConsoleServices
from cluster.console.request_guard import HEADERS, MAX_BODY_BYTES, refused_order
from cluster.console.trend_recorder import TrendRecorder
from cluster.errors import (
    HTTP_STATUS,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    OrderError,
    RequestError,
    UnauthenticatedError,
    is_failure,
    to_grpc_status,
)
from cluster.http.guards import refused_host
from cluster.http.port import VERSIONLESS, HttpBounds, HttpPort, ListenAddress, is_versionless
from cluster.identity.api_keys import split_key
from cluster.identity.audit import NOBODY, OK, AuditEntry, AuditKind
from cluster.identity.authenticator import HEADER, Credentials, require
from cluster.identity.identity import Identity, Role
from cluster.identity.sessions import MAX_COOKIE_CHARS
from cluster.metrics.scraped_registry import CONTENT_TYPE
from cluster.scaling.orders import MAX_REPLICAS, ScalerOrders
from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import SupervisedTasks

PATH = "/console"
API = f"{PATH}/api"
METRICS_PATH = "/metrics"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_MAX_HEADER_BYTES = 8190
# How long a browser's connection may be without a request.
_IDLE_S = 3600.0
_MAX_KEY_CHARS = 2048
_MAX_SPAN_DIGITS = 9

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# A handler that gets the identity of the request's sender.
IdentifiedHandler = Callable[[web.Request, Identity], Awaitable[web.StreamResponse]]
Method = Literal["GET", "POST"]
RouteAccess = Role | Literal["open"]

# What each route needs, of everything but the page's own files, which are open. The key of a route that is
# registered without an entry here is an error at start.
ROUTE_ACCESS: Mapping[tuple[Method, str], RouteAccess] = {
    ("GET", f"{API}/session"): "open",
    ("POST", f"{API}/sign-in"): "open",
    ("POST", f"{API}/sign-out"): "open",
    ("GET", f"{API}/about"): "viewer",
    ("GET", f"{API}/status"): "viewer",
    ("GET", f"{API}/paths"): "viewer",
    ("GET", f"{API}/requests"): "viewer",
    ("GET", f"{API}/explain"): "viewer",
    ("GET", f"{API}/curves"): "viewer",
    ("GET", f"{API}/trends"): "viewer",
    ("GET", METRICS_PATH): "viewer",
    ("POST", f"{API}/scale"): "operator",
    ("POST", f"{API}/release"): "operator",
}


def open_console(
    gateway_id: str, config: ClusterConfig, services: ConsoleServices, clock: Clock
) -> Console | None:
    """Return the console of a gateway, not yet listening; None where none is configured."""
    port = config.gateway.console_port
    if port is None:
        return None
    num_gpus = {pool.name: pool.num_gpus_per_rank for pool in config.pools}
    recorder = TrendRecorder(
        services.status.stats.get,
        services.connections.views,
        lambda pool: num_gpus.get(pool, 0) > 0,
        clock,
    )
    api = ConsoleApi(gateway_id, config, services, recorder.trends, clock)
    return Console(config, port, api, recorder, services)


def _add_route(app: web.Application, method: Method, path: str, handler: Handler) -> None:
    """Serve a route; that of GET is one of HEAD, too."""
    if method == "GET":
        app.router.add_get(path, handler)
    else:
        app.router.add_route(method, path, handler)


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the page's messages: JSON objects with these fields and no other."""


class _SignIn(_Body, frozen=True):
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_KEY_CHARS)]


class _SignOut(_Body, frozen=True):
    pass


class _Scale(_Body, frozen=True):
    pool: str
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)]


class _Release(_Body, frozen=True):
    pool: str


B = TypeVar("B", bound=_Body)


class Console:
    """Serves the console from `start` to `stop`. Requests are not logged: headers carry credentials."""

    def __init__(
        self,
        config: ClusterConfig,
        port: int,
        api: ConsoleApi,
        recorder: TrendRecorder,
        services: ConsoleServices,
    ) -> None:
        gateway = config.gateway
        self._names = frozenset(name.lower() for name in (gateway.host, *gateway.console_hosts))
        self._api = api
        self._recorder = recorder
        self._tasks = SupervisedTasks()
        self._orders = ScalerOrders(services.operations)
        self._access = services.access
        self._fleet = services.fleet
        self._certificate = (
            Certificate(gateway.tls_cert_file, gateway.tls_key_file)
            if gateway.tls_cert_file is not None and gateway.tls_key_file is not None
            else None
        )
        # Cookies know hosts and no ports, so the name tells the applications of a host apart.
        prefix = "" if self._certificate is None else "__Host-"
        self._cookie = f"{prefix}tandem-session-{config.app}"
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", _to_page)
        app.router.add_get(f"{PATH}/", _to_page)
        app.router.add_get(PATH, _file("index.html"))
        for name in sorted(entry.name for entry in (files("cluster.console") / "static").iterdir()):
            if name != "index.html":
                app.router.add_get(f"{PATH}/{name}", _file(name))
        for (method, path), open_handler in self._open_handlers().items():
            assert ROUTE_ACCESS[method, path] == "open"
            _add_route(app, method, path, open_handler)
        for (method, path), handler in self._handlers().items():
            _add_route(app, method, path, self._allowed(ROUTE_ACCESS[method, path], handler))
        self.app = app
        self._listener = HttpPort(
            app,
            ListenAddress(gateway.host, port, "gateway.console_port", gateway.takes_over),
            bounds=HttpBounds(_MAX_HEADER_BYTES, _IDLE_S),
            certificate=self._certificate,
        )

    async def start(self, *, is_shared: bool = False) -> int:
        """Listen, and return the port; `StartError` when it is taken. `is_shared`: the console of the gateway
        that this one takes over from listens there."""
        port = await self._listener.start(is_shared=is_shared)
        self._tasks.spawn(self._recorder.run(), "trends")
        return port

    async def stop(self) -> None:
        await self._tasks.close()
        await self._listener.stop()

    def _open_handlers(self) -> dict[tuple[Method, str], Handler]:
        return {
            ("GET", f"{API}/session"): self._session,
            ("POST", f"{API}/sign-in"): self._sign_in,
            ("POST", f"{API}/sign-out"): self._sign_out,
        }

    def _handlers(self) -> dict[tuple[Method, str], IdentifiedHandler]:
        api = self._api
        return {
            ("GET", f"{API}/about"): _answers(api.about),
            ("GET", f"{API}/status"): _answers(api.status.get),
            ("GET", f"{API}/paths"): _answers(api.paths.get),
            ("GET", f"{API}/requests"): _answers(api.requests),
            ("GET", f"{API}/explain"): self._explain,
            ("GET", f"{API}/curves"): _answers(api.curves),
            ("GET", f"{API}/trends"): self._trends,
            ("GET", METRICS_PATH): self._metrics,
            ("POST", f"{API}/scale"): self._scale,
            ("POST", f"{API}/release"): self._release,
        }

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that the console's page would not send, and turn every refusal into JSON."""
        response: web.StreamResponse
        if is_versionless(request):
            response = _error(400, VERSIONLESS)
        elif problem := refused_host(request.headers.get("Host"), self._names):
            response = _error(421, problem)
        elif request.method == "POST" and (refusal := refused_order(request.headers)):
            response = _error(*refusal)
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _error(error.status, f"{error.reason}: {request.method} {request.path[:100]}")
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
            except RequestError as error:
                response = _error(HTTP_STATUS[to_grpc_status(error).code], str(error))
            except BaseException as error:
                if isinstance(error, ConnectionError) or not is_failure(error):
                    raise
                _log.error("%s failed", request.path, exc_info=error)
                response = _error(500, str(InternalError()))
        response.headers.update(HEADERS)
        return response

    # -------------------------------------------------------------------------------- who is signed in

    def _allowed(self, access: RouteAccess, handler: IdentifiedHandler) -> Handler:
        """Return the handler for callers who have the role."""
        assert access != "open"

        async def answer(request: web.Request) -> web.StreamResponse:
            identity: Identity | None = None
            try:
                identity = self._identify(request)
                require(identity, access)
            except RequestError as error:
                self._record(request, identity, "refusal", error=error)
                raise
            return await handler(request, identity)

        return answer

    def _identify(self, request: web.Request) -> Identity:
        """Return the identity of the sender: by the header that programs send, or by the session's cookie."""
        authenticator = self._access.authenticator
        if not authenticator.is_required or "Authorization" in request.headers:
            return authenticator.identify(
                Credentials(request.headers.get("Authorization", ""), wanted=HEADER)
            )
        if cookie := request.cookies.get(self._cookie):
            return self._access.sessions.identify(cookie[: MAX_COOKIE_CHARS + 1])
        raise UnauthenticatedError("sign in with an API key")

    async def _session(self, request: web.Request) -> web.Response:
        """Answer who is signed in, also to nobody."""
        try:
            identity: Identity | None = self._identify(request)
        except RequestError:
            identity = None
        return _json(self._session_fields(identity))

    async def _sign_in(self, request: web.Request) -> web.Response:
        if not self._access.authenticator.is_required:
            raise OrderError("there is nothing to sign in to: auth.mode is none")
        body = await _read(request, _SignIn)
        key_id, _ = split_key(body.key) or ("", "")
        try:
            session = self._access.sessions.begin(body.key)
        except RequestError as error:
            self._record(request, None, "refusal", {"key_id": key_id}, error=error)
            raise
        self._record(request, session.identity, "session", {"lifetime_s": round(session.lifetime_s)})
        response = _json(self._session_fields(session.identity))
        response.set_cookie(
            self._cookie,
            session.cookie,
            max_age=round(session.lifetime_s),
            path="/",
            httponly=True,
            samesite="Strict",
            secure=self._certificate is not None,
        )
        return response

    async def _sign_out(self, request: web.Request) -> web.Response:
        """End the session at all gateways, and have the browser forget its cookie."""
        await _read(request, _SignOut)
        if cookie := request.cookies.get(self._cookie):
            try:
                who = self._access.sessions.identify(cookie)
                ended = self._access.sessions.end(cookie)
                missing = await self._fleet.end_session(ended)
                what = {"not_reached": ", ".join(sorted(missing))} if missing else {}
                self._record(request, who, "session", what)
            except UnauthenticatedError:
                pass  # it was over already
        response = _json(self._session_fields(None))
        response.del_cookie(self._cookie, path="/", secure=self._certificate is not None, httponly=True)
        return response

    def _session_fields(self, identity: Identity | None) -> dict[str, Any]:
        shown = identity and {
            "name": identity.name,
            "tenant": identity.tenant,
            "roles": sorted({role for role in ("user", "viewer", "operator") if identity.has_role(role)}),
        }
        return {"auth": self._access.config.mode, "insecure": self._access.config.insecure, "identity": shown}

    # ------------------------------------------------------------------------------ questions and orders

    async def _explain(self, request: web.Request, identity: Identity) -> web.Response:
        request_id = request.query.get("id", "")
        if not request_id:
            problem = "name the request, as in /console/api/explain?id=..."
            raise InvalidRequestError(FieldViolation("id", problem))
        return _json(await self._api.explain(request_id, request.query.get("tenant")))

    async def _trends(self, request: web.Request, identity: Identity) -> web.Response:
        span = request.query.get("span_s", "")
        if not (span.isascii() and span.isdecimal() and len(span) <= _MAX_SPAN_DIGITS):
            problem = "name a number of seconds, as in /console/api/trends?span_s=1800"
            raise InvalidRequestError(FieldViolation("span_s", problem))
        return _json(await self._api.trends(int(span)))

    async def _metrics(self, request: web.Request, identity: Identity) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE}
        return web.Response(body=await self._api.metrics.get(), headers=headers)

    async def _scale(self, request: web.Request, identity: Identity) -> web.Response:
        order = await _read(request, _Scale)
        what = {"pool": order.pool, "replicas": order.replicas}
        with self._recorded(request, identity, what):
            done = await self._orders.scale({order.pool: order.replicas}, by=identity.name)
        noun = "replica" if order.replicas == 1 else "replicas"
        if all(change.is_pin for change in done.changes):
            return _json({"message": f"pool {order.pool} keeps its {order.replicas} {noun}: it is pinned"})
        return _json({"message": f"pool {order.pool} will have {order.replicas} {noun}"})

    async def _release(self, request: web.Request, identity: Identity) -> web.Response:
        order = await _read(request, _Release)
        with self._recorded(request, identity, {"pool": order.pool}):
            await self._orders.release([order.pool], by=identity.name)
        return _json({"message": f"pool {order.pool} is released"})

    @contextlib.contextmanager
    def _recorded(
        self, request: web.Request, identity: Identity, what: Mapping[str, object]
    ) -> Iterator[None]:
        """Record the work that is done within, and how it ended."""
        try:
            yield
        except RequestError as error:
            self._record(request, identity, "order", what, error=error)
            raise
        self._record(request, identity, "order", what)

    def _record(
        self,
        request: web.Request,
        identity: Identity | None,
        kind: AuditKind,
        what: Mapping[str, object] | None = None,
        *,
        error: RequestError | None = None,
    ) -> None:
        entry = AuditEntry(
            who=identity.name if identity else NOBODY,
            tenant=identity.tenant if identity else "",
            method=request.path.removeprefix("/").replace("/api/", "/"),
            what=what or {},
            peer=request.remote or "",
            result=to_grpc_status(error).code.name if error else OK,
            detail=str(error) if error else "",
            kind=kind,
        )
        self._access.audit.record(entry)


async def _read(request: web.Request, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(FieldViolation("body", f"cannot be read: {error}")) from error


def _answers(read: Callable[[], Awaitable[dict[str, Any] | str]]) -> IdentifiedHandler:
    """Return a handler that answers with the value of `read`: JSON, or the fields of a JSON object."""

    async def answer(request: web.Request, identity: Identity) -> web.Response:
        return _json(await read())

    return answer


async def _to_page(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": PATH})


def _file(name: str) -> Handler:
    """Return a handler that answers with one file of the page, read once."""
    entry = files("cluster.console") / "static" / name
    body, kind = entry.read_bytes(), _KINDS[f".{name.rpartition('.')[2]}"]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return answer


def _json(fields: dict[str, Any] | str) -> web.Response:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    return web.Response(text=text, content_type="application/json")


def _error(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": reason}), content_type="application/json")
