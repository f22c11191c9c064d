"""One node's store as it really runs: its owner in a process of its own, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from msgspec.structs import replace
from patience import WAIT_S

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.config import StoreSettings
from kvtransfer.rpc.stream import open_tcp, open_unix
from kvtransfer.store.messages import (
    FROM_OWNER_CODEC,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    AdminHello,
    AdminRequest,
    StatRequest,
    StoreStat,
    Tier,
    TierStat,
)
from kvtransfer.store.server.store_server import SPEC_CODEC, StoreServerSpec

R = TypeVar("R")

ROOT = Path(__file__).parents[2]
SECRET = bytes(range(32))
_LENGTH = struct.Struct("<I")


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await SystemClock().sleep(0.005)
    assert condition(), what


class StoreHarness:
    """The owner of one node: started, killed, started again with the same name and folder."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.address = ""
        self.settings = replace(
            StoreSettings(
                node_id="node-1",
                epoch=1,
                name=f"tandem-test-{secrets.token_hex(8)}",
                secret=SECRET,
                host="127.0.0.1",
                dram_bytes=8 << 20,
                granule_bytes=4096,
                huge_pages=False,
                io_threads=2,
                admission="all",
                flush_s=5.0,
            ),
            **settings,
        )
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *faults: FaultRule, offer_wait_s: float = 0.0, **settings: object) -> None:
        """Start the owner; returns when it listens."""
        self.settings = replace(self.settings, epoch=self.settings.epoch + 1, **settings)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvtransfer.store.server.store_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        spec = SPEC_CODEC.encode(StoreServerSpec(self.settings, faults, offer_wait_s))
        self.address = ""
        try:
            self._process.stdin.write(_LENGTH.pack(len(spec)) + spec)
            async with asyncio.timeout(WAIT_S):
                line = await self._process.stdout.readline()
            self.address = line.decode().strip()
            assert self.address, "the owner did not start"
        finally:
            if not self.address:
                await self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self, timeout_s: float | None = WAIT_S) -> int:
        """Its exit status, when it has ended; negative: the signal that killed it."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def kill(self) -> None:
        """As a crash does."""
        self.signal(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def stop(self) -> None:
        """In good order."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self.ended() == 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def ask(self, request: AdminRequest, kind: type[R], *, is_remote: bool = False) -> R:
        """One question of an administrator."""
        if is_remote:
            stream = await open_tcp(self.address, self.settings.secret, "admin")
        else:
            stream = await open_unix(self.settings.name, self.settings.secret, "admin")
        try:
            async with asyncio.timeout(WAIT_S):
                stream.send(TO_OWNER_CODEC.encode(AdminHello(STORE_PROTOCOL)))
                stream.send(TO_OWNER_CODEC.encode(request))
                answer = FROM_OWNER_CODEC.decode(await stream.next_frame())
        finally:
            stream.close()
            await stream.wait_closed()
        assert isinstance(answer, kind), answer
        return answer

    async def stat(self, tier: Tier) -> TierStat:
        stat = await self.ask(StatRequest(), StoreStat)
        return next(each for each in stat.tiers if each.tier == tier)

    async def until(self, tier: Tier, condition: Callable[[TierStat], bool], what: str) -> TierStat:
        """Ask until the tier is as it should be."""
        deadline = SystemClock().now() + WAIT_S
        while not condition(stat := await self.stat(tier)):
            assert SystemClock().now() < deadline, f"not in time: {what}; {stat}"
            await SystemClock().sleep(0.02)
        return stat

    async def check_nothing_leaked(self) -> None:
        """No lease is left and nothing is in quarantine."""
        await self.until("dram", lambda stat: not (stat.num_leases or stat.num_quarantined), "all is free")
