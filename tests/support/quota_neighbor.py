"""What a tenant feels while another one calls as fast as it can, beyond its quota or with work that nobody
generates for: the gateway is a process of its own, in front of replicas whose prompts take 50 ms, and so is
the other tenant. Quiet and loud times alternate in one run. Run this file to print the figures."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import gateway_harness
from callers import key_of
from gateway_harness import GatewayHarness, write_model
from http_harness import EmbeddingReplica
from http_process import started_process

from kvtransfer.common.clock import SystemClock
from workers.messages.link import Submission

PREFILL_S = 0.05
NUM_ROUNDS = 3
NUM_PROBES = 40
# Between two calls of the neighbor.
_PAUSE_S = 0.05
_CONTEXT = 16_384
_NUM_DIGITS = 250_000
_CLOCK = SystemClock()


class Attack(NamedTuple):
    """What the other tenant sends, on how many connections, and what the neighbor's call is meanwhile."""

    tenant: str
    path: str
    body: Mapping[str, Any]
    num_connections: int
    probe: str


ATTACKS: Mapping[str, Attack] = {
    "lists of 256 prompts": Attack(
        "limited", "/v1/completions", {"prompt": ["a"] * 256, "max_tokens": 1}, 4, "first token"
    ),
    "lists of 256 inputs": Attack("limited", "/v1/embeddings", {"input": ["a"] * 256}, 4, "first token"),
    "250,000 digits": Attack("busy", "/tokenize", {"prompt": "7" * _NUM_DIGITS}, 32, "tokenize"),
}


class Figures(NamedTuple):
    """Median times of the neighbor's calls, in seconds, and how many calls the other tenant made."""

    quiet_s: float
    loud_s: float
    num_calls: int

    @property
    def ratio(self) -> float:
        return self.loud_s / self.quiet_s


class _SlowReplica(EmbeddingReplica):
    """Computes a prompt in `PREFILL_S`."""

    async def _prefill(self, submission: Submission, gateway_id: str) -> None:
        await self.harness.clock.sleep(PREFILL_S)
        await super()._prefill(submission, gateway_id)


async def _serve(folder: Path) -> None:
    gateway_harness.MAX_CONTEXT = _CONTEXT
    harness = GatewayHarness(write_model(folder))
    keys = folder / "keys.yaml"
    tenants = ("limited", "busy", "neighbor")
    secrets = {tenant: key_of(keys, tenant) for tenant in tenants}
    limits = {"limited": {"requests_per_s": 1.0}}
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = harness.replicas[replica_id] = _SlowReplica(harness, replica_id, role)
        replica.num_blocks = 10_000
        await replica.start()
    auth = {"mode": "required", "keys_file": str(keys), "tenants": limits}
    gateway, _ = await harness.add_gateway(harness.config(auth=auth))
    print(json.dumps([gateway.http_port, secrets]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.close()


def main() -> None:
    """Be the gateway, or with arguments (port, key, name of the attack) the other tenant."""
    if len(sys.argv) > 1:
        asyncio.run(_attack(int(sys.argv[1]), sys.argv[2], ATTACKS[sys.argv[3]]))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve(Path(folder)))


@asynccontextmanager
async def _session(port: int, key: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", headers=headers, connector=connector
    ) as session:
        yield session


async def _attack(port: int, key: str, attack: Attack) -> None:
    """Call again and again on every connection until the input ends; print how many calls there were."""
    body, num_calls = json.dumps(attack.body).encode(), 0

    async def call_forever(session: aiohttp.ClientSession) -> None:
        nonlocal num_calls
        while True:
            async with session.post(attack.path, data=body) as reply:
                await reply.read()
            num_calls += 1

    async with _session(port, key) as session:
        tasks = [asyncio.create_task(call_forever(session)) for _ in range(attack.num_connections)]
        print("begun", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(num_calls, flush=True)


@contextmanager
def _attacking(port: int, key: str, name: str) -> Iterator[list[int]]:
    """Let the other tenant call; the list holds the number of its calls at the end."""
    found: list[int] = []
    with started_process("quota_neighbor", [str(port), key, name]) as (process, _):
        assert process.stdin is not None
        assert process.stdout is not None
        yield found
        process.stdin.close()
        found.append(int(process.stdout.readline()))


async def _first_token(session: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 1, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


async def _tokenize(session: aiohttp.ClientSession) -> None:
    async with session.post("/tokenize", json={"prompt": "fox"}) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


_PROBES: Mapping[str, Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]] = {
    "first token": _first_token,
    "tokenize": _tokenize,
}


async def measure(name: str) -> Figures:
    """Measure one attack."""
    attack, quiet, loud, num_calls = ATTACKS[name], [], [], 0
    with started_process("quota_neighbor") as (_, line):
        port, secrets = json.loads(line)
        async with _session(port, secrets["neighbor"]) as session:
            await _probed(session, attack.probe)  # the first calls start things
            for _ in range(NUM_ROUNDS):
                quiet += await _probed(session, attack.probe)
                with _attacking(port, secrets[attack.tenant], name) as found:
                    await _CLOCK.sleep(1.0)  # what the bucket holds is used up
                    loud += await _probed(session, attack.probe)
                num_calls += sum(found)
    return Figures(statistics.median(quiet), statistics.median(loud), num_calls)


async def _probed(session: aiohttp.ClientSession, probe: str) -> list[float]:
    times = []
    for _ in range(NUM_PROBES):
        began_at = _CLOCK.now()
        await _PROBES[probe](session)
        times.append(_CLOCK.now() - began_at)
        await _CLOCK.sleep(_PAUSE_S)
    return times


if __name__ == "__main__":
    for each in ATTACKS:
        figures = asyncio.run(measure(each))
        shown = f"{1e3 * figures.quiet_s:.1f} -> {1e3 * figures.loud_s:.1f} ms, x {figures.ratio:.2f}"
        print(f"{each}: {ATTACKS[each].probe} {shown}; {figures.num_calls} calls of the other tenant")
