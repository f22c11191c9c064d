"""Rank processes as an engine core holds them, and ranks without processes that a test plays: only their
connections to the engine core are real."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from local_engine import BLOCK
from patience import WAIT_S
from rank_processes import NurseryLauncher
from trust_files import FILES, TRUST

from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.handshake import prove_as_client, send_frame
from kvtransfer.transfer_orders import TransferSettings
from workers.messages.rank_channel import (
    RANK_UP_CODEC,
    RankJoined,
    RankReady,
    RankSpec,
    RankTicket,
    RankUp,
    StageCost,
    StepPlan,
    StepReport,
)
from workers.replica.layer_split import split_layers
from workers.replica.rank_group import PlanStages, RankGroup, RankHandle, RankLauncher

NUM_LAYERS = 3
PATIENCE_S = WAIT_S
FORKS = NurseryLauncher()
START_STALL_S = 50.0


def make_specs(
    model_dir: Path, tp: int, pp: int, *, probe_rows: int = 0, faults: tuple[FaultRule, ...] = ()
) -> list[RankSpec]:
    return [
        RankSpec(
            replica=ReplicaIdentity("replica", 1),
            rank=rank,
            tp=tp,
            pp=pp,
            engine_core_address="",
            trust=FILES,
            model_dir=str(model_dir),
            dtype="float32",
            device="cpu",
            num_threads=1,
            block_tokens=BLOCK,
            num_kv_tokens=40 * BLOCK,
            max_batch_tokens=128,
            max_sequences=8,
            transfer=TransferSettings("127.0.0.1", ("tcp",)),
            probe_rows=probe_rows,
            faults=faults,
        )
        for rank in range(tp * pp)
    ]


def by_cost(num_stages: int) -> PlanStages:
    def plan(joined: Sequence[RankJoined]) -> tuple[tuple[int, int], ...]:
        tp = len(joined) // num_stages
        return split_layers(NUM_LAYERS, [joined[stage * tp].cost for stage in range(num_stages)])

    return plan


class KeepingLauncher:
    """Keeps what another has started, so that a test can see how each process ended."""

    def __init__(self, launcher: RankLauncher) -> None:
        self._launcher = launcher
        self.handles: list[RankHandle] = []

    async def launch(self, spec: RankSpec) -> RankHandle:
        self.handles.append(await self._launcher.launch(spec))
        return self.handles[-1]

    async def endings(self) -> list[str]:
        return await asyncio.gather(*(handle.wait() for handle in self.handles))


class EngineCore:
    """Holds the group of one replica and keeps what it hears."""

    def __init__(self, launcher: RankLauncher, clock: Clock) -> None:
        self.launcher = KeepingLauncher(launcher)
        self.group = RankGroup(
            TRUST,
            self.launcher,
            self._on_message,
            self._on_died,
            clock=clock,
            start_stall_s=START_STALL_S,
        )
        self.reports: dict[int, list[StepReport]] = defaultdict(list)
        self.deaths: list[str] = []
        self.news = asyncio.Event()

    def _on_message(self, rank: int, message: RankUp) -> None:
        assert isinstance(message, StepReport)
        self.reports[rank].append(message)
        self.news.set()

    def _on_died(self, reason: str) -> None:
        self.deaths.append(reason)
        self.news.set()

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_reached():
                self.news.clear()
                await self.news.wait()

    async def run(self, plans: Sequence[StepPlan], num_ranks: int, num_in_flight: int) -> None:
        """Send the plans; never are more than `num_in_flight` unreported by some rank."""
        for count, plan in enumerate(plans, start=1):
            self.group.send(plan)
            await self.until(lambda due=count - num_in_flight + 1: self._num_done(num_ranks) >= due)  # type: ignore[misc]
        await self.until(lambda: self._num_done(num_ranks) == len(plans))

    def _num_done(self, num_ranks: int) -> int:
        assert self.deaths == []
        return min(len(self.reports[rank]) for rank in range(num_ranks))


@asynccontextmanager
async def holding(launcher: RankLauncher = FORKS, clock: Clock | None = None) -> AsyncIterator[EngineCore]:
    core = EngineCore(launcher, clock or SystemClock())
    try:
        yield core
    finally:
        await core.group.stop()
        await core.launcher.endings()


def refuse_planning(joined: Sequence[RankJoined]) -> tuple[tuple[int, int], ...]:
    raise AssertionError("not all ranks have joined")


@asynccontextmanager
async def starting_puppets() -> AsyncIterator[tuple[list[Puppet], asyncio.Task[list[RankReady]]]]:
    """Start three ranks, of which two have joined."""
    launcher = PuppetLauncher()
    group = RankGroup(TRUST, launcher, lambda rank, message: None, lambda reason: None)
    task = asyncio.create_task(group.start(make_specs(Path(), 3, 1), "127.0.0.1", refuse_planning))
    while len(launcher.puppets) < 3:
        await SystemClock().sleep(0.001)
    for puppet in launcher.puppets[:2]:
        await puppet.join()
    yield launcher.puppets, task
    await group.stop()


@dataclass
class Puppet:
    """A rank that a test plays."""

    spec: RankSpec
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_killed: bool = False
    sock: socket.socket | None = None

    async def wait(self) -> str:
        return await self.ended

    def kill(self) -> None:
        self.is_killed = True
        self.leave()
        if not self.ended.done():
            self.ended.set_result("killed")

    async def join(self) -> None:
        await self.connect()
        self.say(RankJoined(self.spec.rank, 1, "", StageCost(), 0.0))

    async def connect(self) -> None:
        host, _, port = self.spec.engine_core_address.rpartition(":")
        self.sock = sock = socket.create_connection((host, int(port)))
        await asyncio.to_thread(prove_as_client, sock, TRUST, "puppet")
        self.say(RankTicket(self.spec.rank, self.spec.ticket))

    def say(self, message: RankUp) -> None:
        assert self.sock is not None
        send_frame(self.sock, RANK_UP_CODEC.encode(message))

    def leave(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class PuppetLauncher:
    def __init__(self) -> None:
        self.puppets: list[Puppet] = []

    async def launch(self, spec: RankSpec) -> RankHandle:
        self.puppets.append(Puppet(spec))
        return self.puppets[-1]
