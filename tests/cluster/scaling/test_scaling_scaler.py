"""The scaler's loop between a roster, a dashboard over HTTP and a scripted policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from gateway_harness import until
from scaling_harness import TOKEN, FakeApp, FakeDashboard, FakePool
from serving import TINY

from cluster.config import ClusterConfig, parse_config
from cluster.errors import DashboardError, InvalidRequestError, OrderError, UnavailableError
from cluster.metrics.demand import Demand
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import ReplicaRecord, RosterView
from cluster.roster.state import LocalRoster
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.orders import Operations, ScalerOrders
from cluster.scaling.policy import PoolMove, RoleAssignment, RoleReturn, ScalingPlan
from cluster.scaling.samples import History, PoolView
from cluster.scaling.scaler import Scaler
from cluster.scaling.serve_client import ServeClient
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity

TICK_S = 2.0


class TickClock(ManualClock):
    """Tells how often somebody began to wait."""

    num_sleeps = 0

    async def sleep(self, delay_s: float) -> None:
        self.num_sleeps += 1
        await super().sleep(delay_s)


class Script:
    """A policy that says what the test wants, and keeps what it was asked."""

    def __init__(self) -> None:
        self.plan = ScalingPlan()
        self.pools: Sequence[PoolView] = ()
        self.history: History | None = None
        self.num_asked = 0

    def __call__(
        self, history: History, config: ScalingConfig, pools: Sequence[PoolView], now: float
    ) -> ScalingPlan:
        self.history, self.pools = history, pools
        self.num_asked += 1
        plan, self.plan = self.plan, ScalingPlan()
        return plan


class ScalerHarness:
    """One application, one scaler, looked at tick by tick."""

    def __init__(self, dashboard: FakeDashboard, **scaling: object) -> None:
        self.dashboard = dashboard
        self.clock = TickClock(start_s=1000.0)
        self.roster = LocalRoster(self.clock)
        self.policy = Script()
        self.scaler = Scaler(_config(**scaling), self.roster, self._open, self.clock, self.policy)
        self.orders = ScalerOrders(Operations(self._url, self.scaler.obey))

    async def _url(self) -> str:
        return self.dashboard.url

    async def _open(self) -> ServeClient:
        return ServeClient(self.dashboard.url, "tandem", TOKEN)

    async def tick(self) -> RosterView:
        self.clock.advance(TICK_S)
        await self.scaler.tick()
        return await self.roster.view(0, 0.0)

    async def register(self, name: str, pool: str, *, role: str = "", role_epoch: int = 0) -> None:
        record = ReplicaRecord(
            identity=ReplicaIdentity(name, 1),
            pool=pool,
            role=role or pool,
            address="127.0.0.1:1",
            model="tiny",
            compatibility=CompatibilityRecord(1, b"f" * 16, "fp32", "fp32", 16, 4, 2, 32),
            process_id=1,
            rank_process_ids=(2,),
            home_role=pool,
            role_epoch=role_epoch,
        )
        assert await self.roster.register(record)


def _config(**scaling: object) -> ClusterConfig:
    pools = [
        {"name": "prefill", "role": "prefill"},
        {"name": "decode", "role": "decode", "engine": {"max_sequences": 7}},
    ]
    return parse_config({"model": str(TINY), "pools": pools, "scaling": scaling}, "test")


def _app() -> FakeApp:
    return FakeApp({"prefill": FakePool(1, 1), "decode": FakePool(1, 1)})


AUTOSCALE = {"autoscale": True, "pools": {"decode": {"min": 1, "max": 4}}}


async def test_an_order_is_kept_over_a_deploy_and_shown() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard)
        await harness.register("d0", "decode")
        await harness.tick()
        app.pools["decode"].target = 3
        view = await harness.tick()
        assert (view.desired, view.pinned) == ({"decode": 3}, ("decode",))
        app.deploy("m2", {"prefill": 1, "decode": 1})
        view = await harness.tick()
        assert app.pools["decode"].target == 3
        assert [(move.before, move.after, move.by) for move in view.moves] == [
            (1, 3, "operator"),
            (1, 3, "deploy"),
        ]
        assert harness.policy.num_asked == 0


async def test_an_order_of_a_gateway_is_obeyed_pinned_and_told_under_its_name() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard, change_roles=True)
        await harness.register("p0", "prefill")
        harness.policy.plan = ScalingPlan(role_changes=(RoleAssignment("p0", "prefill", "decode", "idle"),))
        view = await harness.tick()
        assert [lease.role for lease in view.leases] == ["decode"]
        done = await harness.orders.scale({"decode": 3, "prefill": 1}, by="key:abcdefgh")
        assert [(it.pool, it.before, it.after, it.is_pin) for it in done.changes] == [
            ("decode", 1, 3, False),
            ("prefill", 1, 1, True),
        ]
        assert dashboard.orders == [("decode", 3)]
        view = await harness.roster.view(0, 0.0)
        assert (view.desired, view.pinned) == ({"decode": 3, "prefill": 1}, ("decode", "prefill"))
        assert (view.targets["decode"], [lease.role for lease in view.leases]) == (3, ["prefill"])
        told = [(it.pool, it.before, it.after, it.by) for it in view.moves if it.by != "autoscaler"]
        assert told == [("decode", 1, 3, "key:abcdefgh"), ("prefill", 1, 1, "key:abcdefgh")]
        assert (await harness.tick()).moves == view.moves  # it is not taken for somebody else's order
        await harness.orders.release(["decode", "decode"], by="jwt:ann")
        view = await harness.roster.view(0, 0.0)
        assert (view.desired["decode"], view.pinned, view.moves[-1].by) == (3, ("prefill",), "jwt:ann")
        assert len([it for it in view.moves if it.by == "jwt:ann"]) == 1


async def test_a_dry_run_changes_nothing_and_says_what_the_cluster_has_free() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        nodes = {"data": {"result": {"result": [
            {"node_id": "n", "state": "ALIVE", "resources_total": {"CPU": 2.0}}
        ]}}}  # fmt: skip
        empty = msgspec.json.encode({"data": {"result": {"result": []}}})
        dashboard.bodies = {"/api/v0/nodes": msgspec.json.encode(nodes)}
        dashboard.bodies |= {f"/api/v0/{what}": empty for what in ("placement_groups", "actors")}
        harness = ScalerHarness(dashboard)
        await harness.register("d0", "decode")
        done = await harness.orders.scale({"decode": 3}, by="somebody", is_dry_run=True)
        assert (done.free, done.unsized, done.shortages) == ({"CPU": 2.0}, ("decode",), ())
        everything = await harness.orders.scale({}, by="somebody", is_dry_run=True)
        assert [(it.pool, it.before, it.after) for it in everything.changes] == [
            ("decode", 1, 1),
            ("prefill", 1, 1),
        ]
        view = await harness.roster.view(0, 0.0)
        assert (dashboard.orders, view.desired, view.moves) == ([], {}, ())


async def test_an_operator_who_called_serve_himself_keeps_his_order_beside_a_gateways() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard)
        await harness.register("d0", "decode")
        await harness.tick()
        app.pools["prefill"].target = 2
        await harness.orders.scale({"decode": 2}, by="key:abcdefgh")
        view = await harness.roster.view(0, 0.0)
        assert [(it.pool, it.before, it.after, it.by) for it in view.moves] == [
            ("prefill", 1, 2, "operator"),
            ("decode", 1, 2, "key:abcdefgh"),
        ]


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ({"decoder": 1}, "there is no pool 'decoder', but decode, prefill"),
        ({"decode": 0}, "no pool that decodes would have a replica"),
        ({"decode": 1001}, "0 to 1000 replicas, not 1001"),
    ],
)
async def test_an_order_that_cannot_be_meant_is_refused(counts: dict[str, int], named: str) -> None:
    async with FakeDashboard(_app()) as dashboard:
        harness = ScalerHarness(dashboard)
        await harness.register("d0", "decode")
        with pytest.raises(InvalidRequestError, match=named):
            await harness.orders.scale(counts, by="somebody")
        with pytest.raises(InvalidRequestError, match="no pool 'x', but decode, prefill"):
            await harness.orders.release(["decode", "x"], by="somebody")
        assert dashboard.orders == []


async def test_what_serve_refuses_is_not_desired_and_what_it_took_before_is() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard)
        with pytest.raises(UnavailableError, match="the roster was restarted"):
            await harness.orders.scale({"decode": 2}, by="somebody")
        await harness.register("d0", "decode")
        app.is_scalable = False
        with pytest.raises(OrderError, match="external_scaler_enabled"):
            await harness.orders.scale({"decode": 2}, by="somebody")
        assert (await harness.roster.view(0, 0.0)).desired == {}
        app.is_scalable, dashboard.name = True, "other"
        with pytest.raises(InvalidRequestError, match="does not run the application 'tandem'"):
            await harness.orders.scale({"decode": 2}, by="somebody")
        dashboard.name, dashboard.refused_pool = "tandem", "prefill"
        with pytest.raises(UnavailableError, match="decode=2 was ordered, prefill was not"):
            await harness.orders.scale({"decode": 2, "prefill": 2}, by="somebody")
        view = await harness.roster.view(0, 0.0)
        assert (view.desired, dashboard.orders) == ({"decode": 2}, [("decode", 2)])


async def test_an_order_waits_for_the_look_that_runs() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard, **AUTOSCALE)
        await harness.register("d0", "decode")
        harness.policy.plan = ScalingPlan(moves=(PoolMove("decode", 1, 2, "more"),))
        await asyncio.gather(harness.tick(), harness.orders.scale({"decode": 4}, by="somebody"))
        view = await harness.roster.view(0, 0.0)
        assert [(it.before, it.after) for it in view.moves] == [(1, 2), (2, 4)]
        assert (app.pools["decode"].target, view.pinned) == (4, ("decode",))


async def test_the_policy_moves_pools_through_the_same_client() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard, **AUTOSCALE)
        await harness.register("d0", "decode")
        harness.policy.plan = ScalingPlan(moves=(PoolMove("decode", 1, 2, "the queue grows"),))
        view = await harness.tick()
        assert app.pools["decode"].target == 2
        assert (view.desired, view.pinned, view.targets["decode"]) == ({"decode": 2}, (), 2)
        assert [(move.by, move.reason) for move in view.moves] == [("autoscaler", "the queue grows")]
        await harness.tick()
        (prefill, decode) = harness.policy.pools
        assert (prefill.limits, decode.limits) == (None, PoolLimits(min=1, max=4))
        assert (decode.desired, decode.max_sequences, decode.grew_at) == (2, 7, 1002.0)


async def test_the_policy_is_not_asked_in_a_tick_that_heard_an_operator() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard, **AUTOSCALE)
        await harness.register("d0", "decode")
        await harness.tick()
        app.pools["decode"].target = 3
        harness.policy.plan = ScalingPlan(moves=(PoolMove("decode", 1, 2, "late"),))
        view = await harness.tick()
        assert (harness.policy.num_asked, app.pools["decode"].target) == (1, 3)
        assert view.pinned == ("decode",)
        harness.policy.plan = ScalingPlan()
        await harness.tick()
        assert harness.policy.pools[1].is_pinned


async def test_a_dashboard_that_fails_stops_nothing_and_the_count_stays_wanted() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard)
        await harness.register("d0", "decode")
        await harness.tick()
        app.pools["decode"].target = 3
        await harness.tick()
        app.deploy("m2", {"prefill": 1, "decode": 1})
        dashboard.failing = 2
        for _ in range(2):
            with pytest.raises(DashboardError):
                await harness.tick()
        view = await harness.tick()
        assert (view.desired, app.pools["decode"].target) == ({"decode": 3}, 3)


async def test_replicas_are_lent_and_an_order_of_any_pool_recalls_them() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard, change_roles=True)
        await harness.register("p0", "prefill")
        harness.policy.plan = ScalingPlan(
            role_changes=(RoleAssignment("p0", "prefill", "decode", "idle for 30 s"),)
        )
        view = await harness.tick()
        assert [(lease.role, lease.epoch) for lease in view.leases] == [("decode", 1_002_000)]
        assert [(move.before, move.after) for move in view.moves] == [(1, 1)]
        await harness.register("p0", "prefill", role="decode", role_epoch=1_002_000)
        await harness.tick()
        assert harness.policy.pools[0].assigned == (("p0", 1002.0),)
        app.pools["decode"].target = 2
        view = await harness.tick()
        assert [(lease.role, lease.epoch > 1_002_000) for lease in view.leases] == [("prefill", True)]


async def test_the_policy_recalls_replicas_and_its_moves_leave_the_others_lent() -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard, change_roles=True, **AUTOSCALE)
        for name in ("p0", "p1"):
            await harness.register(name, "prefill")
        role_changes = tuple(RoleAssignment(name, "prefill", "decode", "idle") for name in ("p0", "p1"))
        harness.policy.plan = ScalingPlan(role_changes=role_changes)
        await harness.tick()
        harness.policy.plan = ScalingPlan(role_changes=(RoleReturn("p0", "prefill", "prompts wait"),))
        view = await harness.tick()
        assert [lease.role for lease in view.leases] == ["prefill", "decode"]
        harness.policy.plan = ScalingPlan(moves=(PoolMove("decode", 1, 2, "more"),))
        view = await harness.tick()
        assert (view.desired["decode"], [lease.role for lease in view.leases]) == (2, ["prefill", "decode"])


async def test_the_lease_of_a_lost_replica_ends_and_a_stray_goes_home() -> None:
    async with FakeDashboard(_app()) as dashboard:
        harness = ScalerHarness(dashboard, change_roles=True)
        await harness.register("p0", "prefill")
        harness.policy.plan = ScalingPlan(role_changes=(RoleAssignment("p0", "prefill", "decode", "idle"),))
        await harness.tick()
        await harness.roster.remove("p0", 1)
        view = await harness.tick()
        assert view.leases == ()
        await harness.register("p1", "prefill", role="decode", role_epoch=5)
        view = await harness.tick()
        assert [(lease.replica.replica_id, lease.role) for lease in view.leases] == [("p1", "prefill")]


async def test_lent_replicas_go_home_when_lending_is_switched_off() -> None:
    async with FakeDashboard(_app()) as dashboard:
        harness = ScalerHarness(dashboard, change_roles=True)
        await harness.register("p0", "prefill")
        harness.policy.plan = ScalingPlan(role_changes=(RoleAssignment("p0", "prefill", "decode", "idle"),))
        await harness.tick()
        harness.scaler.configure(_config())
        view = await harness.tick()
        assert [lease.role for lease in view.leases] == ["prefill"]
        assert harness.policy.num_asked == 1


async def test_samples_are_of_the_gateway_that_heard_last_and_silent_gateways_are_left_out() -> None:
    async with FakeDashboard(_app()) as dashboard:
        harness = ScalerHarness(dashboard, **AUTOSCALE)
        await harness.register("d0", "decode")

        def status(running: int, age_s: float, arrived: int, state: str = "READY") -> admin_pb.StatusResponse:
            load = admin_pb.Load(num_running=running, age_s=age_s, num_total_blocks=9, decode_step_ms=20.0)
            replica = admin_pb.Replica(
                replica_id="d0",
                pool="decode",
                role=admin_pb.REPLICA_ROLE_DECODE,
                state=f"REPLICA_STATE_{state}",
                load=load,
            )
            return admin_pb.StatusResponse(replicas=[replica], demand=admin_pb.Demand(num_arrived=arrived))

        harness.scaler.report("g0/1", status(3, 1.0, 10))
        harness.scaler.report("g1/1", status(5, 0.5, 100))
        await harness.tick()
        assert harness.policy.history is not None
        sample = harness.policy.history.latest
        assert sample is not None
        assert [(it.num_running, it.decode_step_s, it.age_s) for it in sample.replicas] == [
            (5, 0.02, TICK_S + 0.5)
        ]
        assert sample.demand == Demand()
        harness.scaler.report("g0/1", status(3, 0.0, 14))
        harness.scaler.report("g1/1", status(4, 0.1, 101))
        await harness.tick()
        sample = harness.policy.history.latest
        assert sample is not None
        assert ([it.num_running for it in sample.replicas], sample.demand.num_arrived) == ([3], 5)
        harness.clock.advance(100.0)
        await harness.tick()
        sample = harness.policy.history.latest
        assert sample is not None
        assert sample.replicas == ()


async def test_what_all_gateways_hold_for_a_replica_waits_there() -> None:
    async with FakeDashboard(_app()) as dashboard:
        harness = ScalerHarness(dashboard, **AUTOSCALE)
        await harness.register("d0", "decode")
        for gateway, held in (("g0/1", (3, 300, 0)), ("g1/1", (0, 0, 4))):
            num_prompts, num_tokens, num_sequences = held
            replica = admin_pb.Replica(
                replica_id="d0",
                pool="decode",
                role=admin_pb.REPLICA_ROLE_DECODE,
                state=admin_pb.REPLICA_STATE_READY,
                load=admin_pb.Load(num_waiting=1, num_backlog_tokens=50, num_total_blocks=9),
                held=admin_pb.Held(
                    num_prompts=num_prompts, num_tokens=num_tokens, num_sequences=num_sequences
                ),
            )
            harness.scaler.report(gateway, admin_pb.StatusResponse(replicas=[replica]))
        for _ in range(2):  # reports stay as they were
            await harness.tick()
            assert harness.policy.history is not None
            assert harness.policy.history.latest is not None
            (sample,) = harness.policy.history.latest.replicas
            waits = sample.num_waiting, sample.num_held_sequences, sample.num_backlog_tokens
            assert waits == (1 + 3 + 4, 4, 350)
            assert not sample.is_idle


async def test_a_replica_that_leaves_is_no_sample() -> None:
    async with FakeDashboard(_app()) as dashboard:
        harness = ScalerHarness(dashboard, **AUTOSCALE)
        await harness.register("d0", "decode")
        replica = admin_pb.Replica(
            replica_id="d0",
            pool="decode",
            role=admin_pb.REPLICA_ROLE_DECODE,
            state=admin_pb.REPLICA_STATE_LEAVING,
        )
        harness.scaler.report("g0/1", admin_pb.StatusResponse(replicas=[replica]))
        await harness.tick()
        assert harness.policy.history is not None
        assert harness.policy.history.latest is not None
        assert harness.policy.history.latest.replicas == ()


async def test_the_loop_outlives_failures_and_tells_each_once(caplog: pytest.LogCaptureFixture) -> None:
    app = _app()
    async with FakeDashboard(app) as dashboard:
        harness = ScalerHarness(dashboard)
        await harness.register("d0", "decode")
        dashboard.failing = 2
        running = asyncio.create_task(harness.scaler.run())
        for num_looks in range(1, 6):
            await until(lambda wanted=num_looks: harness.clock.num_sleeps == wanted, "it looked")  # type: ignore[misc]
            if num_looks == 3:
                app.pools["decode"].target = 3
            harness.clock.advance(TICK_S)
        assert (await harness.roster.view(0, 0.0)).desired == {"decode": 3}
        running.cancel()
        told = [record.getMessage() for record in caplog.records if record.name.endswith("scaler")]
        assert [line.partition(":")[0] for line in told] == [
            "scaling waits",
            "scaling continues",
            "pool decode",
        ]
