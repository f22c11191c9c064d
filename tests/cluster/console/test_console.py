"""The console's JSON over HTTP, against what the gateway says over gRPC, and orders against a dashboard."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from console_harness import ConsoleHarness, Page
from gateway_harness import PROMPT, GatewayHarness, encode, until
from rich.console import Console as Terminal
from scaling_harness import TOKEN

from cluster.api.client import Client, Collector
from cluster.api.generate_options import GenerateOptions
from cluster.api.json_text import as_dict
from cluster.cli import calls
from cluster.config import ClusterConfig, GatewayConfig, parse_config
from cluster.errors import CallError, ConfigError, DashboardAwayError, StartError, UnavailableError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import GatewayRecord
from cluster.scaling.orders import Operations
from cluster.serve.launcher import check_hosts
from kvtransfer.common.clock import SystemClock
from workers.stats_record import PathMeasure


@pytest.fixture
def page(front: ConsoleHarness) -> Page:
    return front.page


@pytest.fixture
def client(front: ConsoleHarness) -> Client:
    return front.harness.client(front.address)


# ------------------------------------------------------------------------------------------- what it shows


async def test_the_status_is_that_of_the_command_line(
    front: ConsoleHarness, page: Page, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    path = PathMeasure(front.harness.replicas["d0"].identity, 0, 0, "shm", 5.5, 3.0, "memory", "")
    front.harness.replicas["p0"].report([path])
    await until(lambda: any(view.paths for view in front.gateway.connections.views()), "the path is known")
    await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    await calls.status(f"127.0.0.1:{front.gateway.admin_port}", Terminal(), as_json=True)
    reported = json.loads(capsys.readouterr().out)
    shown = await page.get("/console/api/status")
    reported_paths = reported.pop("paths")
    assert await page.get("/console/api/paths") == {"replicas": reported_paths, "num_left_out": 0}
    assert [replica["paths"][0]["gb_s"] for replica in reported_paths if replica["paths"]] == [5.5]
    assert shown["num_finished_requests"] == 1
    assert _without_ages(shown) == _without_ages(reported)


async def test_the_status_has_the_classes_and_who_was_served(
    front: ConsoleHarness, page: Page, client: Client
) -> None:
    await front.harness.roster.register(GatewayRecord("g0", 1, front.address, 7))
    options = GenerateOptions(seed=1, max_tokens=3, tenant="them", service_class="batch")
    await client.complete(PROMPT, options)
    (gateway,) = (await page.get("/console/api/status"))["gateways"]
    admission = gateway["admission"]
    assert [it["service_class"] for it in admission["classes"]] == ["interactive", "standard", "batch"]
    (flow,) = admission["flows"]
    assert (flow["tenant"], flow["service_class"]) == ("them", "batch")
    assert flow["served_s"] > 0


async def test_a_request_is_shown_while_it_runs_and_when_it_has_ended(
    front: ConsoleHarness, page: Page, client: Client
) -> None:
    front.harness.replicas["d0"].script.stop_after = 4
    options = GenerateOptions(seed=1, max_tokens=9, request_id="slow-one", tenant="them")
    stream, collector = aiter(client.generate(PROMPT, options)), Collector()
    while collector.num_tokens < 5:
        collector.add(await anext(stream))
    assert front.gateway.requests.latest(1, None)[0].num_output_tokens == 5
    (shown,) = (await page.get("/console/api/requests"))["requests"]
    assert (shown["request_id"], shown["state"], shown["tenant"]) == ("slow-one", "running", "them")
    assert (shown["num_prompt_tokens"], shown["num_output_tokens"]) == (len(encode(PROMPT)), 5)
    assert (shown["prefill"], shown["decode"], shown["attempts"]) == ("p0", "d0", 1)
    assert shown["e2e_ms"] is None
    assert 0 < shown["ttft_ms"] <= 1e3 * shown["age_s"]

    front.harness.replicas["d0"].script.resume.set()
    finished = [event async for event in stream][-1]
    assert isinstance(finished, pb.Finished)
    (ended,) = (await page.get("/console/api/requests"))["requests"]
    assert (ended["state"], ended["num_output_tokens"]) == ("finished", 9)
    assert ended["ttft_ms"] == pytest.approx(finished.timing.ttft_ms)
    assert ended["e2e_ms"] == pytest.approx(finished.timing.e2e_ms, abs=50)


async def test_the_latest_requests_come_first(front: ConsoleHarness, page: Page, client: Client) -> None:
    for name in ("one", "two", "three"):
        await client.complete(PROMPT, GenerateOptions(max_tokens=1, request_id=name))
    shown = [request["request_id"] for request in (await page.get("/console/api/requests"))["requests"]]
    assert shown == ["three", "two", "one"]
    assert [record.request_id for record in front.gateway.requests.latest(2, None)] == ["three", "two"]


async def test_a_failed_request_says_why(front: ConsoleHarness, page: Page, client: Client) -> None:
    front.harness.replicas["d0"].script.stop_after = 2
    stream = client.generate(PROMPT, GenerateOptions(max_tokens=200, request_id="gone"))

    async def cancel_at_once() -> None:
        async for _ in stream:
            stream.cancel()

    with pytest.raises(CallError):
        await cancel_at_once()
    await until(lambda: front.gateway.requests.num_running == 0, "the request is over")
    (shown,) = (await page.get("/console/api/requests"))["requests"]
    assert shown["state"] == "cancelled"
    assert "cancelled the call" in shown["reason"]


async def test_the_explanation_is_that_of_the_api(page: Page, client: Client) -> None:
    await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=3, request_id="a:b.c-d_e"))
    shown = await page.get("/console/api/explain?id=a%3Ab.c-d_e")
    assert shown == as_dict(await client.explain("a:b.c-d_e"))
    assert shown["decisions"][0]["candidates"]


async def test_a_request_that_nobody_knows_is_not_explained(page: Page) -> None:
    status, fields = await page.ask("GET", "/console/api/explain?id=nobody")
    assert (status, "nobody" in fields["error"]) == (404, True)
    status, fields = await page.ask("GET", "/console/api/explain")
    assert (status, fields["error"].startswith("id: ")) == (400, True)


async def test_the_curves_are_of_what_clients_see(front: ConsoleHarness, page: Page, client: Client) -> None:
    front.harness.replicas["d0"].script.token_s = token_s = 0.02
    assert (await page.get("/console/api/curves"))["ttft"] == []
    done = await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=20))
    curves = await page.get("/console/api/curves")
    wall = SystemClock().wall()
    assert curves["at"] == pytest.approx(wall, abs=5)
    ((at, median, _, high),) = curves["ttft"]
    assert at == pytest.approx(wall, abs=5)
    assert 0 < median == high <= 1.01 * done.finished.timing.ttft_ms / 1e3
    assert curves["itl"]
    assert all(0.99 * token_s <= median <= high for _, median, _, high in curves["itl"])
    assert curves["minute"]["num_arrived"] == 1
    assert curves["minute"]["num_output_tokens"] == 20
    assert curves["totals"] == {
        "g0": {"num_running": 0, "num_finished": 1, "num_failed": 0, "num_cancelled": 0}
    }


async def test_the_page_is_found_from_the_root(front: ConsoleHarness, page: Page) -> None:
    about = await page.get("/console/api/about")
    assert (about["gateway_id"], about["app"], about["dashboard"]) == ("g0", "tandem", front.dashboard.url)
    assert (about["ttft_slo_s"], about["itl_slo_s"]) == (1.0, 0.1)


# --------------------------------------------------------------------------------------------------- orders


async def test_an_order_reaches_serve_through_the_scaler_which_alone_has_the_token(
    front: ConsoleHarness, page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    status, fields = await page.order("scale", {"pool": "decode", "replicas": 3})
    assert (status, fields) == (200, {"message": "pool decode will have 3 replicas"})
    assert front.dashboard.orders == [("decode", 3)]
    view = await front.view()
    assert (view.desired, view.pinned) == ({"decode": 3}, ("decode",))
    status, fields = await page.order("scale", {"pool": "decode", "replicas": 3})
    assert (status, fields) == (200, {"message": "pool decode keeps its 3 replicas: it is pinned"})
    assert front.dashboard.orders == [("decode", 3)]
    status, fields = await page.order("release", {"pool": "decode"})
    assert (status, fields) == (200, {"message": "pool decode is released"})
    view = await front.view()
    assert (view.desired, view.pinned) == ({"decode": 3}, ())
    assert [(move.before, move.after, move.by) for move in view.moves] == [
        (1, 3, "local"),
        (3, 3, "local"),
        (3, 3, "local"),
    ]
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        ((404, "Application or Deployment not found"), 400),
        ((412, "external_scaler_enabled=false"), 412),
        ((503, "Serve controller is not available"), 503),
        ((418, "I am a teapot"), 412),
    ],
)
async def test_serves_refusals_are_passed_on_and_change_nothing(
    front: ConsoleHarness, page: Page, refusal: tuple[int, str], status: int
) -> None:
    front.dashboard.refusal = refusal
    answered, fields = await page.order("scale", {"pool": "decode", "replicas": 3})
    assert answered == status
    assert refusal[1] in fields["error"] or status == 400
    view = await front.view()
    assert (view.desired, view.moves) == ({}, ())


async def test_an_order_that_reaches_no_dashboard_says_so(front: ConsoleHarness, page: Page) -> None:
    await front.dashboard.stop()
    status, fields = await page.order("scale", {"pool": "decode", "replicas": 3})
    assert (status, front.dashboard.url in fields["error"]) == (503, True)
    assert (await front.view()).desired == {}


async def test_what_cannot_be_reached_is_named(harness: GatewayHarness) -> None:
    async def unreachable() -> str:
        raise DashboardAwayError("the GCS is away")

    async def no_scaler(frame: bytes) -> bytes:
        raise UnavailableError("the scaler does not answer")

    reported = []
    for operations in (None, Operations(unreachable, no_scaler)):
        gateway, _ = await harness.add_gateway(harness.config(console_port=0), operations)
        async with aiohttp.ClientSession() as session:
            page = Page(f"http://127.0.0.1:{gateway.console_port}", session)
            reported.append(await page.order("release", {"pool": "decode"}))
            about = await page.get("/console/api/about")
            assert (about["app"], about["dashboard"]) == ("tandem", "")
    assert [status for status, _ in reported] == [412, 503]
    assert "without Ray" in reported[0][1]["error"]
    assert reported[1][1]["error"] == "the scaler does not answer"


# ------------------------------------------------------------------------------------------------ listening


async def test_a_taken_port_is_an_error_that_names_the_field(harness: GatewayHarness) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = harness.gateway("g0", harness.config(console_port=taken.getsockname()[1]))
        with pytest.raises(StartError, match=r"gateway\.console_port: .*127\.0\.0\.1"):
            await gateway.start()
        await gateway.stop()


async def test_there_need_not_be_a_console(harness: GatewayHarness) -> None:
    gateway, _ = await harness.add_gateway(harness.config(console_port=None))
    assert gateway.console_port == 0


async def test_the_console_ends_with_its_gateway(front: ConsoleHarness) -> None:
    port = front.gateway.console_port
    await front.page.get("/console/api/about")
    await front.gateway.stop()
    with socket.create_server(("127.0.0.1", port)) as again:
        assert again.getsockname()[1] == port


def test_another_gateway_beside_the_default_one_has_another_console() -> None:
    def console_port(**fields: Any) -> int | None:
        return GatewayConfig.model_validate(fields).console_port

    assert console_port() == 8781
    assert console_port(port=8780) == 8781
    assert console_port(port=0) == console_port(port=9000) == 0
    assert console_port(port=9000, console_port=9001) == 9001
    assert console_port(port=9000, console_port=None) is None
    assert GatewayConfig().at(None, 9000).console_port == 0
    assert GatewayConfig(console_port=9001).at(None, 9000).console_port == 9001
    assert GatewayConfig(max_requests=7).at(None, 9000).max_requests == 7


def test_several_consoles_on_one_host_need_free_ports(gateway_model: Path) -> None:
    def config(**gateway: Any) -> ClusterConfig:
        pools = [{"name": "both", "role": "both"}]
        fields = {"model": str(gateway_model), "pools": pools, "transfer": {"data_host": "auto"}}
        return parse_config({**fields, "gateway": gateway}, "test")

    with pytest.raises(ConfigError, match=r"gateway\.console_port: 2 gateways on 1 Ray nodes"):
        check_hosts(config(port=0, console_port=8781, replicas=2), 1)
    check_hosts(config(port=0, replicas=2), 1)
    check_hosts(config(port=8780, console_port=8781, replicas=2), 2)


def _without_ages(status: dict[str, Any]) -> dict[str, Any]:
    """What two answers a moment apart have in common."""
    for replica in status["replicas"]:
        replica["load"]["age_s"] = 0.0
    status["recent"]["window_s"] = 0.0
    return {**status, "uptime_s": 0.0, "wall_time_s": 0.0}
