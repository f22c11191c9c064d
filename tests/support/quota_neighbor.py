"""What a tenant feels while another one calls as fast as it can, beyond its quota or with work that nobody
generates for: the gateway is a process of its own, in front of replicas whose prompts take 50 ms, and so is
the other tenant. Quiet and loud times alternate in one run; in each loud one, calls of the other tenant must
have been answered as the case says. Run this file to print the figures, one JSON line a case; it fails where
one is beyond its limit."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import gateway_harness
from callers import key_of
from gateway_harness import GatewayHarness, until, write_model
from http_harness import EmbeddingReplica
from http_process import started_process
from patience import SETTLE_S, SLACK_S

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
    """The other tenant's requests, the number of its connections, and the neighbor's call during that."""

    tenant: str
    path: str
    body: Mapping[str, Any]
    num_connections: int
    probe: str
    # How its calls must be answered while the neighbor is measured, and how many at least in each round.
    status: int
    least: int
    # The neighbor's median may become this many times as long, plus this many seconds.
    most_ratio: float = 1.0
    most_more_s: float = 0.0


ATTACKS: Mapping[str, Attack] = {
    "lists of 256 prompts": Attack(
        "limited",
        "/v1/completions",
        {"prompt": ["a"] * 256, "max_tokens": 1},
        num_connections=4,
        probe="first token",
        status=429,
        least=20,
        most_ratio=1.10,
    ),
    "lists of 256 inputs": Attack(
        "limited",
        "/v1/embeddings",
        {"input": ["a"] * 256},
        num_connections=4,
        probe="first token",
        status=429,
        least=20,
        most_ratio=1.10,
    ),
    "250,000 digits": Attack(
        "busy",
        "/tokenize",
        {"prompt": "7" * _NUM_DIGITS},
        num_connections=32,
        probe="tokenize",
        status=200,
        least=2,
        most_more_s=0.020,
    ),
}


class Figures(NamedTuple):
    """Median times of the neighbor's calls, in seconds, and how the other tenant's were answered."""

    name: str
    quiet_s: float
    loud_s: float
    statuses: Mapping[int, int]

    @property
    def limit_s(self) -> float:
        """The highest allowed loud median."""
        attack = ATTACKS[self.name]
        return attack.most_ratio * self.quiet_s + attack.most_more_s

    @property
    def is_kept(self) -> bool:
        return self.loud_s <= self.limit_s

    def as_json(self) -> str:
        """Return one line."""
        times = {"quiet": self.quiet_s, "loud": self.loud_s, "limit": self.limit_s}
        figures = {
            "case": self.name,
            "probe": ATTACKS[self.name].probe,
            **{f"{name}_ms": round(1e3 * time_s, 1) for name, time_s in times.items()},
            "ratio": round(self.loud_s / self.quiet_s, 3),
            "loud_calls": {str(status): count for status, count in sorted(self.statuses.items())},
            "is_kept": self.is_kept,
        }
        return json.dumps(figures)


class _Attacker:
    """The other tenant's process, which prints the status of each of its calls."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.statuses: Counter[int] = Counter()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.statuses[int(line)] += 1

    async def until(self, status: int, count: int) -> None:
        """Wait until this number of calls were answered like this."""
        await until(
            lambda: self.statuses[status] >= count or self.process.poll() is not None,
            f"{count} answers {status} of the other tenant",
            SETTLE_S,
        )
        self.check()

    def check(self) -> None:
        """Fail where it has ended."""
        assert self.process.poll() is None, f"the other tenant has ended with {self.process.returncode}"

    def stop(self) -> None:
        """End it; return when all that it has printed was read."""
        self.process.kill()
        self._reader.join()


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
    limits = {"limited": {"requests_per_s": 0.01, "burst_s": 1000.0}}
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
    """Run the gateway, or with arguments (port, key, name of the attack) the other tenant."""
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
    """Call again and again on every connection until one call fails; print the status of each."""
    body = json.dumps(attack.body).encode()

    async def call_forever(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.post(attack.path, data=body) as reply:
                await reply.read()
            print(reply.status, flush=True)

    print("begun", flush=True)
    async with _session(port, key) as session, asyncio.TaskGroup() as calls:
        for _ in range(attack.num_connections):
            calls.create_task(call_forever(session))


@contextmanager
def _attacking(port: int, key: str, name: str) -> Iterator[_Attacker]:
    """Let the other tenant call."""
    with started_process("quota_neighbor", [str(port), key, name]) as (process, _):
        attacker = _Attacker(process)
        try:
            yield attacker
        finally:
            attacker.stop()


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
    attack, quiet, loud = ATTACKS[name], [], []
    statuses: Counter[int] = Counter()
    with started_process("quota_neighbor") as (gateway, line), _named_end(gateway):
        port, secrets = json.loads(line)
        async with _session(port, secrets["neighbor"]) as session:
            await _probed(session, attack.probe)  # the first calls start things
            await _use_up(port, secrets[attack.tenant], attack)
            for _ in range(NUM_ROUNDS):
                quiet += await _probed(session, attack.probe)
                with _attacking(port, secrets[attack.tenant], name) as attacker:
                    await attacker.until(attack.status, attack.least)
                    before = attacker.statuses.copy()
                    times = await _probed(session, attack.probe)
                    while attacker.statuses[attack.status] < before[attack.status] + attack.least:
                        attacker.check()
                        times += await _probed(session, attack.probe)
                    loud += times
                    statuses += attacker.statuses - before
    return Figures(name, statistics.median(quiet), statistics.median(loud), statuses)


@contextmanager
def _named_end(gateway: subprocess.Popen[str]) -> Iterator[None]:
    """Report how the gateway ended where that is why a call fails."""
    try:
        yield
    except aiohttp.ClientConnectionError as error:
        with suppress(subprocess.TimeoutExpired):
            gateway.wait(SLACK_S)
        raise AssertionError(f"a call failed; the gateway has ended with {gateway.returncode}") from error


async def _use_up(port: int, key: str, attack: Attack) -> None:
    """Make the other tenant's first call, which is served: its bucket is empty then, where it has one."""
    async with _session(port, key) as session, session.post(attack.path, json=attack.body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


async def _probed(session: aiohttp.ClientSession, probe: str) -> list[float]:
    times = []
    for _ in range(NUM_PROBES):
        began_at = _CLOCK.now()
        await _PROBES[probe](session)
        times.append(_CLOCK.now() - began_at)
        await _CLOCK.sleep(_PAUSE_S)
    return times


def _print_all() -> bool:
    """Print the figures of every case; return whether all limits are kept."""
    found = []
    for name in ATTACKS:
        found.append(asyncio.run(measure(name)))
        print(found[-1].as_json(), flush=True)
    return all(figures.is_kept for figures in found)


if __name__ == "__main__":
    sys.exit(0 if _print_all() else 1)
