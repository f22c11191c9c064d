"""The scaler: its loop looks at Serve, keeps the desired counts, asks the policy and carries out; between two
looks it carries out the orders of operators. No Ray here."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from cluster.config import ClusterConfig
from cluster.errors import (
    DashboardError,
    FieldViolation,
    InvalidRequestError,
    RosterAwayError,
    UnknownPoolError,
)
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import (
    DropLease,
    Observed,
    ReleasePool,
    RoleLease,
    RosterOrder,
    RosterView,
    ScalingChange,
    SetDesired,
)
from cluster.roster.state import ScalingRoster
from cluster.scaling.count_memory import KeptCounts
from cluster.scaling.gateway_reports import GatewayReports, pool_views
from cluster.scaling.orders import (
    ORDER_ANSWER_CODEC,
    ORDER_CODEC,
    OrderDone,
    PoolChange,
    ReleaseOrder,
    ScaleOrder,
    plan_order,
    refusal_of,
)
from cluster.scaling.policy import Policy, RoleAssignment, ScalingPlan, decide, history_span_s
from cluster.scaling.reconciler import Action, Reconciler, RestoreRoles, SetTarget
from cluster.scaling.roles import RoleTable
from cluster.scaling.samples import History
from cluster.scaling.serve_client import AppTargets, ServeClient
from kvtransfer.common.clock import Clock

# A gateway that missed this number of reports is not looked at.
_MISSED_REPORTS = 4
_NUMBER = re.compile(r"[\d.]+")
_log = logging.getLogger(__name__)


class Scaler:
    """The scaler of one application. `open_client` finds Ray's dashboard, which may move with the head
    node."""

    def __init__(
        self,
        config: ClusterConfig,
        roster: ScalingRoster,
        open_client: Callable[[], Awaitable[ServeClient]],
        clock: Clock,
        policy: Policy = decide,
        counts: KeptCounts | None = None,
    ) -> None:
        """`counts`: where the ordered counts are kept for the next Ray cluster; None: nowhere."""
        self._counts = counts
        self._policy = policy
        self._roster = roster
        self._open_client = open_client
        self._clock = clock
        self._reconciler = Reconciler()
        self._reports = GatewayReports()
        self._problem = ""
        self._notes: tuple[str, ...] = ()
        # A look and an order never run at the same time: both begin with the targets of Serve.
        self._turn = asyncio.Lock()
        self.configure(config)

    def configure(self, config: ClusterConfig) -> None:
        """Continue with this configuration, of a later deploy."""
        self._config = config
        self._history = History(history_span_s(config.scaling))

    def report(self, gateway: str, status: admin_pb.StatusResponse) -> None:
        """Note the present status of this gateway; `gateway` names it with its epoch."""
        self._reports.add(gateway, status, self._clock.now())

    async def run(self) -> None:
        """Look every `scaling.interval_s`, until cancelled. A look that fails is tried again; the failure is
        logged once."""
        while True:
            try:
                await self.tick()
                problem = ""
            except (DashboardError, RosterAwayError) as error:
                problem = str(error)
            if problem != self._problem:
                self._problem = problem
                _log.warning("scaling waits: %s", problem) if problem else _log.warning("scaling continues")
            await self._clock.sleep(self._config.scaling.interval_s)

    async def tick(self) -> None:
        """Look once. `DashboardError` or `RosterAwayError`: nothing, or not all, could be done."""
        async with self._turn:
            view = await self._roster.view(0, 0.0)
            if view.version == 0:
                return
            await self._end_leases(view)
            async with await self._open_client() as client:
                seen = await client.application()
                is_calm = await self._look(seen, view, client)
                if seen is not None and is_calm:
                    await self._follow_policy(await self._roster.view(0, 0.0), seen, client)
            if self._counts is not None:
                await self._counts.keep(await self._roster.view(0, 0.0))

    async def obey(self, frame: bytes) -> bytes:
        """Carry out the order in a frame; return the frame of the answer."""
        order = ORDER_CODEC.decode(frame)
        try:
            async with self._turn:
                done = await (self._scale(order) if isinstance(order, ScaleOrder) else self._release(order))
        except (InvalidRequestError, DashboardError, RosterAwayError) as error:
            return ORDER_ANSWER_CODEC.encode(refusal_of(error))
        return ORDER_ANSWER_CODEC.encode(done)

    async def _look(self, seen: AppTargets | None, view: RosterView, client: ServeClient) -> bool:
        """Compare Serve's targets with the desired counts; return whether nothing had to be changed."""
        if self._counts is not None and seen is not None:
            view = await self._take_over(self._counts, seen, view)
        now, wall = self._clock.now(), self._clock.wall()
        actions = self._reconciler.look(seen, view, self._autoscaled(), now, wall)
        await self._carry_out(actions, client)
        return all(isinstance(action, Observed) for action in actions)

    async def _scale(self, order: ScaleOrder) -> OrderDone:
        """Order the counts from Serve first: a count that Serve refuses is not desired."""
        async with await self._open_client() as client:
            seen = await client.application()
            if seen is None:
                raise UnknownPoolError(f"Ray Serve does not run the application {self._config.app!r} now")
            done = await plan_order(client, self._config.app, seen, order.counts)
            self._check_decodes({pool: target.target for pool, target in seen.pools.items()}, order.counts)
            if order.is_dry_run:
                return done
            # Orders that others gave since then come first, under their name.
            await self._look(seen, await self._known_view(), client)
            ordered: list[str] = []
            for change in done.changes:
                try:
                    await self._order(change, order.by, client)
                except (DashboardError, RosterAwayError) as error:
                    if not ordered:
                        raise
                    text = f"{', '.join(ordered)} was ordered, {change.pool} was not: {error}"
                    raise type(error)(text) from error
                ordered.append(f"{change.pool}={change.after}")
        return done

    async def _order(self, change: PoolChange, by: str, client: ServeClient) -> None:
        pull = SetTarget(change.pool, change.after)
        if not change.is_pin:
            await client.scale(*pull)
        reason = "pinned to its present count" if change.is_pin else "ordered through a gateway"
        move = ScalingChange(self._clock.wall(), change.pool, change.before, change.after, by, reason)
        await self._carry_out(self._reconciler.ordered(move), client)
        if not change.is_pin:
            await self._roster.change(self._reconciler.pulled(pull))

    async def _release(self, order: ReleaseOrder) -> OrderDone:
        names = sorted(pool.name for pool in self._config.pools)
        for pool in order.pools:
            if pool not in names:
                problem = f"there is no pool {pool[:100]!r}, but {', '.join(names)}"
                raise InvalidRequestError(FieldViolation("pool", problem))
        for pool in order.pools:
            view = await self._known_view()
            if pool in view.pinned:
                count, reason = view.desired[pool], "released: the autoscaler may change it again"
                await self._roster.change(ReleasePool(pool))
                move = ScalingChange(self._clock.wall(), pool, count, count, order.by, reason)
                await self._record(move)
        return OrderDone()

    async def _known_view(self) -> RosterView:
        view = await self._roster.view(0, 0.0)
        if view.version == 0:
            raise RosterAwayError("the roster was restarted, and collects its members: try again in seconds")
        return view

    def _check_decodes(self, targets: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """Refuse to leave no replica that decodes."""
        if all(counts.values()):
            return
        decoding = [pool.name for pool in self._config.pools if pool.role != "prefill"]
        if not any(counts.get(pool, targets.get(pool, 0)) for pool in decoding):
            problem = "no pool that decodes would have a replica: keep one in at least one of them"
            raise InvalidRequestError(FieldViolation("replicas", problem))

    async def _take_over(self, kept: KeptCounts, seen: AppTargets, view: RosterView) -> RosterView:
        """Take over the orders of an earlier Ray cluster: the roster of this one is new."""
        left = await kept.left(self._config, seen, view)
        for pool, num_replicas in left.desired.items():
            await self._roster.change(SetDesired(pool, num_replicas, pool in left.pinned))
        return await self._roster.view(0, 0.0) if left.desired else view

    def _autoscaled(self) -> frozenset[str]:
        return self._config.scaling.autoscaled

    async def _end_leases(self, view: RosterView) -> None:
        roles = RoleTable(view, self._clock.wall())
        for replica in roles.expired():
            await self._roster.change(DropLease(replica))
        await self._set_leases(roles.strays(), view)

    async def _follow_policy(self, view: RosterView, seen: AppTargets, client: ServeClient) -> None:
        scaling = self._config.scaling
        if not (scaling.autoscale or scaling.change_roles):
            roles = RoleTable(view, self._clock.wall())
            await self._set_leases(roles.restore_all("role changes are switched off"), view)
            return
        desired = {pool: view.desired.get(pool, target.target) for pool, target in seen.pools.items()}
        wall = self._clock.wall()
        max_age_s = _MISSED_REPORTS * scaling.interval_s
        self._history.add(
            self._reports.sample(desired, now=self._clock.now(), wall=wall, max_age_s=max_age_s)
        )
        pools = pool_views(self._config, view, desired, RoleTable(view, wall), self._history)
        plan = self._policy(self._history, scaling, pools, wall)
        notes = tuple(_NUMBER.sub("", note) for note in plan.notes)
        if notes != self._notes:  # with other numbers it is still the same
            self._notes = notes
            _log.info("the policy: %s", "; ".join(plan.notes) or "nothing stands in its way any more")
        await self._change_roles(plan, view)
        for move in plan.moves:
            record = ScalingChange(wall, move.pool, move.before, move.after, "autoscaler", move.reason)
            await self._carry_out(self._reconciler.order(record), client)

    async def _change_roles(self, plan: ScalingPlan, view: RosterView) -> None:
        roles = RoleTable(view, self._clock.wall())
        leases = [
            roles.assign(item.replica_id, item.role, item.reason)
            if isinstance(item, RoleAssignment)
            else roles.restore(item.replica_id, item.reason)
            for item in plan.role_changes
        ]
        await self._set_leases([lease for lease in leases if lease is not None], view)

    async def _set_leases(self, leases: Sequence[RoleLease], view: RosterView) -> None:
        pool_of = {record.identity: record.pool for record in view.replicas}
        for lease in leases:
            await self._roster.change(lease)
            pool = pool_of[lease.replica]
            count = view.desired.get(pool, view.targets.get(pool, 0))
            reason = f"{lease.replica.replica_id} plays {lease.role}: {lease.reason}"
            move = ScalingChange(self._clock.wall(), pool, count, count, "autoscaler", reason)
            await self._roster.change(move)

    async def _carry_out(self, actions: Sequence[Action], client: ServeClient) -> None:
        for action in actions:
            match action:
                case RestoreRoles(reason):
                    view = await self._roster.view(0, 0.0)
                    await self._set_leases(RoleTable(view, self._clock.wall()).restore_all(reason), view)
                case SetTarget():
                    await self._pull(action, client)
                case _:
                    await self._record(action)

    async def _record(self, order: RosterOrder) -> None:
        if isinstance(order, ScalingChange):
            _log.warning("pool %s: %d -> %d by %s: %s", *move_fields(order))
        await self._roster.change(order)

    async def _pull(self, pull: SetTarget, client: ServeClient) -> None:
        try:
            await client.scale(pull.pool, pull.num_replicas)
        except DashboardError as error:
            self._reconciler.failed(pull, self._clock.now())
            _log.warning("pool %s cannot be set to %d now: %s", pull.pool, pull.num_replicas, error)
            return
        await self._roster.change(self._reconciler.pulled(pull))


def move_fields(move: ScalingChange) -> tuple[str, int, int, str, str]:
    """Return the fields for a line of text: pool, before, after, by whom, why."""
    return move.pool, move.before, move.after, move.by, move.reason
