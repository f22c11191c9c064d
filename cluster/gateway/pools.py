"""What is wanted of the pools, and what there is: the roster's wishes beside this gateway's Links."""

from __future__ import annotations

from cluster.config import ClusterConfig, PoolConfig
from cluster.gateway.replica_view import ReplicaView
from cluster.gateway.replicas import ReplicaLinks
from cluster.proto import tandem_pb2 as pb
from cluster.roster.messages import RosterView


def pools_of(config: ClusterConfig, links: ReplicaLinks) -> list[pb.Pool]:
    """The pools of the configuration, in its order."""
    ready = [view for view in links.views() if view.takes_requests]
    return [_pool(config, pool, links.roster_view, ready) for pool in config.pools]


def moves_of(view: RosterView) -> list[pb.ScalingMove]:
    """The latest changes of counts and roles, oldest first."""
    return [
        pb.ScalingMove(
            at=move.at, pool=move.pool, before=move.before, after=move.after, by=move.by, reason=move.reason
        )
        for move in view.moves
    ]


def _pool(config: ClusterConfig, pool: PoolConfig, view: RosterView, ready: list[ReplicaView]) -> pb.Pool:
    own = [replica for replica in ready if replica.record.pool == pool.name]
    limits = config.scaling.pools.get(pool.name) if config.scaling.autoscale else None
    return pb.Pool(
        name=pool.name,
        role=pool.role,
        configured=pool.replicas,
        desired=view.desired.get(pool.name, pool.replicas),
        pinned=pool.name in view.pinned,
        min=limits.min if limits else 0,
        max=limits.max if limits else 0,
        num_ready=len(own),
        num_lent=sum(replica.role != pool.role for replica in own),
    )
