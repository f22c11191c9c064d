"""Indexes over a real Redis that can be killed, stopped, slowed down or filled."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import redis
from child_processes import killed_on_error
from patience import WAIT_S
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.store.index import redis_watchdog
from kvtransfer.store.index.announcer import AnnounceLimits
from kvtransfer.store.index.index import Index
from kvtransfer.store.index.redis_server import find_binary
from kvtransfer.store.messages.records import RecordId, RecordInfo, Tier

SPACE = b"space-01"
CHAIN = b"chain-of-16bytes"
WHOLE = Shard(0, 4, 0, 2)
QUICK = AnnounceLimits(linger_s=0.0, rebuild_pause_s=0.0, retry_s=0.02)
PATIENT_S = WAIT_S
_SHORTLY = Retry(ConstantBackoff(0.02), 10)


class RawRedis:
    """A `redis-server` with settings of the test's. Use as a context manager, or `close` it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        """`settings` with underscores for dashes. It runs from here on."""
        self.port = stable_port()
        fixed = {"bind": "127.0.0.1", "port": self.port, "save": '""', "dir": folder, "loglevel": "warning"}
        named = {name.replace("_", "-"): value for name, value in settings.items()}
        self._settings = {**fixed, **named}
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Run (again), at the same port."""
        config = "".join(f"{name} {value}\n" for name, value in self._settings.items())
        command = [sys.executable, redis_watchdog.__file__, find_binary()]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._watchdog.stdin is not None
        with killed_on_error(self._watchdog):
            self._watchdog.stdin.write(config.encode() + b"\n")
            self._watchdog.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_up(self) -> bool:
        """Wait until the server answers. Returns False if it ends instead."""
        assert self._watchdog is not None
        while self._watchdog.poll() is None:
            with suppress(redis.ConnectionError), redis.Redis(port=self.port, retry=_SHORTLY) as client:
                return bool(client.ping())
        return False

    def client(self, **options: Any) -> redis.Redis:
        """Return a connection of the test's own, once the server answers. It is closed with the server."""
        retry = Retry(ConstantBackoff(0.02), 500)
        client = redis.Redis(port=self.port, retry=retry, retry_on_error=[redis.ConnectionError], **options)
        self._clients.append(client)
        return client

    def signal(self, number: signal.Signals) -> None:
        assert self._watchdog is not None
        for child in psutil.Process(self._watchdog.pid).children():
            child.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL; return when the server is gone."""
        self.signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
            self._watchdog.wait()


class HeldAnswers:
    """A proxy before a server that lets answers through only while it may."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._allowance: int | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self, after_bytes: int = 0) -> None:
        """Keep back every answer from now on, after `after_bytes` bytes more."""
        self._allowance = after_bytes

    def release(self) -> None:
        """Release the answers that were kept back."""
        self._allowance = None
        self._may_pass.set()

    async def __aenter__(self) -> HeldAnswers:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for copy in (self._copy(reader, back, False), self._copy(there, writer, True)):
            task = asyncio.create_task(copy)
            self._tasks.add(task)

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if is_answer:
                    while data and self._allowance is not None:
                        writer.write(data[: self._allowance])
                        passed = min(len(data), self._allowance)
                        data = data[passed:]
                        self._allowance -= passed
                        if data:
                            self._may_pass.clear()
                            await self._may_pass.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


def stable_port() -> int:
    """Return a free port that no outgoing connection takes while its server is away; a cluster's second port,
    10000 higher, is one too."""
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def record(number: int, shard: Shard = WHOLE, chain: bytes = CHAIN) -> RecordInfo:
    """Block `number` of the chain."""
    return RecordInfo(RecordId(SPACE, key(number, chain), shard), b"", chain, "tenant", b"model", 4096, 7)


def key(number: int, chain: bytes = CHAIN) -> bytes:
    return chain if number == 0 else chain[:8] + number.to_bytes(8, "big")


def make_index(
    url: str,
    node: str = "a",
    *,
    epoch: int = 1,
    budget_s: float = PATIENT_S,
    lease_s: float = 60.0,
    clock: Clock | None = None,
    limits: AnnounceLimits = QUICK,
    held: Sequence[tuple[RecordInfo, Tier]] = (),
) -> Index:
    settings = StoreSettings(
        node_id=node,
        epoch=epoch,
        name="",
        host="127.0.0.1",
        dram_bytes=0,
        redis_url=url,
        lookup_budget_s=budget_s,
        node_lease_s=lease_s,
    )
    identity = ReplicaIdentity(node, epoch)
    return Index(settings, identity, f"host-{node}:1", clock or SystemClock(), lambda: held, limits)


async def nodes(index: Index, numbers: list[int]) -> list[set[str]]:
    """Return the nodes that have each of these blocks, as the index knows them."""
    found = await index.find(SPACE, CHAIN, [key(number) for number in numbers])
    return [{holder.node_id for holder in holders} for holders in found]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; the limit is there for the failure's report only."""
    async with asyncio.timeout(PATIENT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def until_found(index: Index, numbers: list[int], expected: list[set[str]]) -> None:
    async with asyncio.timeout(PATIENT_S):
        while await nodes(index, numbers) != expected:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(*indexes: Index, is_up: bool = True) -> AsyncIterator[None]:
    """Run the indexes; with `is_up` they have reached Redis."""
    for index in indexes:
        await index.start()
    try:
        if is_up:
            await until(lambda: all(index.stat().state == "up" for index in indexes))
        yield
    finally:
        for index in indexes:
            await index.close()
