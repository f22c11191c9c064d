"""Turn the reports of the gateways and the roster into the samples and pools of the scaling policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cluster.config import ClusterConfig, PoolConfig
from cluster.metrics.demand import demand_of
from cluster.metrics.replica_stats import stats_of
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import RosterView
from cluster.scaling.roles import RoleTable
from cluster.scaling.samples import (
    DemandMeter,
    History,
    PoolView,
    ReplicaSample,
    ScalingSample,
    last_changes,
)
from router.policies.known_policies import is_priced


class _Report(NamedTuple):
    received_at: float
    status: admin_pb.StatusResponse


class GatewayReports:
    """The latest report of each gateway; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._latest: dict[str, _Report] = {}
        self._demand = DemandMeter()

    def add(self, gateway: str, status: admin_pb.StatusResponse, now: float) -> None:
        """Add the report of a gateway; `gateway` names it with its epoch."""
        self._latest[gateway] = _Report(now, status)
        self._demand.add(gateway, demand_of(status.demand))

    def sample(
        self, desired: Mapping[str, int], *, now: float, wall: float, max_age_s: float
    ) -> ScalingSample:
        """Return a sample of all gateways that reported in the last `max_age_s`; each replica as it was heard
        of last."""
        self._latest = {
            gateway: report
            for gateway, report in self._latest.items()
            if now - report.received_at <= max_age_s
        }
        self._demand.keep(tuple(self._latest))
        replicas: dict[str, ReplicaSample] = {}
        held: defaultdict[str, admin_pb.Held] = defaultdict(admin_pb.Held)
        for report in self._latest.values():
            for replica in report.status.replicas:
                _add_held(held[replica.replica_id], replica.held)
                seen = ReplicaSample(
                    replica_id=replica.replica_id,
                    pool=replica.pool,
                    role=name_of(admin_pb.ReplicaRole, replica.role),
                    age_s=replica.load.age_s + (now - report.received_at),
                    **stats_of(replica.load),
                )
                known = replicas.get(seen.replica_id)
                if replica.state == admin_pb.REPLICA_STATE_READY and (
                    known is None or seen.age_s < known.age_s
                ):
                    replicas[seen.replica_id] = seen
        return ScalingSample(
            at=wall,
            desired=dict(desired),
            replicas=tuple(_with_held(replicas[name], held[name]) for name in sorted(replicas)),
            demand=self._demand.take(),
        )


def _add_held(total: admin_pb.Held, held: admin_pb.Held) -> None:
    total.num_prompts += held.num_prompts
    total.num_tokens += held.num_tokens
    total.num_sequences += held.num_sequences


def _with_held(sample: ReplicaSample, held: admin_pb.Held) -> ReplicaSample:
    """Return the replica as if it had been sent the requests that gateways hold for it: those need replicas
    as well."""
    return msgspec.structs.replace(
        sample,
        num_waiting=sample.num_waiting + held.num_prompts + held.num_sequences,
        num_backlog_tokens=sample.num_backlog_tokens + held.num_tokens,
        num_held_sequences=held.num_sequences,
    )


def pool_views(
    config: ClusterConfig,
    view: RosterView,
    desired: Mapping[str, int],
    roles: RoleTable,
    history: History,
) -> tuple[PoolView, ...]:
    """Return the pools of the configuration that run: those with a desired count."""
    assigned = roles.assigned()
    prices_prompts = is_priced(config.router.policy)
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
                max_sequences=_max_sequences(pool, history),
                block_tokens=pool.engine.block_tokens,
                limits=config.scaling.pools.get(pool.name) if config.scaling.autoscale else None,
                is_pinned=pool.name in view.pinned,
                grew_at=grew_at,
                changed_at=changed_at,
                assigned=tuple((key, since) for key, since in assigned.items() if pool_of[key] == pool.name),
                tpot_objective_s=pool.engine.tpot_objective_s if prices_prompts else None,
            )
        )
    return tuple(views)


def _max_sequences(pool: PoolConfig, history: History) -> int:
    """Return how many sequences a step of the pool's replicas may hold, as configured. Where that is `auto`,
    the model is part of the decision and only replicas are sure to have its files: as they report, and as
    many as there can be on these devices until one has."""
    if pool.engine.max_sequences != "auto":
        return pool.engine.max_sequences
    most = pool.engine.step_sizes(pool.stage_devices, has_groups=False).max_sequences
    return history.max_sequences(pool.name) or most
