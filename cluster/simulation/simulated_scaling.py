"""Autoscaling of a simulated cluster: the scaler that serves, at its period, in virtual time.

    GatewayFigures.status --> Scaler (samples, policy, reconciler, leases) --> SimulatedServe: counts
                                  |  ^                                         SimulatedRoster: leases
                                  v  |                                             |
                             SimulatedRoster <-- records of the replicas           v
                                                                       SimulatedReplica.set_role

The scaler waits for nothing here, so each of its looks runs at one moment.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from cluster.config import ClusterConfig, PoolConfig
from cluster.errors import ConfigError
from cluster.roster.messages import ScalingChange
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.policy import Policy, decide
from cluster.scaling.roles import role_of
from cluster.scaling.scaler import Scaler
from cluster.simulation.gateway_figures import record_of
from cluster.simulation.simulated_cluster import SimulatedCluster
from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.simulated_roster import SimulatedRoster
from cluster.simulation.simulated_serve import APP, ReplicaTimes, SimulatedServe
from router.config import RouterConfig
from workers.config import EngineSettings

T = TypeVar("T")


class PlannedScaling(NamedTuple):
    """How a simulated cluster is scaled: the settings under `scaling:`, how long replicas take, and what
    decides."""

    config: ScalingConfig
    times: ReplicaTimes = ReplicaTimes()
    policy: Policy = decide


class SimulatedScaling:
    """Scales a simulated cluster from now on. Pools are named like their roles."""

    def __init__(self, cluster: SimulatedCluster, plan: PlannedScaling) -> None:
        self._cluster = cluster
        self._interval_s = plan.config.interval_s
        engines: dict[str, SimulatedEngine] = {}
        for role, engine in cluster.shape.replicas:
            engines.setdefault(role, engine)
        _check_pools(plan.config.pools, engines)
        self.serve = SimulatedServe(cluster, engines, plan.times)
        self.roster = SimulatedRoster(cluster.clock)
        config = _cluster_config(engines, plan.config, cluster.shape.router)
        self._scaler = Scaler(config, self.roster, self._open_client, cluster.clock, plan.policy)
        for gateway in cluster.gateways:
            gateway.figures.ttft_slo_s = plan.config.ttft_slo_s
            gateway.figures.itl_slo_s = plan.config.itl_slo_s
            gateway.start_patience_s = plan.config.start_patience_s
        cluster.events.after(0.0, self._look)

    @property
    def moves(self) -> list[ScalingChange]:
        """All changes of counts and of roles so far."""
        return self.roster.moves

    async def _open_client(self) -> SimulatedServe:
        return self.serve

    def _look(self) -> None:
        """Let the scaler look. What replicas have sent by now counts, although it has not arrived yet."""
        now = self._cluster.clock.now()
        self._cluster.events.after(self._interval_s, self._look)
        for replica in self._cluster.replicas:
            if replica.is_alive:
                replica.catch_up()
                replica.flush()
        self.serve.keep_targets()
        self.roster.list_replicas(
            [
                record_of(replica.hello(), is_leaving=self.serve.is_leaving(replica.identity.replica_id))
                for replica in self._cluster.replicas
            ]
        )
        for gateway in self._cluster.gateways:
            self._scaler.report(f"{gateway.name}@1", gateway.figures.status(gateway.admission, now))
        _run_at_once(self._scaler.tick())
        self._cluster.events.after(NETWORK_S, self._follow_leases)

    def _follow_leases(self) -> None:
        """Let each replica take the role of its lease, as `cluster.serve.app.ReplicaActor` does."""
        view = self.roster.now
        for replica in self._cluster.replicas:
            if (changed := role_of(replica.identity, view, replica.role_epoch)) is not None:
                replica.set_role(*changed)


def _run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the scaler waits for something that does not come in virtual time")


def _cluster_config(
    engines: Mapping[str, SimulatedEngine], scaling: ScalingConfig, router: RouterConfig
) -> ClusterConfig:
    """Return a configuration with a pool for each role. The other settings are not looked at."""
    pools = [
        PoolConfig(
            name=role,
            role=role,  # type: ignore[arg-type]
            engine=EngineSettings(
                max_sequences=engine.max_sequences, tpot_objective_s=engine.tpot_objective_s
            ),
        )
        for role, engine in engines.items()
    ]
    return ClusterConfig(app=APP, model="simulated", pools=tuple(pools), scaling=scaling, router=router)


def _check_pools(pools: Mapping[str, PoolLimits], engines: Mapping[str, SimulatedEngine]) -> None:
    for pool in pools:
        if pool not in engines:
            raise ConfigError(
                f"--autoscale {pool}: no replica of this role is simulated, but {', '.join(engines)}"
            )
