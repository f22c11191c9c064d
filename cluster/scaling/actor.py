"""The scaler as a Ray actor: named, detached, restarted by Ray, made by the gateways, which report to it.

Also where in the Ray cluster the dashboard is, and with which token it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private import ray_constants
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import internal_kv

from cluster.config import ClusterConfig
from cluster.errors import DashboardAwayError
from cluster.observe.logs import log_to_stderr
from cluster.proto import tandem_pb2 as pb
from cluster.roster.actor import NAMESPACE, open_roster
from cluster.scaling.lever import Lever
from cluster.scaling.scaler import Scaler
from kvtransfer.clock import SystemClock

_CALL_S = 5.0
_BEARER = "Bearer "
_A_PLACE_THERE = 0.001
_log = logging.getLogger(__name__)


async def dashboard_url() -> str:
    """Of the Ray cluster that this process belongs to, such as `http://127.0.0.1:8265`; "" when it has no
    dashboard."""
    address = await asyncio.to_thread(_dashboard_address)
    return f"http://{address}" if address else ""


def _dashboard_address() -> str:
    try:
        found: bytes | None = internal_kv._internal_kv_get(
            ray_constants.DASHBOARD_ADDRESS, namespace=ray_constants.KV_NAMESPACE_DASHBOARD
        )
    except (RayError, RuntimeError) as error:
        raise DashboardAwayError(f"Ray's GCS does not tell where the dashboard is: {error}") from error
    return found.decode() if found else ""


def ray_token() -> str:
    """The Ray token of this process; "" where Ray uses none."""
    headers: dict[str, str] = get_auth_headers_if_auth_enabled({})
    return headers.get("authorization", headers.get("Authorization", "")).removeprefix(_BEARER)


class RayScaler:
    """`Scaler` in an actor. `mark` is that of the deploy whose configuration it follows: the latest one."""

    def __init__(self, config_json: str, mark: str) -> None:
        config = ClusterConfig.model_validate_json(config_json)
        log_to_stderr(config.logs, f"scaler-{config.app}")
        self._app = config.app
        self._mark = mark
        self._scaler = Scaler(config, open_roster(config.app), self._open_lever, SystemClock())
        self._running: asyncio.Task[None] | None = None

    async def report(self, gateway: str, frame: bytes) -> str:
        """A gateway's status; returns the mark of the configuration in use. The first one starts the loop."""
        if self._running is not None and self._running.done():
            _log.error("the scaler's loop broke and starts again", exc_info=self._running.exception())
            self._running = None
        if self._running is None:
            self._running = asyncio.create_task(self._scaler.run(), name="scaler")
        self._scaler.report(gateway, pb.StatusResponse.FromString(frame))
        return self._mark

    async def configure(self, config_json: str, mark: str) -> None:
        """Follow this configuration, unless it is of an earlier deploy."""
        if mark > self._mark:
            self._mark = mark
            self._scaler.configure(ClusterConfig.model_validate_json(config_json))

    async def _open_lever(self) -> Lever:
        url = await dashboard_url()
        if not url:
            raise DashboardAwayError(
                "this Ray cluster has no dashboard, so counts can neither be changed nor kept; start its "
                "head with one"
            )
        return Lever(url, self._app, ray_token())


class ScalerReports:
    """A gateway's way to the scaler, which is made when it is missing."""

    def __init__(self, config: ClusterConfig, mark: str, gateway: str) -> None:
        self._config_json = config.model_dump_json()
        self._app = config.app
        self._mark = mark
        self._gateway = gateway
        self._actor: ActorHandle[RayScaler] | None = None

    async def send(self, status: pb.StatusResponse) -> None:
        """Never raises for a scaler that is away: the next report may reach it, or another."""
        try:
            async with asyncio.timeout(_CALL_S):
                actor: ActorHandle[RayScaler] = self._actor or await asyncio.to_thread(self._find)
                self._actor = actor
                mark = await actor.report.remote(self._gateway, _slim(status).SerializeToString())
                if mark < self._mark:
                    await actor.configure.remote(self._config_json, self._mark)
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            _log.info("scaler: %r", error)

    def _find(self) -> ActorHandle[RayScaler]:
        make: Callable[..., Any] = (
            ray.remote(RayScaler)
            .options(
                name=_scaler_name(self._app),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=0,
                # Ray's dashboard listens on the head node, by default for that node alone.
                resources={HEAD_NODE_RESOURCE_NAME: _A_PLACE_THERE},
            )
            .remote
        )
        actor: ActorHandle[RayScaler] = make(self._config_json, self._mark)
        return actor


def _slim(status: pb.StatusResponse) -> pb.StatusResponse:
    """What the scaler looks at: small enough to travel inside of Ray's call."""
    return pb.StatusResponse(replicas=status.replicas, demand=status.demand)


def stop_scaler(app: str) -> None:
    """End the application's scaler for good; its gateways must be gone."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(_scaler_name(app), namespace=NAMESPACE), no_restart=True)


def _scaler_name(app: str) -> str:
    return f"scaler-{app}"
