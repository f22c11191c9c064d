"""Connections of clients are closed at an age, and no call fails by it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from gateway_harness import GatewayHarness
from serving import ROOT, environment

NUM_CHANNELS = 8
NUM_AT_ONCE = 4


async def failures_of(address: str, num_calls: int) -> list[str]:
    """Make the calls, with clients of a process of their own that neither repeat nor resume them; returns
    what the failed ones met."""
    clients = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests/support/plain_clients.py"),
        address,
        *map(str, (num_calls, NUM_CHANNELS, NUM_AT_ONCE)),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await clients.communicate()
    found = json.loads(printed)
    failures: list[str] = found["failures"]
    assert failures or found["done"] == num_calls
    return failures


@pytest.mark.parametrize(
    ("num_calls", "age_s"),
    [
        (300, 0.05),
        pytest.param(100_000, 5.0, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(20_000, 0.1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_no_call_fails_by_the_age_of_its_connection(
    harness: GatewayHarness, num_calls: int, age_s: float
) -> None:
    await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway(harness.config(max_connection_age_s=age_s))
    assert await failures_of(address, num_calls) == []
