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
import os
import sys

from ray import serve

from cluster.capacity import GATEWAY_CPUS, bundles, placement_strategy
from cluster.config import ClusterConfig
from cluster.gateway.server import Gateway
from cluster.logs import log_to_stderr
from cluster.messages import GatewayRecord, ReplicaRecord
from cluster.metrics import ReplicaMetrics
from cluster.rank_actors import RayRankLauncher, node_host, only
from cluster.roster import keep_registered
from cluster.roster_actor import open_roster
from cluster.store_actors import keep_store, own_store_name
from cluster.stores import draw_life, resolve_dtype
from kvtransfer.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from workers.brain import Brain
from workers.config import Parallel
from workers.errors import RankDiedError
from workers.messages import HandOverTarget

GATEWAY_DEPLOYMENT = "Gateway"
_WATCH_S = 30.0
_SELF_CHECK_S = 0.25
_METRICS_S = 2.0
_GRACE_S = 10.0
"""Added to a replica's drain: Serve kills it only when it overstays this."""


def build_application(config: ClusterConfig, cpus: dict[str, float], secret: bytes) -> serve.Application:
    """The Serve application: the gateways with all pools bound below them. `cpus` are per rank of a pool."""
    config_json, life = config.model_dump_json(), draw_life()
    pools = [
        serve.deployment(ReplicaActor)
        .options(
            name=deployment_name(pool.name),
            num_replicas=pool.replicas,
            placement_group_bundles=bundles(pool, cpus[pool.name]),
            placement_group_strategy=placement_strategy(pool),
            ray_actor_options=only(bundles(pool, cpus[pool.name])[0]),
            health_check_period_s=pool.health_check_period_s,
            health_check_timeout_s=pool.health_check_timeout_s,
            graceful_shutdown_timeout_s=pool.drain_s + _GRACE_S,
            max_constructor_retry_count=2,
        )
        .bind(config_json, pool.name, secret, life)
        for pool in config.pools
    ]
    return (
        serve.deployment(GatewayActor)
        .options(
            name=GATEWAY_DEPLOYMENT,
            num_replicas=config.gateway.replicas,
            ray_actor_options={"num_cpus": GATEWAY_CPUS},
            health_check_period_s=2.0,
            health_check_timeout_s=5.0,
            graceful_shutdown_timeout_s=_GRACE_S,
            max_constructor_retry_count=2,
        )
        .bind(config_json, secret, *pools)
    )


def deployment_name(pool: str) -> str:
    return f"Pool-{pool}"


class ReplicaActor:
    """One replica: its brain, in the Serve replica's own process and event loop, and its registration.

    The constructor returns when the ranks have loaded and warmed up, so Serve counts the replica as running
    exactly when it can serve.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_json: str, pool_name: str, secret: bytes, life: str
    ) -> None:
        log_to_stderr()
        config = ClusterConfig.model_validate_json(config_json)
        self._pool = next(pool for pool in config.pools if pool.name == pool_name)
        self._model_name = config.model_name
        self._clock = SystemClock()
        self._roster = open_roster(config.app)
        host = node_host(config.transfer.data_host)
        unique_id = serve.get_replica_context().replica_id.unique_id
        self._identity = ReplicaIdentity(f"{pool_name}-{unique_id}", int(self._clock.wall() * 1000))
        self._leaving = False
        self._brain = Brain(
            identity=self._identity,
            pool=pool_name,
            role=self._pool.role,
            model_dir=str(config.model),
            dtype=resolve_dtype(self._pool, config.model),
            parallel=Parallel(self._pool.tp, self._pool.pp, self._pool.stage_devices, self._pool.layers),
            engine=self._pool.engine,
            transfer=config.transfer,
            secret=secret,
            launcher=RayRankLauncher(self._pool.tp),
            clock=self._clock,
            host=host,
            faults=config.debug.fault_rules,
            store=own_store_name(config, life),
        )
        self._storing = asyncio.create_task(keep_store(config, life, secret, self._clock))
        await self._brain.start()
        self._metrics = ReplicaMetrics(pool_name, self._identity.replica_id)
        self._renewing = asyncio.create_task(keep_registered(self._register, self._clock))
        self._watching = asyncio.create_task(self._join_peers())
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

    async def _join_peers(self) -> None:
        """Open and measure the paths to every decode replica before a request needs them."""
        version = 0
        while self._pool.role != "decode":
            view = await self._roster.view(version, _WATCH_S)
            version = view.version
            self._brain.join_peers(
                [
                    HandOverTarget(record.identity, record.address)
                    for record in view.replicas
                    if record.role != "prefill" and not record.leaving
                ]
            )
        await asyncio.Event().wait()

    async def _export_metrics(self) -> None:
        while True:
            self._metrics.update(self._brain.reports.load())
            await self._clock.sleep(_METRICS_S)

    async def _register(self) -> bool:
        return await self._roster.register_replica(
            ReplicaRecord(
                identity=self._identity,
                pool=self._pool.name,
                role=self._pool.role,
                address=self._brain.address,
                model=self._model_name,
                compatibility=self._brain.compatibility,
                process_id=os.getpid(),
                rank_process_ids=self._brain.rank_process_ids,
                leaving=self._leaving,
                tp=self._pool.tp,
                stages=self._brain.stages,
            )
        )


class GatewayActor:
    """One gateway: the gRPC server in the Serve replica's own event loop, and its registration."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_json: str, secret: bytes, *_pools: object
    ) -> None:
        log_to_stderr()
        config = ClusterConfig.model_validate_json(config_json)
        self._clock = SystemClock()
        self._roster = open_roster(config.app)
        unique_id = serve.get_replica_context().replica_id.unique_id
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
        )
        self._port = await self._gateway.start()
        self._renewing = asyncio.create_task(keep_registered(self._register, self._clock))

    def check_health(self) -> None:
        if self._renewing.done():
            self._renewing.result()
            raise RuntimeError(f"{self._gateway_id}: this life is over in the roster")

    async def __del__(self) -> None:
        self._renewing.cancel()
        await self._roster.remove(self._gateway_id, self._epoch)
        await self._gateway.stop()

    async def _register(self) -> bool:
        address = f"{self._host}:{self._port}"
        return await self._roster.register_gateway(
            GatewayRecord(self._gateway_id, self._epoch, address, os.getpid())
        )
