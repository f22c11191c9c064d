"""The console's HTTP server, in the gateway's event loop: the page, its JSON, orders, and which requests are
refused."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib.resources import files
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from cluster.api.grpc_server import check_free
from cluster.api.replies import StatusService
from cluster.api.store_admin import StoreAdmin
from cluster.config import ClusterConfig, GatewayConfig
from cluster.console.console_data import ConsoleApi
from cluster.errors import HTTP_STATUS, RequestError, StartError, to_grpc_status
from cluster.gateway.request_manager import RequestManager
from cluster.scaling.orders import MAX_REPLICAS, Operations, ScalerOrders
from kvtransfer.common.clock import Clock

PATH = "/console"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STOP_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AnOrder = TypeVar("AnOrder", bound="_Order")


def open_console(
    gateway_id: str,
    config: ClusterConfig,
    status: StatusService,
    requests: RequestManager,
    stores: StoreAdmin,
    operations: Operations | None,
    clock: Clock,
) -> Console | None:
    """Return the console of a gateway, not yet listening; None where none is configured."""
    gateway = config.gateway
    if gateway.console_port is None:
        return None
    api = ConsoleApi(
        gateway_id=gateway_id,
        config=config,
        status=status,
        requests=requests,
        stores=stores,
        operations=operations,
        clock=clock,
    )
    return Console(gateway, gateway.console_port, api, ScalerOrders(operations))


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what the page sends: JSON objects with these fields and no other."""


class _Scale(_Order, frozen=True):
    pool: str
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)]


class _Release(_Order, frozen=True):
    pool: str


class Console:
    """Serves the console from `start` to `stop`. Requests are not logged: headers may carry credentials."""

    def __init__(self, gateway: GatewayConfig, port: int, api: ConsoleApi, orders: ScalerOrders) -> None:
        self._host = gateway.host
        self._port = port
        self._takes_over = gateway.takes_over
        self._names = frozenset(name.lower() for name in (gateway.host, *gateway.console_hosts))
        self._api = api
        self._orders = orders
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/", _to_page),
                web.get(f"{PATH}/", _to_page),
                web.get(PATH, _file("index.html")),
                web.get(f"{PATH}/api/about", _answers(api.about)),
                web.get(f"{PATH}/api/status", _answers(api.status.get)),
                web.get(f"{PATH}/api/paths", _answers(api.paths.get)),
                web.get(f"{PATH}/api/requests", _answers(api.requests)),
                web.get(f"{PATH}/api/explain", self._explain),
                web.get(f"{PATH}/api/curves", _answers(api.curves)),
                web.post(f"{PATH}/api/scale", _obeys(_Scale, self._scale)),
                web.post(f"{PATH}/api/release", _obeys(_Release, self._release)),
            ]
        )
        for name in sorted(entry.name for entry in (files("cluster.console") / "static").iterdir()):
            if name != "index.html":
                app.router.add_get(f"{PATH}/{name}", _file(name))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)

    async def start(self, *, is_shared: bool = False) -> int:
        """Listen, and return the port; `StartError` when it is taken. `is_shared`: the console of the gateway
        that this one takes over from listens there."""
        await self._runner.setup()
        may_share = self._takes_over and self._port != 0
        try:
            if may_share and not is_shared:
                check_free(self._host, self._port)
            await web.TCPSite(self._runner, self._host, self._port, reuse_port=may_share).start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(
                f"gateway.console_port: the console cannot listen on {self._host}:{self._port}: "
                f"{error.strerror or error}; choose another port, 0 for a free one, or null for no console"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what the console's page would not send, and turn every refusal into JSON."""
        response: web.StreamResponse
        if problem := refused_host(request.headers.get("Host"), self._names):
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
        response.headers.update(HEADERS)
        return response

    async def _explain(self, request: web.Request) -> web.Response:
        request_id = request.query.get("id", "")
        if not request_id:
            return _error(400, "id: name the request, as in /console/api/explain?id=...")
        return _json(self._api.explain(request_id))

    async def _scale(self, order: _Scale) -> str:
        noun = "replica" if order.replicas == 1 else "replicas"
        done = await self._orders.scale({order.pool: order.replicas}, by="local")
        if all(change.is_pin for change in done.changes):
            return f"pool {order.pool} keeps its {order.replicas} {noun}: it is pinned"
        return f"pool {order.pool} will have {order.replicas} {noun}"

    async def _release(self, order: _Release) -> str:
        await self._orders.release([order.pool], by="local")
        return f"pool {order.pool} is released"


def _answers(read: Callable[[], Awaitable[dict[str, Any] | str]]) -> Handler:
    """Return a handler that answers with what `read` returns: JSON, or the fields of a JSON object."""

    async def answer(request: web.Request) -> web.Response:
        return _json(await read())

    return answer


def _obeys(kind: type[AnOrder], obey: Callable[[AnOrder], Awaitable[str]]) -> Handler:
    """Return a handler that reads an order of this kind, has it carried out, and answers with a text for the
    operator."""

    async def answer(request: web.Request) -> web.Response:
        try:
            order = msgspec.json.decode(await request.read(), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _error(400, f"the order cannot be read: {error}")
        return _json({"message": await obey(order)})

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


# ----------------------------------------------------------------------------------------------
# Which HTTP requests the console answers at all: pure functions over headers.
#
# Reading needs no sign-in, so a page of another site must be kept from reading (DNS rebinding: its name leads
# here) and from sending orders (by a form or a script).

MAX_BODY_BYTES = 4096
MAX_TOKEN_CHARS = 4096
# On every answer: the page loads and reaches nothing but this console, and no other page frames or reads it.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "tandem",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def refused_host(host: str | None, names: Collection[str]) -> str:
    """Return why a request with this Host header is refused; "" when it is not.

    A name that somebody else owns can be made to resolve to this host; an address, `localhost` and the names
    in `names` (lower case) cannot.
    """
    if host is None:
        return "the Host header is missing"
    name = _name(host)
    if name is None:
        return f"the Host header {host[:100]!r} is not a host and a port"
    if name == "localhost" or name in names or _is_address(name):
        return ""
    return f"the console is not known as {name[:100]!r}; to allow it, add it to gateway.console_hosts"


def refused_order(headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Return why a POST with these headers is refused, as (status, reason); None when it is not.

    A page of another site can send a POST, but neither of this type nor with this Origin without a preflight
    request, which is never granted here.
    """
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        return 415, f"the Content-Type must be application/json, not {kind[:100]!r}"
    origin = headers.get("Origin")
    if origin is not None and _place(origin) != headers.get("Host", "").lower():
        return 403, f"orders from pages of {origin[:100]!r} are not taken"
    if headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return 403, "orders from pages of other sites are not taken"
    return None


def bearer_token(authorization: str) -> str:
    """Return the token of the Authorization header; "" where there is none, or none that could be one."""
    scheme, _, token = authorization.strip().partition(" ")
    token = token.strip()
    is_sane = token.isascii() and token.isprintable() and len(token) <= MAX_TOKEN_CHARS
    return token if scheme.lower() == "bearer" and is_sane else ""


def _name(host: str) -> str | None:
    """`localhost` of `localhost:8781`, `::1` of `[::1]:8781`, in lower case."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # refuses what is no number
        name = parts.hostname
    except ValueError:
        return None
    is_plain = parts.netloc == host and parts.username is None and parts.password is None
    return name.lower() if name and is_plain else None


def _place(origin: str) -> str:
    """`host:port` of an Origin header; "" where it has none ("null")."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
