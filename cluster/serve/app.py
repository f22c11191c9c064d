"""The Ray application: pools and gateways as Ray Serve deployments, and named actors. Serve starts, watches,
replaces and counts them; no request passes through it.

    ReplicaActor    an engine core; bundle 0 of its placement group, one deployment `Pool-<name>` a pool
    RankActor       bundle 1 + stage of the same group, started by its engine core (`rank_actors`)
    StoreActor      one a node, named, detached, made by the node's first engine core (`store_actors`)
    GatewayActor    the deployment `Gateway`, ingress of the application
    RosterActor     one, named, detached (`cluster.roster.actor`); Ray restarts it and the stores
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve

from cluster.config import ClusterConfig
from cluster.dtypes import resolve_dtype
from cluster.metrics.exporters import GatewayMetrics, ReplicaMetrics
from cluster.metrics.logs import log_to_stderr
from cluster.metrics.ray_registry import ray_registry
from cluster.model_source.fetch_context import FetchContext, FetchProgress
from cluster.roster.introduction import meet_gateways
from cluster.roster.messages import GatewayRecord, ReplicaRecord, StartingReplica
from cluster.roster.ray_roster import find_roster, open_roster
from cluster.roster.state import keep_registered
from cluster.scaling.orders import Operations
from cluster.scaling.roles import role_of
from cluster.scaling.serve_client import MARK_DEPLOYMENT, MARK_KEY, REPLICAS_KEY, deployment_name
from cluster.secret_files import read_trust, trust_files
from cluster.serve.allocator import return_large_blocks
from cluster.serve.auto_kv import NodeResources, engine_config
from cluster.serve.capacity import bundles, gateway_bundle, placement_strategy
from cluster.serve.collector import leave_out_started
from cluster.serve.deployed import Deployed, remember
from cluster.serve.gateway_server import ControlPlane, Gateway, GatewayHosts
from cluster.serve.machine import Machine
from cluster.serve.rank_actors import RayRankLauncher, node_host, only
from cluster.serve.ray_private import bind_serve_to_loopback, with_version
from cluster.serve.rollout import gateway_version, pool_version, with_replicas
from cluster.serve.scaler_actor import ScalerHandle, dashboard_url
from cluster.serve.store_actors import keep_store, own_store_name
from cluster.served_model import described_model, model_weights
from cluster.stored_config import read_stored_config
from cluster.stores import draw_life
from cluster.text.tokenizer import ModelText
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from workers.config import PaceConfig
from workers.errors import RankDiedError
from workers.messages.link import HandOverTarget
from workers.messages.rank_channel import StepPace
from workers.model.model_config import read_model_config
from workers.model.quantization.weight_form import WeightForm
from workers.replica.engine_core import EngineCore
from workers.replica.partition import ReplicaSpec

_WATCH_S = 30.0
_log = logging.getLogger(__name__)
_SELF_CHECK_S = 0.25
_METRICS_S = 2.0
_TELL_S = 1.0
# For how long another thread of a gateway may keep the interpreter while its event loop waits for it.
_SWITCH_S = 0.0005
# Added to a replica's drain: Serve kills it only when it overstays this.
_GRACE_S = 10.0
# The share of a deployment that is replaced at a time; at least one replica.
_ONE_BY_ONE = 0.01
# Percent of a deployment, rounded up: one replica.
_ONE_MORE = 1


def build_application(
    config: ClusterConfig,
    cpus: Mapping[str, float],
    *,
    life: str = "",
    counts: Mapping[str, int] | None = None,
    counts_key: str = "",
) -> serve.Application:
    """Return the Serve application: the gateways, with all pools bound below them.

    `cpus` are per rank of a pool; `life` names the application's life where it is not a new one; `counts`
    take precedence over the file's replicas; orders are kept in the store's Redis under `counts_key` ("":
    nowhere). Of secrets only the paths of their files are in the arguments, which Ray keeps. When it is
    deployed over a running one, Serve replaces, one after the other, the replicas of the
    deployments whose version differs (`cluster.serve.rollout`).
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
        .bind(config_json, pool.name, life, dict(cpus))
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
        .bind(config_json, mark, counts_key, *pools)
    )


class ReplicaActor:
    """Represents one replica: its engine core, in the Serve replica's process and event loop, and its
    registration.

    The constructor returns when the ranks have loaded and warmed up and the gateways have connected, so that
    Serve counts the replica as running exactly when it can serve.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config_json: str, pool_name: str, life: str, cpus: dict[str, float]
    ) -> None:
        bind_serve_to_loopback()
        config = read_stored_config(config_json)
        unique_id = serve.get_replica_context().replica_id.unique_id
        log_to_stderr(config.logs, f"{pool_name}-{unique_id}", pool_name)
        self._pool = next(pool for pool in config.pools if pool.name == pool_name)
        self._model_name = config.model_name
        self._clock = SystemClock()
        self._roster = open_roster(config.app)
        self._identity = ReplicaIdentity(f"{pool_name}-{unique_id}", int(self._clock.wall() * 1000))
        self._leaving = False
        self._phase = "starting"
        telling = asyncio.create_task(self._tell_start())
        try:
            self._engine_core = await self._launch(config, life, cpus)
        finally:
            telling.cancel()
        registry = ray_registry(
            app=config.app, pool=pool_name, replica=self._identity.replica_id, model=config.model_name
        )
        self._metrics = ReplicaMetrics(registry, self._pool.engine.block_tokens)
        self._tasks = [
            asyncio.create_task(keep_registered(self._register, self._clock)),
            asyncio.create_task(self._follow_roster()),
            asyncio.create_task(self._export_metrics()),
        ]
        self._dying = asyncio.create_task(self._end_when_dead())
        missing = await meet_gateways(self._roster, self._engine_core.connected_gateways, self._clock)
        if missing:
            _log.warning("%s starts before %s know it", self._identity.replica_id, ", ".join(missing))
        leave_out_started()

    async def _launch(self, config: ClusterConfig, life: str, cpus: dict[str, float]) -> EngineCore:
        """Start the engine core with its ranks, once the model's files are on this host."""
        await asyncio.to_thread(config.model_source.fetch, FetchContext(self._enter_download))
        pool_name = self._pool.name
        engine = engine_config(config, pool_name, Machine(), _own_node(cpus))
        self._storing = asyncio.create_task(keep_store(config, life, self._clock))
        dtype = resolve_dtype(config.pools, described_model(config))
        model_dir = await asyncio.to_thread(
            model_weights, config, dtype, WeightForm(self._pool.weight_dtype), self._enter
        )
        spec = ReplicaSpec(
            identity=self._identity,
            pool=pool_name,
            role=self._pool.role,
            model_dir=str(model_dir),
            dtype=dtype,
            weight_dtype=self._pool.weight_dtype,
            parallel=self._pool.parallel,
            engine=engine,
            kv_share=self._pool.device_kv_share,
            group_shares=config.auth.shares("device_kv_share"),
            transfer=config.transfer,
            trust=trust_files(config),
            host=node_host(config.transfer.data_host),
            faults=config.debug.fault_rules,
            pace=_step_pace(config.debug.pace),
            store=own_store_name(config, life),
            store_kv_dtype=config.store.kv_dtype,
            frees_windows=config.frees_windows,
            gguf_file="" if model_dir == config.model_path else str(config.model_path),
            model_cache=str(config.model_cache or ""),
        )
        launcher = RayRankLauncher(self._pool.tp, config.logs, pool_name, config.model_source)
        return await EngineCore.launch(spec, launcher, self._clock, self._enter)

    def _enter(self, phase: str) -> None:
        self._phase = phase

    def _enter_download(self, progress: FetchProgress) -> None:
        self._phase = progress.text

    async def _tell_start(self) -> None:
        """Report the replica's progress to those who wait for it."""
        while True:
            await self._roster.tell_start(
                StartingReplica(self._identity.replica_id, self._pool.name, self._phase)
            )
            await self._clock.sleep(_TELL_S)

    def check_health(self) -> None:
        """Raise when the engine core or its ranks cannot continue; Serve then replaces the replica."""
        self._engine_core.check_health()
        if not self._leaving:
            _check_tasks(self._tasks, self._identity.replica_id, self._identity.epoch)

    async def __del__(self) -> None:
        """Leave, let streams finish or move, and stop the ranks. Serve awaits this before it ends the
        process."""
        self._leaving = True
        await self._register()
        await self._engine_core.drain(self._pool.drain_s)
        for task in (*self._tasks, self._dying, self._storing):
            task.cancel()
        await self._roster.remove(self._identity.replica_id, self._identity.epoch)
        await self._engine_core.stop()

    async def _end_when_dead(self) -> None:
        """End the process when the ranks died: Serve notices that at once, a failed health check only the
        third time."""
        try:
            while True:
                await self._clock.sleep(_SELF_CHECK_S)
                self._engine_core.check_health()
        except RankDiedError as error:
            print(f"{self._identity.replica_id} ends: {error}", file=sys.stderr, flush=True)
        try:
            await self._roster.remove(self._identity.replica_id, self._identity.epoch)
            await self._engine_core.stop()
        finally:
            os._exit(1)

    async def _follow_roster(self) -> None:
        """Follow the role assignment, and open and measure the paths to every replica that decodes before a
        request needs them: prompts are handed over to these replicas, and streams migrate between them."""
        version = 0
        while True:
            view = await self._roster.view(version, _WATCH_S)
            version = view.version
            if (changed := role_of(self._identity, view, self._engine_core.role_epoch)) is not None:
                self._engine_core.set_role(*changed)
                await self._register()
            self._engine_core.join_peers(
                [
                    HandOverTarget(record.identity, record.address)
                    for record in view.replicas
                    if record.role != "prefill" and not record.leaving
                ]
            )

    async def _export_metrics(self) -> None:
        while True:
            self._metrics.update(self._engine_core.reports.load(), self._engine_core.role)
            await self._clock.sleep(_METRICS_S)

    async def _register(self) -> bool:
        return await self._roster.register(
            ReplicaRecord(
                identity=self._identity,
                pool=self._pool.name,
                role=self._engine_core.role,
                address=self._engine_core.address,
                model=self._model_name,
                compatibility=self._engine_core.compatibility,
                process_id=os.getpid(),
                rank_process_ids=self._engine_core.rank_process_ids,
                leaving=self._leaving,
                tp=self._pool.tp,
                stages=self._engine_core.stages,
                home_role=self._pool.role,
                role_epoch=self._engine_core.role_epoch,
                ep=self._pool.ep,
            )
        )


def _keep_responsive() -> None:
    """Keep pauses of a gateway's event loop short. Existing objects stay out of garbage collection; and the
    other threads of this process, which are Ray's and Serve's, give the interpreter back sooner than after 5
    ms."""
    leave_out_started()
    sys.setswitchinterval(_SWITCH_S)


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
        _check_tasks(self._tasks, self._gateway_id, self._epoch)

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


def _check_tasks(tasks: Sequence[asyncio.Task[Any]], name: str, epoch: int) -> None:
    """Raise when a background task has ended: it failed, or a later registration took this one's place."""
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError(f"{name}: this registration was superseded in the roster (epoch {epoch})")


def check_model(config: ClusterConfig) -> None:
    """Raise `CheckpointError` or `ConfigError` where the pools cannot serve the model's folder."""
    model = read_model_config(described_model(config))
    for pool in config.pools:
        pool.check_model(model)
    ModelText.load(described_model(config))


def deploy(config: ClusterConfig, deployed: Deployed, counts: Mapping[str, int] | None = None) -> None:
    """Hand the application to Serve and return at once; `deployed` is recorded for later updates."""
    remember(config.app, deployed)
    target = serve.RunTarget(
        build_application(config, deployed.cpus, life=deployed.life, counts=counts),
        name=config.app,
        route_prefix=None,
        external_scaler_enabled=True,
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _step_pace(pace: PaceConfig | None) -> StepPace | None:
    return None if pace is None else StepPace(pace.base_s, pace.sequence_s, pace.token_s)


def _own_node(cpus: Mapping[str, float]) -> NodeResources:
    """Return the resources of this process's node, with the CPUs per rank of each pool."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes: dict[str, dict[str, float]] = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    return NodeResources(nodes[node_id], cpus)
