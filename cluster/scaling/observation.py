"""What the gateways report, as the samples and pools that the policy looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.config import ClusterConfig
from cluster.metrics.replica_stats import stats_of
from cluster.proto import tandem_pb2 as pb
from cluster.roster.messages import RosterView
from cluster.scaling.roles import RoleTable
from cluster.scaling.samples import Demand, DemandMeter, PoolView, ReplicaSample, Sample, last_changes

_READY = "ready"


class _Report(NamedTuple):
    received_at: float
    status: pb.StatusResponse


class Reports:
    """The latest report of each gateway; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._latest: dict[str, _Report] = {}
        self._demand = DemandMeter()

    def add(self, gateway: str, status: pb.StatusResponse, now: float) -> None:
        """`gateway` names it with its epoch."""
        self._latest[gateway] = _Report(now, status)
        self._demand.add(gateway, _demand(status.demand))

    def sample(self, desired: Mapping[str, int], *, now: float, wall: float, max_age_s: float) -> Sample:
        """Of all gateways that reported in the last `max_age_s`; each replica as it was heard of last."""
        self._latest = {
            gateway: report
            for gateway, report in self._latest.items()
            if now - report.received_at <= max_age_s
        }
        self._demand.keep(tuple(self._latest))
        replicas: dict[str, ReplicaSample] = {}
        for report in self._latest.values():
            for replica in report.status.replicas:
                seen = _replica(replica, now - report.received_at)
                known = replicas.get(seen.replica_id)
                if replica.state == _READY and (known is None or seen.age_s < known.age_s):
                    replicas[seen.replica_id] = seen
        return Sample(
            at=wall,
            desired=dict(desired),
            replicas=tuple(replicas[replica_id] for replica_id in sorted(replicas)),
            demand=self._demand.take(),
        )


def pool_views(
    config: ClusterConfig, view: RosterView, desired: Mapping[str, int], book: RoleTable
) -> tuple[PoolView, ...]:
    """The pools of the configuration that run: those with a desired count."""
    lent = book.lent()
    pool_of = {record.identity.replica_id: record.pool for record in view.replicas}
    views = []
    for pool in config.pools:
        if pool.name not in desired:
            continue
        grew_at, changed_at = last_changes(pool.name, view.moves)
        views.append(
            PoolView(
                name=pool.name,
                role=pool.role,
                desired=desired[pool.name],
                max_sequences=pool.engine.max_sequences,
                block_tokens=pool.engine.block_tokens,
                limits=config.scaling.pools.get(pool.name) if config.scaling.autoscale else None,
                is_pinned=pool.name in view.pinned,
                grew_at=grew_at,
                changed_at=changed_at,
                lent=tuple((key, since) for key, since in lent.items() if pool_of[key] == pool.name),
            )
        )
    return tuple(views)


def _replica(replica: pb.Replica, report_age_s: float) -> ReplicaSample:
    return ReplicaSample(
        replica_id=replica.replica_id,
        pool=replica.pool,
        role=replica.role,
        age_s=replica.load.age_s + report_age_s,
        **stats_of(replica.load),
    )


def _demand(demand: pb.Demand) -> Demand:
    return Demand(*(getattr(demand, field) for field in Demand._fields))
