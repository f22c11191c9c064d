"""Peer links: lanes between all ranks, paths that fail over or cool down, writers that reconnect, silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from e2e_harness import until
from engine_fakes import FakeControl, FakeRanks, LinkEnd
from msgspec.structs import replace

from kvtransfer.common.clock import ManualClock
from kvtransfer.config import TransferConfig
from kvtransfer.messages import CompatibilityRecord, KvGroup, RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.peer_messages import (
    LandingAbort,
    LandingGrant,
    PeerHello,
    PeerRefusal,
    PeerStopping,
    WriterStopped,
)
from kvtransfer.rpc.stream import FrameStream, LinkServer
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import ClosePeer, ConnectPeer, TransferOrder
from kvtransfer.transfer_reports import LanePath, PeerConnected, PeerConnectFailed, PeerLost
from workers.disagg import peers as peers_module
from workers.disagg.peers import Peers
from workers.messages.link import HandOverTarget
from workers.messages.peer_link import PEER_CODEC, PeerLinkMessage
from workers.stats_record import PathMeasure

TRUST = Trust.draw()
HERE, PEER = ReplicaIdentity("here", 1), ReplicaIdentity("peer", 1)
RECORD = CompatibilityRecord(1, b"model", "float32", "float32", 16, 2, 2, 8)


def ranks(*shards: Shard) -> tuple[RankEndpoints, ...]:
    return tuple(RankEndpoints(rank, shard, "host", ()) for rank, shard in enumerate(shards))


WHOLE = ranks(Shard(0, 2, 0, 2))
STAGES = ranks(Shard(0, 1, 0, 2), Shard(1, 2, 0, 2))
COLUMNS = ranks(Shard(0, 2, 0, 1), Shard(0, 2, 1, 2))
# What goes from one of `STAGES` to one of `COLUMNS`.
QUARTERS = {(stage, head): Shard(stage, stage + 1, head, head + 1) for stage in (0, 1) for head in (0, 1)}


class Sides:
    """Prefill side and decode side in one, which keep what they hear."""

    def __init__(self) -> None:
        self.heard: list[PeerLinkMessage] = []
        self.lost: list[ReplicaIdentity] = []
        self.failed: list[str] = []
        self.num_ready = 0
        self.pieces: Sequence[Sequence[tuple[int, Shard]]] = ()
        self.is_broken = False
        self.on_joined: Callable[[ReplicaIdentity], None] = lambda writer: None

    def message(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        if self.is_broken:
            raise RuntimeError("a mistake of ours")
        self.heard.append(message)

    def peer_ready(self, peer: ReplicaIdentity) -> None:
        self.num_ready += 1

    def peer_failed(self, peer: ReplicaIdentity, reason: str) -> None:
        self.failed.append(reason)

    def writer_joined(self, writer: ReplicaIdentity, pieces: Sequence[Sequence[tuple[int, Shard]]]) -> None:
        self.pieces = pieces
        self.on_joined(writer)

    def writer_lost(self, writer: ReplicaIdentity) -> None:
        self.lost.append(writer)


class PeersHarness:
    """The Peer links of one replica."""

    def __init__(
        self, own: tuple[RankEndpoints, ...] = WHOLE, compatibility: CompatibilityRecord = RECORD
    ) -> None:
        self.sides = Sides()
        self.clock = ManualClock(100.0)
        self.control, self.ranks = FakeControl(), FakeRanks()
        self.errors, self.orders = self.control.errors, self.ranks.orders
        self.peers = Peers(
            identity=HERE,
            compatibility=compatibility,
            ranks=own,
            config=TransferConfig(transports=("shm", "tcp"), below_floor="warn", max_cool_down_s=3.0),
            trust=TRUST,
            clock=self.clock,
            channel=self.ranks,
            control=self.control,
        )

    def orders_to(self, rank: int) -> list[TransferOrder]:
        return [order for number, order in self.ranks.orders_to if number == rank]

    def ensure(self, target: HandOverTarget) -> None:
        self.peers.ensure(target, self.sides)

    async def serve(self, stream: FrameStream) -> None:
        await self.peers.serve(stream, self.sides)


def fed(*messages: PeerLinkMessage) -> tuple[FrameStream, LinkEnd]:
    """A stream that brings these messages, and then what its end is fed."""
    end = LinkEnd("writer")
    for message in messages:
        end.feed(PEER_CODEC.encode(message))
    return end.stream, end


@asynccontextmanager
async def served(
    harness: PeersHarness, handler: Callable[[FrameStream], Awaitable[None]]
) -> AsyncIterator[HandOverTarget]:
    """A peer of the harness that answers its links by `handler`."""
    server = LinkServer(TRUST, handler, handler)
    port = await server.start("127.0.0.1")
    try:
        yield HandOverTarget(PEER, f"127.0.0.1:{port}")
    finally:
        await harness.peers.close()
        await server.stop()


async def test_a_writer_that_reconnects_has_lost_what_it_had() -> None:
    harness = PeersHarness()
    hello = PeerHello(PEER, RECORD, WHOLE)
    old, _ = fed(hello)
    first = asyncio.create_task(harness.serve(old))
    await until(lambda: PEER in harness.peers._writers, "the first link")
    new, feed = fed(hello, WriterStopped(b"1"))
    second = asyncio.create_task(harness.serve(new))
    await until(lambda: bool(harness.sides.heard), "the second link is heard")
    assert harness.sides.lost == [PEER], (
        "the landings of the first link would stay open until their lease ends"
    )
    assert old.closed
    await first
    assert harness.sides.lost == [PEER], "the end of the first link is not that of the second"
    feed.feed(None)
    await second
    assert harness.sides.lost == [PEER, PEER]


async def test_what_a_newer_peer_has_added_is_skipped() -> None:
    """Fields of its hello, and a message that this version does not know."""
    harness = PeersHarness()
    end = LinkEnd("writer")
    hello = msgspec.msgpack.decode(PEER_CODEC.encode(PeerHello(PEER, RECORD, WHOLE)))
    for message in ([*hello, "added"], ["Added", 1]):
        end.feed(msgspec.msgpack.encode(message))
    end.feed(PEER_CODEC.encode(WriterStopped(b"1")))
    end.feed(None)
    await harness.serve(end.stream)
    assert harness.sides.heard == [WriterStopped(b"1")]


async def test_what_still_comes_over_a_link_that_was_replaced_is_not_heard() -> None:
    """Its landings are lost: a request of it would open one that its writer has forgotten."""
    harness = PeersHarness()
    hello = PeerHello(PEER, RECORD, WHOLE)
    old, late = fed(hello)
    first = asyncio.create_task(harness.serve(old))
    await until(lambda: PEER in harness.peers._writers, "the first link")
    lose = harness.sides.writer_lost

    def lose_with_a_frame_on_its_way(writer: ReplicaIdentity) -> None:
        late.feed(PEER_CODEC.encode(WriterStopped(b"1")))
        lose(writer)

    harness.sides.writer_lost = lose_with_a_frame_on_its_way  # type: ignore[method-assign]
    new, feed = fed(hello)
    second = asyncio.create_task(harness.serve(new))
    await first
    assert harness.sides.heard == []
    feed.feed(None)
    await second


@pytest.mark.parametrize(
    ("hello", "word"),
    [
        (PeerHello(PEER, replace(RECORD, dtype="bfloat16"), WHOLE), "dtype: 'float32' here, 'bfloat16' "),
        (PeerHello(PEER, replace(RECORD, kv_dtype="int8"), WHOLE), "kv_dtype: '' here, 'int8' "),
        (PeerHello(PEER, RECORD, ()), "the peer has 0 ranks"),
    ],
)
async def test_a_peer_that_accepts_what_does_not_fit_is_not_written_to(hello: PeerHello, word: str) -> None:
    harness = PeersHarness()
    async with served(harness, answering(hello)) as target:
        harness.ensure(target)
        await until(lambda: bool(harness.sides.failed), "it is refused")
        assert word in harness.sides.failed[0]
        assert connects(harness.orders_to(0)) == []


async def test_an_error_of_ours_is_told_and_does_not_leave_a_dead_link_behind() -> None:
    async def grant(stream: FrameStream) -> None:
        await stream.receive()
        stream.send(PEER_CODEC.encode(PeerHello(PEER, RECORD, WHOLE)))
        stream.send(PEER_CODEC.encode(LandingGrant(b"1", 0, ())))
        await stream.receive()

    harness = PeersHarness()
    harness.sides.is_broken = True
    async with served(harness, grant) as target:
        harness.ensure(target)
        await until(lambda: bool(harness.errors), "the error is told")
        assert "a mistake of ours" in str(harness.errors[0])


async def test_a_peer_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_HELLO_TIMEOUT_S", 0.1)

    async def silent(stream: FrameStream) -> None:
        while await stream.receive() is not None:
            pass

    harness = PeersHarness()
    async with served(harness, silent) as target:
        harness.ensure(target)
        await until(lambda: bool(harness.sides.failed), "it is given up")
        assert "no answer" in harness.sides.failed[0]
        assert harness.peers.connection(PEER) is None


def answering(reply: PeerLinkMessage) -> Callable[[FrameStream], Awaitable[None]]:
    """A peer that answers the first message with `reply` and then only listens."""

    async def handle(stream: FrameStream) -> None:
        while await stream.receive() is not None:
            stream.send(PEER_CODEC.encode(reply))

    return handle


def path(peer_rank: int, transport: str = "shm", instead_of: str = "") -> LanePath:
    return LanePath(peer_rank, transport, "memory", 5.0, 20.0, instead_of)


def connects(orders: list[TransferOrder]) -> list[ConnectPeer]:
    return [order for order in orders if isinstance(order, ConnectPeer)]


async def test_each_rank_connects_its_lanes_and_the_path_is_ready_when_all_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tandem.peers")
    harness = PeersHarness(STAGES)
    async with served(harness, answering(PeerHello(PEER, RECORD, COLUMNS))) as target:
        harness.ensure(target)
        await until(
            lambda: bool(harness.orders_to(0) and harness.orders_to(1)), "both ranks are told to connect"
        )
        for rank in (0, 1):
            (connect,) = connects(harness.orders_to(rank))
            assert (connect.writer, connect.peer, connect.refuse_slow) == (HERE, PEER, False)
            lanes = [(lane.target, lane.piece) for lane in connect.lanes]
            assert lanes == [(COLUMNS[head], QUARTERS[rank, head]) for head in (0, 1)]
        connection = connects(harness.orders_to(0))[0].connection_id
        assert connects(harness.orders_to(1))[0].connection_id == connection

        harness.peers.path_report(1, PeerConnected(connection, (path(0), path(1))))
        assert (harness.peers.connection(PEER), harness.sides.num_ready) == (None, 0)
        slow = path(1, "tcp", "shm: no memory")
        harness.peers.path_report(0, PeerConnected(connection, (path(0), slow)))
        assert (harness.peers.connection(PEER), harness.sides.num_ready) == (connection, 1)
        assert harness.peers.paths()[1] == PathMeasure(
            PEER, 0, 1, "tcp", 5.0, 20.0, "memory", "shm: no memory"
        )
        assert [(it.rank, it.peer_rank) for it in harness.peers.paths()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert warning.endswith("rank 1 over tcp on memory: 5.00 GB/s, 20 us; not as wanted: shm: no memory")
        assert len([record for record in caplog.records if record.levelname == "INFO"]) == 3

        caplog.clear()
        harness.peers.path_report(1, PeerConnected(connection, (path(0), path(1, "tcp", "shm: 3 failures"))))
        (warning,) = (record.getMessage() for record in caplog.records)
        assert "here rank 1 has failed over and writes to peer rank 1 over tcp" in warning
        assert [it.transport for it in harness.peers.paths()] == ["shm", "tcp", "shm", "tcp"]
        assert harness.sides.num_ready == 1


async def test_what_the_decode_side_sends_a_new_writer_follows_the_introduction() -> None:
    """Otherwise the writer would take it for the introduction, and give the link up."""
    harness = PeersHarness()
    abort = LandingAbort(b"1", "the peer link was lost", False)
    harness.sides.on_joined = lambda writer: harness.peers.send_to_writer(writer, abort)
    stream, feed = fed(PeerHello(PEER, RECORD, WHOLE))
    serving = asyncio.create_task(harness.serve(stream))
    await until(lambda: bool(harness.sides.pieces), "the link is open")
    await asyncio.sleep(0)  # what is sent in one turn of the loop is written together
    feed.feed(None)
    await serving
    hello, sent = (PEER_CODEC.decode(frame) for frame in feed.sent())
    assert isinstance(hello, PeerHello)
    assert sent == abort


async def test_lanes_of_a_group_lead_where_its_layers_are() -> None:
    """The first of two stages has the layer of the one group, the second that of the other."""
    record = msgspec.structs.replace(RECORD, groups=(KvGroup((1,), 0), KvGroup((0,), 4)))
    harness = PeersHarness(STAGES, record)
    async with served(harness, answering(PeerHello(PEER, record, COLUMNS))) as target:
        harness.ensure(target)
        await until(lambda: bool(harness.orders_to(0) and harness.orders_to(1)), "both ranks connect")
        for rank, group in ((0, 1), (1, 0)):
            (connect,) = connects(harness.orders_to(rank))
            assert [(lane.piece, lane.group) for lane in connect.lanes] == [
                (QUARTERS[rank, head], group) for head in (0, 1)
            ]
    harness = PeersHarness(COLUMNS, record)
    stream, feed = fed(PeerHello(PEER, record, STAGES))
    feed.feed(None)
    await harness.serve(stream)
    assert harness.sides.pieces == [[(head, QUARTERS[stage, head]) for head in (0, 1)] for stage in (1, 0)]


async def test_the_decode_side_expects_what_the_writers_ranks_will_send() -> None:
    harness = PeersHarness(COLUMNS)
    stream, feed = fed(PeerHello(PEER, RECORD, STAGES))
    feed.feed(None)
    await harness.serve(stream)
    assert sorted(harness.sides.pieces[0], key=str) == sorted(
        ((head, piece) for (_, head), piece in QUARTERS.items()), key=str
    )
    assert harness.sides.lost == [PEER]


@pytest.mark.parametrize(
    ("own", "word"),
    [
        (STAGES[:1], "no rank of the writer holds layers 1 to 1 of KV heads 0 to 1, which rank 0 needs"),
        (STAGES[::-1], "did not introduce its ranks in order"),
        ((), "the peer has 0 ranks"),
        (ranks(*[Shard(0, 2, 0, 2)] * 1025), "the peer has 1025 ranks"),
        (ranks(Shard(-1, 2, 0, 2)), "rank 0 of the peer holds Shard(layer_start=-1"),
        (ranks(Shard(0, 2, 0, 2), Shard(1, 1, 0, 2)), "rank 1 of the peer holds Shard(layer_start=1"),
        (ranks(Shard(0, 2, 0, 3)), "rank 0 of the peer holds Shard(layer_start=0"),
    ],
)
async def test_a_writer_that_cannot_send_all_is_refused_with_the_reason(
    own: tuple[RankEndpoints, ...], word: str
) -> None:
    harness = PeersHarness()
    stream, feed = fed(PeerHello(PEER, RECORD, own))
    feed.feed(None)
    await harness.serve(stream)
    (frame,) = feed.sent()
    refusal = PEER_CODEC.decode(frame)
    assert isinstance(refusal, PeerRefusal)
    assert word in refusal.reason
    assert (harness.sides.pieces, harness.sides.lost) == ((), [])


@pytest.mark.parametrize(
    ("farewell", "reason", "level"),
    [([PeerStopping()], "it stops", "INFO"), ([], "the peer link closed", "WARNING")],
)
async def test_a_peer_that_stops_is_no_cause_for_a_warning(
    caplog: pytest.LogCaptureFixture, farewell: list[PeerLinkMessage], reason: str, level: str
) -> None:
    caplog.set_level(logging.INFO, "tandem.peers")
    harness = PeersHarness()

    async def serve(stream: FrameStream) -> None:
        await stream.receive()
        for message in (PeerHello(PEER, RECORD, WHOLE), *farewell):
            stream.send(PEER_CODEC.encode(message))

    async with served(harness, serve) as target:
        harness.ensure(target)
        await until(lambda: bool(harness.sides.failed), "the link's end is seen")
    assert harness.sides.failed == [reason]
    (record,) = (record for record in caplog.records if "lost its way" in record.getMessage())
    assert (record.getMessage(), record.levelname) == (f"here lost its way to peer: {reason}", level)


async def test_two_replicas_part_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.peers")
    here, there = PeersHarness(), PeersHarness()
    async with served(here, there.serve) as target:
        here.ensure(HandOverTarget(HERE, target.address))
        await until(lambda: bool(here.orders_to(0)), "the link is open")
        await there.peers.close()
        await until(lambda: bool(here.sides.failed), "the link's end is seen")
    assert here.sides.failed == ["it stops"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_failed_path_cools_down_longer_each_time_until_it_was_good_for_a_while() -> None:
    harness = PeersHarness()
    async with served(harness, answering(PeerHello(PEER, RECORD, WHOLE))) as target:

        async def fail(number: int) -> bytes:
            """Connect once more, and let the rank find no path; returns the connection's id."""
            harness.ensure(target)
            await until(lambda: len(connects(harness.orders_to(0))) == number, "it is tried")
            connection = connects(harness.orders_to(0))[-1].connection_id
            harness.peers.path_report(0, PeerConnectFailed(connection, "all are slow"))
            assert ClosePeer(connection) in harness.orders
            return connection

        for number, delay_s in enumerate((1.0, 2.0, 3.0, 3.0), 1):
            await fail(number)
            assert [(it.peer, it.transport, it.instead_of) for it in harness.peers.paths()] == [
                (PEER, "", "rank 0: all are slow")
            ]
            harness.clock.advance(delay_s - 0.5)
            harness.ensure(target)
            assert harness.sides.failed == [
                "rank 0: all are slow",
                "rank 0: all are slow (tried again in 0.5 s)",
            ]
            assert len(connects(harness.orders_to(0))) == number
            harness.sides.failed.clear()
            harness.clock.advance(0.5)
        harness.ensure(target)
        await until(lambda: len(connects(harness.orders_to(0))) == 5, "it is tried")
        connection = connects(harness.orders_to(0))[-1].connection_id
        harness.peers.path_report(0, PeerConnected(connection, (path(0),)))
        assert [it.transport for it in harness.peers.paths()] == [path(0).transport]
        harness.clock.advance(3.5)
        harness.peers.path_report(0, PeerLost(connection, "it broke"))
        harness.clock.advance(0.75)
        harness.ensure(target)
        assert harness.sides.failed == ["rank 0: it broke", "rank 0: it broke (tried again in 0.2 s)"]
        harness.peers.forget_others([PEER])
        assert [it.instead_of for it in harness.peers.paths()] == ["rank 0: it broke"]
        harness.peers.forget_others([])
        assert harness.peers.paths() == (), "a replica that is gone for good is no missing path"
