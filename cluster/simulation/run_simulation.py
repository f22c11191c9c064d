"""Run a simulation from its description to its result."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from cluster.roster.messages import ScalingChange
from cluster.simulation.planned_failures import PlannedFailure, schedule_failures
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_load import LoadDriver, SimulatedSession
from cluster.simulation.simulated_scaling import PlannedScaling, SimulatedScaling
from cluster.simulation.simulation_result import SimulatedObjectives, SimulationResult, result_of
from cluster.simulation.time_lines import TimeLines
from router.config import RouterConfig

# Until then the gateways know all replicas.
_BEGINS_S = 1.0
# The longest that requests run without the end of any.
_LONGEST_S = 24 * 3600.0
_PROGRESS_EVENTS = 4096


class SimulationPlan(NamedTuple):
    """What is simulated. `price_per_s` is that of all devices together. With `samples_s` above 0, the state
    of all replicas is noted as often. With `scaling` the replicas of the shape are those at the beginning."""

    shape: ClusterShape
    sessions: Iterable[SimulatedSession]
    objectives: SimulatedObjectives
    seed: int = 0
    failures: tuple[PlannedFailure, ...] = ()
    price_per_s: float | None = None
    samples_s: float = 0.0
    scaling: PlannedScaling | None = None

    def of_policy(self, policy: str, sessions: Iterable[SimulatedSession]) -> SimulationPlan:
        """Return the same simulation with this policy of the router, and these sessions."""
        router = RouterConfig.model_validate({**self.shape.router.model_dump(), "policy": policy})
        return self._replace(shape=self.shape._replace(router=router), sessions=sessions)


class Simulated(NamedTuple):
    """A simulation that is over. Times of moves are seconds from its beginning."""

    result: SimulationResult
    time_lines: TimeLines
    num_left_out: int
    moves: tuple[ScalingChange, ...] = ()


def run_simulation(
    plan: SimulationPlan, on_progress: Callable[[float, int], None] = lambda now, num_ended: None
) -> Simulated:
    """Run it to the end of its last request. `on_progress` hears now and then how far time has come, in
    seconds from the first arrival, and how many requests have ended. Raises `ConfigError` for failures of
    replicas that are not there."""
    cluster = SimulatedCluster(plan.shape, plan.seed)
    most_tokens = min(
        min(engine.max_context_tokens, engine.num_blocks * engine.block_tokens)
        for _, engine in plan.shape.replicas
    )
    cluster.events.run(_BEGINS_S)
    schedule_failures(cluster, list(plan.failures))
    lines = TimeLines(cluster, plan.samples_s)
    scaling = None if plan.scaling is None else SimulatedScaling(cluster, plan.scaling)
    driver = LoadDriver(cluster, plan.sessions, most_tokens)
    driver.start()
    was_enabled = gc.isenabled()
    # Nothing of a request is in a cycle; looking for cycles among millions of blocks takes most of the time.
    gc.disable()
    try:
        _run(cluster, driver, on_progress)
    finally:
        if was_enabled:
            gc.enable()
    result = result_of(cluster, _BEGINS_S, plan.objectives, plan.price_per_s)
    if scaling is None:
        return Simulated(result, lines, driver.num_left_out)
    started_s = scaling.serve.starting_s(_BEGINS_S, _BEGINS_S + result.span_s)
    replica_s = result.replica_s + started_s
    price_per_s = plan.price_per_s
    if price_per_s is not None:  # that of the replicas at the beginning
        price_per_s *= replica_s / (len(plan.shape.replicas) * result.span_s)
    result = result._replace(replica_s=replica_s, price_per_s=price_per_s)
    moves = tuple(replace(move, at=move.at - _BEGINS_S) for move in scaling.moves)
    return Simulated(result, lines, driver.num_left_out, moves)


def _run(cluster: SimulatedCluster, driver: LoadDriver, on_progress: Callable[[float, int], None]) -> None:
    num_events, num_ended, ended_at = 0, 0, 0.0
    while not driver.is_over:
        cluster.events.step()
        num_events += 1
        if num_events % _PROGRESS_EVENTS == 0:
            now, num_before = cluster.clock.now(), num_ended
            num_ended = len(cluster.records) - cluster.num_running
            ended_at = now if num_ended > num_before or not cluster.num_running else ended_at
            assert now < ended_at + _LONGEST_S, f"{cluster.num_running} requests hang"
            on_progress(now - _BEGINS_S, num_ended)
