"""Two nodes with an owner each and a Redis between them: what one holds is found and fetched by the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from index_harness import RawRedis
from optional_programs import uses_redis_or_valkey
from patience import WAIT_S
from store_harness import LEFT, MODEL, RIGHT, Chain, Replica, StoreHarness, block_bytes, eventually

from kvtransfer.common.clock import SystemClock
from kvtransfer.store.messages.admin_requests import PurgeRequest, PurgeResult, StatRequest, StoreStat
from kvtransfer.store.messages.records import Tier

pytestmark = [pytest.mark.slow, uses_redis_or_valkey]


class Nodes(NamedTuple):
    """Both owners run."""

    redis: RawRedis
    first: StoreHarness
    second: StoreHarness


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    redis = RawRedis(tmp_path)
    harnesses = [
        StoreHarness(
            tmp_path,
            node_id=f"node-{number}",
            redis_url=redis.url,
            nvme_path=str(tmp_path / f"nvme-{number}"),
            nvme_bytes=64 << 20,
            segment_bytes=4 << 20,
            lookup_budget_s=0.5,
            dram_bytes=2 << 20,
        )
        for number in (1, 2)
    ]
    try:
        for harness in harnesses:
            await harness.start()
        yield Nodes(redis, *harnesses)
    finally:
        for harness in harnesses:
            await harness.close()
        redis.close()


async def found(replica: Replica, chain: Chain, tiers: tuple[Tier, ...]) -> None:
    """Wait until a look-up answers so."""
    deadline = SystemClock().now() + WAIT_S
    while (answer := await replica.find(chain)) != tiers:
        assert SystemClock().now() < deadline, answer
        await SystemClock().sleep(0.05)


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
async def test_another_nodes_blocks_are_found_and_fetched(nodes: Nodes, transports: tuple[str, ...]) -> None:
    if transports != nodes.first.settings.transports:
        for harness in (nodes.first, nodes.second):
            await harness.stop()
            await harness.start(transports=transports)
    writer, reader = await Replica(nodes.first).start(), await Replica(nodes.second, LEFT, RIGHT).start()
    chain = Chain.of("prompt", 20)
    await writer.put(chain)
    await found(reader, chain, ("remote",) * 20)
    assert not reader.tiers, "nobody told it of the other node"
    assert await reader.get(chain) == ("remote",) * 20
    assert await reader.get(chain) == ("dram",) * 20
    remote = await nodes.second.stat("remote")
    assert remote.num_hits == 20
    assert remote.read_gb_s > 0
    listed = await nodes.second.ask(StatRequest(), StoreStat)
    assert set(listed.bytes_by_group) == {"alice"}
    for harness in (nodes.first, nodes.second):
        await harness.check_nothing_leaked()
    await writer.close()
    await reader.close()
    for harness in (nodes.first, nodes.second):
        await harness.stop()


async def test_another_nodes_nvme_is_read_for_it(nodes: Nodes) -> None:
    writer, reader = await Replica(nodes.first).start(), await Replica(nodes.second).start()
    chain = Chain.of("prompt", 8)
    await writer.put(chain)
    num_fitting = (2 << 20) // (block_bytes(MODEL) + 4096)
    for number in range(4):
        await writer.put(Chain.of(f"other {number}", num_fitting // 4))
        await nodes.first.until("nvme", lambda stat: not stat.num_queued, "written")
    assert await writer.find(chain) == ("nvme",) * 8
    await found(reader, chain, ("remote",) * 8)
    assert await reader.get(chain) == ("remote",) * 8
    await writer.close()
    await reader.close()


async def test_a_prefetch_brings_other_nodes_blocks(nodes: Nodes) -> None:
    writer, reader = await Replica(nodes.first).start(), await Replica(nodes.second).start()
    chain = Chain.of("prompt", 8)
    await writer.put(chain)
    await found(reader, chain, ("remote",) * 8)
    reader.prefetch(chain)
    await eventually(lambda: reader.tiers == dict.fromkeys(chain.keys, "dram"), "brought")
    assert await reader.get(chain) == ("dram",) * 8
    await writer.close()
    await reader.close()


async def test_a_node_that_dies_is_a_miss(nodes: Nodes) -> None:
    writer, reader = await Replica(nodes.first).start(), await Replica(nodes.second).start()
    chain = Chain.of("prompt", 8)
    await writer.put(chain)
    await found(reader, chain, ("remote",) * 8)
    await nodes.first.kill()
    assert await reader.get(chain) == ()
    mine = Chain.of("mine", 4)
    assert await reader.put(mine) == [0, 1, 2, 3]
    assert await reader.get(mine) == ("dram",) * 4
    await nodes.second.check_nothing_leaked()
    await writer.close()
    await reader.close()
    await nodes.second.stop()


async def test_what_is_purged_at_one_node_is_not_found_by_the_other(nodes: Nodes) -> None:
    writer, reader = await Replica(nodes.first).start(), await Replica(nodes.second).start()
    chain = Chain.of("prompt", 8)
    await writer.put(chain)
    await found(reader, chain, ("remote",) * 8)
    await nodes.first.ask(PurgeRequest("alice", None), PurgeResult)
    await found(reader, chain, ())
    await writer.close()
    await reader.close()


async def test_without_redis_each_node_goes_on_alone_and_heals(nodes: Nodes) -> None:
    writer, reader = await Replica(nodes.first).start(), await Replica(nodes.second).start()
    nodes.redis.kill()
    chain = Chain.of("prompt", 8)
    assert await writer.put(chain) == list(range(8))
    assert await writer.get(chain) == ("dram",) * 8
    assert await asyncio.gather(*(reader.find(chain) for _ in range(8))) == [()] * 8
    assert not writer.losses
    assert not reader.losses
    nodes.redis.start()
    await found(reader, chain, ("remote",) * 8)
    assert await reader.get(chain) == ("remote",) * 8
    stat = await nodes.second.ask(StatRequest(), StoreStat)
    assert stat.index.state == "up"
    await writer.close()
    await reader.close()
    for harness in (nodes.first, nodes.second):
        await harness.stop()
