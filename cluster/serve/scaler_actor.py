"""The scaler as a Ray actor: named, detached, restarted by Ray, made by the gateways, which report to it and
pass it the orders of operators.

It alone reads the Ray token, for Ray's dashboard, behind which Serve's scale endpoint is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.config import ClusterConfig
from cluster.errors import DashboardAwayError, UnavailableError
from cluster.metrics.logs import log_to_stderr
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.ray_roster import AT_HEAD, NAMESPACE, open_roster
from cluster.scaling.count_memory import KeptCounts
from cluster.scaling.redis_counts import RedisCounts
from cluster.scaling.scaler import Scaler
from cluster.scaling.serve_client import ServeClient
from cluster.secret_files import read_trust
from cluster.serve.ray_private import dashboard_address, ray_token, read_value, write_value
from cluster.stored_config import read_stored_config
from cluster.stores import index_url
from kvtransfer.common.clock import SystemClock

_CALL_S = 5.0
# An order waits for a look that has begun, and each of both for the dashboard.
_ORDER_S = 40.0
_KV_NAMESPACE = b"tandem"
_log = logging.getLogger(__name__)


async def dashboard_url() -> str:
    """Return the URL of the Ray cluster's dashboard, such as `http://127.0.0.1:8265`; "" when there is
    none."""
    try:
        address = await asyncio.to_thread(dashboard_address)
    except (RayError, RuntimeError) as error:
        raise DashboardAwayError(f"Ray's GCS does not report where the dashboard is: {error}") from error
    return f"http://{address}" if address else ""


class RayScaler:
    """Runs a `Scaler` as an actor. `mark` is that of the deploy whose configuration it follows: the latest
    one."""

    def __init__(self, config_json: str, mark: str, counts_key: str) -> None:
        config = read_stored_config(config_json)
        log_to_stderr(config.logs, f"scaler-{config.app}")
        self._app = config.app
        self._mark = mark
        keeping: KeptCounts | None = None
        if counts_key and config.store.has_redis:
            url = index_url(config, read_trust(config, certificates=False))
            remembered = RedisCounts(url, counts_key, str(config.store.redis_ca_file or ""))
            keeping = KeptCounts(remembered, _began_at_ms(config.app), SystemClock())
        self._scaler = Scaler(
            config, open_roster(config.app), self._open_client, SystemClock(), counts=keeping
        )
        self._running: asyncio.Task[None] | None = None

    async def report(self, gateway: str, frame: bytes) -> str:
        """Take a gateway's status, and return the mark of the configuration in use. The first call starts the
        loop."""
        if self._running is not None and self._running.done():
            _log.error("the scaler's loop broke and starts again", exc_info=self._running.exception())
            self._running = None
        if self._running is None:
            self._running = asyncio.create_task(self._scaler.run(), name="scaler")
        self._scaler.report(gateway, admin_pb.StatusResponse.FromString(frame))
        return self._mark

    async def order(self, frame: bytes) -> bytes:
        """Carry out an operator's order, and return the outcome."""
        return await self._scaler.obey(frame)

    async def configure(self, config_json: str, mark: str) -> None:
        """Follow this configuration, unless it is of an earlier deploy."""
        if mark > self._mark:
            self._mark = mark
            self._scaler.configure(read_stored_config(config_json))

    async def _open_client(self) -> ServeClient:
        url = await dashboard_url()
        if not url:
            raise DashboardAwayError(
                "this Ray cluster has no dashboard, so counts can neither be changed nor kept; start its "
                "head with one"
            )
        return ServeClient(url, self._app, ray_token())


class ScalerHandle:
    """Reaches the scaler from a gateway, and starts it when it is missing."""

    def __init__(self, config: ClusterConfig, mark: str, gateway: str, counts_key: str = "") -> None:
        """`counts_key`: where orders are kept for the next Ray cluster (`RedisCounts`); "": nowhere."""
        self._counts_key = counts_key
        self._app = config.app
        self._gateway = gateway
        self._actor: ActorHandle[RayScaler] | None = None
        self.configure(config, mark)

    def configure(self, config: ClusterConfig, mark: str) -> None:
        """Continue with the configuration of the deploy with this mark."""
        self._config_json, self._mark = config.model_dump_json(), mark

    async def report(self, status: admin_pb.StatusResponse) -> None:
        """Send a report. A scaler that is away is no error: the next report may reach it, or another."""
        try:
            async with asyncio.timeout(_CALL_S):
                actor = await self._reach()
                # The part that the scaler uses, small enough to be passed inside Ray's call.
                part = admin_pb.StatusResponse(replicas=status.replicas, demand=status.demand)
                mark = await actor.report.remote(self._gateway, part.SerializeToString())
                if mark < self._mark:
                    await actor.configure.remote(self._config_json, self._mark)
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            _log.info("scaler: %r", error)

    async def order(self, frame: bytes) -> bytes:
        """Pass on the frame of an order and return that of the answer; `UnavailableError` without one."""
        try:
            async with asyncio.timeout(_ORDER_S):
                actor = await self._reach()
                answer: bytes = await actor.order.remote(frame)
                return answer
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            _log.warning("an order got no answer of the scaler: %r", error)
            raise UnavailableError(
                "the scaler does not answer, so it is not known whether the order is carried out; "
                "`tandem status` shows the desired counts"
            ) from error

    async def _reach(self) -> ActorHandle[RayScaler]:
        actor: ActorHandle[RayScaler] = self._actor or await asyncio.to_thread(self._find)
        self._actor = actor
        return actor

    def _find(self) -> ActorHandle[RayScaler]:
        make: Callable[..., ActorHandle[RayScaler]] = (
            ray.remote(RayScaler)
            .options(
                name=_scaler_name(self._app),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=0,
                # Ray's dashboard listens on the head node, by default for that node alone.
                resources=AT_HEAD,
            )
            .remote
        )
        return make(self._config_json, self._mark, self._counts_key)


def _began_at_ms(app: str) -> int:
    """Return when the first scaler of the application started in this Ray cluster, as Unix time."""
    key = f"began/{app}".encode()
    if (known := read_value(key, _KV_NAMESPACE)) is not None:
        return int(known)
    began_at_ms = round(SystemClock().wall() * 1000)
    write_value(key, str(began_at_ms).encode(), _KV_NAMESPACE)
    return began_at_ms


def stop_scaler(app: str) -> None:
    """End the application's scaler for good; its gateways must be gone."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(_scaler_name(app), namespace=NAMESPACE), no_restart=True)


def _scaler_name(app: str) -> str:
    return f"scaler-{app}"
