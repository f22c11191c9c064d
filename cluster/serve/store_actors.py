"""The store of each node as a Ray actor: pinned to its node, named, detached, restarted after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
from collections.abc import Callable
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.metrics.logs import log_to_stderr
from cluster.metrics.ray_registry import ray_registry
from cluster.metrics.replica_exporter import StoreMetrics
from cluster.roster.messages import StoreRecord
from cluster.roster.ray_roster import NAMESPACE, open_roster
from cluster.roster.state import keep_registered
from cluster.secret_files import read_trust
from cluster.serve.collector import leave_out_started
from cluster.serve.rank_actors import node_host
from cluster.stored_config import read_stored_config
from cluster.stores import NODE_ID_CHARS, NodeAddress, NvmeFolder, store_name, store_settings
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import TransferError

_START_S = 20.0
# Time added to the time that a store may flush.
_STOP_S = 5.0
_METRICS_S = 2.0
_LOOK_S = 10.0
_RETRY_S = 1.0

_log = logging.getLogger("tandem.store")


class StoreActor:
    """Runs one node's store process: the owner on the actor's event loop, its registration and its metrics.

    Every start has a new epoch. An error that breaks the owner ends the process, and Ray restarts it: then it
    adopts the arena that the ranks still have mapped.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config_json: str, life: str
    ) -> None:
        config = read_stored_config(config_json)
        context = ray.get_runtime_context()
        log_to_stderr(config.logs, f"store-{context.get_node_id()[:NODE_ID_CHARS]}")
        self._clock = SystemClock()
        self._is_stopping = False
        self._roster = open_roster(config.app)
        path = config.store.nvme_path
        self._folder = None if path is None else NvmeFolder(path, platform.node(), config.app)
        node = NodeAddress(context.get_node_id(), node_host(config.transfer.data_host))
        trust = read_trust(config)
        settings = store_settings(
            config,
            trust,
            node,
            life,
            epoch=int(self._clock.wall() * 1000),
            nvme_path=self._folder.path if self._folder else None,
        )
        self._node_id, self._epoch = settings.node_id, settings.epoch
        from kvtransfer.store.server.store_server import StoreServer  # here: replicas run no store

        self._owner = StoreServer(settings, trust, self._clock, Faults(config.debug.fault_rules))
        try:
            await self._owner.start()
        except (TransferError, OSError):
            if not context.was_current_actor_reconstructed:
                raise
            _log.exception("the store does not start again yet")
            await self._clock.sleep(_RETRY_S)
            os._exit(1)  # Ray would not restart the actor after an exception
        _log.info(
            "the store of node %s listens at %s, epoch %d", self._node_id, self._owner.address, self._epoch
        )
        self._metrics = StoreMetrics(ray_registry(app=config.app, node=self._node_id))
        self._tasks = [
            asyncio.create_task(keep_registered(self._register, self._clock)),
            asyncio.create_task(self._export_metrics()),
            asyncio.create_task(self._end_when_broken()),
        ]
        leave_out_started()

    async def ready(self) -> None:
        """Return when the store has started."""

    async def stop(self) -> None:
        """Flush, end every connection, leave the roster. The actor serves nothing afterwards."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        record = self._record()
        await self._owner.stop()
        await self._roster.remove(record.member_id, record.epoch)
        if self._folder is not None:
            self._folder.close()

    async def _register(self) -> bool:
        return await self._roster.register(self._record())

    async def _export_metrics(self) -> None:
        while True:
            self._metrics.update(self._owner.stat())
            await self._clock.sleep(_METRICS_S)

    async def _end_when_broken(self) -> None:
        try:
            await self._owner.wait_ended()
        finally:
            if not self._is_stopping:
                _log.critical("the store of node %s is broken and ends", self._node_id, exc_info=True)
                os._exit(1)

    def _record(self) -> StoreRecord:
        return StoreRecord(
            node_id=self._node_id,
            epoch=self._epoch,
            address=self._owner.address,
            process_id=os.getpid(),
            host=platform.node(),
        )


def own_store_name(config: ClusterConfig, life: str) -> str | None:
    """Return the name of the node's store, which may not run yet; None where none is configured."""
    if not config.store.dram_gb:
        return None
    return store_name(config.app, life, ray.get_runtime_context().get_node_id())


async def keep_store(config: ClusterConfig, life: str, clock: Clock) -> None:
    """Keep this node's store running until cancelled. Ray restarts one that dies; one that could not start is
    made again. Serving does not depend on it. Returns at once where no store is configured."""
    if not config.store.dram_gb:
        return
    node_id = ray.get_runtime_context().get_node_id()
    reported = ""
    while True:
        problem = await _ensure_store(config, life, node_id)
        if problem and problem != reported:
            _log.error("serving continues without the store of node %s: %s", node_id, problem)
        elif reported and not problem:
            _log.info("the store of node %s is up", node_id)
        reported = problem
        await clock.sleep(_LOOK_S)


async def _ensure_store(config: ClusterConfig, life: str, node_id: str) -> str:
    """Return why the store is not up; "" when it is."""
    try:
        async with asyncio.timeout(_START_S):
            actor = await asyncio.to_thread(_store_actor, config, life, node_id)
            await actor.ready.remote()
    except TimeoutError:
        return f"it has not answered within {_START_S:g} s; it is waited for"
    except (RayError, ValueError) as error:
        return str(error)
    return ""


def stop_stores(app: str, flush_s: float) -> None:
    """Let every store of the application flush and end, then end its process for good."""
    actors = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and named["name"].startswith(_actor_name(app, "")):
            with contextlib.suppress(ValueError):  # gone since
                actors.append(ray.get_actor(named["name"], namespace=NAMESPACE))
    stopping = [actor.stop.remote() for actor in actors]
    with contextlib.suppress(RayError, GetTimeoutError):
        ray.get(stopping, timeout=flush_s + _STOP_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _store_actor(config: ClusterConfig, life: str, node_id: str) -> ActorHandle[StoreActor]:
    with contextlib.suppress(ValueError):  # there is none yet
        return cast(
            "ActorHandle[StoreActor]", ray.get_actor(_actor_name(config.app, node_id), namespace=NAMESPACE)
        )
    make: Callable[..., ActorHandle[StoreActor]] = (
        ray.remote(StoreActor)
        .options(
            name=_actor_name(config.app, node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote
    )
    return make(config.model_dump_json(), life)


def _actor_name(app: str, node_id: str) -> str:
    return f"store-{app}/{node_id}"
