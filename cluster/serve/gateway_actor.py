"""A gateway as a Ray Serve deployment, the ingress of the application."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from ray import serve

from cluster.metrics.exporters import GatewayMetrics
from cluster.metrics.logs import log_to_stderr
from cluster.metrics.ray_registry import ray_registry
from cluster.roster.messages import GatewayRecord
from cluster.roster.ray_roster import find_roster, open_roster
from cluster.roster.state import keep_registered
from cluster.scaling.orders import Operations
from cluster.scaling.serve_client import MARK_KEY, REPLICAS_KEY
from cluster.secret_files import read_trust
from cluster.serve.allocator import return_large_blocks
from cluster.serve.background_tasks import check_tasks
from cluster.serve.collector import leave_out_started
from cluster.serve.gateway_server import ControlPlane, Gateway, GatewayHosts
from cluster.serve.rank_actors import node_host
from cluster.serve.ray_private import bind_serve_to_loopback
from cluster.serve.rollout import with_replicas
from cluster.serve.scaler_actor import ScalerHandle, dashboard_url
from cluster.stored_config import read_stored_config
from kvtransfer.common.clock import SystemClock

_METRICS_S = 2.0
# For how long another thread of a gateway may keep the interpreter while its event loop waits for it.
_SWITCH_S = 0.0005


class GatewayActor:
    """Represents one gateway: the gRPC server in the Serve replica's event loop, and its registration."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_json: str, mark: str, counts_key: str, *_pools: object
    ) -> None:
        bind_serve_to_loopback()
        config = read_stored_config(config_json)
        unique_id = serve.get_replica_context().replica_id.unique_id
        log_to_stderr(config.logs, f"gateway-{unique_id}")
        return_large_blocks()
        await asyncio.to_thread(config.model_source.fetch)
        self._config, self._mark = config, mark
        self._clock = SystemClock()
        self._roster = open_roster(config.app)
        self._host = node_host(config.gateway.host)
        self._inner_host = node_host(config.transfer.data_host)
        if config.gateway.host == "auto":
            everywhere = config.gateway.model_copy(update={"host": "0.0.0.0"})
            config = config.model_copy(update={"gateway": everywhere})
        self._gateway_id, self._epoch = f"gateway-{unique_id}", int(self._clock.wall() * 1000)
        self._scaler = ScalerHandle(self._config, mark, f"{self._gateway_id}/{self._epoch}", counts_key)
        self._gateway = Gateway(
            gateway_id=self._gateway_id,
            epoch=self._epoch,
            config=config,
            control=ControlPlane(self._roster, Operations(dashboard_url, self._scaler.order), find_roster),
            trust=read_trust(config),
            clock=self._clock,
            hosts=GatewayHosts(self._host, self._inner_host),
        )
        self._port = await self._gateway.start()
        _keep_responsive()
        registry = ray_registry(app=config.app, gateway=self._gateway_id, model=config.model_name)
        self._metrics = GatewayMetrics(registry, config.transfer.min_gb_s, config.costs)
        self._tasks = [
            asyncio.create_task(keep_registered(self._register, self._clock)),
            asyncio.create_task(self._export_metrics()),
        ]
        self._reporting: asyncio.Task[None] | None = None

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take over the counts of a deploy without a restart. Serve calls this after the constructor, and
        when the `user_config` of a later deploy differs. That of a declared application has only the
        counts."""
        self._config = with_replicas(self._config, settings[REPLICAS_KEY])
        self._gateway.configure(self._config)
        self._scaler.configure(self._config, settings.get(MARK_KEY, self._mark))
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._report())

    async def _export_metrics(self) -> None:
        while True:
            await self._gateway.export(self._metrics)
            await self._clock.sleep(_METRICS_S)

    async def _report(self) -> None:
        """Send this gateway's status to the scaler, and start the scaler where it is missing."""
        while True:
            await self._scaler.report(await self._gateway.status())
            await self._clock.sleep(self._config.scaling.interval_s)

    def check_health(self) -> None:
        """Raise when the gateway cannot continue; Serve then replaces it."""
        check_tasks(self._tasks, self._gateway_id, self._epoch)

    async def __del__(self) -> None:
        for task in (*self._tasks, *((self._reporting,) if self._reporting else ())):
            task.cancel()
        await self._roster.remove(self._gateway_id, self._epoch)
        await self._gateway.stop()

    async def _register(self) -> bool:
        console = f"{self._host}:{port}" if (port := self._gateway.console_port) else ""
        http = f"{self._host}:{port}" if (port := self._gateway.http_port) else ""
        return await self._roster.register(
            GatewayRecord(
                gateway_id=self._gateway_id,
                epoch=self._epoch,
                address=f"{self._host}:{self._port}",
                process_id=os.getpid(),
                console=console,
                admin=f"{self._host}:{self._gateway.admin_port}",
                certificate=self._gateway.certificate_chain(),
                fleet=f"{self._inner_host}:{self._gateway.fleet_port}",
                http=http,
            )
        )


def _keep_responsive() -> None:
    """Keep pauses of a gateway's event loop short. Existing objects stay out of garbage collection; and the
    other threads of this process, which are Ray's and Serve's, give the interpreter back sooner than after 5
    ms."""
    leave_out_started()
    sys.setswitchinterval(_SWITCH_S)
