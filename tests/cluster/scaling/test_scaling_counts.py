"""Which counts a deploy begins with, and how they come from one Ray cluster into the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from index_harness import RawRedis
from serving import TINY

from cluster.config import ClusterConfig, parse_config
from cluster.roster.messages import RosterView
from cluster.scaling.count_memory import WRITE_AGAIN_S, KeptCounts
from cluster.scaling.counts import KnownCounts, counts_of, counts_to_deploy, kept_counts
from cluster.scaling.redis_counts import RedisCounts, counts_key
from cluster.scaling.serve_client import AppTargets, PoolTarget
from kvtransfer.common.clock import ManualClock
from kvtransfer.errors import WireError
from kvtransfer.store.index.redis_client import IndexAwayError


def make(decode: int = 2, **rest: Any) -> ClusterConfig:
    """A prefill pool of 1 and a decode pool of so many."""
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode", "replicas": decode}]
    return parse_config({"model": str(TINY), "pools": pools, **rest}, "test")


ORDERED = {"prefill": 1, "decode": 5}
FILE = {"prefill": 1, "decode": 2}
AUTOSCALED = {"scaling": {"autoscale": True, "pools": {"decode": {"min": 1, "max": 8}}}}


@pytest.mark.parametrize(
    ("config", "known", "decode"),
    [
        (make(), KnownCounts(), 2),
        (make(), KnownCounts({"decode": 5}, ("decode",), FILE), 5),
        (make(logs={"format": "json"}), KnownCounts({"decode": 5}, (), FILE), 5),
        (make(decode=3), KnownCounts({"decode": 5}, ("decode",), FILE), 5),
        (make(decode=3, **AUTOSCALED), KnownCounts({"decode": 5}, (), FILE), 5),
        (make(decode=3), KnownCounts({"decode": 5}, (), FILE), 3),
        (make(decode=3), KnownCounts({"decode": 5}), 5),
    ],
    ids=["new", "pinned", "nobodys", "pinned-other", "autoscaled-other", "nobodys-other", "unknown-file"],
)
def test_a_deploy_begins_with_what_was_ordered(
    config: ClusterConfig, known: KnownCounts, decode: int
) -> None:
    assert counts_to_deploy(config, known) == {"prefill": 1, "decode": decode}


def test_pools_that_are_gone_are_forgotten() -> None:
    known = KnownCounts({"gone": 4, "decode": 5}, ("gone", "decode"), {"gone": 1})
    assert kept_counts(make(), known) == KnownCounts({"decode": 5}, ("decode",), FILE)


# ------------------------------------------------------------------------------------- over Ray clusters


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RawRedis]:
    with closing(RawRedis(tmp_path)) as server:
        server.client().ping()
        yield server


def remembered(redis: RawRedis, life: str = "life") -> RedisCounts:
    return RedisCounts(redis.url, counts_key("tandem", life))


async def test_counts_outlive_the_ray_cluster_that_was_told(redis: RawRedis) -> None:
    counts = KnownCounts(ORDERED, ("decode",), FILE)
    assert await remembered(redis).read() is None
    assert await remembered(redis).write(counts, since_ms=100)
    assert await remembered(redis).read() == counts
    assert await remembered(redis, "of-another-application").read() is None
    (key,) = redis.client().keys("*")
    assert 0 < redis.client().ttl(key) <= 30 * 24 * 3600


async def test_a_cluster_that_is_replaced_overwrites_nothing(redis: RawRedis) -> None:
    new, old = KnownCounts(ORDERED), KnownCounts({"decode": 1})
    assert await remembered(redis).write(new, since_ms=200)
    assert not await remembered(redis).write(old, since_ms=100)
    assert await remembered(redis).read() == new
    assert await remembered(redis).write(old, since_ms=200)


async def test_a_server_that_is_away_or_holds_something_else_is_an_error(redis: RawRedis) -> None:
    redis.client().hset("tandem:counts:life", "counts", "garbage")
    with pytest.raises(WireError):
        await remembered(redis).read()
    redis.kill()
    with pytest.raises(IndexAwayError):
        await remembered(redis).read()


class Memory:
    """A `CountMemory` that can be away."""

    def __init__(self, counts: KnownCounts | None) -> None:
        self.counts = counts
        self.is_away = False
        self.num_writes = 0

    async def read(self) -> KnownCounts | None:
        self._answer()
        return self.counts

    async def write(self, counts: KnownCounts, since_ms: int) -> bool:
        self._answer()
        self.counts, self.num_writes = counts, self.num_writes + 1
        return True

    def _answer(self) -> None:
        if self.is_away:
            raise IndexAwayError("away")


def seen(**targets: int) -> AppTargets:
    return AppTargets("RUNNING", "m", True, {pool: PoolTarget(n, n) for pool, n in targets.items()})


def view(**fields: Any) -> RosterView:
    return RosterView(version=1, **fields)


async def test_a_new_clusters_roster_is_told_what_the_last_one_knew() -> None:
    memory = Memory(KnownCounts(ORDERED, ("decode",), FILE))
    kept = KeptCounts(memory, 1, ManualClock())
    assert await kept.left(make(), seen(), view()) == KnownCounts()  # Serve is still building
    found = await kept.left(make(), seen(prefill=1, decode=5), view(desired={"prefill": 1}))
    assert found == KnownCounts({"decode": 5}, ("decode",))
    assert await kept.left(make(), seen(prefill=1, decode=5), view()) == KnownCounts()


async def test_what_serve_was_not_deployed_with_is_no_order_of_now() -> None:
    """Somebody has ordered another count since, or the file now says another."""
    memory = Memory(KnownCounts(ORDERED, (), FILE))
    assert await KeptCounts(memory, 1, ManualClock()).left(make(), seen(decode=4), view()) == KnownCounts()
    assert await KeptCounts(memory, 1, ManualClock()).left(make(3), seen(decode=5), view()) == KnownCounts()


async def test_what_the_roster_knows_is_written_when_it_changes_and_now_and_then() -> None:
    memory, clock = Memory(None), ManualClock()
    kept = KeptCounts(memory, 1, clock)
    known = view(desired=ORDERED, pinned=("decode",), declared=FILE)
    await kept.keep(known)
    assert memory.num_writes == 0  # what is there has not been read yet
    await kept.left(make(), seen(decode=5), known)
    for _ in range(2):
        await kept.keep(known)
    assert (memory.num_writes, memory.counts) == (1, counts_of(known))
    await kept.keep(view(desired={"decode": 1}))
    clock.advance(WRITE_AGAIN_S)
    await kept.keep(view(desired={"decode": 1}))
    assert memory.num_writes == 3


async def test_nothing_is_lost_while_the_server_is_away() -> None:
    memory = Memory(KnownCounts({"decode": 5}, (), FILE))
    kept = KeptCounts(memory, 1, ManualClock())
    memory.is_away = True
    assert await kept.left(make(), seen(decode=5), view()) == KnownCounts()
    await kept.keep(view())
    memory.is_away = False
    await kept.keep(view())
    assert memory.num_writes == 0
    assert await kept.left(make(), seen(decode=5), view()) == KnownCounts({"decode": 5})
