"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from console_harness import ConsoleHarness
from gateway_harness import GatewayHouse, Pair
from gateway_model import write_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshot", default="", help="where test_console_cluster.py puts a picture")


@pytest.fixture(scope="session")
def gateway_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gateway-model") / "m")


@pytest.fixture
async def house(gateway_model: Path) -> AsyncIterator[GatewayHouse]:
    """Empty: for the test to fill."""
    built = GatewayHouse(gateway_model)
    yield built
    await built.close()


@pytest.fixture
async def pair(house: GatewayHouse) -> Pair:
    """A house with p0 (prefill), d0 (decode), a gateway and a client of it."""
    await house.add_replica("p0", "prefill")
    await house.add_replica("d0", "decode")
    gateway, address = await house.add_gateway()
    return Pair(house, gateway, house.client(address))


@pytest.fixture
async def front(house: GatewayHouse) -> AsyncIterator[ConsoleHarness]:
    """The same pair, with a console."""
    built = ConsoleHarness(house)
    await built.start()
    yield built
    await built.stop()
