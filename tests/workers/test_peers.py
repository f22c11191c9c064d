"""Peer links: a writer that reconnects, a peer that is silent, an error of ours that must not pass unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from walk_house import until

from kvtransfer.config import TransferConfig
from kvtransfer.messages import (
    CompatibilityRecord,
    LandingGrant,
    PeerHello,
    ReplicaIdentity,
    TransferOrder,
    WriterStopped,
)
from kvtransfer.secret import draw_secret
from workers import peers as peers_module
from workers.links import FrameStream, LinkServer
from workers.messages import PEER_CODEC, HandOverTarget, PeerLinkMessage
from workers.peers import Peers

SECRET = draw_secret()
HERE, PEER = ReplicaIdentity("here", 1), ReplicaIdentity("peer", 1)
RECORD = CompatibilityRecord(1, b"model", "float32", 16, 2, 2, 8)


class Sides:
    """Prefill side and decode side in one, which keep what they hear."""

    def __init__(self) -> None:
        self.heard: list[PeerLinkMessage] = []
        self.lost: list[ReplicaIdentity] = []
        self.failed: list[str] = []
        self.is_broken = False

    def message(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        if self.is_broken:
            raise RuntimeError("a mistake of ours")
        self.heard.append(message)

    def peer_ready(self, peer: ReplicaIdentity) -> None: ...

    def peer_failed(self, peer: ReplicaIdentity, reason: str) -> None:
        self.failed.append(reason)

    def writer_lost(self, writer: ReplicaIdentity) -> None:
        self.lost.append(writer)


class House:
    """The Peer links of one replica."""

    def __init__(self) -> None:
        self.sides = Sides()
        self.errors: list[BaseException] = []
        self.orders: list[TransferOrder] = []
        self.peers = Peers(
            identity=HERE,
            compatibility=RECORD,
            ranks=(),
            config=TransferConfig(),
            secret=SECRET,
            order=self.orders.append,
            prefill_side=self.sides,
            decode_side=self.sides,
            wake=lambda: None,
            on_error=self.errors.append,
        )


def fed(*messages: PeerLinkMessage) -> tuple[FrameStream, asyncio.Queue[bytes | None]]:
    """A stream that brings these messages, and then what is put into its queue."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    for message in messages:
        queue.put_nowait(PEER_CODEC.encode(message))
    return FrameStream("writer", queue.get), queue


async def served(handler: Callable[[FrameStream], Awaitable[None]]) -> tuple[LinkServer, HandOverTarget]:
    server = LinkServer(SECRET, handler, handler)
    port = await server.start("127.0.0.1")
    return server, HandOverTarget(PEER, f"127.0.0.1:{port}")


async def test_a_writer_that_reconnects_has_lost_what_it_had() -> None:
    house = House()
    hello = PeerHello(PEER, RECORD, ())
    old, _ = fed(hello)
    first = asyncio.create_task(house.peers.serve(old))
    await until(lambda: PEER in house.peers._inbound, "the first link")
    new, feed = fed(hello, WriterStopped(b"1"))
    second = asyncio.create_task(house.peers.serve(new))
    await until(lambda: bool(house.sides.heard), "the second link is heard")
    assert house.sides.lost == [PEER], "the landings of the first link would stay open until their lease ends"
    assert old.closed
    await first
    assert house.sides.lost == [PEER], "the end of the first link is not that of the second"
    feed.put_nowait(None)
    await second
    assert house.sides.lost == [PEER, PEER]


async def test_an_error_of_ours_is_told_and_does_not_leave_a_dead_link_behind() -> None:
    async def grant(stream: FrameStream) -> None:
        await stream.receive()
        stream.send(PEER_CODEC.encode(PeerHello(PEER, RECORD, ())))
        stream.send(PEER_CODEC.encode(LandingGrant(b"1", 0, ())))
        await stream.receive()

    house = House()
    house.sides.is_broken = True
    server, target = await served(grant)
    house.peers.ensure(target)
    await until(lambda: bool(house.errors), "the error is told")
    assert "a mistake of ours" in str(house.errors[0])
    await house.peers.close()
    await server.stop()


async def test_a_peer_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_HELLO_TIMEOUT_S", 0.1)

    async def silent(stream: FrameStream) -> None:
        while await stream.receive() is not None:
            pass

    house = House()
    server, target = await served(silent)
    house.peers.ensure(target)
    await until(lambda: bool(house.sides.failed), "it is given up")
    assert "no answer" in house.sides.failed[0]
    assert house.peers.connection(PEER) is None
    await house.peers.close()
    await server.stop()
