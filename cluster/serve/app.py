"""The Ray application: pools and gateways as Ray Serve deployments, and named actors. Serve starts, watches,
replaces and counts them; no request passes through it.

    ReplicaActor    an engine core; bundle 0 of its placement group, one deployment `Pool-<name>` a pool
                    (`replica_actor`)
    RankActor       bundle 1 + stage of the same group, started by its engine core (`rank_actors`)
    StoreActor      one a node, named, detached, made by the node's first engine core (`store_actors`)
    GatewayActor    the deployment `Gateway`, ingress of the application (`gateway_actor`)
    RosterActor     one, named, detached (`cluster.roster.actor`); Ray restarts it and the stores
"""

from __future__ import annotations

from collections.abc import Mapping

from ray import serve

from cluster.config import ClusterConfig
from cluster.scaling.serve_client import MARK_DEPLOYMENT, MARK_KEY, REPLICAS_KEY, deployment_name
from cluster.serve.capacity import bundles, gateway_bundle, placement_strategy
from cluster.serve.deployed import Deployed, remember
from cluster.serve.gateway_actor import GatewayActor
from cluster.serve.rank_actors import only
from cluster.serve.ray_private import with_version
from cluster.serve.replica_actor import ReplicaActor
from cluster.serve.rollout import gateway_version, pool_version
from cluster.stores import draw_life
from kvtransfer.common.clock import SystemClock

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
