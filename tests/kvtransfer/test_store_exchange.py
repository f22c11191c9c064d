"""Records between two nodes' owners: right bytes or a miss, and slots that come free once nobody writes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from exchange_harness import GRANULE_BYTES, NodeProcess, StoreNode, eventually, record_id, settings
from inner_tls import TLS_FILES
from patience import WAIT_S
from service_harness import Hooks
from trust_files import FILES

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.records import RecordId
from kvtransfer.store.remote.owner_link import Wanted

TRANSPORTS = ("shm", "tcp")
# Payloads: of one granule, exactly one, and more.
SIZES = (1, 4096, GRANULE_BYTES - 4096, GRANULE_BYTES - 4095, 100_000)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def fetch(asker: StoreNode, holder: StoreNode, wanted: list[Wanted]) -> dict[RecordId, int]:
    return await asker.exchange.fetch(holder.identity, holder.address, wanted)


def assert_nothing_leaks(asker: StoreNode, holder: StoreNode) -> None:
    assert holder.num_leases == 0
    assert asker.exchange.stat().num_quarantined == 0
    asker.arena.check()


async def test_records_arrive_whole(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport])) as b,
    ):
        for number, num_bytes in enumerate(SIZES):
            b.put(number, num_bytes)
        wanted = [a.want(number, num_bytes) for number, num_bytes in enumerate(SIZES)]
        sums = await fetch(a, b, wanted)
        for each in wanted:
            a.check(each, sums[each.record])
        assert a.freed == []
        stat = a.exchange.stat()
        assert (stat.num_hits, stat.num_misses, stat.num_io_errors, stat.note) == (len(SIZES), 0, 0, "")
        assert stat.read_gb_s > 0
        assert b.exchange.stat().num_written_bytes >= stat.num_hit_bytes > 0
        assert_nothing_leaks(a, b)


async def test_records_arrive_whole_between_nodes_with_certificates() -> None:
    trust = Trust.read(TLS_FILES)
    async with (
        StoreNode(settings("a", transports=["tcp"]), trust=trust) as a,
        StoreNode(settings("b", transports=["tcp"]), trust=trust) as b,
        StoreNode(settings("c", transports=["tcp"]), trust=Trust.read(FILES)) as without,
    ):
        b.put(1, 100_000)
        wanted = a.want(1, 100_000)
        sums = await fetch(a, b, [wanted])
        a.check(wanted, sums[wanted.record])
        refused = without.want(1, 100_000)
        assert await fetch(without, b, [refused]) == {}
        assert "name the same inner_tls on both" in without.exchange.stat().note
        assert_nothing_leaks(a, b)


async def test_both_ask_each_other_over_and_over(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport])) as b,
    ):
        for number in range(8):
            (a if number % 2 else b).put(number, 50_000)

        async def ask(asker: StoreNode, holder: StoreNode, number: int) -> None:
            wanted = asker.want(number, 50_000)
            sums = await fetch(asker, holder, [wanted])
            asker.check(wanted, sums[wanted.record])

        for _ in range(3):
            await asyncio.gather(*(ask(*((b, a) if number % 2 else (a, b)), number) for number in range(8)))
        assert_nothing_leaks(a, b)
        assert_nothing_leaks(b, a)


async def test_a_request_of_many_chunks(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport], dram_bytes=32 << 20)) as a,
        StoreNode(settings("b", transports=[transport], dram_bytes=32 << 20)) as b,
    ):
        for number in range(40):
            b.put(number, 700_000)
        wanted = [a.want(number, 700_000) for number in range(40)]
        most = 0

        async def watch(record: RecordId) -> None:
            nonlocal most
            most = max(most, b.num_leases)

        b.on_lease = watch
        sums = await fetch(a, b, wanted)
        for each in wanted:
            a.check(each, sums[each.record])
        assert most < 30  # not all of it is leased at once
        assert_nothing_leaks(a, b)


async def test_what_is_not_held_or_of_another_size_is_a_miss(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport])) as b,
    ):
        b.put(1, 50_000)
        b.put(2, 50_000)
        good, other_size, unknown = a.want(1, 50_000), a.want(2, 20_000), a.want(3, 50_000)
        sums = await fetch(a, b, [good, other_size, unknown])
        assert set(sums) == {record_id(1)}
        a.check(good, sums[record_id(1)])
        await eventually(lambda: len(a.freed) == 2, "the other slots are free")
        assert sorted(a.freed) == sorted([other_size.offset, unknown.offset])
        stat = a.exchange.stat()
        assert (stat.num_hits, stat.num_misses, stat.num_io_errors) == (1, 2, 0)
        assert not a.exchange.is_cooling(b.identity)
        assert_nothing_leaks(a, b)


async def test_a_record_evicted_meanwhile_is_a_miss(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport])) as b,
    ):
        b.put(1, 50_000)
        b.put(2, 50_000)

        async def evict(record: RecordId) -> None:
            if record == record_id(2) and record in b.records:
                b.arena.free(b.records.pop(record).offset)

        b.on_lease = evict
        kept, evicted = a.want(1, 50_000), a.want(2, 50_000)
        sums = await fetch(a, b, [kept, evicted])
        assert set(sums) == {record_id(1)}
        a.check(kept, sums[record_id(1)])
        await eventually(lambda: a.freed == [evicted.offset], "the other slot is free")
        assert_nothing_leaks(a, b)


async def test_a_lease_lasts_until_the_push_has_ended(transport: str) -> None:
    hooks = Hooks()
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport]), faults=hooks) as b,
    ):
        b.put(1, 50_000)
        leases: list[int] = []
        hooks.hooks["push.half"] = lambda passage: leases.append(b.num_leases)
        wanted = a.want(1, 50_000)
        assert set(await fetch(a, b, [wanted])) == {record_id(1)}
        assert leases
        assert set(leases) == {1}
        assert_nothing_leaks(a, b)


# ------------------------------------------------------------------------------------- stops and ends


class Held:
    """Holds the pushing thread at a point until the test lets it go on."""

    def __init__(self, hooks: Hooks, point: str) -> None:

        self.reached = threading.Event()
        self._go = threading.Event()
        hooks.hooks[point] = self._hold

    def _hold(self, passage: int) -> None:
        self.reached.set()
        assert self._go.wait(WAIT_S)

    def go(self) -> None:
        self._go.set()


async def test_a_cancelled_fetch_keeps_its_slots_until_the_writer_has_stopped(transport: str) -> None:
    hooks = Hooks()
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport]), faults=hooks) as b,
    ):
        b.put(1, 50_000)
        b.put(2, 50_000)
        wanted = a.want(2, 50_000)
        assert set(await fetch(a, b, [wanted])) == {record_id(2)}  # the connection is open
        held = Held(hooks, "push.half")
        cancelled = a.want(1, 50_000)
        fetching = asyncio.create_task(fetch(a, b, [cancelled]))
        await eventually(held.reached.is_set, "half of a granule is written")
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        if transport == "shm":  # the other drops what comes late itself
            await one_round()
            assert a.freed == []
            assert a.exchange.stat().num_quarantined == 1
        assert b.num_leases == 1
        assert await fetch(a, b, [a.want(3, 50_000)]) == {}  # so the holder has heard of the end
        num_copied = hooks.counts["push.copy"]
        held.go()
        await eventually(lambda: cancelled.offset in a.freed, "the slot is free")
        await eventually(lambda: b.num_leases == 0, "the lease has ended")
        assert hooks.counts["push.copy"] == num_copied  # the rest was not written
        again = a.want(1, 50_000)
        a.check(again, (await fetch(a, b, [again]))[record_id(1)])
        assert_nothing_leaks(a, b)


async def one_round() -> None:
    """Return when everything that the agents have reported so far was heard."""
    heard = asyncio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(heard.set)
    await heard.wait()


async def test_a_lost_link_stops_the_holder(transport: str) -> None:
    hooks = Hooks()
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport]), faults=hooks) as b,
    ):
        b.put(1, 50_000)
        held = Held(hooks, "push.half")
        wanted = a.want(1, 50_000)
        fetching = asyncio.create_task(fetch(a, b, [wanted]))
        await eventually(held.reached.is_set, "half of a granule is written")
        a.end_links()
        assert await fetching == {}
        held.go()
        await eventually(lambda: a.freed == [wanted.offset], "the slot is free")
        await eventually(lambda: b.num_leases == 0, "the lease has ended")
        assert a.exchange.is_cooling(b.identity)
        assert_nothing_leaks(a, b)


async def test_a_stop_that_comes_while_records_are_lent(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport])) as b,
    ):
        b.put(1, 50_000)
        asked, go = asyncio.Event(), asyncio.Event()

        async def slowly(record: RecordId) -> None:
            asked.set()
            await go.wait()

        b.on_lease = slowly
        wanted = a.want(1, 50_000)
        fetching = asyncio.create_task(fetch(a, b, [wanted]))
        await asked.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await eventually(lambda: a.freed == [wanted.offset], "the slot is free: nobody was let in")
        go.set()
        await eventually(lambda: b.num_leased == 1 and b.num_leases == 0, "the lease has ended")
        assert_nothing_leaks(a, b)


async def test_a_holder_that_is_killed_mid_push_is_a_miss(transport: str, tmp_path: Path) -> None:
    rules = [FaultRule("push.half", "kill", str(tmp_path / "marker"), after=3)]
    with NodeProcess(settings("b", transports=[transport]), [(1, 100_000)], rules) as b:
        async with StoreNode(settings("a", transports=[transport])) as a:
            wanted = a.want(1, 100_000)
            assert await a.exchange.fetch(b.identity, b.address, [wanted]) == {}
            await eventually(lambda: a.freed == [wanted.offset], "the slot is free")
            assert a.exchange.is_cooling(b.identity)
            assert a.exchange.stat().num_quarantined == 0
            more = a.want(1, 100_000)
            assert await a.exchange.fetch(b.identity, b.address, [more]) == {}
            assert a.freed == [wanted.offset, more.offset]


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL], ids=["goes on", "is killed"])
async def test_a_holder_that_stalls_holds_its_slots_only(
    transport: str, tmp_path: Path, end: signal.Signals
) -> None:
    marker = tmp_path / "marker"
    rules = [FaultRule("push.half", "stop", str(marker), after=2)]
    clock = ManualClock()
    with NodeProcess(settings("b", transports=[transport]), [(1, 100_000)], rules) as b:
        async with StoreNode(settings("a", transports=[transport]), clock=clock) as a:
            wanted = a.want(1, 100_000)
            fetching = asyncio.create_task(a.exchange.fetch(b.identity, b.address, [wanted]))
            await eventually(marker.exists, "the holder has stopped")
            clock.advance(100.0)
            assert await fetching == {}
            await one_round()
            if transport == "shm":
                assert a.freed == []
                assert a.exchange.stat().num_quarantined == 1
                clock.advance(100_000.0)  # no timer ends it
                await one_round()
                assert a.freed == []
            os.kill(b.pid, end)
            await eventually(lambda: a.freed == [wanted.offset], "the slot is free")
