"""The client of Serve's scale endpoint: what it reads, and that each refusal says what to do."""

from __future__ import annotations

import pytest
from scaling_harness import TOKEN, FakeApp, FakeDashboard, FakePool
from serving import free_port

from cluster.errors import (
    DashboardAwayError,
    DashboardError,
    ScalerDisabledError,
    TokenRefusedError,
    UnknownPoolError,
)
from cluster.scaling.serve_client import PoolTarget, ServeClient


def two_pools() -> FakeApp:
    states = ["RUNNING", "RUNNING", "STARTING"]
    return FakeApp({"decode": FakePool(3, 1, states), "prefill": FakePool(1, 1, ["STOPPING"])})


async def test_targets_are_read_and_set() -> None:
    app = two_pools()
    async with FakeDashboard(app) as dashboard, ServeClient(dashboard.url + "/", "tandem", TOKEN) as client:
        targets = await client.application()
        assert targets is not None
        assert targets.pools == {
            "decode": PoolTarget(3, 1, 2, {"RUNNING": 2, "STARTING": 1}),
            "prefill": PoolTarget(1, 1, 0, {"STOPPING": 1}),
        }
        assert (targets.status, targets.is_scalable) == ("RUNNING", True)
        await client.scale("prefill", 4)
        assert dashboard.orders == [("prefill", 4)]
        again = await client.application()
        assert again is not None
        assert again.pools["prefill"].target == 4


async def test_an_application_that_is_not_there_is_none() -> None:
    async with FakeDashboard(None) as dashboard, ServeClient(dashboard.url, "tandem", TOKEN) as client:
        assert await client.application() is None
        with pytest.raises(UnknownPoolError, match=r"Pool-decode .*'tandem'"):
            await client.scale("decode", 1)


@pytest.mark.parametrize(
    ("mark", "source", "deployed_at", "expected"),
    [
        ("m7", "imperative", 2.0, "m7"),
        ("m7", "imperative", 9.0, "m7"),  # the controller restarted: its own time is no deploy
        ("m7", "declarative", 2.0, "m7@2.000"),
        ("", "imperative", 2.0, "@2.000"),
    ],
)
async def test_the_mark_names_the_deploy(mark: str, source: str, deployed_at: float, expected: str) -> None:
    app = FakeApp({"decode": FakePool(1, 1)}, mark=mark, source=source, deployed_at=deployed_at)
    async with FakeDashboard(app) as dashboard, ServeClient(dashboard.url, "tandem", TOKEN) as client:
        targets = await client.application()
    assert targets is not None
    assert targets.deploy_mark == expected


@pytest.mark.parametrize(
    ("token", "problem"), [("", "set RAY_AUTH_TOKEN"), ("another", "does not accept this Ray token")]
)
async def test_a_missing_and_a_wrong_token_are_told_apart(token: str, problem: str) -> None:
    async with FakeDashboard(two_pools()) as dashboard, ServeClient(dashboard.url, "tandem", token) as client:
        with pytest.raises(TokenRefusedError, match=problem):
            await client.application()
        with pytest.raises(TokenRefusedError, match=problem):
            await client.scale("decode", 2)
        assert dashboard.orders == []


async def test_an_application_without_the_scaler_is_refused_with_the_remedy() -> None:
    app = two_pools()
    app.is_scalable = False
    async with FakeDashboard(app) as dashboard, ServeClient(dashboard.url, "tandem", TOKEN) as client:
        with pytest.raises(ScalerDisabledError, match="external_scaler_enabled: true"):
            await client.scale("decode", 2)


async def test_a_controller_that_is_away_is_told_and_may_come_back() -> None:
    async with FakeDashboard(two_pools()) as dashboard, ServeClient(dashboard.url, "tandem", TOKEN) as client:
        dashboard.failing = 1
        with pytest.raises(DashboardAwayError, match=r"status 503.*controller is not available"):
            await client.scale("decode", 2)
        await client.scale("decode", 2)


async def test_no_dashboard_and_something_else_at_its_address() -> None:
    async with ServeClient(f"http://127.0.0.1:{free_port()}", "tandem", TOKEN) as client:
        with pytest.raises(DashboardAwayError, match="cannot be reached"):
            await client.application()
    async with ServeClient("http://no url", "tandem", TOKEN) as client:
        with pytest.raises(DashboardAwayError, match="cannot be reached"):
            await client.application()
    async with (
        FakeDashboard(None) as dashboard,
        ServeClient(f"{dashboard.url}/other", "tandem", TOKEN) as client,
    ):
        with pytest.raises(DashboardError, match="is no dashboard of Ray"):
            await client.application()
        dashboard.bodies["/other/api/serve/applications/"] = b"<html>"
        with pytest.raises(DashboardError, match="is no dashboard of Ray"):
            await client.application()
