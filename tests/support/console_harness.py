"""A gateway with its console over scripted replicas, and what stands in for Ray's dashboard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from gateway_harness import GatewayHarness

from cluster.console.orders import Operations
from cluster.roster.messages import ReleasePool, RosterOrder, SetDesired
from cluster.serve.gateway_server import Gateway

TOKEN = "the-operators-token"


@dataclass
class FakeDashboard:
    """The two routes that the Serve client uses, for the application `tandem` and the pools of the
    harness."""

    # Deployment and count, as they were obeyed.
    orders: list[tuple[str, int]] = field(default_factory=list)
    pinned: list[tuple[str, int]] = field(default_factory=list)
    # Pools: what the roster of a real gateway is told.
    released: list[str] = field(default_factory=list)
    # In place of an answer to an order of whoever has the token.
    refusal: tuple[int, str] | None = None
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/api/v1/applications/tandem/deployments/{name}/scale", self._scale)
        app.router.add_get("/api/serve/applications/", self._applications)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def operations(self) -> Operations:
        async def dashboard_url() -> str:
            return self.url

        async def record(order: RosterOrder) -> None:
            match order:
                case SetDesired(pool, num_replicas, pinned):
                    assert pinned
                    self.pinned.append((pool, num_replicas))
                case ReleasePool(pool):
                    self.released.append(pool)
                case _:
                    raise AssertionError(f"no operator gives this order: {order}")

        return Operations(dashboard_url, record)

    def _refused(self, request: web.Request) -> web.Response | None:
        """As Ray 2.60 does: 401 without a token, 403 with another one."""
        authorization = request.headers.get("Authorization", "")
        if not authorization:
            return web.Response(status=401, text="Unauthorized: Missing authentication token")
        if authorization != f"Bearer {TOKEN}":
            return web.Response(status=403, text="Forbidden: Invalid authentication token")
        return None

    async def _scale(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        if self.refusal is not None:
            return web.json_response({"error": self.refusal[1]}, status=self.refusal[0])
        body = await request.json()
        assert list(body) == ["target_num_replicas"]
        self.orders.append((request.match_info["name"], body["target_num_replicas"]))
        return web.json_response({"message": "Scaling request received."})

    async def _applications(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response({"applications": {}})


@dataclass
class Page:
    """What a browser would do, without one."""

    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        """The JSON of a 200."""
        async with self.session.get(self.url + path) as reply:
            body = await reply.text()
            assert reply.status == 200, body
            return json.loads(body)

    async def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, data: bytes | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        async with self.session.request(method, self.url + path, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def order(self, what: str, order: dict[str, Any], token: str = TOKEN) -> tuple[int, dict[str, Any]]:
        """As the page gives it; `token` "": without one."""
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return await self.ask("POST", f"/console/api/{what}", headers, json.dumps(order).encode())


class ConsoleHarness:
    """p0 (prefill), d0 (decode), a gateway with a console, a dashboard, and a page."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.dashboard = FakeDashboard()
        self.gateway: Gateway
        self.address = ""
        self.page: Page

    async def start(self) -> None:
        await self.dashboard.start()
        await self.harness.add_replica("p0", "prefill")
        await self.harness.add_replica("d0", "decode")
        config = self.harness.config(console_port=0, console_hosts=["console.example"])
        self.gateway, self.address = await self.harness.add_gateway(config, self.dashboard.operations())
        self.page = Page(f"http://127.0.0.1:{self.gateway.console_port}", aiohttp.ClientSession())

    async def stop(self) -> None:
        """The harness itself is its fixture's."""
        await self.page.session.close()
        await self.dashboard.stop()
