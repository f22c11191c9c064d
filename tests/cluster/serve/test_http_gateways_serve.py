"""Streams over HTTP at gateways of a running cluster: one of two dies, and one is replaced by an update."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_harness import until
from http_harness import events_of
from serving import TINY, RunningCluster, free_port, tandem

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
        self.request_id = ""
        self.seen: list[Any] = []
        self.began_at, self.ended_at = time.monotonic(), 0.0
        self._reading = asyncio.create_task(self._read(session, url))

    async def _read(self, session: aiohttp.ClientSession, url: str) -> None:
        async with session.post(f"{url}/v1/completions", json=BODY) as reply:
            assert reply.status == 200, await reply.text()
            self.request_id = reply.headers["X-Request-Id"]
            events: AsyncIterator[Any] = events_of(reply)
            async for event in events:
                self.seen.append(event)
        self.ended_at = time.monotonic()

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


ROLLED_FILE = f"""
model: {TINY}
logs: {{format: json}}
pools:
  - {{name: both, role: both, dtype: fp32, engine: {{block_tokens: 16}}}}
gateway: {{drain_s: 60, default_max_tokens: %s}}
"""


@pytest.fixture
def rolled(tmp_path: Path) -> Iterator[tuple[RunningCluster, Path, list[str]]]:
    """A cluster with one gateway, the file of its configuration, and the options with its ports."""
    file = tmp_path / "cluster.yaml"
    file.write_text(ROLLED_FILE % 64)
    names = ("--port", "--admin-port", "--http-port")
    places = [part for name in names for part in (name, str(free_port()))]
    running = RunningCluster("--file", str(file), *places)
    yield running, file, places
    assert running.stop() == 0


def gateway_of(cluster: RunningCluster) -> dict[str, str]:
    """By request: the gateway that has served it, from the lines that gateways log."""
    lines = [json.loads(line) for line in cluster.log().splitlines() if line.startswith('{"ts"')]
    return {line["request_id"]: line["process"] for line in lines if line.get("logger") == "tandem.access"}


async def test_streams_finish_at_a_gateway_that_is_rolled(
    rolled: tuple[RunningCluster, Path, list[str]],
) -> None:
    cluster, file, places = rolled
    url = cluster.addresses["HTTP"].removesuffix("/v1")
    (before,) = (it.gateway_id for it in cluster.status().gateways)
    file.write_text(ROLLED_FILE % 65)
    ray = ("--ray-address", cluster.addresses["Ray"])
    command = ("update", "-f", str(file), *places, "--json", *ray)
    streams: list[Stream] = []

    async def keep_streaming(update: asyncio.Task[Any]) -> None:
        while not update.done():
            async with aiohttp.ClientSession() as session:  # a connection of its own
                streams.append(Stream(session, url))
                await streams[-1].end()

    update = asyncio.create_task(asyncio.to_thread(tandem, *command, timeout_s=180.0))
    await asyncio.gather(*(keep_streaming(update) for _ in range(3)))
    done = await update
    assert done.returncode == 0, done.stderr
    actions = [it["action"] for it in json.loads(done.stdout)["deployments"]]
    assert actions.count("roll") == 1, actions

    (after,) = (it.gateway_id for it in cluster.status().gateways)
    assert after != before
    assert all(stream.seen[-1] == "[DONE]" for stream in streams)
    async with aiohttp.ClientSession() as session:
        last = Stream(session, url)
        await last.end()
    await until(lambda: last.request_id in gateway_of(cluster), "the line of the last request")
    served_by = gateway_of(cluster)
    assert served_by[last.request_id] == after
    began_there = min(it.began_at for it in [*streams, last] if served_by[it.request_id] == after)
    spanning = [it for it in streams if served_by[it.request_id] == before and it.ended_at > began_there]
    assert spanning, "streams of the old gateway go on while the new one serves"
