"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from console_harness import ConsoleHarness
from gateway_harness import GatewayHarness, Pair, write_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshot", default="", help="where test_console_cluster.py puts a picture")


@pytest.fixture(scope="session")
def gateway_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gateway-model") / "m")


@pytest.fixture
async def harness(gateway_model: Path) -> AsyncIterator[GatewayHarness]:
    """Empty: for the test to fill."""
    built = GatewayHarness(gateway_model)
    yield built
    await built.close()


@pytest.fixture
async def pair(harness: GatewayHarness) -> Pair:
    """A harness with p0 (prefill), d0 (decode), a gateway and a client of it."""
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    return Pair(harness, gateway, harness.client(address))


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[ConsoleHarness]:
    """The same pair, with a console."""
    built = ConsoleHarness(harness)
    await built.start()
    yield built
    await built.stop()
