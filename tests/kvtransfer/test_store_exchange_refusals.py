"""Owners that cannot exchange records, or that do not keep to the protocol: refused loudly, and a miss."""

from __future__ import annotations

import asyncio

import pytest
from exchange_harness import GRANULE_BYTES, TRUST, StoreNode, eventually, record_id, settings
from patience import WAIT_S

from kvtransfer.errors import PeerGoneError
from kvtransfer.messages import RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.stream import FrameStream, open_tcp
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, STORE_PROTOCOL, TO_OWNER_CODEC, ToOwner
from kvtransfer.store.messages.record_exchange import OwnerHello, RecordsSent, SendRecords
from kvtransfer.store.messages.records import RecordId
from kvtransfer.store.remote.owner_link import Wanted

pytestmark = pytest.mark.slow

TRANSPORTS = ("shm", "tcp")


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


async def test_another_granule_is_refused_by_both_sides() -> None:
    async with StoreNode(settings("a", granule_bytes=2 * GRANULE_BYTES)) as a, StoreNode(settings("b")) as b:
        b.put(1, 50_000)
        wanted = a.want(1, 50_000)
        assert await fetch(a, b, [wanted]) == {}
        assert a.freed == [wanted.offset]
        note = a.exchange.stat().note
        assert f"{GRANULE_BYTES} here" in note
        assert f"{2 * GRANULE_BYTES} there" in note


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "a..b:1", "\0:5", "x" * 300 + ":5"])
async def test_an_address_that_is_none_is_a_miss(address: str) -> None:
    """The index may say anything."""
    async with StoreNode(settings("a")) as a:
        wanted = a.want(1, 50_000)
        async with asyncio.timeout(WAIT_S):
            assert await a.exchange.fetch(ReplicaIdentity("b", 1), address, [wanted]) == {}
        assert a.freed == [wanted.offset]


@pytest.mark.parametrize("who", ["another secret", "another life", "nobody"])
async def test_owners_that_cannot_be_asked_are_a_miss_and_cool_down(who: str) -> None:
    trust = Trust.draw() if who == "another secret" else TRUST
    async with StoreNode(settings("a")) as a, StoreNode(settings("b"), trust=trust) as b:
        b.put(1, 50_000)
        holder = ReplicaIdentity("b", 2) if who == "another life" else b.identity
        address = "127.0.0.1:1" if who == "nobody" else b.address
        wanted = a.want(1, 50_000)
        assert await a.exchange.fetch(holder, address, [wanted]) == {}
        assert a.freed == [wanted.offset]
        assert a.exchange.is_cooling(holder)
        stat = a.exchange.stat()
        assert (stat.num_io_errors, stat.num_misses) == (1, 1)
        assert stat.note
        again = a.want(1, 50_000)
        assert await a.exchange.fetch(holder, address, [again]) == {}
        assert a.exchange.stat().num_io_errors == 1  # it was not asked
        assert a.freed == [wanted.offset, again.offset]
        assert b.num_leased == 0


async def test_a_path_below_the_floor_is_not_used(transport: str) -> None:
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport], remote_min_gb_s=1e6)) as b,
    ):
        b.put(1, 50_000)
        wanted = a.want(1, 50_000)
        assert await fetch(a, b, [wanted]) == {}
        await eventually(lambda: a.freed == [wanted.offset], "the slot is free")
        assert "floor" in a.exchange.stat().note
        assert a.exchange.is_cooling(b.identity)
        assert_nothing_leaks(a, b)


NOWHERE = RankEndpoints(0, Shard(0, 1, 0, 1), "elsewhere", ())
MODEL_POOL = RankEndpoints(0, Shard(0, 2, 0, 2), "elsewhere", ())
RECORDS = (record_id(1),)


@pytest.mark.parametrize(
    "message",
    [
        SendRecords(draw_id(), NOWHERE, RECORDS, ()),
        SendRecords(draw_id(), MODEL_POOL, RECORDS, ((1,),)),
        OwnerHello(STORE_PROTOCOL, ReplicaIdentity("a", 1), GRANULE_BYTES),
    ],
)
async def test_nonsense_ends_that_connection_only(message: ToOwner) -> None:
    async with StoreNode(settings("a")) as a, StoreNode(settings("b")) as b:
        b.put(1, 50_000)
        stream = await introduced(b)
        stream.send(TO_OWNER_CODEC.encode(message))
        with pytest.raises(PeerGoneError):
            await stream.next_frame()
        stream.close()
        await stream.wait_closed()
        wanted = a.want(1, 50_000)
        assert set(await fetch(a, b, [wanted])) == {record_id(1)}
        assert_nothing_leaks(a, b)


async def introduced(holder: StoreNode) -> FrameStream:
    """A connection of an owner that is not one of ours."""
    stream = await open_tcp(holder.address, TRUST, "stranger")
    hello = OwnerHello(STORE_PROTOCOL, ReplicaIdentity("stranger", 1), GRANULE_BYTES)
    stream.send(TO_OWNER_CODEC.encode(hello))
    FROM_OWNER_CODEC.decode(await stream.next_frame())
    return stream


async def test_an_asker_that_cannot_be_reached_is_answered() -> None:
    async with StoreNode(settings("b")) as b:
        b.put(1, 50_000)
        stream = await introduced(b)
        order = SendRecords(draw_id(), NOWHERE, RECORDS, ((1, 2, 3, 4),))
        stream.send(TO_OWNER_CODEC.encode(order))
        answer = FROM_OWNER_CODEC.decode(await stream.next_frame())
        assert isinstance(answer, RecordsSent)
        assert (answer.landing_id, answer.sent) == (order.landing_id, ())
        assert "no path" in answer.reason
        stream.close()
        await stream.wait_closed()
        assert b.num_leased == b.num_leases


async def test_granules_outside_the_askers_arena_are_not_written(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The asker's own books are wrong, or it lies: the push fails, nothing is written anywhere.
    async with (
        StoreNode(settings("a", transports=[transport])) as a,
        StoreNode(settings("b", transports=[transport])) as b,
    ):
        b.put(1, 50_000)
        beyond = Wanted(record_id(1), a.arena.num_bytes, 50_000)
        monkeypatch.setattr(a, "slot_free", a.freed.append)
        assert await fetch(a, b, [beyond]) == {}
        await eventually(lambda: a.freed == [beyond.offset], "the slot is told")
        assert_nothing_leaks(a, b)
