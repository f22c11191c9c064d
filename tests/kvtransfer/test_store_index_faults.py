"""The index while Redis is slow, stopped, killed, flushed or full: nobody waits, nothing fails, all heals."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_harness import (
    CHAIN,
    QUICK,
    SPACE,
    HeldAnswers,
    RawRedis,
    key,
    make_index,
    nodes,
    record,
    running,
    until,
    until_found,
)
from optional_programs import uses_redis_or_valkey

from kvtransfer.store.index.breaker import FAILURE_BUDGET
from kvtransfer.store.index.holder_reader import CHUNK
from kvtransfer.store.index.values import node_key, node_number
from kvtransfer.store.messages.records import RecordInfo, Tier

pytestmark = [pytest.mark.slow, uses_redis_or_valkey]

# A budget that is over soon, and that an idle server keeps.
SHORT_S = 0.05


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RawRedis]:
    with RawRedis(tmp_path) as server:
        server.client().ping()
        yield server


async def test_a_look_up_does_not_wait_for_an_answer_that_is_late(server: RawRedis) -> None:
    async with HeldAnswers(server.port) as proxy:
        a, b = make_index(server.url, "a"), make_index(proxy.url, "b", budget_s=SHORT_S)
        async with running(a, b):
            a.announce(record(1), "dram")
            await until_found(b, [1], [{"a"}])
            num_late = b.stat().num_late
            proxy.hold()
            for _ in range(FAILURE_BUDGET):  # all of them end although no answer has come, nor will
                assert await nodes(b, [1, 2]) == [set(), set()]
            assert b.stat().state == "slow"
            assert b.stat().num_late == num_late + FAILURE_BUDGET
            assert "does not answer within 50 ms" in b.stat().note
            num_lookups = b.stat().num_lookups
            assert await nodes(b, [1]) == [set()]
            assert b.stat().num_lookups == num_lookups  # not even asked
            proxy.release()
            await until_found(b, [1], [{"a"}])
            assert b.stat().state == "up"
            assert b.stat().note == ""


async def test_what_was_answered_in_time_counts_although_the_rest_is_late(server: RawRedis) -> None:
    async with HeldAnswers(server.port) as proxy:
        a, b = make_index(server.url, "a"), make_index(proxy.url, "b", budget_s=1.0)
        numbers = list(range(3 * CHUNK))
        async with running(a, b):
            for number in numbers:
                a.announce(record(number), "dram")
            await until(lambda: a.stat().num_announced == len(numbers))
            await until_found(b, numbers, [{"a"}] * len(numbers))
            entry_bytes = len(b"$29\r\n") + 29 + len(b"\r\n")
            proxy.hold(after_bytes=len(b"*512\r\n") + CHUNK * entry_bytes)
            found = await nodes(b, numbers)
            assert found == [{"a"}] * CHUNK + [set()] * (2 * CHUNK)
            proxy.release()
            await until_found(b, numbers, [{"a"}] * len(numbers))
            assert b.stat().state == "up"


async def test_a_server_that_is_stopped_is_not_waited_for(server: RawRedis) -> None:
    a, b = make_index(server.url, "a"), make_index(server.url, "b", budget_s=SHORT_S)
    async with running(a, b):
        a.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])
        server.signal(signal.SIGSTOP)
        for _ in range(FAILURE_BUDGET):
            assert await nodes(b, [1]) == [set()]
        assert b.stat().state == "slow"
        a.announce(record(2), "dram")
        server.signal(signal.SIGCONT)
        await until_found(b, [1, 2], [{"a"}, {"a"}])


async def test_after_a_kill_and_a_restart_all_is_announced_again(server: RawRedis) -> None:
    held: list[tuple[RecordInfo, Tier]] = [(record(1), "dram"), (record(2), "nvme")]
    a, b = make_index(server.url, "a", lease_s=3.0, held=held), make_index(server.url, "b")
    async with running(a, b):
        await until_found(b, [1, 2, 3], [{"a"}, {"a"}, set()])
        server.kill()
        for _ in range(2 * FAILURE_BUDGET):
            assert await nodes(b, [1, 2]) == [set(), set()]
        assert b.stat().state == "down"
        assert "start it, or correct store.redis_url" in b.stat().note
        a.announce(record(3), "dram")
        server.start()
        await until_found(b, [1, 2, 3], [{"a"}] * 3)
        await until(lambda: a.stat().num_rebuilds == 1)
        await until(lambda: a.stat().state == b.stat().state == "up")


async def test_an_idle_index_notices_that_the_server_is_gone(server: RawRedis) -> None:
    index = make_index(server.url, lease_s=0.3)
    async with running(index):
        server.kill()
        await until(lambda: index.stat().state == "down")
        server.start()
        await until(lambda: index.stat().state == "up")


async def test_after_a_flush_all_is_announced_again(server: RawRedis) -> None:
    held: list[tuple[RecordInfo, Tier]] = [(record(number), "dram") for number in range(600)]
    a, b = make_index(server.url, "a", lease_s=0.3, held=held), make_index(server.url, "b")
    async with running(a, b):
        numbers = list(range(600))
        await until_found(b, numbers, [{"a"}] * 600)
        server.client().flushall()
        await until(lambda: a.stat().num_rebuilds == 1)
        await until_found(b, numbers, [{"a"}] * 600)


async def test_a_server_that_lost_its_last_seconds_is_filled_again(server: RawRedis) -> None:
    held: list[tuple[RecordInfo, Tier]] = [(record(1), "dram")]
    a, b = make_index(server.url, "a", lease_s=1.5, held=held), make_index(server.url, "b")
    async with running(a, b):
        with server.client() as client:
            name = node_key("tandem", node_number("a"))
            await until(lambda: bool(client.exists(name)))
            before = bytes(client.get(name) or b"")
            await until(lambda: client.get(name) != before)  # until it was renewed
            client.flushall()
            client.set(name, before)
        await until(lambda: a.stat().num_rebuilds == 1)
        await until_found(b, [1], [{"a"}])


async def test_a_server_that_is_there_late_gets_all(tmp_path: Path) -> None:
    server = RawRedis(tmp_path)
    server.kill()
    a, b = make_index(server.url, "a"), make_index(server.url, "b")
    async with running(a, b, is_up=False):
        a.announce(record(1), "dram")
        assert await nodes(b, [1]) == [set()]
        await until(lambda: a.stat().num_errors > 0)
        assert a.stat().state == "down"
        assert b.stat().num_lookups == 0
        server.start()
        await until_found(b, [1], [{"a"}])
    server.close()


async def test_a_full_server_is_read_and_written_later(tmp_path: Path) -> None:
    server = RawRedis(tmp_path, maxmemory="8mb", maxmemory_policy="noeviction")
    a, b = make_index(server.url, "a", lease_s=600.0), make_index(server.url, "b", lease_s=600.0)
    with server.client() as client:
        async with running(a, b):
            a.announce(record(1), "dram")
            a.announce(record(2), "dram")
            await until_found(b, [1, 2], [{"a"}, {"a"}])
            client.config_set("maxmemory", 1)
            a.announce(record(3), "dram")
            await until(lambda: "raise its maxmemory" in a.stat().note)
            assert await nodes(b, [1, 2, 3]) == [{"a"}, {"a"}, set()]
            assert a.stat().state == b.stat().state == "up"
            assert a.stat().num_errors > 0
            a.announce(record(2), None)
            a.announce(record(3), "nvme")
            client.config_set("maxmemory", 0)
            await until_found(b, [1, 2, 3], [{"a"}, set(), {"a"}])
            ((holder,),) = await b.find(SPACE, CHAIN, [key(3)])
            assert holder.tier == "nvme"
            await until(lambda: a.stat().note == "")
    server.close()


async def test_a_server_that_forgets_its_scripts_is_told_them_again(server: RawRedis) -> None:
    a, b = make_index(server.url, "a"), make_index(server.url, "b")
    async with running(a, b):
        for number in range(3):
            server.client().script_flush()
            a.announce(record(number), "dram")
            await until(lambda number=number: a.stat().num_announced == number + 1)  # type: ignore[misc]
        await until_found(b, [0, 1, 2], [{"a"}] * 3)
        assert a.stat().num_errors == 0


async def test_more_look_ups_than_connections_are_all_answered(server: RawRedis) -> None:
    a, b = make_index(server.url, "a"), make_index(server.url, "b")
    async with running(a, b):
        a.announce(record(1), "dram")
        await until_found(b, [1], [{"a"}])
        assert await asyncio.gather(*(nodes(b, [1]) for _ in range(100))) == [[{"a"}]] * 100
        assert b.stat().num_errors == 0
        assert len(server.client().client_list()) < 40


async def test_a_look_up_may_be_cancelled(server: RawRedis) -> None:
    async with HeldAnswers(server.port) as proxy:
        a, b = make_index(server.url, "a"), make_index(proxy.url, "b")
        async with running(a, b):
            a.announce(record(1), "dram")
            await until_found(b, [1], [{"a"}])
            proxy.hold()
            asked = asyncio.create_task(nodes(b, [1]))
            await until(lambda: b.stat().num_lookups >= 2)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            proxy.release()
            await until_found(b, [1], [{"a"}])


async def test_it_closes_while_the_server_is_stopped(server: RawRedis) -> None:
    index = make_index(server.url, budget_s=SHORT_S)
    async with running(index):
        server.signal(signal.SIGSTOP)
    server.signal(signal.SIGCONT)  # the index was closed before


async def test_a_change_of_state_is_logged_once(server: RawRedis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtransfer.store")
    index = make_index(server.url, limits=QUICK)
    async with running(index):
        server.kill()
        for _ in range(4 * FAILURE_BUDGET):
            assert await nodes(index, [1]) == [set()]
        num_errors = index.stat().num_errors
        await until(lambda: index.stat().num_errors > num_errors + 2)
        server.start()
        await until(lambda: index.stat().state == "up")
    texts = [entry.getMessage() for entry in caplog.records]
    assert len([text for text in texts if "not queried any more" in text]) == 1
    assert len([text for text in texts if "the index is queried" in text]) == 2
