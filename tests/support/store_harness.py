"""One node's store as it really runs: its owner in a process of its own, killed and started again, and
replicas that are stand-ins in this process, around the real `StoreClient` and the real `StoreWorker`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from patience import WAIT_S
from trust_files import FILES, TRUST

from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool
from kvtransfer.codec import framed
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.config import StoreSettings
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity, Shard
from kvtransfer.rpc.stream import open_tcp, open_unix
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.store.messages.admin_requests import (
    AdminHello,
    AdminRequest,
    StatRequest,
    StoreStat,
    TierStat,
)
from kvtransfer.store.messages.engine_session import (
    REFUSED,
    EngineHello,
    FetchedBlocks,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    NewRecord,
    PutCommit,
    PutGrant,
    PutRequest,
    Source,
    StoreWelcome,
    TierEvents,
    TierPart,
    TierPartRequest,
)
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, STORE_PROTOCOL, TO_OWNER_CODEC
from kvtransfer.store.messages.records import Tier
from kvtransfer.store.messages.store_orders import (
    AttachStore,
    StoreAttached,
    StoreCopy,
    StoreGet,
    StoreGetDone,
    StorePut,
    StorePutDone,
    StoreRead,
    StoreReport,
)
from kvtransfer.store.server.store_process import SPEC_CODEC, StoreServerSpec
from kvtransfer.store.store_client import StoreClient
from kvtransfer.store.worker import StoreWorker
from kvtransfer.transfer_orders import TransferSettings

R = TypeVar("R")

ROOT = Path(__file__).parents[2]


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds; fail when it does not within the deadline."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await SystemClock().sleep(0.005)
    assert condition(), what


class StoreHarness:
    """The owner of one node: started, killed, started again with the same name and folder."""

    def __init__(self, folder: Path, trust: TrustFiles = FILES, /, **settings: object) -> None:
        self.folder = folder
        self.trust = trust
        self.address = ""
        self.settings = replace(
            StoreSettings(
                node_id="node-1",
                epoch=1,
                name=f"tandem-test-{secrets.token_hex(8)}",
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
            "kvtransfer.store.server.store_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        spec = SPEC_CODEC.encode(StoreServerSpec(self.settings, self.trust, faults, offer_wait_s))
        self.address = ""
        try:
            self._process.stdin.write(framed(spec))
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
        """Wait for the end of the process; return its exit status; negative: the signal that killed it."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def kill(self) -> None:
        """As a crash does."""
        self.signal(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def stop(self) -> None:
        """Stop the process in good order."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self.ended() == 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the process in whatever state it is."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def ask(self, request: AdminRequest, kind: type[R], *, is_remote: bool = False) -> R:
        """Ask one question as an administrator."""
        if is_remote:
            stream = await open_tcp(self.address, Trust.read(self.trust), "admin")
        else:
            stream = await open_unix(self.settings.name, Trust.read(self.trust), "admin")
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
        """Check that no lease is left and nothing is in quarantine."""
        await self.until("dram", lambda stat: not (stat.num_leases or stat.num_quarantined), "all is free")


Bytes = npt.NDArray[np.uint8]

# All layers and heads of the model of these tests.
MODEL = Shard(0, 4, 0, 4)
LEFT, RIGHT = Shard(0, 4, 0, 2), Shard(0, 4, 2, 4)
TOP, BOTTOM = Shard(0, 2, 0, 4), Shard(2, 4, 0, 4)
COMPATIBILITY = CompatibilityRecord(1, b"model of tests..", "float32", "float32", 16, 4, 4, 16)
# Blocks of each rank's pool.
NUM_BLOCKS = 256

# K or V of one head and layer of a block.
_HEAD_BYTES = 16 * 16 * 4


def block_bytes(shard: Shard) -> int:
    return _layout(shard).block_bytes


def _layout(shard: Shard) -> BlockLayout:
    return BlockLayout(shard, head_dim=16, block_tokens=16, item_bytes=4)


class Chain(NamedTuple):
    """Blocks of one prompt. What each holds follows from its key."""

    group: str
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, name: str, num_blocks: int, group: str = "alice") -> Chain:
        keys = [
            hashlib.sha256(f"{group}/{name}/{index}".encode()).digest()[:16] for index in range(num_blocks)
        ]
        return cls(group, tuple(keys))

    def parent(self, index: int) -> bytes:
        return self.keys[index - 1] if index else b""


def content(key: bytes, shard: Shard) -> Bytes:
    """Return the block's bytes at a rank that holds `shard`: plain slices, the reference."""
    shape = (4, 2, 4, _HEAD_BYTES)
    seed = int.from_bytes(key[:8], "big")
    whole: Bytes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    piece = whole[shard.layer_start : shard.layer_end, :, shard.head_start : shard.head_end]
    return np.ascontiguousarray(piece).reshape(-1)


class _Rank:
    """A rank's pool and its store worker."""

    def __init__(
        self, rank: int, shard: Shard, report: Callable[[StoreReport], None], faults: Faults
    ) -> None:
        self.shard = shard
        layout = _layout(shard)
        self._memory = KvMemory.allocate(NUM_BLOCKS * layout.block_bytes)
        self.blocks: Bytes = np.frombuffer(self._memory.buffer, dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        clock = SystemClock()
        governor = TrafficGovernor(TransferSettings("127.0.0.1", ()), clock)
        self._pool = HostPool(layout, self._memory)
        self.worker = StoreWorker((self._pool,), rank, governor, TRUST, faults, clock, report)

    def close(self) -> None:
        self.worker.close()
        self.blocks = np.empty(0, dtype=np.uint8)
        self._pool.close()


class Replica:
    """An engine core with ranks. Its `get` and `put` return what came of them; bytes are compared at once."""

    def __init__(
        self,
        harness: StoreHarness,
        *shards: Shard,
        compatibility: CompatibilityRecord = COMPATIBILITY,
        trust: Trust = TRUST,
        faults: Faults | None = None,
        takes_parts: bool = True,
    ) -> None:
        self.session = secrets.token_bytes(16)
        self.shards = shards or (MODEL,)
        self.identity = ReplicaIdentity(f"replica-{self.session.hex()[:6]}", 1)
        self.welcomes: list[StoreWelcome] = []
        self.losses: list[str] = []
        # The tiers as reported by `TierPart` and `TierEvents`, and the last reasons of removals.
        self.tiers: dict[bytes, str] = {}
        self.reasons: dict[bytes, str] = {}
        self._harness = harness
        self._loop = asyncio.get_running_loop()
        self._up = asyncio.Event()
        self._answers: dict[tuple[type, int], asyncio.Queue[object]] = {}
        self._num_requests = 0
        self._pending: set[tuple[int, int]] = set()
        self._attaching: set[int] = set()
        self._next_block = 0
        # The fetch of the last `get`.
        self.held = 0
        # Why it ended where it did.
        self.reason = ""
        self.ranks = [
            _Rank(rank, shard, self._reporter(rank), faults or Faults())
            for rank, shard in enumerate(self.shards)
        ]
        self._trust = trust
        self._hello = EngineHello(
            STORE_PROTOCOL, self.session, self.identity, compatibility, self.shards, takes_parts
        )
        self.errors: list[BaseException] = []
        self.client = self._new_client()

    def _new_client(self) -> StoreClient:
        name, clock = self._harness.settings.name, SystemClock()
        return StoreClient(name, self._trust, self._hello, self, clock, on_error=self.errors.append)

    async def start(self) -> Replica:
        """Start the replica; return when the owner has welcomed the engine core and every rank has the arena
        mapped."""
        await self.client.start()
        await self.up()
        return self

    async def leave(self) -> None:
        """End the engine core's connection; the ranks keep the arena mapped."""
        await self.client.close()
        self._up.clear()
        self.tiers.clear()

    async def come_back(self) -> None:
        """Connect the same engine core and ranks again, after `leave`."""
        self.client = self._new_client()
        await self.start()

    async def up(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._up.wait()

    async def close(self) -> None:
        await self.client.close()
        await asyncio.to_thread(self.close_ranks)
        assert not self.errors, self.errors

    def close_ranks(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks = []

    # ------------------------------------------------------------------------------------------ requests

    async def put(self, chain: Chain, *, only: Sequence[int] = ()) -> list[int]:
        """Write these blocks of the chain (all); return the indices of those that the owner was told to
        commit, now or before."""
        indices = list(only) or list(range(len(chain.keys)))
        grant = await self.grant(chain, indices)
        if grant is None:
            return []
        places = [(index, rank) for index in indices for rank in range(len(self.ranks))]
        offsets = dict(zip(places, grant.offsets, strict=True))
        sums = await self.write(chain, grant, places)
        failed = [place for place, offset in offsets.items() if offset >= 0 and place not in sums]
        written = tuple((offsets[place], checksum) for place, checksum in sums.items())
        if not self.client.send(PutCommit(written, tuple(offsets[place] for place in failed))):
            return []
        lost = {place[0] for place, offset in offsets.items() if offset == REFUSED or place in failed}
        return [index for index in indices if index not in lost]

    async def grant(self, chain: Chain, indices: Iterable[int]) -> PutGrant | None:
        """Ask for space; None when the owner went away."""
        records = tuple(
            NewRecord(chain.keys[index], chain.parent(index), shard, block_bytes(shard))
            for index in indices
            for shard in self.shards
        )
        request = PutRequest(self._number(), chain.group, chain.keys[0], records)
        return await self._answer(PutGrant, request.number) if self.client.send(request) else None

    async def write(
        self, chain: Chain, grant: PutGrant, places: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], int]:
        """Let the ranks copy the granted records for each (index, rank); return the sum of each copied
        one."""
        copies: dict[int, dict[tuple[int, int], StoreCopy]] = {}
        for (index, rank), offset in zip(places, grant.offsets, strict=True):
            if offset >= 0:
                block = self._block()
                self.ranks[rank].blocks[block] = content(chain.keys[index], self.shards[rank])
                copies.setdefault(rank, {})[index, rank] = StoreCopy(block, offset)
        sums: dict[tuple[int, int], int] = {}
        for rank, orders in copies.items():
            order = StorePut(self._number(), grant.arena, tuple(orders.values()))
            done = await self._do(rank, order, StorePutDone)
            if not done.error:
                sums |= zip(orders, done.sums, strict=True)
        return sums

    async def find(self, chain: Chain) -> tuple[Tier, ...]:
        request = FindRequest(self._number(), chain.keys[0], chain.keys)
        answer = await self._answer(FindAnswer, request.number) if self.client.send(request) else None
        return () if answer is None else answer.tiers

    async def get(self, chain: Chain, *, hold: bool = False) -> tuple[Tier, ...]:
        """Load the chain into the ranks; the tiers of the leading blocks that came, whose bytes are compared.
        With `hold` the leases stay (`release`)."""
        request = FetchRequest(self._number(), chain.group, chain.keys[0], chain.keys, True)
        if not self.client.send(request):
            return ()
        tiers: list[Tier] = []
        bad: set[int] = set()
        is_over = False
        while not is_over:
            part = await self._answer(FetchedBlocks, request.number)
            if part is None:
                return ()
            assert part.first == len(tiers)
            for index, sources in enumerate(part.blocks, part.first):
                bad |= await self._read(chain.keys[index], part.arena, sources)
            tiers += part.tiers
            is_over, self.reason = part.is_last, part.reason
        if bad:
            self.client.send(FetchRelease(request.number, tuple(bad)))
            return await self.get(chain)
        self.held = request.number
        if not hold:
            self.release(self.held)
        return tuple(tiers)

    def release(self, number: int) -> None:
        self.client.send(FetchRelease(number))

    def prefetch(self, chain: Chain) -> None:
        self.client.send(FetchRequest(self._number(), chain.group, chain.keys[0], chain.keys, False))

    async def _read(self, key: bytes, arena: bytes, sources: Sequence[Source]) -> set[int]:
        """Let the ranks copy one block; return the offsets of the bad records. Right bytes, or none."""
        bad: set[int] = set()
        for rank, shard in enumerate(self.shards):
            mine = [source for source in sources if source.rank == rank]
            block = self._block()
            blocks = self.ranks[rank].blocks
            blocks[block] = 0
            reads = tuple(
                StoreRead(block, each.offset, each.shard, each.piece, each.num_bytes, each.checksum)
                for each in mine
            )
            done = await self._do(rank, StoreGet(self._number(), arena, reads), StoreGetDone)
            if done.error:
                continue  # the owner is away
            bad |= {mine[index].offset for index in done.bad}
            assert done.bad or np.array_equal(blocks[block], content(key, shard)), "wrong bytes"
        return bad

    # -------------------------------------------------------------------------------------- StoreEvents

    async def ready_to_connect(self) -> None:
        await eventually(lambda: not self._pending and not self._attaching, "the ranks are done")

    def on_welcome(self, welcome: StoreWelcome) -> None:
        self.welcomes.append(welcome)
        if not self._up.is_set() and self._hello.takes_parts:
            self.client.send(TierPartRequest(0))
        if not self._up.is_set() and not self._attaching:
            self._attaching = set(range(len(self.ranks)))
            for rank in self.ranks:
                rank.worker.handle(AttachStore(self._harness.settings.name, self.session))

    def on_lost(self, reason: str) -> None:
        self.losses.append(reason)
        self._up.clear()
        self.tiers.clear()
        for (kind, _), waiting in self._answers.items():
            if kind in (PutGrant, FindAnswer, FetchedBlocks):
                waiting.put_nowait(None)

    def on_grant(self, grant: PutGrant) -> None:
        self._deliver(grant, grant.number)

    def on_find(self, answer: FindAnswer) -> None:
        self._deliver(answer, answer.number)

    def on_fetched(self, fetched: FetchedBlocks) -> None:
        self._deliver(fetched, fetched.number)

    def on_tiers(self, events: TierEvents) -> None:
        for stored in events.stored:
            self.tiers |= dict.fromkeys(stored.keys, stored.tier)
        for key, reason in zip(events.removed, events.reasons, strict=True):
            self.tiers.pop(key, None)
            self.reasons[key] = reason

    def on_tier_part(self, part: TierPart) -> None:
        for stored in part.stored:
            self.tiers |= dict.fromkeys(stored.keys, stored.tier)
        if part.next_part:
            self.client.send(TierPartRequest(part.next_part))

    # -------------------------------------------------------------------------------------------- inside

    def _block(self) -> int:
        self._next_block = (self._next_block + 1) % NUM_BLOCKS
        return self._next_block

    def _number(self) -> int:
        self._num_requests += 1
        return self._num_requests

    async def _do(self, rank: int, order: StorePut | StoreGet, kind: type[R]) -> R:
        """Carry out the order at the rank and return its report."""
        self._pending.add((rank, order.number))
        self.ranks[rank].worker.handle(order)
        report = await self._answer(kind, order.number)
        assert report is not None
        return report

    def _reporter(self, rank: int) -> Callable[[StoreReport], None]:
        return lambda report: self._hear(rank, report)

    def _hear(self, rank: int, report: StoreReport) -> None:
        with contextlib.suppress(RuntimeError):  # the test has ended
            self._loop.call_soon_threadsafe(self._on_report, rank, report)

    def _on_report(self, rank: int, report: StoreReport) -> None:
        if isinstance(report, StoreAttached):
            self._on_attached(rank, report)
            return
        self._pending.discard((rank, report.number))
        self._deliver(report, report.number)

    def _on_attached(self, rank: int, report: StoreAttached) -> None:
        if rank not in self._attaching:
            return  # an arena's end
        self._attaching.discard(rank)
        if not report.error and not self._attaching and self.client.is_up:
            self._up.set()

    def _deliver(self, message: object, number: int) -> None:
        self._queue(type(message), number).put_nowait(message)

    def _queue(self, kind: type, number: int) -> asyncio.Queue[object]:
        return self._answers.setdefault((kind, number), asyncio.Queue())

    async def _answer(self, kind: type[R], number: int) -> R | None:
        """Return the answer; None: the owner went away."""
        async with asyncio.timeout(WAIT_S):
            answer = await self._queue(kind, number).get()
        assert answer is None or isinstance(answer, kind)
        return answer
