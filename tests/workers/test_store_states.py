"""States in the store: records of their own beside those of blocks, through a real owner and real ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from index_harness import RawRedis
from msgspec.structs import replace
from optional_programs import uses_redis_or_valkey
from patience import WAIT_S
from state_replica import NUM_HEADS, NUM_LAYERS, StateReplica
from store_harness import Chain, StoreHarness

from kvtransfer.blocks.keys import state_key
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import Shard
from kvtransfer.store.messages.admin_requests import PurgeRequest, PurgeResult
from kvtransfer.store.messages.store_orders import StoreGetDone

WHOLE = Shard(0, NUM_LAYERS, 0, NUM_HEADS)
HALVES = Shard(0, NUM_LAYERS, 0, 2), Shard(0, NUM_LAYERS, 2, 4)
# The second stage has a layer that attends and none with a state.
STAGES = Shard(0, 3, 0, NUM_HEADS), Shard(3, NUM_LAYERS, 0, NUM_HEADS)

_NOTHING: tuple[int, dict[str, int]] = 0, {}


@contextlib.asynccontextmanager
async def store(folder: Path) -> AsyncIterator[StoreHarness]:
    """An owner with a host tier and NVMe, which has started."""
    nvme = {"nvme_path": str(folder / "nvme"), "nvme_bytes": 64 << 20, "segment_bytes": 4 << 20}
    async with StoreHarness(folder, **nvme) as harness:
        await harness.start()
        yield harness


@contextlib.asynccontextmanager
async def replica(harness: StoreHarness, *shards: Shard) -> AsyncIterator[StateReplica]:
    its = await StateReplica(harness.settings.name, *shards or (WHOLE,)).start()
    try:
        yield its
    finally:
        await its.close()


def test_a_load_ends_in_a_state_and_brings_exactly_that(tmp_path: Path) -> None:
    async def run() -> None:
        chain = Chain.of("a", 10)
        async with store(tmp_path) as harness, replica(harness) as its:
            await its.compute("alice", chain.keys, borders=(4, 7))
            assert its.connector.saver.num_stored == 10
            assert its.connector.saver.num_stored_states == 2
            its.evict()
            assert await its.load("alice", chain.keys) == (7, {"dram": 7 * 16})
            # Only four are asked for, and then six.
            its.evict()
            assert await its.load("alice", chain.keys[:4]) == (4, {"dram": 4 * 16})
            its.evict()
            assert await its.load("alice", chain.keys[:6]) == (4, {"dram": 4 * 16})
            its.evict()
            assert await its.load("alice", chain.keys[:3]) == (0, {}), "no state is behind any of them"

    asyncio.run(run())


def test_only_what_the_device_lacks_is_loaded(tmp_path: Path) -> None:
    async def run() -> None:
        chain = Chain.of("a", 8)
        async with store(tmp_path) as harness, replica(harness) as its:
            await its.compute("alice", chain.keys, borders=(4, 8))
            its.states.purge(None)
            assert await its.load("alice", chain.keys) == (8, {}), "its state alone"
            its.states.purge(None)
            assert await its.load("alice", chain.keys[:6]) == (4, {})
            # Of KV the device has six blocks, and no state that goes with them but one farther on.
            its.evict()
            await its.load("alice", chain.keys)
            for key in reversed(chain.keys[6:]):
                block_id = its.pool.find(key)
                assert block_id is not None
                its.pool.acquire([block_id])
                its.pool.forget(block_id)
                its.pool.release([block_id])
            assert await its.load("alice", chain.keys) == (8, {"dram": 2 * 16})

    asyncio.run(run())


@pytest.mark.parametrize(
    ("writers", "readers"), [((WHOLE,), HALVES), (HALVES, (WHOLE,)), (STAGES, HALVES), (HALVES, STAGES)]
)
def test_replicas_of_other_shapes_share_states(
    tmp_path: Path, writers: tuple[Shard, ...], readers: tuple[Shard, ...]
) -> None:
    async def run() -> None:
        chain = Chain.of("a", 6)
        async with store(tmp_path) as harness:
            async with replica(harness, *writers) as its:
                await its.compute("alice", chain.keys, borders=(3, 5))
            async with replica(harness, *readers) as its:
                assert await its.load("alice", chain.keys) == (5, {"dram": 5 * 16})

    asyncio.run(run())


@pytest.mark.slow
def test_states_come_back_from_nvme_after_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        chain = Chain.of("a", 8)
        async with store(tmp_path) as harness:
            async with replica(harness, *HALVES) as its:
                await its.compute("alice", chain.keys, borders=(4, 8))
            await harness.until("nvme", lambda stat: stat.num_records == 20, "all is on NVMe")
            await harness.stop()
            await harness.start()
            async with replica(harness, *HALVES) as its:
                assert await its.load("alice", chain.keys) == (8, {"nvme": 8 * 16})

    asyncio.run(run())


def test_a_prefetch_brings_the_last_state_near(tmp_path: Path) -> None:
    async def run() -> None:
        chain = Chain.of("a", 8)
        async with store(tmp_path) as harness:
            async with replica(harness) as its:
                await its.compute("alice", chain.keys, borders=(2, 4, 7))
            await harness.until("nvme", lambda stat: stat.num_records == 11, "all is on NVMe")
            await harness.stop()
            await harness.start()
            async with replica(harness) as its:
                its.connector.loader.prefetch("alice", chain.keys)
                # All blocks, and one of the three states.
                await harness.until("dram", lambda stat: stat.num_records == 9, "it is near")
                assert await its.load("alice", chain.keys) == (7, {"dram": 7 * 16})

    asyncio.run(run())


@pytest.mark.slow
@uses_redis_or_valkey
def test_states_come_from_another_node(tmp_path: Path) -> None:
    async def run() -> None:
        redis = RawRedis(tmp_path)
        how = {"redis_url": redis.url, "lookup_budget_s": 0.5}
        nodes = [StoreHarness(tmp_path, node_id=f"node-{number}", **how) for number in (1, 2)]
        chain = Chain.of("a", 6)
        try:
            for node in nodes:
                await node.start()
            async with replica(nodes[0]) as its:
                await its.compute("alice", chain.keys, borders=(3, 5))
            async with replica(nodes[1], *HALVES) as its:
                deadline, found = SystemClock().now() + WAIT_S, _NOTHING
                while found == _NOTHING and SystemClock().now() < deadline:  # until they are announced
                    found = await its.load("alice", chain.keys)
                assert found == (5, {"remote": 5 * 16})
        finally:
            for node in nodes:
                await node.close()
            redis.close()

    asyncio.run(run())


def test_a_purge_takes_states_with_their_blocks(tmp_path: Path) -> None:
    async def run() -> None:
        mine, other = Chain.of("a", 4), Chain.of("a", 4, group="bob")
        async with store(tmp_path) as harness, replica(harness) as its:
            await its.compute("alice", mine.keys, borders=(4,))
            await its.compute("bob", other.keys, borders=(4,))
            await harness.until("nvme", lambda stat: stat.num_records == 10, "all is on NVMe")
            purged = await harness.ask(PurgeRequest("alice", None), PurgeResult)
            assert purged.num_records == {"dram": 5, "nvme": 5}
            its.evict()
            assert await its.load("alice", mine.keys) == (0, {})
            assert await its.load("bob", other.keys) == (4, {"dram": 4 * 16})

    asyncio.run(run())


def test_a_damaged_state_is_not_used_and_its_blocks_are_kept(tmp_path: Path) -> None:
    async def run() -> None:
        chain = Chain.of("a", 5)
        async with store(tmp_path) as harness, replica(harness) as its:
            await its.compute("alice", chain.keys, borders=(3, 5))
            its.evict()
            damaged = its.connector.loader.copied

            def copied(rank: int, done: StoreGetDone) -> None:
                """The last record, of the state, has a wrong sum."""
                its.connector.loader.copied = damaged  # type: ignore[method-assign]
                _, part = its.connector.loader._gets[done.number]
                places = [index for index, _ in part.reads[rank]]
                bad = tuple(place for place, index in enumerate(places) if index == 5)
                damaged(rank, replace(done, bad=bad) if bad else done)

            its.connector.loader.copied = copied  # type: ignore[method-assign]
            num_blocks, came = await its.load("alice", chain.keys)
            assert its.states.find(chain.keys[4]) is None
            assert len(its.pool.match(chain.keys)) == 5
            assert (num_blocks, came) == (0, {"dram": 5 * 16})
            # The owner has dropped the bad one; the next load takes the state before it, and no KV again.
            assert await its.load("alice", chain.keys) == (3, {})
            assert its.connector.loader.num_checksum_failures == 1

    asyncio.run(run())


def test_the_key_of_a_state_is_not_one_of_a_block() -> None:
    keys = Chain.of("a", 64).keys
    states = {state_key(key) for key in keys}
    assert len(states) == 64
    assert not states & set(keys)
    assert not states & {state_key(key) for key in states}
