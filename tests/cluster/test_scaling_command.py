"""`tandem scale` against a dashboard over HTTP: what it says, what it orders, what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from console_harness import ConsoleHarness
from gateway_harness import GatewayHarness, until
from rich.console import Console
from scaling_harness import TOKEN, FakeApp, FakeDashboard, FakePool
from serving import free_port, tandem
from typer.testing import CliRunner

from cluster.cli.calls import move_line, pool_parts
from cluster.cli.scale import (
    ScaleTarget,
    ScaleWork,
    dashboard_url,
    parse_orders,
    plan_json,
    plan_scale,
    plan_view,
    read_token,
    scale,
)
from cluster.errors import ConfigError, DashboardError, PinError, ScaleTimeoutError, UnknownPoolError
from cluster.proto import tandem_pb2 as pb
from cluster.roster.messages import GatewayRecord
from cluster.scaling.headroom import make_headroom
from cluster.scaling.serve_client import AppTargets, PoolTarget
from kvtransfer.common.clock import SystemClock

RUNNING = ["RUNNING"]


def shown(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(*parts)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def targets(**pools: int) -> AppTargets:
    return AppTargets("RUNNING", "m", True, {name: PoolTarget(n, 1, n) for name, n in pools.items()})


def status(*loads: tuple[str, str, int]) -> pb.StatusResponse:
    """Replicas as (pool, role, requests there), whose pool's role is its name."""
    return pb.StatusResponse(
        replicas=[
            pb.Replica(
                replica_id=f"{pool}-{number}",
                pool=pool,
                role=role,
                home_role=pool,
                state="ready",
                load=pb.Load(num_running=running),
            )
            for number, (pool, role, running) in enumerate(loads)
        ],
        pools=[pb.Pool(name=name, role=name) for name in ("prefill", "decode")],
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


def test_a_plan_says_what_is_needed_and_what_does_not_fit() -> None:
    headroom = make_headroom("tandem", *rows())
    plan = plan_scale(targets(decode=1, prefill=1), status(), headroom, {"decode": 4}, ())
    text = shown(plan_view(plan))
    assert "CPU: 1.65 needed, 1.3 free" in text
    assert "does not fit now: CPU: 1.65 wanted" in text
    assert plan_json(plan)["pools"][0]["needed"] == {"CPU": pytest.approx(1.65)}


def test_a_plan_bounds_how_many_requests_move() -> None:
    there = status(("decode", "decode", 5), ("decode", "decode", 1), ("decode", "decode", 2))
    (change,) = plan_scale(targets(decode=3), there, None, {"decode": 1}, ()).changes
    assert (change.before, change.after, change.least, change.most) == (3, 1, 3, 7)
    plan = plan_scale(targets(decode=3), there, None, {"decode": 2}, ())
    assert "1 to 5" in shown(plan_view(plan))
    assert "move to other replicas" in shown(plan_view(plan))


def test_a_plan_names_the_lent_replicas_that_are_recalled() -> None:
    there = status(("prefill", "decode", 0), ("decode", "decode", 0))
    plan = plan_scale(targets(decode=1, prefill=1), there, None, {"decode": 2}, ())
    assert plan.recalled == ("prefill-0",)
    assert "prefill-0 plays another role and is recalled first" in shown(plan_view(plan))
    same = plan_scale(targets(decode=1, prefill=1), there, None, {"decode": 1}, ())
    assert same.recalled == ()
    assert "without a gateway's console it cannot be pinned" in shown(plan_view(same))


def test_a_pool_that_there_is_not_and_an_order_that_leaves_no_decoder_are_refused() -> None:
    with pytest.raises(ConfigError, match="no pool 'decoder', but decode, prefill"):
        plan_scale(targets(decode=1, prefill=1), None, None, {"decoder": 1}, ())
    with pytest.raises(ConfigError, match="no pool 'x'"):
        plan_scale(targets(decode=1), None, None, {}, ("x",))
    with pytest.raises(ConfigError, match="keep one in at least one of them"):
        plan_scale(targets(decode=1, prefill=1), status(), None, {"decode": 0}, ())
    assert plan_scale(targets(decode=1, prefill=1), status(), None, {"prefill": 0}, ()).changes


def test_the_dashboard_and_the_token_are_found_as_ray_finds_them(tmp_path: Path) -> None:
    assert dashboard_url("", "") == "http://127.0.0.1:8265"
    assert dashboard_url("", "127.0.0.1:6379") == "http://127.0.0.1:8265"
    assert dashboard_url("", "https://ray.example") == "https://ray.example"
    assert dashboard_url("http://here:1", "https://ray.example") == "http://here:1"
    with pytest.raises(ConfigError, match="is no URL"):
        dashboard_url("here:8265", "")
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert read_token("given", file) == "given"
    assert read_token("", file) == "from-file"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token("", tmp_path / "missing")


class CommandHarness:
    """A dashboard, and what the command printed."""

    def __init__(self, dashboard: FakeDashboard, gateway: str, app: str = "tandem") -> None:
        self.console = Console(file=io.StringIO(), width=100)
        self.door = ScaleTarget(gateway, dashboard.url, TOKEN, app)

    async def scale(self, *orders: str, dry_run: bool = False, wait_s: float | None = None) -> str:
        work = ScaleWork(self.door, self.console, SystemClock(), as_json=False)
        await work.scale(orders, (), dry_run=dry_run, wait_s=wait_s)
        text: str = self.console.file.getvalue()  # type: ignore[attr-defined]
        return text


def two_pools() -> FakeApp:
    return FakeApp({"decode": FakePool(1, 1, list(RUNNING)), "prefill": FakePool(1, 1, list(RUNNING))})


async def test_a_dry_run_orders_nothing_and_shows_the_cluster(harness: GatewayHarness) -> None:
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    gateway, _ = await harness.add_gateway()
    address = f"127.0.0.1:{gateway.admin_port}"
    async with FakeDashboard(two_pools()) as dashboard:
        text = await CommandHarness(dashboard, address).scale("decode=3", dry_run=True)
        assert dashboard.orders == []
    assert "nothing was changed" in text
    assert "what the Ray cluster has free is not known" in text
    assert "no gateway answers" not in text


async def test_an_order_that_leaves_nothing_to_decode_is_refused_before_the_dashboard_is_asked(
    harness: GatewayHarness,
) -> None:
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    gateway, _ = await harness.add_gateway()
    address = f"127.0.0.1:{gateway.admin_port}"
    work = ScaleWork(
        ScaleTarget(address, f"http://127.0.0.1:{free_port()}", TOKEN, "tandem"),
        Console(file=io.StringIO()),
        SystemClock(),
        as_json=False,
    )
    with pytest.raises(ConfigError, match="no pool that decodes would have a replica"):
        await work.scale(["decode=0"], (), dry_run=False, wait_s=None)


async def test_it_orders_and_waits_until_the_count_is_reached() -> None:
    app = two_pools()
    async with FakeDashboard(app) as dashboard:
        harness = CommandHarness(dashboard, f"127.0.0.1:{free_port()}")
        working = asyncio.create_task(harness.scale("decode=2", "prefill=1", wait_s=60.0))
        while not dashboard.orders:
            await asyncio.sleep(0)
        app.pools["decode"].states = ["RUNNING", "STARTING"]
        dashboard.failing = 1
        app.pools["decode"].states = ["RUNNING", "RUNNING"]
        text = await working
        assert dashboard.orders == [("decode", 2)]
    assert "no gateway answers" in text


async def test_it_gives_up_waiting_and_says_that_serve_continues() -> None:
    async with FakeDashboard(two_pools()) as dashboard:
        harness = CommandHarness(dashboard, f"127.0.0.1:{free_port()}")
        with pytest.raises(ScaleTimeoutError, match="Serve continues"):
            await harness.scale("decode=2", wait_s=0.001)
        assert dashboard.orders == [("decode", 2)]


async def test_an_order_that_is_overruled_while_it_waits_is_told() -> None:
    app = two_pools()
    async with FakeDashboard(app) as dashboard:
        harness = CommandHarness(dashboard, f"127.0.0.1:{free_port()}")
        working = asyncio.create_task(harness.scale("decode=2", wait_s=60.0))
        while not dashboard.orders:
            await asyncio.sleep(0)
        app.pools["decode"].target = 5
        with pytest.raises(ScaleTimeoutError, match="another count of decode"):
            await working


async def test_an_application_that_does_not_run_is_named() -> None:
    async with FakeDashboard(two_pools()) as dashboard:
        harness = CommandHarness(dashboard, f"127.0.0.1:{free_port()}", app="other")
        with pytest.raises(UnknownPoolError, match="no application 'other'; --app"):
            await harness.scale("decode=2")


async def test_the_count_that_a_pool_has_already_is_pinned_through_the_console(front: ConsoleHarness) -> None:
    record = GatewayRecord("g0", 1, front.address, 1, f"127.0.0.1:{front.gateway.console_port}")
    await front.harness.roster.register(record)
    await until(lambda: bool(front.gateway.connections.gateways), "the gateway knows itself")
    text = await CommandHarness(front.dashboard, front.admin_address).scale("decode=1", dry_run=True)
    assert "decode has this target already, and is pinned to it" in text
    assert (await front.view()).pinned == ()
    await CommandHarness(front.dashboard, front.admin_address).scale("decode=1", "prefill=2")
    assert front.dashboard.orders == [("prefill", 2)]
    view = await front.view()
    assert (view.desired["decode"], "decode" in view.pinned) == (1, True)
    stranger = CommandHarness(front.dashboard, front.admin_address)
    stranger.door = stranger.door._replace(token="another")
    with pytest.raises(DashboardError, match="token"):
        await stranger.scale("decode=1")


async def test_releasing_without_a_console_says_what_to_set(harness: GatewayHarness) -> None:
    await harness.add_replica("d0", "decode")
    gateway, _ = await harness.add_gateway()
    address = f"127.0.0.1:{gateway.admin_port}"
    async with FakeDashboard(two_pools()) as dashboard:
        door = ScaleTarget(address, dashboard.url, TOKEN, "tandem")
        work = ScaleWork(door, Console(file=io.StringIO()), SystemClock(), as_json=False)
        with pytest.raises(PinError, match=r"gateway\.console_port"):
            await work.scale((), ("decode",), dry_run=False, wait_s=None)


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
    async with FakeDashboard(two_pools()) as dashboard:
        door = ScaleTarget(f"127.0.0.1:{free_port()}", dashboard.url, TOKEN, "tandem")
        work = ScaleWork(door, Console(file=io.StringIO()), SystemClock(), as_json=True)
        await work.scale(["decode=3"], (), dry_run=True, wait_s=None)
    told = json.loads(capsys.readouterr().out)
    assert told["dry_run"] is True
    (pool,) = told["pools"]
    assert (pool["name"], pool["before"], pool["after"], pool["num_running"]) == ("decode", 1, 3, 1)
    assert (pool["num_moving_least"], told["free"]) == (None, None)


def test_status_shows_counts_pins_lent_replicas_and_moves() -> None:
    pool = pb.Pool(
        name="decode", role="decode", configured=1, desired=3, pinned=True, num_ready=2, num_lent=1
    )
    move = pb.ScalingMove(at=0.0, pool="decode", before=1, after=3, by="operator", reason="curl")
    text = shown(*pool_parts(pb.StatusResponse(pools=[pool], moves=[move])))
    assert "operator (pinned)" in text
    assert "1970-01-01 00:00:00Z decode 1 -> 3 by operator: curl" in text
    role = pb.ScalingMove(
        at=0.0, pool="prefill", before=1, after=1, by="autoscaler", reason="p0 plays decode"
    )
    assert move_line(role) == "1970-01-01 00:00:00Z prefill by autoscaler: p0 plays decode"
    assert pool_parts(pb.StatusResponse()) == []
