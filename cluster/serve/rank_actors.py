"""A replica's ranks as Ray actors, each in the bundle of its stage, and ending them on any node.

Used by `cluster.serve.replica_actor`, inside a replica's placement group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import NamedTuple

import psutil
import ray
from msgspec.structs import replace
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.metrics.config import LogConfig
from cluster.metrics.logs import log_to_stderr
from cluster.model_source.source import ModelSource
from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import RANK_SPEC_CODEC, RankSpec
from workers.rank.start import start_rank

_KILL_AFTER_S = 0.3
# How long a process on another node may take to be killed; Ray itself needs about as long.
_THERE_S = 5.0
_SAME_S = 0.1


class RankLocation(NamedTuple):
    """Represents where a rank runs. After its end the process id may be reused, but not with this start
    time."""

    process_id: int
    started_at: float
    node_id: str


class RankActor:
    """Runs one rank in a process of its own; `run` returns when the engine core ends it, or is gone."""

    def place(self) -> RankLocation:
        """Return where this actor runs."""
        return RankLocation(
            os.getpid(), psutil.Process().create_time(), ray.get_runtime_context().get_node_id()
        )

    def run(self, spec_frame: bytes, logs_json: str, pool: str, model_json: str) -> None:
        """Serve as the rank of the encoded `RankSpec`. The model comes to this node, where it is not yet."""
        spec = RANK_SPEC_CODEC.decode(spec_frame)
        who = f"{spec.replica.replica_id}/{spec.rank}"
        log_to_stderr(LogConfig.model_validate_json(logs_json), who, pool)
        # The ranks of a replica may be on several nodes: each listens at its own.
        transfer = replace(spec.transfer, data_host=node_host(spec.transfer.data_host))
        source = ModelSource.model_validate_json(model_json).fetch()
        start_rank(replace(spec, transfer=transfer, model_dir=str(source.path)))


class RayRankLauncher:
    """Implements `RankLauncher`: starts each rank in the bundle of its stage, with a share of it."""

    def __init__(self, tp: int, logs: LogConfig, pool: str, source: ModelSource) -> None:
        self._tp = tp
        self._arguments = logs.model_dump_json(), pool, source.model_dump_json()

    async def launch(self, spec: RankSpec) -> RayRankHandle:
        """Start the rank; return when its process runs."""
        group = get_current_placement_group()
        assert group is not None, "a replica runs in a placement group"
        index = 1 + spec.stage
        share = {name: amount / self._tp for name, amount in group.bundle_specs[index].items()}
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        actor = (
            ray.remote(RankActor).options(**only(share), max_restarts=0, scheduling_strategy=bundle).remote()
        )
        return RayRankHandle(actor, RankLocation(*await actor.place.remote()), spec, self._arguments)


class RayRankHandle:
    """Implements `RankHandle`: the rank runs for the time of its one call."""

    def __init__(
        self,
        actor: ActorHandle[RankActor],
        place: RankLocation,
        spec: RankSpec,
        arguments: tuple[str, str, str],
    ) -> None:
        self._actor = actor
        self._place = place
        self._rank = spec.rank
        self._killing: asyncio.Task[None] | None = None
        self._running = actor.run.remote(RANK_SPEC_CODEC.encode(spec), *arguments)

    async def wait(self) -> str:
        """Return why the rank ended."""
        reason = await self._call_ended()
        if self._killing is not None:  # Ray reports a stopped process as dead before it is
            await self._killing
        return reason

    def kill(self) -> None:
        """Make Ray end the actor, which it then does not report as a crash. SIGKILL follows, for a process
        that is stopped, from the node that it runs on."""
        ray.kill(self._actor, no_restart=True)
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill_process())

    async def _call_ended(self) -> str:
        try:
            await self._running
        except RayTaskError as error:
            return f"rank {self._rank} failed: {error.cause!r}"
        except RayActorError as error:
            lines = str(error).splitlines()
            return f"rank {self._rank}, process {self._place.process_id}, died: {lines[0]}"
        return f"rank {self._rank} left"

    async def _kill_process(self) -> None:
        await SystemClock().sleep(_KILL_AFTER_S)
        if self._place.node_id == ray.get_runtime_context().get_node_id():
            end_process(self._place.process_id, self._place.started_at)
            return
        there = NodeAffinitySchedulingStrategy(self._place.node_id, soft=False)
        ending = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        with contextlib.suppress(RayError, TimeoutError):  # the node is gone, or Ray was faster
            async with asyncio.timeout(_THERE_S):
                await ending.remote(self._place.process_id, self._place.started_at)


def end_process(process_id: int, started_at: float) -> None:
    """Send SIGKILL, if that process still is the one that started then."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        if abs(process.create_time() - started_at) < _SAME_S:
            process.kill()


def node_host(configured: str) -> str:
    """Return the address at which others reach this process: `auto` and wildcards become this node's."""
    return ray.util.get_node_ip_address() if configured in ("auto", "0.0.0.0", "::") else configured


def only(bundle: dict[str, float]) -> dict[str, float]:
    """Return actor options that request exactly the content of the bundle."""
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0)}
