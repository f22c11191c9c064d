"""A changed configuration for an application that runs. Ray Serve replaces the affected replicas one after
the other, while the others continue.

    connecting -> planning -> rolling -> done

What `tandem serve` drew and decided (the secret's file, life, CPU shares, index server) stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace
from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from cluster.config import ClusterConfig, PoolConfig
from cluster.errors import ConfigError, RosterAwayError, StartError
from cluster.metrics.tracing import check_tracing
from cluster.roster.messages import RosterView
from cluster.roster.ray_roster import await_roster, read_roster
from cluster.scaling.counts import KnownCounts, counts_to_deploy
from cluster.scaling.resource_demand import ReplicaDemand, shortages
from cluster.scaling.serve_client import MARK_DEPLOYMENT, deployment_name
from cluster.secret_files import read_redis_url, read_trust
from cluster.serve.app import deploy
from cluster.serve.capacity import bundles, demands, gateway_bundle, plan_cpus
from cluster.serve.deployed import Deployed, recall
from cluster.serve.launcher import (
    SCHEDULE_S,
    StartProgress,
    check_gateway_files,
    check_hosts,
    failure,
    node_resources,
    unplaced,
)
from cluster.serve.model_check import check_model
from cluster.serve.ray_private import free_resources
from cluster.serve.rollout import Roll, SettingChange, carried_over, changes, check_update, plan_rolls
from cluster.stores import index_url
from kvtransfer.common.clock import Clock
from kvtransfer.store.index.redis_server import with_password

_POLL_S = 0.25
_ROSTER_S = 20.0
# How long an application may be unhealthy in a roll before that counts as its failure.
_ILL_S = 60.0


class UpdatePlan(NamedTuple):
    """Represents the changes of an update, and their meaning for each deployment."""

    changes: tuple[SettingChange, ...]
    rolls: tuple[Roll, ...]


class Update:
    """Carries out one update of one application, in the Ray cluster that this process has joined."""

    def __init__(self, config: ClusterConfig, clock: Clock) -> None:
        """`ConfigError` where the configuration cannot be used, or not without stopping the application;
        `StartError` where there is no such application."""
        deployed = recall(config.app)
        if deployed is None:
            raise StartError(
                f"no `tandem serve` has deployed the application {config.app!r} to this Ray cluster; one "
                "that a Serve configuration declares is updated there (docs/upgrades.md)"
            )
        self._before = deployed
        self._old = deployed.config
        self._clock = clock
        _check(config, deployed, clock)
        self._config = carried_over(self._old, _with_known_index(config, self._old))
        check_update(self._old, self._config)
        self._view = _roster_view(config.app)
        self._cpus = self._plan_cpus()
        self.plan = UpdatePlan(
            tuple(changes(self._old, self._config)),
            tuple(
                plan_rolls(
                    self._old,
                    self._config,
                    (deployed.cpus, self._cpus),
                    self._view.desired,
                    frozenset(self._view.pinned),
                )
            ),
        )

    def check_headroom(self) -> None:
        """Raise `StartError` where a replacement would wait for resources that are missing; nothing is
        changed then."""
        wanted = [
            ReplicaDemand(pool.name, tuple(bundles(pool, self._cpus[pool.name])), may_spread=pool.pp > 1)
            for roll, pool in self._rolled()
            if roll.action == "roll" and roll.surges
        ]
        gateways = next(roll for roll in self.plan.rolls if not roll.pool)
        if gateways.action == "roll" and gateways.surges:
            wanted.append(ReplicaDemand("gateway", (gateway_bundle(self._config.gateway),)))
        new = [pool for roll, pool in self._rolled() if roll.action == "start"]
        wanted += demands(new, self._cpus)
        if missing := shortages(wanted, free_resources(), node_resources()):
            raise StartError(
                "the Ray cluster lacks resources for the new replicas beside the old ones: "
                + "; ".join(missing)
                + "; surge: false of a pool, or of the gateway, has an old one leave first"
            )

    def apply(self, report: Callable[[StartProgress], None], interrupted: threading.Event) -> None:
        """Deploy, and return when every affected replica is replaced; `StartError` names what went wrong.
        Interrupted, it returns, and Ray Serve continues."""
        before = {record.identity.replica_id for record in self._view.replicas}
        view = _roster_view(self._config.app)
        declared = {pool.name: pool.replicas for pool in self._old.pools}
        counts = counts_to_deploy(self._config, KnownCounts(view.desired, view.pinned, declared))
        config_json = self._config.model_dump_json()
        deployed = replace(self._before, config_json=config_json, cpus=self._cpus)
        deploy(self._config, deployed, counts)
        self._wait(report, interrupted, before)

    def _wait(
        self, report: Callable[[StartProgress], None], interrupted: threading.Event, before: set[str]
    ) -> None:
        ill_since: float | None = None
        unplaced_since: float | None = None
        while not interrupted.wait(_POLL_S):
            status = serve.status().applications.get(self._config.app)
            report(StartProgress("rolling", self._replaced(before)))
            now = self._clock.now()
            if status is None or self._has_settled(status):
                return
            is_ill = status.status in ("DEPLOY_FAILED", "UNHEALTHY")
            ill_since = (ill_since or now) if is_ill else None
            if status.status == "DEPLOY_FAILED" or (ill_since is not None and now > ill_since + _ILL_S):
                raise StartError(
                    f"{failure(status)}\nReplicas that were not replaced keep running;  "
                    "`tandem update` with the file as it was takes the others back"
                )
            waiting = unplaced()
            unplaced_since = (unplaced_since or now) if waiting else None
            if unplaced_since is not None and now > unplaced_since + SCHEDULE_S:
                raise StartError(
                    "Ray cannot place a new replica yet: "
                    + "; ".join(waiting)
                    + "; the old ones keep running"
                )

    def _has_settled(self, status: ApplicationStatusOverview) -> bool:
        names = {deployment_name(roll.pool): roll.num_replicas for roll, _ in self._rolled()}
        names[MARK_DEPLOYMENT] = self._config.gateway.replicas
        return (
            status.status == "RUNNING"
            and set(status.deployments) == set(names)
            and all(
                deployment.status == "HEALTHY" and set(deployment.replica_states) <= {"RUNNING"}
                for deployment in status.deployments.values()
            )
        )

    def _replaced(self, before: set[str]) -> dict[str, tuple[int, int]]:
        """Return, by pool that changes, how many new replicas serve, of how many."""
        view = read_roster(self._config.app)
        new = [record.pool for record in view.replicas if record.identity.replica_id not in before]
        return {
            roll.pool: (new.count(roll.pool), roll.num_replicas)
            for roll, _ in self._rolled()
            if roll.action != "stay"
        }

    def _rolled(self) -> list[tuple[Roll, PoolConfig]]:
        """Return the pools of the new configuration, with the change of each."""
        pools = {pool.name: pool for pool in self._config.pools}
        return [(roll, pools[roll.pool]) for roll in self.plan.rolls if roll.pool in pools]

    def _plan_cpus(self) -> dict[str, float]:
        """Return the CPUs per rank: existing pools keep their share where the file does not configure
        another."""
        new = [pool for pool in self._config.pools if pool.name not in self._before.cpus]
        planned = plan_cpus(new, 0, free_resources()) if new else {}
        shares = {**planned, **self._before.cpus}
        return {pool.name: pool.cpus_per_rank or shares[pool.name] for pool in self._config.pools}


def _roster_view(app: str) -> RosterView:
    """Return the roster's view with the counts that were ordered; `StartError` where they are unknown now."""
    try:
        view = await_roster(app, _ROSTER_S)
    except RosterAwayError as error:
        raise StartError(
            f"{error}; an update now could stop replicas that were ordered; try again"
        ) from error
    return view or RosterView(version=0)


def _check(config: ClusterConfig, deployed: Deployed, clock: Clock) -> None:
    """Carry out the checks that `tandem serve` makes at its start, and check that the secret is the one in
    use."""
    check_model(config)
    check_tracing(config.tracing)
    check_gateway_files(config, clock)
    check_hosts(config, len(node_resources()))
    in_use = deployed.config
    if config.secret_file in (None, in_use.secret_file):
        return
    if read_trust(config, certificates=False).secret != read_trust(in_use, certificates=False).secret:
        raise ConfigError(
            "secret_file: it holds another secret than the application uses; stop it and start it anew"
        )


def _with_known_index(config: ClusterConfig, in_use: ClusterConfig) -> ClusterConfig:
    """Return the configuration with the index as the running application names it, where both mean the same:
    `tandem serve` keeps a URL with a password in a file."""
    url, trust = read_redis_url(config.store), read_trust(in_use, certificates=False)
    if with_password(url, trust) != index_url(in_use, trust):
        return config
    return config.with_redis_url(in_use.store.redis_url, in_use.store.redis_url_file)
