"""What a look-up in the index costs over a bare MGET of the same keys: `python -m benchmarks.store_index`.

One node announces the blocks of a chain, another looks them up; all ways take turns over the same server:

    mget      redis-py's MGET of keys that were built before, values not looked at
    packed    the same with the command packed by hiredis, the fastest that the client can be used
    find      `Index.find`: keys built, cut off in time, values decoded to holders
    pipeline  one GET for each key in one round trip, for comparison

Times are medians. Ratios are against mget and packed; asked: find <= 1.5.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from hiredis import pack_command
from redis.asyncio import Redis

from kvtransfer.common.clock import SystemClock
from kvtransfer.config import StoreSettings
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index.index import Index
from kvtransfer.store.index.redis_server import RedisServer
from kvtransfer.store.index.values import key_prefix
from kvtransfer.store.messages.records import RecordId, RecordInfo

SPACE = b"bench---"
SHARDS = (Shard(0, 16, 0, 8), Shard(16, 28, 0, 8))
CLOCK = SystemClock()


def make_index(node: str, url: str) -> Index:
    """Return a node's index, with a budget that never cuts off: here every look-up counts."""
    settings = StoreSettings(
        node_id=node,
        epoch=1,
        name="",
        host="127.0.0.1",
        dram_bytes=0,
        redis_url=url,
        lookup_budget_s=1.0,
    )
    return Index(settings, ReplicaIdentity(node, 1), f"{node}:1", CLOCK)


async def fill(holders: list[Index], keys: list[bytes]) -> None:
    """Announce all shards of all blocks at every holder."""
    for holder in holders:
        for key in keys:
            for shard in SHARDS:
                holder.announce(RecordInfo(RecordId(SPACE, key, shard), b"", keys[0], "", b"", 1, 0), "dram")
    while any(holder.stat().num_announced < len(keys) * len(SHARDS) for holder in holders):
        await CLOCK.sleep(0.01)


async def measure(url: str, num_keys: int, num_nodes: int, num_rounds: int) -> dict[str, float]:
    """Return the median seconds of each way."""
    keys = [hashlib.sha256(number.to_bytes(4, "big")).digest()[:16] for number in range(num_keys)]
    built = [key_prefix("tandem", keys[0], SPACE) + key for key in keys]
    holders = [make_index(f"node-{number}", url) for number in range(num_nodes)]
    reader = make_index("reader", url)
    client = Redis.from_url(url, protocol=2)
    try:
        for index in (*holders, reader):
            await index.start()
        while any(index.stat().state != "up" for index in (*holders, reader)):
            await CLOCK.sleep(0.01)
        await fill(holders, keys)

        async def pipeline() -> None:
            pipe = client.pipeline(transaction=False)
            for key in built:
                pipe.get(key)
            await pipe.execute()

        command: Any = ("MGET", *built)

        async def packed() -> None:
            pool: Any = client.connection_pool
            connection = await pool.get_connection()
            await connection.send_packed_command(pack_command(command))
            await connection.read_response()
            await pool.release(connection)

        async def find() -> None:
            found = await reader.find(SPACE, keys[0], keys)
            assert all(len(some) == num_nodes * len(SHARDS) for some in found)

        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "mget": lambda: client.mget(built),
            "packed": packed,
            "find": find,
            "pipeline": pipeline,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_rounds):
            for name, way in ways.items():
                started_at = CLOCK.now()
                await way()
                times[name].append(CLOCK.now() - started_at)
        return {name: median(some) for name, some in times.items()}
    finally:
        for index in (*holders, reader):
            await index.close()
        await client.aclose()


async def main() -> None:
    """Print one JSON line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=512)
    parser.add_argument("--nodes", type=int, default=2, help="that hold every block")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--url", default="", help="of a running server; else one is started")
    args = parser.parse_args()
    server = None if args.url else await RedisServer.start("127.0.0.1", Trust.draw(), CLOCK)
    try:
        url = args.url if server is None else server.url
        times = await measure(url, args.keys, args.nodes, args.rounds)
    finally:
        if server is not None:
            server.close()
    for name, seconds in times.items():
        line = {
            "what": "look-up",
            "way": name,
            "keys": args.keys,
            "us": round(seconds * 1e6),
            "ratio_mget": round(seconds / times["mget"], 2),
            "ratio_packed": round(seconds / times["packed"], 2),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    asyncio.run(main())
