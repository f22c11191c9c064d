"""What a gateway knows of one replica, and who hears of changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cluster.config import ClusterConfig, PoolConfig
from cluster.gateway.replica_connections import ReplicaLinks
from cluster.proto import tandem_pb2 as pb
from cluster.roster.messages import ReplicaRecord, RosterView
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream
from workers.messages import CachePurged, LoadReport, PathMeasure, ReplicaHello, StepFrame


class LinkEvents(Protocol):
    """Who carries the requests."""

    def on_step(self, source: ReplicaIdentity, frame: StepFrame) -> None:
        """News of a replica's step."""

    def on_lost(self, source: ReplicaIdentity, reason: str) -> None:
        """The Link to this life of the replica has ended."""

    def on_streams(self, source: ReplicaIdentity, may_stay: bool) -> None:
        """Whether streams may go on at this life of the replica: not if it leaves, or plays "prefill"."""

    def on_members(self) -> None:
        """A replica came, left or goes: what can be served may have changed."""


class ReplicaState(StrEnum):
    """Of one replica, as this gateway sees it."""

    CONNECTING = "connecting"
    READY = "ready"
    LEAVING = "leaving"
    REFUSED = "refused"
    """It serves another model or block size than the others; see `note`."""


@dataclass(slots=True)
class ReplicaView:
    """What is known of one replica of the roster. `hello` is None until it was connected."""

    record: ReplicaRecord
    state: ReplicaState = ReplicaState.CONNECTING
    note: str = ""
    hello: ReplicaHello | None = None
    load: LoadReport | None = None
    load_at: float = 0.0
    paths: tuple[PathMeasure, ...] = ()
    stream: FrameStream | None = field(default=None, repr=False)
    purges: dict[int, asyncio.Future[CachePurged]] = field(default_factory=dict, repr=False)
    """What it was asked to forget and has not answered yet, by number."""

    @property
    def epoch(self) -> int:
        """Of the life that was connected last; 0 before the first."""
        return self.hello.identity.epoch if self.hello else 0

    @property
    def role(self) -> str:
        """The one that it plays now."""
        return self.hello.role if self.hello else self.record.role

    @property
    def takes_requests(self) -> bool:
        return self.state is ReplicaState.READY and self.stream is not None


# ----------------------------------------------------------------------------------------------
# What is wanted of the pools, and what there is: the roster's wishes beside this gateway's Links.


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
