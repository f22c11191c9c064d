"""Ray applied to plain classes: pools and gateways as Ray Serve deployments, beside actors. Serve starts,
watches, replaces and counts them; no request ever passes through it.

    ReplicaActor (brain)   bundle 0 of its placement group, one deployment `Pool-<name>` a pool
    RankActor              bundle 1 + stage of the same group, started by its brain (`rank_actors`)
    StoreActor             one a node, named, detached, made by its first brain (`store_actors`)
    GatewayActor           the deployment `Gateway`, ingress of the application
    RosterActor            one, named, detached (`roster_actor`); Ray restarts these two
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from ray import serve

from cluster.config import ClusterConfig
from cluster.console.orders import Operations
from cluster.dtypes import resolve_dtype
from cluster.metrics.exporters import GatewayMetrics, ReplicaMetrics
from cluster.metrics.logs import log_to_stderr
from cluster.metrics.registry import ray_registry
from cluster.roster.actor import find_roster, open_roster
from cluster.roster.messages import GatewayRecord, ReplicaRecord
from cluster.roster.state import keep_registered
from cluster.scaling.roles import role_of
from cluster.scaling.serve_client import MARK_DEPLOYMENT, MARK_KEY, REPLICAS_KEY, deployment_name
from cluster.serve.capacity import bundles, gateway_bundle, placement_strategy
from cluster.serve.gateway_server import Gateway
from cluster.serve.machine import Machine
from cluster.serve.memory import check_container_memory
from cluster.serve.rank_actors import RayRankLauncher, node_host, only
from cluster.serve.ray_private import with_version
from cluster.serve.rollout import gateway_version, pool_version, with_replicas
from cluster.serve.scaler_actor import ScalerReports, dashboard_url
from cluster.serve.store_actors import keep_store, own_store_name
from cluster.stores import draw_life
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from workers.config import Parallel
from workers.errors import RankDiedError
from workers.messages import HandOverTarget
from workers.replica.engine_core import EngineCore

_WATCH_S = 30.0
_SELF_CHECK_S = 0.25
_METRICS_S = 2.0
# Added to a replica's drain: Serve kills it only when it overstays this.
_GRACE_S = 10.0
# The share of a deployment that is replaced at a time; at least one replica.
_ONE_BY_ONE = 0.01
# Percent of a deployment, rounded up: one replica.
_ONE_MORE = 1


def build_application(
    config: ClusterConfig,
    cpus: Mapping[str, float],
    secret: bytes,
    *,
    life: str = "",
    counts: Mapping[str, int] | None = None,
    counts_key: str = "",
) -> serve.Application:
    """The Serve application: the gateways with all pools bound below them. `cpus` are per rank of a pool;
    `life` is that of the application where it is not a new one; `counts` go before the file's replicas;
    orders are kept in the store's Redis under `counts_key` ("": not).

    Deployed over a running one, Serve replaces the replicas of those deployments whose version differs, one
    after the other (`cluster.serve.rollout`).
    """
    config_json, life = config.model_dump_json(), life or draw_life()
    mark = f"{round(SystemClock().wall() * 1000):015d}"
    pools = [
        with_version(
            serve.deployment(rolling_update_percentage=_ONE_BY_ONE)(ReplicaActor),
            pool_version(config, pool.name),
        )
        .options(
            name=deployment_name(pool.name),
            num_replicas=(counts or {}).get(pool.name, pool.replicas),
            placement_group_bundles=bundles(pool, cpus[pool.name]),
            placement_group_strategy=placement_strategy(pool),
            ray_actor_options=only(bundles(pool, cpus[pool.name])[0]),
            health_check_period_s=pool.health_check_period_s,
            health_check_timeout_s=pool.health_check_timeout_s,
            graceful_shutdown_timeout_s=pool.drain_s + _GRACE_S,
            max_constructor_retry_count=2,
            max_surge_percent=_ONE_MORE if pool.surge else 0,
        )
        .bind(config_json, pool.name, secret, life)
        for pool in config.pools
    ]
    return (
        with_version(
            serve.deployment(rolling_update_percentage=_ONE_BY_ONE)(GatewayActor), gateway_version(config)
        )
        .options(
            name=MARK_DEPLOYMENT,
            num_replicas=config.gateway.replicas,
            ray_actor_options=only(gateway_bundle(config.gateway)) | {"resources": config.gateway.resources},
            health_check_period_s=2.0,
            health_check_timeout_s=5.0,
            graceful_shutdown_timeout_s=config.gateway.drain_s + _GRACE_S,
            max_constructor_retry_count=2,
            max_surge_percent=_ONE_MORE if config.gateway.surge else 0,
            user_config={
                MARK_KEY: mark,
                REPLICAS_KEY: {pool.name: pool.replicas for pool in config.pools},
            },
        )
        .bind(config_json, secret, mark, counts_key, *pools)
    )


class ReplicaActor:
    """One replica: its brain, in the Serve replica's own process and event loop, and its registration.

    The constructor returns when the ranks have loaded and warmed up, so Serve counts the replica as running
    exactly when it can serve.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_json: str, pool_name: str, secret: bytes, life: str
    ) -> None:
        config = ClusterConfig.model_validate_json(config_json)
        unique_id = serve.get_replica_context().replica_id.unique_id
        log_to_stderr(config.logs, f"{pool_name}-{unique_id}", pool_name)
        self._pool = next(pool for pool in config.pools if pool.name == pool_name)
        check_container_memory(config, pool_name, Machine())
        self._model_name = config.model_name
        self._clock = SystemClock()
        self._roster = open_roster(config.app)
        host = node_host(config.transfer.data_host)
        self._identity = ReplicaIdentity(f"{pool_name}-{unique_id}", int(self._clock.wall() * 1000))
        self._leaving = False
        self._brain = EngineCore(
            identity=self._identity,
            pool=pool_name,
            role=self._pool.role,
            model_dir=str(config.model),
            dtype=resolve_dtype(config.pools, config.model),
            parallel=Parallel(self._pool.tp, self._pool.pp, self._pool.stage_devices, self._pool.layers),
            engine=self._pool.engine,
            transfer=config.transfer,
            secret=secret,
            launcher=RayRankLauncher(self._pool.tp, config.logs, pool_name),
            clock=self._clock,
            host=host,
            faults=config.debug.fault_rules,
            store=own_store_name(config, life),
        )
        self._storing = asyncio.create_task(keep_store(config, life, secret, self._clock))
        await self._brain.start()
        board = ray_registry(
            app=config.app, pool=pool_name, replica=self._identity.replica_id, model=config.model_name
        )
        self._metrics = ReplicaMetrics(board, self._pool.engine.block_tokens)
        self._renewing = asyncio.create_task(keep_registered(self._register, self._clock))
        self._watching = asyncio.create_task(self._follow_roster())
        self._measuring = asyncio.create_task(self._export_metrics())
        self._dying = asyncio.create_task(self._end_when_dead())

    def check_health(self) -> None:
        """Raises when the brain or its ranks cannot go on; Serve then replaces the replica."""
        self._brain.check_health()
        for task in (self._renewing, self._watching, self._measuring):
            if task.done() and not self._leaving:
                task.result()
                raise RuntimeError(f"{self._identity.replica_id}: this life is over in the roster")

    async def __del__(self) -> None:
        """Serve awaits this before it ends the process: leave, let streams finish or move, stop the ranks."""
        self._leaving = True
        await self._register()
        await self._brain.drain(self._pool.drain_s)
        for task in (self._renewing, self._watching, self._measuring, self._dying, self._storing):
            task.cancel()
        await self._roster.remove(self._identity.replica_id, self._identity.epoch)
        await self._brain.stop()

    async def _end_when_dead(self) -> None:
        """Serve sees the end of a process at once, but a failed health check only the third time."""
        try:
            while True:
                await self._clock.sleep(_SELF_CHECK_S)
                self._brain.check_health()
        except RankDiedError as error:
            print(f"{self._identity.replica_id} ends: {error}", file=sys.stderr, flush=True)
        try:
            await self._roster.remove(self._identity.replica_id, self._identity.epoch)
            await self._brain.stop()
        finally:
            os._exit(1)

    async def _follow_roster(self) -> None:
        """Play the role that the lease says; open and measure the paths to every replica that decodes before
        a request needs them: prompts are handed over to those, and streams of decode replicas moved."""
        version = 0
        while True:
            view = await self._roster.view(version, _WATCH_S)
            version = view.version
            if (changed := role_of(self._identity, view, self._brain.role_epoch)) is not None:
                self._brain.set_role(*changed)
                await self._register()
            self._brain.join_peers(
                [
                    HandOverTarget(record.identity, record.address)
                    for record in view.replicas
                    if record.role != "prefill" and not record.leaving
                ]
            )

    async def _export_metrics(self) -> None:
        while True:
            self._metrics.update(self._brain.reports.load(), self._brain.role)
            await self._clock.sleep(_METRICS_S)

    async def _register(self) -> bool:
        return await self._roster.register_replica(
            ReplicaRecord(
                identity=self._identity,
                pool=self._pool.name,
                role=self._brain.role,
                address=self._brain.address,
                model=self._model_name,
                compatibility=self._brain.compatibility,
                process_id=os.getpid(),
                rank_process_ids=self._brain.rank_process_ids,
                leaving=self._leaving,
                tp=self._pool.tp,
                stages=self._brain.stages,
                home_role=self._pool.role,
                role_epoch=self._brain.role_epoch,
            )
        )


class GatewayActor:
    """One gateway: the gRPC server in the Serve replica's own event loop, and its registration."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_json: str, secret: bytes, mark: str, counts_key: str, *_pools: object
    ) -> None:
        config = ClusterConfig.model_validate_json(config_json)
        unique_id = serve.get_replica_context().replica_id.unique_id
        log_to_stderr(config.logs, f"gateway-{unique_id}")
        self._config, self._mark, self._counts_key = config, mark, counts_key
        self._clock = SystemClock()
        self._roster = open_roster(config.app)
        self._host = node_host(config.gateway.host)
        if config.gateway.host == "auto":
            everywhere = config.gateway.model_copy(update={"host": "0.0.0.0"})
            config = config.model_copy(update={"gateway": everywhere})
        self._gateway_id, self._epoch = f"gateway-{unique_id}", int(self._clock.wall() * 1000)
        self._gateway = Gateway(
            gateway_id=self._gateway_id,
            epoch=self._epoch,
            config=config,
            roster=self._roster,
            secret=secret,
            clock=self._clock,
            operations=Operations(
                dashboard_url, functools.partial(self._roster.set_desired, pinned=True), self._roster.release
            ),
            open_roster=find_roster,
            advertised_host=self._host,
        )
        self._port = await self._gateway.start()
        self._renewing = asyncio.create_task(keep_registered(self._register, self._clock))
        board = ray_registry(app=config.app, gateway=self._gateway_id, model=config.model_name)
        self._metrics = GatewayMetrics(board, config.transfer.min_gb_s)
        self._measuring = asyncio.create_task(self._export_metrics())
        self._reporting: asyncio.Task[None] | None = None

    async def reconfigure(self, settings: dict[str, Any]) -> None:
        """Serve calls this after the constructor, and when the `user_config` of a later deploy differs: so
        gateways need no restart for other counts. A declared one has the counts alone."""
        self._config = with_replicas(self._config, settings[REPLICAS_KEY])
        self._gateway.configure(self._config)
        if self._reporting is not None:
            self._reporting.cancel()
        name = f"{self._gateway_id}/{self._epoch}"
        mark = settings.get(MARK_KEY, self._mark)
        reports = ScalerReports(self._config, mark, name, self._counts_key)
        self._reporting = asyncio.create_task(self._report(reports))

    async def _export_metrics(self) -> None:
        while True:
            meters = self._gateway.desk.meters
            status = await self._gateway.status()
            for _ in self._metrics.update(meters, status, self._clock.now()):
                await self._clock.sleep(0)
            await self._clock.sleep(_METRICS_S)

    async def _report(self, reports: ScalerReports) -> None:
        """Tell the scaler what this gateway sees; make it where it is missing."""
        while True:
            await reports.send(await self._gateway.status())
            await self._clock.sleep(self._config.scaling.interval_s)

    def check_health(self) -> None:
        for task in (self._renewing, self._measuring):
            if task.done():
                task.result()
                raise RuntimeError(f"{self._gateway_id}: this life is over in the roster")

    async def __del__(self) -> None:
        self._renewing.cancel()
        self._measuring.cancel()
        if self._reporting is not None:
            self._reporting.cancel()
        await self._roster.remove(self._gateway_id, self._epoch)
        await self._gateway.stop()

    async def _register(self) -> bool:
        console = f"{self._host}:{port}" if (port := self._gateway.console_port) else ""
        return await self._roster.register_gateway(
            GatewayRecord(
                gateway_id=self._gateway_id,
                epoch=self._epoch,
                address=f"{self._host}:{self._port}",
                process_id=os.getpid(),
                console=console,
            )
        )
