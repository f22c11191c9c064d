"""Whom and what each transport refuses: slow paths, strangers, misfits, garbage, floods."""

from __future__ import annotations

import socket
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from patience import WAIT_S
from transfer_harness import (
    LAYOUT,
    SHARD,
    WRITER,
    Rank,
    TransferHarness,
    eventually,
    lane,
)

from benchmarks.drawn_trust import draw_trust
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import PROTOCOL_VERSION, Shard
from kvtransfer.rpc.handshake import prove_as_client, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_reports import PeerConnected, PeerConnectFailed
from kvtransfer.transports.stream_sockets import HELLO_CODEC, ChannelHello, ChannelRefusal


def test_a_path_below_the_floor_is_refused_by_name_or_used_with_a_warning(harness: TransferHarness) -> None:
    writer, target = harness.writer(), harness.target()
    writer.connect([lane(target)], harness.transport, min_gb_s=1e6)
    reason = writer.reports.take(PeerConnectFailed).reason
    assert f"{harness.transport}: " in reason
    assert "below the floor" in reason
    writer.connect([lane(target)], harness.transport, min_gb_s=1e6, refuse_slow=False)
    (path,) = writer.reports.take(PeerConnected).paths
    assert "below the floor" in path.instead_of


def test_a_wrong_secret_is_refused(harness: TransferHarness) -> None:
    writer, target = harness.writer(trust=draw_trust()), harness.target()
    writer.connect([lane(target)], harness.transport)
    assert "does not know the cluster secret" in writer.reports.take(PeerConnectFailed).reason


def reach(target: Rank) -> socket.socket:
    (endpoint,) = target.endpoints.endpoints
    if endpoint.transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WAIT_S)
        sock.connect(f"\0{endpoint.address}")
        return sock
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def hello(layout: BlockLayout = LAYOUT) -> ChannelHello:
    shape = layout.head_dim, layout.block_tokens, layout.item_bytes
    return ChannelHello(PROTOCOL_VERSION, WRITER, bytes(16), 0, SHARD, layout.shard, *shape)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (hello(replace(LAYOUT, block_tokens=32)), "block_tokens: 32 "),
        (hello(replace(LAYOUT, shard=Shard(0, 2, 0, 4))), "is not part of"),
        (msgspec.structs.replace(hello(), piece=Shard(0, 5, 0, 4)), "is not part of"),
        (msgspec.structs.replace(hello(), target_rank=3), "this is rank 0, not 3"),
        (msgspec.structs.replace(hello(), protocol=1), f"protocol {PROTOCOL_VERSION}"),
    ],
    ids=["another block", "a piece it lacks", "a piece we lack", "another rank", "an old protocol"],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    harness: TransferHarness, odd: ChannelHello, reason: str
) -> None:
    bare = reach(harness.target())
    with bare, prove_as_client(bare, Trust.read(harness.trust), "stranger") as sock:
        send_frame(sock, HELLO_CODEC.encode(odd))
        refusal = HELLO_CODEC.decode(receive_frame(sock))
    assert isinstance(refusal, ChannelRefusal)
    assert reason in refusal.reason


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x04\0\0\0abcd"])
def test_garbage_closes_only_its_own_connection(harness: TransferHarness, garbage: bytes) -> None:
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    with reach(target) as sock:
        sock.sendall(garbage)
        assert ends(sock)
    writer.move(target, connection_id, 1, [(1, 1)])
    np.testing.assert_array_equal(target.pool[1], writer.pool[1])


def test_a_flood_of_silent_connections_is_shed(harness: TransferHarness) -> None:
    """At most 64 wait for their proof; the next are closed at once, and proven ones go on."""
    writer, target = harness.writer(), harness.target()
    connection_id = writer.connected(target, harness.transport)
    socks = [reach(target) for _ in range(100)]
    try:
        for sock in socks:
            sock.setblocking(False)
        eventually(lambda: sum(is_closed(sock) for sock in socks) >= 36, "the shedding of the flood")
        writer.move(target, connection_id, 1, [(1, 1)])
    finally:
        for sock in socks:
            sock.close()


def ends(sock: socket.socket) -> bool:
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
