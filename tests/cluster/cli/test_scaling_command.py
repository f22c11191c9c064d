"""`tandem scale` through a gateway, and against a dashboard over HTTP: what it says, what it orders, what it
refuses."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from console_harness import ConsoleHarness
from gateway_harness import GatewayHarness, until
from rich.console import Console
from scaling_harness import TOKEN, FakeApp, FakeDashboard, FakePool
from serving import free_port, tandem
from typer.testing import CliRunner

from cluster.cli.calls import move_line, pool_parts
from cluster.cli.scale import read_token, scale
from cluster.cli.scale_plan import parse_orders, plan_json, plan_scale, plan_view
from cluster.cli.scale_target import DashboardTarget, GatewayTarget, ScaleTarget
from cluster.cli.scale_work import ScaleWork
from cluster.errors import (
    CallError,
    ConfigError,
    DashboardError,
    PinError,
    ScaleTimeoutError,
    UnknownPoolError,
)
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.scaling.headroom import make_headroom
from cluster.scaling.serve_client import ServeClient
from kvtransfer.common.clock import SystemClock

RUNNING = ["RUNNING"]


def shown(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(*parts)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def status(*loads: tuple[str, str, int]) -> admin_pb.StatusResponse:
    """Replicas as (pool, role, requests there), whose pool's role is its name."""
    return admin_pb.StatusResponse(
        replicas=[
            admin_pb.Replica(
                replica_id=f"{pool}-{number}",
                pool=pool,
                role=value_of(admin_pb.ReplicaRole, role),
                home_role=value_of(admin_pb.ReplicaRole, pool),
                state=admin_pb.REPLICA_STATE_READY,
                load=admin_pb.Load(num_running=running),
            )
            for number, (pool, role, running) in enumerate(loads)
        ],
        pools=[
            admin_pb.Pool(name=name, role=value_of(admin_pb.ReplicaRole, name))
            for name in ("prefill", "decode")
        ],
    )


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """As Ray's state API lists one node with a decode replica and an actor."""
    nodes: list[dict[str, Any]] = [
        {"node_id": "n", "state": "ALIVE", "resources_total": {"CPU": 2.0, "memory": 1e9, "node:n": 1.0}},
        {"node_id": "old", "state": "DEAD", "resources_total": {"CPU": 64.0}},
    ]
    bundles = [{"node_id": "n", "unit_resources": {"CPU": amount}} for amount in (0.05, 0.5)]
    groups: list[dict[str, Any]] = [
        {"name": "SERVE_REPLICA::tandem#Pool-decode#abc", "state": "CREATED", "bundles": bundles},
        {"name": "SERVE_REPLICA::tandem#Pool-decode#old", "state": "REMOVED", "bundles": bundles},
        {"name": "SERVE_REPLICA::other#Pool-prefill#abc", "state": "CREATED", "bundles": bundles[:1]},
    ]
    actors: list[dict[str, Any]] = [
        {"state": "ALIVE", "node_id": "n", "required_resources": {"CPU": 0.1}, "placement_group_id": None},
        {"state": "ALIVE", "node_id": "n", "required_resources": {"CPU": 9.0}, "placement_group_id": "g"},
        {"state": "DEAD", "node_id": "n", "required_resources": {"CPU": 9.0}, "placement_group_id": None},
    ]
    return nodes, groups, actors


@pytest.mark.parametrize("text", ["decode", "decode=", "=3", "decode=-1", "decode=three", "decode=1.5"])
def test_an_order_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="expected POOL=REPLICAS"):
        parse_orders([text])


def test_orders_are_read_and_a_pool_is_ordered_once() -> None:
    assert parse_orders(["decode=3", "prefill=0"]) == {"decode": 3, "prefill": 0}
    with pytest.raises(ConfigError, match="decode is ordered twice"):
        parse_orders(["decode=3", "decode=4"])


def test_free_resources_are_what_nodes_have_less_what_groups_and_actors_take() -> None:
    headroom = make_headroom("tandem", *rows())
    assert headroom.total_free("CPU") == pytest.approx(2.0 - 0.55 - 0.05 - 0.1)
    assert headroom.total == ({"CPU": 2.0},)
    assert headroom.needed("decode", 2) == {"CPU": pytest.approx(1.1)}
    assert headroom.shortages({"decode": 2}) == []
    assert headroom.shortages({"decode": 3}) == ["CPU: 1.65 wanted, 1.3 free of 2 in the cluster"]
    assert headroom.needed("prefill", 1) == {}
    assert make_headroom("other", *rows()).needed("prefill", 1) == {"CPU": 0.05}


def reply(
    *changes: tuple[str, int, int], shortages: tuple[str, ...] = (), **free: float
) -> admin_pb.ScaleResponse:
    """Changes as (pool, before, after); each added replica needs half a CPU."""
    return admin_pb.ScaleResponse(
        pools=[
            admin_pb.PoolChange(
                name=pool,
                before=before,
                after=after,
                num_running=before,
                needed={"CPU": 0.5 * (after - before)} if after > before else {},
            )
            for pool, before, after in changes
        ],
        free=free,
        free_known=bool(free),
        shortages=shortages,
    )


def test_a_plan_says_what_is_needed_and_what_does_not_fit() -> None:
    plan = plan_scale(reply(("decode", 1, 4), shortages=("CPU: 1.5 wanted",), CPU=1.3), status(), ())
    text = shown(plan_view(plan))
    assert "CPU: 1.5 needed, 1.3 free" in text
    assert "does not fit now: CPU: 1.5 wanted" in text
    assert plan_json(plan)["pools"][0]["needed"] == {"CPU": 1.5}


def test_a_plan_bounds_how_many_requests_move() -> None:
    there = status(("decode", "decode", 5), ("decode", "decode", 1), ("decode", "decode", 2))
    (pool,) = plan_scale(reply(("decode", 3, 1)), there, ()).pools
    assert (pool.least, pool.most) == (3, 7)
    plan = plan_scale(reply(("decode", 3, 2)), there, ())
    assert "1 to 5" in shown(plan_view(plan))
    assert "move to other replicas" in shown(plan_view(plan))


def test_a_plan_names_the_lent_replicas_that_are_recalled() -> None:
    there = status(("prefill", "decode", 0), ("decode", "decode", 0))
    plan = plan_scale(reply(("decode", 1, 2)), there, ())
    assert plan.recalled == ("prefill-0",)
    assert "prefill-0 plays another role and is recalled first" in shown(plan_view(plan))
    same = plan_scale(reply(("decode", 1, 1)), there, ())
    assert same.recalled == ()
    assert "decode has this target already, and is pinned to it" in shown(plan_view(same))
    alone = plan_scale(reply(("decode", 1, 1)), None, ())
    assert "only a gateway could pin it" in shown(plan_view(alone))


def test_the_token_is_found_as_ray_finds_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_token("given", file) == "given"
    assert read_token("", file) == "from-file"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token("", tmp_path / "missing")


def two_pools() -> FakeApp:
    return FakeApp({"decode": FakePool(1, 1, list(RUNNING)), "prefill": FakePool(1, 1, list(RUNNING))})


async def scaled(
    target: ScaleTarget, counts: dict[str, int], *, dry_run: bool = False, wait_s: float | None = None
) -> str:
    """What the command prints."""
    console = Console(file=io.StringIO(), width=100)
    work = ScaleWork(target, console, SystemClock(), as_json=False)
    await work.scale(counts, (), dry_run=dry_run, wait_s=wait_s)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


# ---------------------------------------------------------------------------------- through a gateway


async def test_a_dry_run_orders_nothing_and_shows_the_cluster(front: ConsoleHarness) -> None:
    target = GatewayTarget(front.harness.admin(front.gateway))
    text = await scaled(target, {"decode": 3}, dry_run=True)
    assert "nothing was changed" in text
    assert "what the Ray cluster has free is not known" in text
    assert "not known without a gateway" not in text
    view = await front.view()
    assert (front.dashboard.orders, view.desired) == ([], {})


async def test_it_orders_by_name_pins_and_releases(front: ConsoleHarness) -> None:
    target = GatewayTarget(front.harness.admin(front.gateway))
    text = await scaled(target, {"decode": 1, "prefill": 2})
    assert "decode has this target already, and is pinned to it" in text
    assert front.dashboard.orders == [("prefill", 2)]
    view = await front.view()
    assert (view.desired, view.pinned) == ({"decode": 1, "prefill": 2}, ("decode", "prefill"))
    assert {move.by for move in view.moves} == {"local"}
    await target.release(["decode"])
    assert (await front.view()).pinned == ("prefill",)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ({"decode": 0}, "no pool that decodes would have a replica"),
        ({"decoder": 1}, "there is no pool 'decoder', but decode, prefill"),
    ],
)
async def test_an_order_that_cannot_be_meant_is_refused(
    front: ConsoleHarness, counts: dict[str, int], named: str
) -> None:
    with pytest.raises(CallError, match=named) as refused:
        await scaled(GatewayTarget(front.harness.admin(front.gateway)), counts)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert front.dashboard.orders == []


async def test_it_waits_until_the_count_is_reached(front: ConsoleHarness) -> None:
    target = GatewayTarget(front.harness.admin(front.gateway))
    working = asyncio.create_task(scaled(target, {"decode": 2}, wait_s=60.0))
    await until(lambda: bool(front.dashboard.orders), "it is ordered")
    front.dashboard.failing = 1
    front.app.pools["decode"].states = ["RUNNING", "RUNNING"]
    await working
    assert front.dashboard.orders == [("decode", 2)]


async def test_a_gateway_without_ray_says_so(harness: GatewayHarness) -> None:
    await harness.add_replica("d0", "decode")
    gateway, _ = await harness.add_gateway()
    with pytest.raises(CallError, match="runs without Ray"):
        await scaled(GatewayTarget(harness.admin(gateway)), {"decode": 2})


# --------------------------------------------------------------------- without one, by Serve's endpoint


@contextlib.asynccontextmanager
async def dashboard_target(dashboard: FakeDashboard, app: str = "tandem") -> AsyncIterator[DashboardTarget]:
    async with ServeClient(dashboard.url, app, TOKEN) as client:
        yield DashboardTarget(client, app)


async def test_serve_is_ordered_without_a_gateway(front: ConsoleHarness) -> None:
    async with dashboard_target(front.dashboard) as target:
        text = await scaled(target, {"decode": 2, "prefill": 1})
        assert front.dashboard.orders == [("decode", 2)]
        assert "not known without a gateway" in text
        with pytest.raises(PinError, match="through a gateway"):
            await target.release(["decode"])


async def test_it_gives_up_waiting_and_says_that_serve_continues() -> None:
    async with FakeDashboard(two_pools()) as dashboard, dashboard_target(dashboard) as target:
        with pytest.raises(ScaleTimeoutError, match="Serve continues"):
            await scaled(target, {"decode": 2}, wait_s=0.001)
        assert dashboard.orders == [("decode", 2)]


async def test_an_order_that_is_overruled_while_it_waits_is_told() -> None:
    app = two_pools()
    async with FakeDashboard(app) as dashboard, dashboard_target(dashboard) as target:
        working = asyncio.create_task(scaled(target, {"decode": 2}, wait_s=60.0))
        await until(lambda: bool(dashboard.orders), "it is ordered")
        app.pools["decode"].target = 5
        with pytest.raises(ScaleTimeoutError, match="another count of decode"):
            await working


async def test_an_application_that_does_not_run_is_named() -> None:
    async with FakeDashboard(two_pools()) as dashboard, dashboard_target(dashboard, "other") as target:
        with pytest.raises(UnknownPoolError, match="no application 'other'; --app"):
            await scaled(target, {"decode": 2})


async def test_serve_takes_what_it_took_before_a_refusal() -> None:
    async with FakeDashboard(two_pools()) as dashboard, dashboard_target(dashboard) as target:
        dashboard.refused_pool = "prefill"
        with pytest.raises(DashboardError, match="decode=2 was ordered, prefill not"):
            await scaled(target, {"decode": 2, "prefill": 2})


def test_the_command_wants_an_order() -> None:
    command = typer.Typer()
    command.command()(scale)
    empty = CliRunner().invoke(command, [])
    assert empty.exit_code == 2
    assert "decode=3" in empty.output


def test_the_command_tells_an_unreachable_dashboard_in_one_line() -> None:
    port = free_port()
    away = tandem("scale", "decode=3", "--dashboard", f"http://127.0.0.1:{port}")
    assert away.returncode == 1
    assert away.stderr.startswith(f"tandem: Ray's dashboard at http://127.0.0.1:{port} cannot be reached")
    assert "Traceback" not in away.stderr


async def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeDashboard(two_pools()) as dashboard, dashboard_target(dashboard) as target:
        work = ScaleWork(target, Console(file=io.StringIO()), SystemClock(), as_json=True)
        await work.scale({"decode": 3}, (), dry_run=True, wait_s=None)
    told = json.loads(capsys.readouterr().out)
    assert told["dry_run"] is True
    (pool,) = told["pools"]
    assert (pool["name"], pool["before"], pool["after"], pool["num_running"]) == ("decode", 1, 3, 1)
    assert (pool["num_moving_least"], told["free"]) == (None, None)


def test_status_shows_counts_pins_lent_replicas_and_moves() -> None:
    pool = admin_pb.Pool(
        name="decode",
        role=admin_pb.REPLICA_ROLE_DECODE,
        configured=1,
        desired=3,
        pinned=True,
        num_ready=2,
        num_reassigned=1,
    )
    move = admin_pb.ScalingChange(at=0.0, pool="decode", before=1, after=3, by="operator", reason="curl")
    text = shown(*pool_parts(admin_pb.StatusResponse(pools=[pool], scaling_changes=[move])))
    assert "operator (pinned)" in text
    assert "1970-01-01 00:00:00Z decode 1 -> 3 by operator: curl" in text
    role = admin_pb.ScalingChange(
        at=0.0, pool="prefill", before=1, after=1, by="autoscaler", reason="p0 plays decode"
    )
    assert move_line(role) == "1970-01-01 00:00:00Z prefill by autoscaler: p0 plays decode"
    assert pool_parts(admin_pb.StatusResponse()) == []
