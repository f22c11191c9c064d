"""Ray Serve's scale endpoint without Ray: the states and refusals that the dashboard has, over real HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

TOKEN = "the-token"


@dataclass
class FakePool:
    """One deployment: its target, and what the last deploy set it to."""

    target: int
    configured: int
    states: list[str] = field(default_factory=list)


@dataclass
class FakeApp:
    """One application, as `serve.run` makes it with `external_scaler_enabled`."""

    pools: dict[str, FakePool]
    mark: str = "m1"
    status: str = "RUNNING"
    source: str = "imperative"
    deployed_at: float = 1.5
    is_scalable: bool = True

    def deploy(self, mark: str, counts: dict[str, int]) -> None:
        """Serve sets every target to the configured count."""
        self.mark = mark
        self.pools = {pool: FakePool(count, count) for pool, count in counts.items()}


class FakeDashboard:
    """Listens on a free loopback port while entered; `url` is its address."""

    def __init__(self, app: FakeApp | None, name: str = "tandem") -> None:
        self.app = app
        self.name = name
        # Of the next requests, so many are answered with 503.
        self.failing = 0
        self.orders: list[tuple[str, int]] = []
        # Other paths that it answers.
        self.bodies: dict[str, bytes] = {}
        self.url = ""
        self._server = web.Application(middlewares=[self._guard])
        self._server.add_routes(
            [
                web.get("/api/serve/applications/", self._applications),
                web.post("/api/v1/applications/{app}/deployments/{deployment}/scale", self._scale),
                web.get("/{tail:.*}", self._other),
            ]
        )
        self._runner = web.AppRunner(self._server, access_log=None)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not given:
            return web.Response(status=401, text="Unauthorized: Missing authentication token")
        if given != f"Bearer {TOKEN}":
            return web.Response(status=403, text="Forbidden: Invalid authentication token")
        if self.failing:
            self.failing -= 1
            return web.json_response({"error": "Serve controller is not available"}, status=503)
        response: web.StreamResponse = await handler(request)
        return response

    async def _applications(self, request: web.Request) -> web.Response:
        shown = {} if self.app is None else {self.name: _shown(self.app)}
        return web.json_response({"applications": shown, "proxies": {}, "target_capacity": None})

    async def _scale(self, request: web.Request) -> web.Response:
        count = (await request.json())["target_num_replicas"]
        pool = request.match_info["deployment"].removeprefix("Pool-")
        if self.app is None or request.match_info["app"] != self.name or pool not in self.app.pools:
            return web.json_response({"error": "Application or Deployment not found"}, status=404)
        if not self.app.is_scalable:
            return web.json_response({"error": "external_scaler_enabled=false"}, status=412)
        self.app.pools[pool].target = count
        self.orders.append((pool, count))
        return web.json_response({"message": "Scaling request received."})

    async def _other(self, request: web.Request) -> web.Response:
        body = self.bodies.get(request.path)
        return web.Response(status=200 if body else 404, body=body or b"", content_type="application/json")


def _shown(app: FakeApp) -> dict[str, Any]:
    gateway = _deployment(1, 1, ["RUNNING"], {"deploy_mark": app.mark} if app.mark else None)
    pools = {
        f"Pool-{name}": _deployment(pool.target, pool.configured, pool.states, None)
        for name, pool in app.pools.items()
    }
    return {
        "name": "tandem",
        "status": app.status,
        "last_deployed_time_s": app.deployed_at,
        "source": app.source,
        "external_scaler_enabled": app.is_scalable,
        "deployments": {"Gateway": gateway, **pools},
    }


def _deployment(target: int, configured: int, states: list[str], user_config: Any) -> dict[str, Any]:
    return {
        "status": "HEALTHY",
        "target_num_replicas": target,
        "deployment_config": {"num_replicas": configured, "user_config": user_config, "name": "x"},
        "replicas": [{"state": state, "replica_id": str(number)} for number, state in enumerate(states)],
    }
