"""Ray Serve's scale endpoint on the dashboard's port: the one client that operators and the autoscaler pull.

    GET  /api/serve/applications/                                       targets, states
    POST /api/v1/applications/{app}/deployments/{deployment}/scale      {"target_num_replicas": n}

Without a token the dashboard answers 401, with a wrong one 403, where the application may not be scaled from
outside 412, where there is no such deployment 404.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import aiohttp
import msgspec

from cluster.errors import (
    DashboardAwayError,
    DashboardError,
    ScalerDisabledError,
    TokenRefusedError,
    UnknownPoolError,
)

# The deployment whose `user_config` carries the mark of the deploy.
MARK_DEPLOYMENT = "Gateway"
MARK_KEY = "deploy_mark"
# In the same `user_config`: the configuration's count of each pool, which may change without a build.
REPLICAS_KEY = "replicas"
_POOL_PREFIX = "Pool-"
_ANSWER_S = 10.0
_MAX_TEXT_CHARS = 300


def deployment_name(pool: str) -> str:
    """Return the name of a pool's Serve deployment."""
    return f"{_POOL_PREFIX}{pool}"


class PoolTarget(NamedTuple):
    """Serve's target for a pool."""

    target: int
    # The count of the last deploy, to which a deploy sets the target.
    configured: int
    num_running: int = 0
    # Replicas by Serve's state, such as STARTING, RUNNING, STOPPING.
    states: dict[str, int] = {}
    # The count in the configuration of the last deploy, which binds the desired count in its place; None:
    # unknown.
    declared: int | None = None


class AppTargets(NamedTuple):
    """An application as Serve sees it."""

    # Serve's status, such as DEPLOYING, RUNNING, DELETING.
    status: str
    # A mark that differs from the one before: the application was deployed again, so targets may have been
    # reset.
    deploy_mark: str
    is_scalable: bool
    pools: dict[str, PoolTarget]


class ServeClient:
    """A client of the dashboard at `url` for one application. Every failure is a `DashboardError`.

    `token` is the Ray token; "": none is sent. Use as an async context manager.
    """

    def __init__(self, url: str, app: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._app = app
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def application(self) -> AppTargets | None:
        """Return the targets of Serve for the pools; None while Serve does not know the application."""
        text = await self._ask("GET", "/api/serve/applications/")
        try:
            instance = msgspec.json.decode(text, type=_Instance)
        except msgspec.MsgspecError as error:
            raise self._no_dashboard(str(error)) from error
        found = instance.applications.get(self._app)
        return None if found is None else _targets(found)

    async def scale(self, pool: str, num_replicas: int) -> None:
        """Set the target of the pool. When this returns, Serve has it and keeps it over its restarts."""
        deployment = deployment_name(pool)
        path = f"/api/v1/applications/{quote(self._app)}/deployments/{quote(deployment)}/scale"
        await self._ask("POST", path, {"target_num_replicas": num_replicas}, pool)

    async def get(self, path: str) -> bytes:
        """Return the body of another of the dashboard's answers."""
        return (await self._ask("GET", path)).encode()

    async def _ask(self, method: str, path: str, body: dict[str, int] | None = None, pool: str = "") -> str:
        """Return the text of the answer; `pool` is the one that the request is about."""
        assert self._session is not None
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=self._headers, allow_redirects=False
            ) as reply:
                status, text = reply.status, await reply.text(errors="replace")
        except TimeoutError as error:
            problem = f"did not answer within {_ANSWER_S:g} s"
            raise DashboardAwayError(f"Ray's dashboard at {self.url} {problem}") from error
        except (aiohttp.ClientError, ValueError) as error:
            problem = (
                f"cannot be reached ({error}); does the head node run with one, and is this its address?"
            )
            raise DashboardAwayError(f"Ray's dashboard at {self.url} {problem}") from error
        if status != 200:
            raise self._refusal(status, text, pool)
        return text

    def _no_dashboard(self, answer: str) -> DashboardError:
        return DashboardError(f"what answers at {self.url} is no dashboard of Ray 2.60 or later: {answer}")

    def _refusal(self, status: int, text: str, pool: str) -> DashboardError:
        answer, dashboard = _answer_of(text), f"Ray's dashboard at {self.url}"
        if status == 401:
            remedy = "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            return TokenRefusedError(f"{dashboard} wants the Ray token: {remedy}")
        if status == 403:
            remedy = "take that of this Ray cluster"
            return TokenRefusedError(f"{dashboard} does not accept this Ray token: {remedy}")
        if status == 404 and not pool:
            return self._no_dashboard(answer)
        if status == 404:
            return UnknownPoolError(
                f"Ray Serve runs no deployment {deployment_name(pool)} of the application {self._app!r}; "
                "`tandem status` names the pools"
            )
        if status == 412:
            return ScalerDisabledError(
                f"Ray Serve does not let the application {self._app!r} be scaled: {answer}; deploy it with "
                "external_scaler_enabled: true"
            )
        if status in (500, 502, 503, 504):
            problem = f"has no answer of Ray Serve now (status {status})"
            return DashboardAwayError(f"{dashboard} {problem}: {answer}")
        return DashboardError(f"{dashboard} answered with status {status}: {answer}")


class _Config(msgspec.Struct):
    num_replicas: int | str | None = None
    user_config: Any = None


class _Replica(msgspec.Struct):
    state: str


class _Deployment(msgspec.Struct):
    target_num_replicas: int
    deployment_config: _Config
    replicas: list[_Replica] = []


class _Application(msgspec.Struct):
    status: str
    last_deployed_time_s: float
    deployments: dict[str, _Deployment]
    source: str = ""
    external_scaler_enabled: bool = False


class _Instance(msgspec.Struct):
    applications: dict[str, _Application]


def _targets(found: _Application) -> AppTargets:
    gateway = found.deployments.get(MARK_DEPLOYMENT)
    declared = declared_counts(gateway.deployment_config.user_config) if gateway is not None else {}
    return AppTargets(
        status=found.status,
        deploy_mark=_mark(found),
        is_scalable=found.external_scaler_enabled,
        pools={
            name.removeprefix(_POOL_PREFIX): _pool(deployment, declared.get(name.removeprefix(_POOL_PREFIX)))
            for name, deployment in found.deployments.items()
            if name.startswith(_POOL_PREFIX)
        },
    )


def declared_counts(user_config: Any) -> dict[str, int]:
    """Return the counts in the `user_config` of the gateways; values that cannot be counts are left out."""
    counts = user_config.get(REPLICAS_KEY) if isinstance(user_config, dict) else None
    if not isinstance(counts, dict):
        return {}
    return {str(pool): count for pool, count in counts.items() if isinstance(count, int)}


def _mark(found: _Application) -> str:
    """Return our own mark, drawn when the application is built, and for declarative deploys also the time of
    the deploy, since those may reset targets without building again. Serve draws the time of others again
    when its controller restarts, so that time says nothing there."""
    gateway = found.deployments.get(MARK_DEPLOYMENT)
    config = gateway.deployment_config.user_config if gateway is not None else None
    own = str(config.get(MARK_KEY, "")) if isinstance(config, dict) else ""
    return f"{own}@{found.last_deployed_time_s:.3f}" if found.source == "declarative" or not own else own


def _pool(deployment: _Deployment, declared: int | None) -> PoolTarget:
    states: dict[str, int] = {}
    for replica in deployment.replicas:
        states[replica.state] = states.get(replica.state, 0) + 1
    configured = deployment.deployment_config.num_replicas
    target = deployment.target_num_replicas
    return PoolTarget(
        target=target,
        configured=configured if isinstance(configured, int) else target,
        num_running=states.get("RUNNING", 0),
        states=states,
        declared=declared,
    )


def _answer_of(text: str) -> str:
    """Return the dashboard's own words: the `error` of its JSON, or the beginning of its text."""
    try:
        fields = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        fields = None
    if isinstance(fields, dict):
        text = str(fields.get("error") or text)
    return " ".join(text.split())[:_MAX_TEXT_CHARS] or "nothing more"
