"""A replica as a Ray Serve deployment. Its process imports nothing of gateways: its ranks start sooner."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping

import ray
from ray import serve

from cluster.config import ClusterConfig
from cluster.dtypes import resolve_dtype
from cluster.metrics.logs import log_to_stderr
from cluster.metrics.ray_registry import ray_registry
from cluster.metrics.replica_exporter import ReplicaMetrics
from cluster.model_source.fetch_context import FetchContext, FetchProgress
from cluster.roster.introduction import meet_gateways
from cluster.roster.messages import ReplicaRecord, StartingReplica
from cluster.roster.ray_roster import open_roster
from cluster.roster.state import keep_registered
from cluster.scaling.roles import role_of
from cluster.secret_files import trust_files
from cluster.serve.auto_kv import NodeResources, engine_config
from cluster.serve.background_tasks import check_tasks
from cluster.serve.collector import leave_out_started
from cluster.serve.machine import Machine
from cluster.serve.rank_actors import RayRankLauncher, node_host
from cluster.serve.ray_private import bind_serve_to_loopback
from cluster.serve.store_actors import keep_store, own_store_name
from cluster.served_model import described_model, model_weights
from cluster.stored_config import read_stored_config
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from workers.config import PaceConfig
from workers.errors import RankDiedError
from workers.messages.link import HandOverTarget
from workers.messages.rank_channel import StepPace
from workers.model.quantization.weight_form import WeightForm
from workers.replica.engine_core import EngineCore
from workers.replica.partition import ReplicaSpec

_WATCH_S = 30.0
_SELF_CHECK_S = 0.25
_METRICS_S = 2.0
_TELL_S = 1.0
_log = logging.getLogger(__name__)


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
            check_tasks(self._tasks, self._identity.replica_id, self._identity.epoch)

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


def _step_pace(pace: PaceConfig | None) -> StepPace | None:
    return None if pace is None else StepPace(pace.base_s, pace.sequence_s, pace.token_s)


def _own_node(cpus: Mapping[str, float]) -> NodeResources:
    """Return the resources of this process's node, with the CPUs per rank of each pool."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes: dict[str, dict[str, float]] = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    return NodeResources(nodes[node_id], cpus)
