"""A replica's ranks as Ray actors: each in the bundle of its stage, ended on whichever node it runs.

Used by `cluster.app`, inside a replica's placement group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import ray
from msgspec.structs import replace
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from workers.messages import RANK_SPEC_CODEC, RankSpec

_KILL_AFTER_S = 1.0


class RankActor:
    """One rank in a process of its own; `run` returns when the brain has told it to leave, or is gone."""

    def place(self) -> tuple[int, str]:
        """The process id, and the Ray node that it is an id of."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def run(self, spec_frame: bytes) -> None:
        from workers.engine.rank import run_rank  # here: it imports torch, which no other actor needs

        spec = RANK_SPEC_CODEC.decode(spec_frame)
        # The ranks of a replica may be on several nodes: each listens at its own.
        transfer = replace(spec.transfer, data_host=node_host(spec.transfer.data_host))
        run_rank(replace(spec, transfer=transfer))


class RayRankLauncher:
    """A `RankLauncher` that starts each rank in the bundle of its stage, with a share of it."""

    def __init__(self, tp: int) -> None:
        self._tp = tp

    async def launch(self, spec: RankSpec) -> RayRankHandle:
        group = get_current_placement_group()
        assert group is not None, "a replica runs in a placement group"
        index = 1 + spec.stage
        share = {name: amount / self._tp for name, amount in group.bundle_specs[index].items()}
        actor = (
            ray.remote(RankActor)
            .options(**only(share), max_restarts=0, scheduling_strategy=_in_bundle(group, index))
            .remote()
        )
        process_id, node_id = await actor.place.remote()
        return RayRankHandle(actor, process_id, node_id, spec)


class RayRankHandle:
    """A `RankHandle`: the rank runs while its one call does."""

    def __init__(self, actor: ActorHandle[RankActor], process_id: int, node_id: str, spec: RankSpec) -> None:
        self._actor = actor
        self._process_id = process_id
        self._node_id = node_id
        self._rank = spec.rank
        self._ended = False
        self._running = actor.run.remote(RANK_SPEC_CODEC.encode(spec))

    async def wait(self) -> str:
        try:
            await self._running
        except RayTaskError as error:
            return f"rank {self._rank} failed: {error.cause!r}"
        except RayActorError as error:
            return f"rank {self._rank}, process {self._process_id}, died: {str(error).splitlines()[0]}"
        finally:
            self._ended = True
        return f"rank {self._rank} left"

    def kill(self) -> None:
        """Ray ends the actor, which it then does not report as a crash; SIGKILL follows, for a process that
        is stopped, from the node that it runs on."""
        ray.kill(self._actor, no_restart=True)
        asyncio.get_running_loop().call_later(_KILL_AFTER_S, self._kill_process)

    def _kill_process(self) -> None:
        if self._ended:
            return
        if self._node_id == ray.get_runtime_context().get_node_id():
            _end_process(self._process_id)
        else:
            there = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            ray.remote(_end_process).options(num_cpus=0, scheduling_strategy=there).remote(self._process_id)


def _end_process(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, signal.SIGKILL)


def node_host(configured: str) -> str:
    """The address others reach this process at: `auto` and wildcards become this node's."""
    return ray.util.get_node_ip_address() if configured in ("auto", "0.0.0.0", "::") else configured


def only(bundle: dict[str, float]) -> dict[str, float]:
    """Actor options that ask for exactly what the bundle holds."""
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0)}


def _in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
