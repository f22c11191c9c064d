"""A replica whose layers partly keep states, as its store sees it: the real connector and the real workers of
its ranks around pools whose bytes follow from keys; a stand-in for the scheduler."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_fakes import FakeCounts
from patience import WAIT_S
from trust_files import TRUST

from kvtransfer.agent.qos import TrafficGovernor
from kvtransfer.blocks.group_prefix import Prefix, match_prefix
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import STATE_WINDOW, CompatibilityRecord, KvGroup, ReplicaIdentity, Shard
from kvtransfer.store.messages.store_orders import StoreReport
from kvtransfer.store.store_client import StoreClient
from kvtransfer.store.worker import StoreWorker
from kvtransfer.transfer_orders import TransferSettings
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.step import FinishedBlock, LoadNeed, StepRates
from workers.store_connector.connector import StoreConnector
from workers.store_connector.engine_parts import EngineParts

Bytes = npt.NDArray[np.uint8]

NUM_BLOCKS, NUM_STATES, BLOCK_TOKENS, NUM_HEADS = 48, 16, 16, 4
# Layer 3 has neither KV nor a state.
ATTENDING, STATEFUL, NUM_LAYERS = (0, 4), (1, 2), 5
HEAD_DIM, STATE_SIZE = 8, 96
COMPATIBILITY = CompatibilityRecord(
    protocol=8,
    model_fingerprint=b"hybrid" * 4,
    dtype="float32",
    weight_dtype="float32",
    block_tokens=BLOCK_TOKENS,
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_HEADS,
    head_dim=HEAD_DIM,
    groups=(KvGroup(ATTENDING, 0), KvGroup(STATEFUL, STATE_WINDOW, STATE_SIZE)),
)


def content(key: bytes, shard: Shard, *, is_state: bool) -> Bytes:
    """Return the bytes of a block, or of the state behind it, at a rank: plain slices, the reference."""
    layers, kinds, head_bytes = (STATEFUL, 1, 4 * STATE_SIZE) if is_state else (ATTENDING, 2, _HEAD_BYTES)
    seed = int.from_bytes(key[:8], "big") + is_state
    whole: Bytes = np.random.default_rng(seed).integers(
        0, 256, (len(layers), kinds, NUM_HEADS, head_bytes), dtype=np.uint8
    )
    rows = [row for row, layer in enumerate(layers) if shard.layer_start <= layer < shard.layer_end]
    return np.ascontiguousarray(whole[rows][:, :, shard.head_start : shard.head_end]).reshape(-1)


_HEAD_BYTES = BLOCK_TOKENS * HEAD_DIM * 4


class _Rank:
    def __init__(self, rank: int, shard: Shard, report: Any) -> None:
        self.shard = shard
        # [num_blocks, block_bytes] of KV and of states.
        self.blocks: list[Bytes] = []
        self.pools = []
        for group, num_blocks in enumerate((NUM_BLOCKS, NUM_STATES)):
            layout = BlockLayout.of(COMPATIBILITY, shard, group)
            memory = KvMemory.allocate(max(1, num_blocks * layout.block_bytes))
            if layout.block_bytes:
                blocks: Bytes = np.frombuffer(memory.buffer, dtype=np.uint8)
                self.blocks.append(blocks[: num_blocks * layout.block_bytes].reshape(num_blocks, -1))
                self.pools.append(HostPool(layout, memory))
            else:
                self.blocks.append(np.empty((num_blocks, 0), dtype=np.uint8))
                self.pools.append(HostPool(layout, KvMemory.allocate(1)))
        clock = SystemClock()
        governor = TrafficGovernor(TransferSettings("127.0.0.1", ()), clock)
        self.worker = StoreWorker(self.pools, rank, governor, TRUST, Faults(), clock, report)


class StateReplica:
    """Computes prompts by writing what follows from their keys, and checks what it reads."""

    def __init__(self, store: str, *shards: Shard) -> None:
        """`store` is the owner's socket."""
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
        self.states = GroupPool(STATE_WINDOW, NUM_STATES)
        self.rates = StepRates()
        self.counts = FakeCounts()
        self.config = SimpleNamespace(max_loading=4, write_queue=256)
        self.life = SimpleNamespace(tables=self)
        self.errors: list[BaseException] = []
        self._finished: list[FinishedBlock] = []
        self._wanted: list[LoadNeed] = []
        self._ended: dict[str, dict[str, int]] = {}
        self._loop = asyncio.get_running_loop()
        fake: Any = self
        clock = SystemClock()
        ready: Any = [
            SimpleNamespace(compatibility=COMPATIBILITY, endpoints=SimpleNamespace(shard=shard))
            for shard in shards
        ]
        self.connector = StoreConnector(
            name=store,
            connect=lambda hello, events: StoreClient(store, TRUST, hello, events, clock, self.fail),
            identity=ReplicaIdentity(secrets.token_hex(4), 1),
            ready=ready,
            engine=EngineParts(self.pool, fake, fake, self.rates, fake, (), (self.states,)),
            clock=clock,
        )
        self.ranks = [_Rank(rank, shard, self._reporter(rank)) for rank, shard in enumerate(shards)]

    async def start(self) -> StateReplica:
        await self.connector.start()
        self.connector.tick()
        await self.until(lambda: self.connector.is_open, "the store opens")
        return self

    async def close(self) -> None:
        await self.connector.close()
        for rank in self.ranks:
            await asyncio.to_thread(rank.worker.close)
        assert not self.errors, self.errors
        self.check()

    def check(self) -> None:
        self.pool.check()
        self.states.check()
        assert self.pool.num_references == self.connector.num_references
        assert (self.states.num_references,) == self.connector.num_group_references

    async def until(self, condition: Any, what: str) -> None:
        """Pump until it holds."""
        deadline = self._loop.time() + WAIT_S
        while not condition():
            assert self._loop.time() < deadline, what
            self.connector.tick()
            self.connector.pump()
            self.check()
            await asyncio.sleep(0.005)

    # --------------------------------------------------------------------------------------- what it does

    async def compute(self, group: str, keys: Sequence[bytes], borders: Iterable[int]) -> None:
        """Compute a prompt of which nothing is here, with the states behind so many blocks; return when they
        are in the store."""
        block_ids = self.pool.allocate(len(keys), group)
        parent = ROOT
        for border, (block_id, key) in enumerate(zip(block_ids, keys, strict=True), 1):
            self._write(0, block_id, key)
            assert self.pool.register(block_id, parent, key, group)
            if has_state := border in borders:
                (state_id,) = self.states.allocate(1)
                self._write(1, state_id, key)
                assert self.states.register(state_id, key, group)
                self.states.release([state_id])
            self._finished.append(FinishedBlock(key, parent, keys[0], group, has_state))
            parent = key
        self.pool.release(block_ids)
        self.connector.pump()
        await self.until(lambda: self.connector.saver.is_idle, "all is saved")

    def evict(self) -> None:
        """Forget all KV and states."""
        self.pool.purge(None)
        self.states.purge(None)
        for rank in self.ranks:
            for blocks in rank.blocks:
                blocks[:] = 0

    async def load(self, group: str, keys: Sequence[bytes], name: str = "r") -> tuple[int, dict[str, int]]:
        """Load what is worth it, and check it. Return how many blocks a sequence can use then, and the tokens
        that came, by tier."""
        num_held = len(self.match(keys).block_ids)
        self._wanted.append(LoadNeed(name, 0, 0, group, tuple(keys), num_held))
        await self.until(lambda: name in self._ended, "the load ends")
        await self.until(lambda: self.connector.loader.is_idle, "its blocks are released")
        found = self.match(keys)
        for block_id, key in zip(found.block_ids, keys, strict=False):
            self._compare(0, block_id, key)
        if found.block_ids:
            (state_id,) = found.windows[0].block_ids
            self._compare(1, state_id, keys[len(found.block_ids) - 1])
        return len(found.block_ids), self._ended.pop(name)

    def match(self, keys: Sequence[bytes]) -> Prefix:
        """Return what a sequence finds."""
        return match_prefix(self.pool, (self.states,), keys, BLOCK_TOKENS)

    def _write(self, group: int, block_id: int, key: bytes) -> None:
        for rank in self.ranks:
            rank.blocks[group][block_id] = content(key, rank.shard, is_state=group == 1)

    def _compare(self, group: int, block_id: int, key: bytes) -> None:
        for rank in self.ranks:
            right = content(key, rank.shard, is_state=group == 1)
            assert np.array_equal(rank.blocks[group][block_id], right), f"wrong bytes in group {group}"

    def _reporter(self, rank: int) -> Any:
        def hear(report: StoreReport) -> None:
            self._loop.call_soon_threadsafe(self.connector.report, rank, report)

        return hear

    # ------------------------------------------------- ranks, scheduler and engine core of the connector

    def send_to(self, rank: int, order: Any) -> None:
        self.ranks[rank].worker.handle(order)

    def take_finished(self) -> list[FinishedBlock]:
        finished, self._finished = self._finished, []
        return finished

    def loads_wanted(self) -> list[LoadNeed]:
        wanted, self._wanted = self._wanted, []
        return wanted

    def end_load(self, need: LoadNeed, num_loaded_tokens: dict[str, int]) -> None:
        self._ended[need.request_id] = num_loaded_tokens

    def hold_back(self, need: LoadNeed, whom: object) -> None:
        pass

    def wake(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)
