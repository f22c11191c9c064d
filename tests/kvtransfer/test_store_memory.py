"""What a node's store keeps of blocks that were evicted and of fetches that are over: nothing."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from kept_objects import KeptObjects, num_by_type, without_collector
from store_harness import COMPATIBILITY, StoreHarness
from trust_files import TRUST

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import PeerGoneError
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.rpc.stream import FrameStream, frame_stream
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.dram.chain_lru import ChainKey
from kvtransfer.store.dram.record_table import Held
from kvtransfer.store.messages.engine_session import (
    EngineHello,
    FetchedBlocks,
    FetchRelease,
    FetchRequest,
    NewRecord,
    PutCommit,
)
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, STORE_PROTOCOL, TO_OWNER_CODEC
from kvtransfer.store.record import Writer
from kvtransfer.store.server.arena_manager import ArenaManager
from kvtransfer.store.server.node import StoreNode
from kvtransfer.store.server.session import EngineSession

SESSION, SHARD, GROUP = b"s" * 16, Shard(0, 4, 0, 4), "tenant"
# Of one round: several times as many as the arena has place for.
NUM_BLOCKS = 200
ARENA_BYTES, RECORD_BYTES = 1 << 20, 32 << 10


def spawn(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(work, name=name)


class Load:
    """An engine core that puts blocks, each after the one before, and fetches each of them once."""

    def __init__(self, node: StoreNode, session: EngineSession, stream: FrameStream) -> None:
        self._node, self._session, self._stream = node, session, stream
        self._number = 0

    async def run(self) -> None:
        """Put and fetch so many more of them."""
        for _ in range(NUM_BLOCKS):
            self._number += 1
            await self._put_and_fetch(self._number)

    @property
    def num_held(self) -> int:
        """How many blocks are here; the others were evicted."""
        return sum(1 for _ in self._node.catalog.records())

    def use_slices(self) -> None:
        """Use every slice of the catalog: its dictionary gets memory of its own with the first block."""
        for each in self._slices:
            each[ChainKey(b"", b"")] = {}
            del each[ChainKey(b"", b"")]

    def num_by_type(self) -> Counter[str]:
        """Count the objects of the process, without the slices of the catalog: the collector tracks the
        dictionary of a slice while it has blocks."""
        return num_by_type() - Counter({str(dict): sum(map(gc.is_tracked, self._slices))})

    @property
    def _slices(self) -> tuple[dict[ChainKey, dict[Shard, Held]], ...]:
        return self._node.catalog._table._blocks.slices

    async def _put_and_fetch(self, number: int) -> None:
        key = number.to_bytes(16, "little")
        parent = b"" if number % 4 == 0 else (number - 1).to_bytes(16, "little")
        offset = self._node.catalog.allocate(
            SESSION,
            GROUP,
            key,
            self._session._view.space,
            COMPATIBILITY.model_fingerprint,
            NewRecord(key, parent, SHARD, RECORD_BYTES),
            Writer(1, 1),
        )
        self._stream.send(TO_OWNER_CODEC.encode(PutCommit(((offset, number),))))
        self._stream.send(TO_OWNER_CODEC.encode(FetchRequest(number, GROUP, key, (key,), to_device=True)))
        while True:
            message = FROM_OWNER_CODEC.decode(await self._stream.next_frame())
            if isinstance(message, FetchedBlocks) and message.is_last:
                break
        assert not message.reason
        self._stream.send(TO_OWNER_CODEC.encode(FetchRelease(number)))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Load]:
    """A node that serves one engine core."""
    settings, clock = StoreHarness(folder).settings, ManualClock()
    node = StoreNode(settings, TRUST, clock, Faults(), spawn)
    node.catalog.attach(Arena.create(ARENA_BYTES, 4096, False))
    node.catalog.session_opened(SESSION)
    arena_manager = ArenaManager(settings, clock, 0, node.attach, lambda rank: None, spawn)
    ours, theirs = socket.socketpair()
    stream = await frame_stream(theirs, "engine core")
    hello = EngineHello(STORE_PROTOCOL, SESSION, ReplicaIdentity("replica", 1), COMPATIBILITY, (SHARD,))
    session = EngineSession(hello, await frame_stream(ours, "owner"), arena_manager, node, spawn)
    tasks = [asyncio.create_task(session.serve()), asyncio.create_task(node.run())]
    try:
        yield Load(node, session, stream)
    finally:
        stream.abort()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, PeerGoneError):
                await task
        await node.release()


@pytest.mark.slow
async def test_blocks_and_fetches_that_are_over_leave_nothing_behind(tmp_path: Path) -> None:
    async with serving(tmp_path) as load:
        await load.run()
        assert load.num_held < NUM_BLOCKS / 2
        load.use_slices()
        kept = KeptObjects(NUM_BLOCKS)
        for _ in range(5):
            await load.run()
            kept.count()
        kept.check()


async def test_blocks_and_fetches_that_are_over_are_in_no_cycle(tmp_path: Path) -> None:
    async with serving(tmp_path) as load:
        await load.run()
        with without_collector():
            before = load.num_by_type()
            await load.run()
            grown = load.num_by_type() - before
        kept = {name: num for name, num in grown.items() if num > NUM_BLOCKS / 2}
        assert not kept, kept
