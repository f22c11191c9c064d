"""A client reads the status of a call before it lets the call go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_harness import PROMPT, GatewayHarness, until

from cluster.api.generate_options import GenerateOptions
from cluster.api.servicer import InferenceServicer


async def test_no_finished_call_is_cancelled_by_its_client(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc leaves the memory of a status behind that it cannot send."""
    ends: list[str] = []
    generate: Any = InferenceServicer.Generate

    async def slowly_ended(*args: Any, **options: Any) -> None:
        try:
            await generate(*args, **options)
            await asyncio.sleep(0.05)  # for which the status lies behind the last message
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("ended")

    monkeypatch.setattr(InferenceServicer, "Generate", slowly_ended)
    await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway()
    client = harness.client(address)
    for number in range(3):
        await client.complete(PROMPT, GenerateOptions(seed=number, max_tokens=2))
    await until(lambda: len(ends) == 3, "the calls have ended")
    assert ends == ["ended"] * 3
