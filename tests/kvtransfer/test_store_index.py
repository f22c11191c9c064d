"""The index over a real Redis that is well: who holds what, leases, epochs, announcements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis
from index_harness import (
    CHAIN,
    PATIENT_S,
    QUICK,
    SPACE,
    WHOLE,
    RawRedis,
    key,
    make_index,
    nodes,
    record,
    running,
    until,
    until_found,
)
from kept_objects import KeptObjects
from optional_programs import uses_redis_or_valkey

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import Shard
from kvtransfer.store.index.holder_reader import NODES_S, Holder
from kvtransfer.store.index.index import Index
from kvtransfer.store.index.values import key_prefix, node_key, node_number
from kvtransfer.store.messages.admin_requests import IndexStat
from kvtransfer.store.messages.records import RecordInfo, Tier

pytestmark = uses_redis_or_valkey


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawRedis]:
    with RawRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(server: RawRedis) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        client.script_flush()
        yield client


@pytest.fixture
def url(server: RawRedis, client: redis.Redis) -> str:
    return server.url


async def test_what_one_node_announces_another_finds(url: str) -> None:
    a, b = make_index(url, "a", epoch=3), make_index(url, "b")
    async with running(a, b):
        a.announce(record(0), "dram")
        a.announce(record(2), "nvme")
        await until_found(b, [0, 1, 2], [{"a"}, set(), {"a"}])
        found = await b.find(SPACE, CHAIN, [key(number) for number in range(3)])
        assert found == [
            (Holder("a", 3, "host-a:1", "dram", WHOLE),),
            (),
            (Holder("a", 3, "host-a:1", "nvme", WHOLE),),
        ]
        assert await b.find(b"space-02", CHAIN, [key(0)]) == [()]
        assert await b.find(SPACE, CHAIN, []) == []


async def test_a_node_does_not_find_itself(url: str) -> None:
    a, b = make_index(url, "a"), make_index(url, "b")
    async with running(a, b):
        for index in (a, b):
            index.announce(record(0), "dram")
        await until_found(a, [0], [{"b"}])
        await until_found(b, [0], [{"a"}])


async def test_shards_of_several_nodes_stand_side_by_side(url: str) -> None:
    a, b, reader = make_index(url, "a"), make_index(url, "b"), make_index(url, "c")
    halves = Shard(0, 4, 0, 1), Shard(0, 4, 1, 2)
    async with running(a, b, reader):
        for shard in halves:
            a.announce(record(1, shard), "dram")
        b.announce(record(1, halves[1]), "nvme")
        await until(lambda: a.stat().num_announced == 2 and b.stat().num_announced == 1)
        (holders,) = await reader.find(SPACE, CHAIN, [key(1)])
        assert len(holders) == 3
        assert set(holders) == {
            Holder("a", 1, "host-a:1", "dram", halves[0]),
            Holder("a", 1, "host-a:1", "dram", halves[1]),
            Holder("b", 1, "host-b:1", "nvme", halves[1]),
        }


async def test_a_record_changes_its_tier_and_goes(url: str, client: redis.Redis) -> None:
    a, b = make_index(url, "a"), make_index(url, "b")
    async with running(a, b):
        a.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])
        a.announce(record(1), "nvme")
        await until(lambda: a.stat().num_announced == 2)
        ((holder,),) = await b.find(SPACE, CHAIN, [key(1)])
        assert holder.tier == "nvme"
        a.announce(record(1), None)
        await until_found(b, [1], [set()])
        assert client.get(key_prefix("tandem", CHAIN, SPACE) + key(1)) is None


async def test_the_last_state_of_a_record_wins(url: str) -> None:
    a, b = make_index(url, "a"), make_index(url, "b")
    async with running(a, b):
        await until(lambda: a.stat().state == "up")
        for _ in range(10):
            a.announce(record(1), "dram")
            a.announce(record(1), None)
        a.announce(record(2), "dram")
        await until_found(b, [1, 2], [set(), {"a"}])
        assert a.stat().num_announced == 2


async def test_namespaces_and_databases_are_apart(url: str) -> None:
    a, other_db = make_index(url, "a"), make_index(url.removesuffix("0") + "1", "b")
    async with running(a, other_db):
        a.announce(record(1), "dram")
        await until(lambda: a.stat().num_announced == 1)
        assert await nodes(other_db, [1]) == [set()]


async def test_long_chains_are_read_to_their_end(url: str) -> None:
    a, b = make_index(url, "a"), make_index(url, "b")
    numbers = list(range(1300))
    async with running(a, b):
        for number in numbers:
            if number != 700:
                a.announce(record(number), "dram")
        await until_found(b, numbers, [set() if number == 700 else {"a"} for number in numbers])


async def test_keys_of_another_length_are_just_not_known(url: str) -> None:
    a, b = make_index(url, "a"), make_index(url, "b")
    async with running(a, b):
        a.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])
        found = await b.find(SPACE, CHAIN, [b"short", key(1), b"x\r\n$3\r\nabc", b""])
        assert [len(holders) for holders in found] == [0, 1, 0, 0]
        assert b.stat().num_errors == 0


async def test_a_node_whose_lease_ended_holds_nothing(url: str, client: redis.Redis) -> None:
    clock = ManualClock()  # stands still: the node renews nothing, as if it were stopped
    a, b = make_index(url, "a", clock=clock, lease_s=0.2), make_index(url, "b")
    async with running(a, b):
        a.announce(record(1), "dram")
        await until(lambda: a.stat().num_announced == 1)
        await until(lambda: not client.exists(node_key("tandem", node_number("a"))))
        assert client.exists(key_prefix("tandem", CHAIN, SPACE) + key(1))
        await until_found(b, [1], [set()])


async def test_a_node_that_continues_after_its_lease_had_ended_announces_all_again(
    url: str, client: redis.Redis
) -> None:
    clock = ManualClock()
    held: list[tuple[RecordInfo, Tier]] = [(record(5), "nvme")]
    a, b = make_index(url, "a", clock=clock, lease_s=0.2, held=held), make_index(url, "b")
    async with running(a, b):
        await until(lambda: bool(client.exists(node_key("tandem", node_number("a")))))
        await until(lambda: not client.exists(node_key("tandem", node_number("a"))))

        def forward_until_rebuilt() -> bool:
            clock.advance(0.05)
            return a.stat().num_rebuilds == 1

        await until(forward_until_rebuilt)
        assert client.exists(key_prefix("tandem", CHAIN, SPACE) + key(5))


async def test_a_node_that_leaves_holds_nothing_at_once(url: str, client: redis.Redis) -> None:
    clock = ManualClock()
    a, b = make_index(url, "a"), make_index(url, "b", clock=clock)
    async with running(b):
        async with running(a):
            a.announce(record(1), "dram")
            await until_found(b, [1], [{"a"}])
        assert not client.exists(node_key("tandem", node_number("a")))
        assert await nodes(b, [1]) == [{"a"}]  # read a moment ago
        clock.advance(NODES_S)
        assert await nodes(b, [1]) == [set()]


async def test_what_an_earlier_owner_announced_is_not_believed(url: str, client: redis.Redis) -> None:
    first, b = make_index(url, "a", epoch=1), make_index(url, "b")
    async with running(first, b):
        first.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])
    second, b = make_index(url, "a", epoch=2), make_index(url, "b")
    async with running(second, b):
        await until(lambda: bool(client.exists(node_key("tandem", node_number("a")))))
        assert client.exists(key_prefix("tandem", CHAIN, SPACE) + key(1))
        assert await nodes(b, [1]) == [set()]
        second.announce(record(1), "nvme")
        await until_found(b, [1], [{"a"}])
        ((holder,),) = await b.find(SPACE, CHAIN, [key(1)])
        assert holder.epoch == 2


async def test_an_owner_that_was_replaced_announces_no_more(url: str) -> None:
    old, b = make_index(url, "a", epoch=1, lease_s=0.3), make_index(url, "b")
    async with running(old, b):
        old.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])
        new = make_index(url, "a", epoch=2, lease_s=0.3)
        async with running(new):
            await until(lambda: "a later owner of node a announces" in old.stat().note)
            num_announced = old.stat().num_announced
            old.announce(record(2), "dram")
            new.announce(record(3), "dram")
            await until_found(b, [1, 2, 3], [set(), set(), {"a"}])
            assert old.stat().num_announced == num_announced


async def test_all_that_is_held_is_announced_at_the_first_contact_and_refreshed(
    url: str, client: redis.Redis
) -> None:
    clock = ManualClock()
    held: list[tuple[RecordInfo, Tier]] = [(record(1), "dram")]
    a, b = make_index(url, "a", clock=clock, held=held), make_index(url, "b")
    name = key_prefix("tandem", CHAIN, SPACE) + key(1)
    async with running(a, b):
        await until_found(b, [1], [{"a"}])
        client.pexpire(name, 100_000)

        def is_refreshed() -> bool:
            clock.advance(QUICK.refresh_s / 10)
            return int(str(client.pttl(name))) > 100_000

        await until(is_refreshed)
        assert a.stat().num_rebuilds == 0


async def test_a_record_that_goes_while_all_is_announced_does_not_come_back(url: str) -> None:
    clock = ManualClock()
    limits = QUICK._replace(batch=1, rebuild_pause_s=5.0)
    held: list[tuple[RecordInfo, Tier]] = [(record(1), "dram"), (record(2), "dram"), (record(3), "dram")]
    a, b = make_index(url, "a", clock=clock, limits=limits, held=held), make_index(url, "b")
    async with running(a, b):
        await until_found(b, [1, 2, 3], [{"a"}, set(), set()])
        a.announce(record(2), None)
        async with asyncio.timeout(PATIENT_S):
            while await nodes(b, [3]) == [set()]:
                clock.advance(5.0)
        assert await nodes(b, [1, 2, 3]) == [{"a"}, set(), {"a"}]


async def announce_all(index: Index, numbers: range, tier: Tier | None) -> None:
    """Return when the index server has them."""
    wanted = index.stat().num_announced + len(numbers)
    for number in numbers:
        index.announce(record(number), tier)
    await until(lambda: index.stat().num_announced == wanted)


@pytest.mark.slow
async def test_a_slow_refresh_keeps_no_other_records(url: str) -> None:
    """What is held takes minutes to announce again, and a busy node announces any number of others then."""
    num_records = 300
    limits = QUICK._replace(batch=num_records, rebuild_pause_s=5.0)
    held: list[tuple[RecordInfo, Tier]] = [(record(num), "dram") for num in range(2 * num_records)]
    a, b = make_index(url, "a", clock=ManualClock(), limits=limits, held=held), make_index(url, "b")
    async with running(a, b):
        await until_found(b, [1], [{"a"}])  # the other half waits for the clock
        kept = KeptObjects(num_records)
        for first in range(1000, 1000 + 6 * num_records, num_records):
            await announce_all(a, range(first, first + num_records), "dram")
            await announce_all(a, range(first, first + num_records), None)
            kept.count()
        kept.check()


async def test_what_does_not_fit_in_the_queue_is_dropped_and_announced_later(url: str) -> None:
    held: list[tuple[RecordInfo, Tier]] = [(record(number), "dram") for number in range(10)]
    a = make_index(url, "a", limits=QUICK._replace(max_queued=3, batch=2), held=held)
    b = make_index(url, "b")
    for info, _ in held:
        a.announce(info, "dram")
    assert a.stat().num_dropped == 7
    async with running(a, b):
        await until_found(b, list(range(10)), [{"a"}] * 10)


async def test_what_others_wrote_there_is_no_holder(url: str, client: redis.Redis) -> None:
    prefix = key_prefix("tandem", CHAIN, SPACE)
    client.set(prefix + key(1), b"not ours")
    client.rpush((prefix + key(2)).decode("latin-1"), "a list")
    client.set(prefix + key(3), bytes(29))
    client.set(node_key("tandem", bytes(8)), b"nor is this")
    a, b = make_index(url, "a"), make_index(url, "b")
    async with running(a, b):
        assert await nodes(b, [1, 2, 3]) == [set()] * 3
        for number in (1, 2, 3):
            a.announce(record(number), "dram")
        await until_found(b, [1, 3], [{"a"}] * 2)
        assert b.stat().num_errors == 0


async def test_without_a_url_it_is_off() -> None:
    index = make_index("")
    async with running(index, is_up=False):
        index.announce(record(1), "dram")
        assert await nodes(index, [1, 2]) == [set(), set()]
        assert index.stat() == IndexStat("off")
