"""Streams over HTTP at two gateways of a running cluster, of which one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_harness import until
from http_harness import events_of
from serving import TINY, RunningCluster

from cluster.api.blocking_client import BlockingAdminClient

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
FILE = f"""
model: {TINY}
pools:
  - {{name: both, role: both, dtype: fp32, engine: {{block_tokens: 16}}}}
gateway: {{port: 0, admin_port: 0, replicas: 2, drain_s: 120, http: {{port: 0}}}}
"""
NUM_TOKENS = 1500
BODY = {
    "prompt": "def main():\n",
    "max_tokens": NUM_TOKENS,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE)
    running = RunningCluster("--file", str(file))
    yield running
    assert running.stop() == 0


def gateways(cluster: RunningCluster) -> dict[str, int]:
    """By the URL of HTTP: the process of the gateway."""
    places = cluster.addresses["gateway"].split(", ")
    urls = cluster.addresses["HTTP"].split(", ")
    with BlockingAdminClient(cluster.admin_address.split(", ")[0]) as client:
        processes = {it.address: it.process_id for it in client.status().gateways}
    return {url.removesuffix("/v1"): processes[place] for url, place in zip(urls, places, strict=True)}


class Stream:
    """One answer, and what of it has come."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.seen: list[Any] = []
        self._reading = asyncio.create_task(self._read(session, url))

    async def _read(self, session: aiohttp.ClientSession, url: str) -> None:
        async with session.post(f"{url}/v1/completions", json=BODY) as reply:
            assert reply.status == 200, await reply.text()
            events: AsyncIterator[Any] = events_of(reply)
            async for event in events:
                self.seen.append(event)

    async def begin(self) -> None:
        """Return when the first events are here."""
        await until(lambda: len(self.seen) > 2 or self._reading.done(), "the stream begins")
        assert not self._reading.done(), "the stream has ended"

    async def end(self) -> None:
        """Return when nothing more comes; raises what the client sees."""
        await self._reading

    @property
    def text(self) -> str:
        return "".join(it["choices"][0]["text"] for it in self.seen if it != "[DONE]" and it["choices"])


async def test_a_gateway_that_dies_cuts_its_streams_and_no_other(cluster: RunningCluster) -> None:
    async with aiohttp.ClientSession() as session:
        (dying, process_id), (other, _) = gateways(cluster).items()
        cut, kept = Stream(session, dying), Stream(session, other)
        await cut.begin()
        await kept.begin()
        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientPayloadError):
            await cut.end()
        assert "[DONE]" not in cut.seen
        assert all(event["choices"][0]["finish_reason"] is None for event in cut.seen)
        await kept.end()
        assert kept.seen[-1] == "[DONE]"
        assert kept.text.startswith(cut.text)
        assert len(kept.text) > len(cut.text)
