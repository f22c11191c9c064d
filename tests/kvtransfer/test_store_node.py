"""A node's books as engine cores and other nodes use them, without processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from store_harness import COMPATIBILITY, StoreHarness, eventually
from trust_files import TRUST

from kvtransfer.codec import framed
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import PeerGoneError
from kvtransfer.kv_events import BlocksStored
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.rpc.stream import FrameStream, frame_stream
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.messages.engine_session import (
    EngineHello,
    FetchRequest,
    NewRecord,
    PutCommit,
    TierEvents,
    TierPart,
    TierPartRequest,
)
from kvtransfer.store.messages.owner_codec import STORE_PROTOCOL, TO_OWNER_CODEC, FromOwner
from kvtransfer.store.messages.records import PurgeOrder, RecordId
from kvtransfer.store.record import Writer
from kvtransfer.store.server.arena_manager import ArenaManager
from kvtransfer.store.server.node import StoreNode
from kvtransfer.store.server.session import EngineSession
from kvtransfer.store.server.session_decisions import SessionDecisions

SPACE, KEY, SHARD, SESSION = b"thespace", bytes(16), Shard(0, 2, 0, 2), b"s" * 16


def spawn(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(work, name=name)


def allocate(node: StoreNode) -> int:
    new = NewRecord(KEY, b"", SHARD, 1000)
    return node.catalog.allocate(SESSION, "t", KEY, SPACE, bytes(16), new, Writer(1, 1))


def put(node: StoreNode) -> int:
    offset = allocate(node)
    assert node.catalog.commit(SESSION, offset, 1) is not None
    return offset


async def connected(tmp_path: Path) -> tuple[StoreNode, EngineSession, FrameStream, socket.socket]:
    """A node, an engine core's session with it, and the two ends of their connection."""
    settings, clock = StoreHarness(tmp_path).settings, ManualClock()
    node = StoreNode(settings, TRUST, clock, Faults(), spawn)
    arena_manager = ArenaManager(settings, clock, 0, node.attach, lambda rank: None, spawn)
    ours, engine_cores = socket.socketpair()
    stream = await frame_stream(ours, "test")
    hello = EngineHello(STORE_PROTOCOL, SESSION, ReplicaIdentity("replica", 1), COMPATIBILITY, (SHARD,))
    return node, EngineSession(hello, stream, arena_manager, node, spawn), stream, engine_cores


async def test_each_loan_ends_where_it_was_made(tmp_path: Path) -> None:
    """While one is out the record is found bad, dropped, put again elsewhere, and lent again."""
    node = StoreNode(StoreHarness(tmp_path).settings, TRUST, ManualClock(), Faults(), spawn)
    node.catalog.attach(Arena.create(2 << 20, 4096, False))
    node.catalog.session_opened(SESSION)
    record = RecordId(SPACE, KEY, SHARD)
    places = [put(node)]
    first = await node.lease_record(record)
    node.bad(places[0])
    places.append(put(node))
    second = await node.lease_record(record)
    assert first is not None
    assert second is not None
    assert [first.offset, second.offset] == places
    node.release_record(first)
    node.catalog.check()
    assert set(node.catalog._allocator.slots) == {places[1]}, (
        "what is not lent any more is free, the other is not"
    )
    assert node.catalog._allocator.slots[places[1]].num_leases == 1
    node.release_record(second)
    assert node.catalog.stat().num_leases == 0
    await node.release()


async def test_what_a_closed_connection_had_still_to_say_is_void(tmp_path: Path) -> None:
    """The engine core is back on another one, where the same offset may have been granted for something
    else."""
    node, earlier, stream, engine_cores = await connected(tmp_path)
    node.catalog.attach(Arena.create(2 << 20, 4096, False))
    node.catalog.session_opened(SESSION)
    offset = allocate(node)
    frame = TO_OWNER_CODEC.encode(PutCommit(((offset, 1),)))
    engine_cores.sendall(framed(frame))
    await eventually(lambda: bool(stream._frames), "it has come")
    earlier.close()
    with pytest.raises(PeerGoneError):
        await earlier.serve()
    assert node.catalog.find(RecordId(SPACE, KEY, SHARD)) is None
    assert node.catalog.commit(SESSION, offset, 2) is not None
    engine_cores.close()
    await node.release()


async def test_what_a_newer_engine_core_has_added_is_skipped(tmp_path: Path) -> None:
    node, session, _, engine_cores = await connected(tmp_path)
    node.catalog.attach(Arena.create(2 << 20, 4096, False))
    node.catalog.session_opened(SESSION)
    offset = allocate(node)
    engine_cores.sendall(framed(msgspec.msgpack.encode(["Added", 1])))
    engine_cores.sendall(framed(TO_OWNER_CODEC.encode(PutCommit(((offset, 1),)))))
    serving = asyncio.create_task(session.serve())
    await eventually(lambda: node.catalog.find(RecordId(SPACE, KEY, SHARD)) is not None, "it is stored")
    engine_cores.close()
    with pytest.raises(PeerGoneError):
        await serving
    await node.release()


async def test_the_content_is_sent_when_the_records_of_an_earlier_owner_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that has not asked yet, or waits, keeps its view when another session of its shape ends."""
    node, session, _, engine_cores = await connected(tmp_path)
    sent: list[FromOwner] = []
    monkeypatch.setattr(session, "_hello", replace(session._hello, takes_parts=True))
    monkeypatch.setattr(session, "send", sent.append)
    session.begin()
    node.catalog.session_opened(SESSION)
    session.handle(TierPartRequest(0))
    other = SessionDecisions(replace(session._hello, session=b"o" * 16), lambda rank: None, node, spawn)
    other.begin()
    other.end()
    await node.open_disk()  # there is none
    await asyncio.sleep(0)
    assert sent == []
    node.use(Arena.create(2 << 20, 4096, False), None)
    new = NewRecord(KEY, b"", SHARD, 1000)
    space = session._view.space
    offset = node.catalog.allocate(SESSION, "t", KEY, space, bytes(16), new, Writer(1, 1))
    assert node.catalog.commit(SESSION, offset, 1) is not None
    await eventually(lambda: bool(sent), "the part is sent")
    node.settle_all()
    assert sent == [TierPart((BlocksStored(b"", (KEY,), "dram"),), 0, 0)]
    node.catalog.purge(PurgeOrder(None, None))
    node.settle_all()
    assert sent[1:] == [TierEvents((), (KEY,), ("purged",))]
    session.end()
    session.close()
    assert not node._views
    await asyncio.sleep(0)
    engine_cores.close()
    await node.release()


async def test_a_flood_of_prefetches_is_cut_off_without_a_word(tmp_path: Path) -> None:
    """They are hints of requests that wait; too many of them do not end the connection."""
    node, session, _, engine_cores = await connected(tmp_path)
    for number in range(5000):
        session.handle(FetchRequest(number, "", KEY, (KEY,), to_device=False))
    session.handle(FetchRequest(5000, "", KEY, (KEY,), to_device=True))
    assert 5000 in session._fetches
    engine_cores.close()
    with pytest.raises(PeerGoneError):
        await session.serve()
    assert not session._fetches
    await node.release()


async def test_what_came_before_nvme_was_open_is_written_before_the_end(tmp_path: Path) -> None:
    disk = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 8 << 20, "segment_bytes": 1 << 20}
    node = StoreNode(StoreHarness(tmp_path, **disk).settings, TRUST, ManualClock(), Faults(), spawn)
    node.catalog.attach(Arena.create(2 << 20, 4096, False))
    node.catalog.session_opened(SESSION)
    put(node)
    closing = spawn(node.close(60.0), "close")
    await asyncio.sleep(0)
    await node.open("127.0.0.1:1")
    await closing
    held = node.catalog.find(RecordId(SPACE, KEY, SHARD))
    assert held is not None
    assert held.nvme is not None
    await node.release()
