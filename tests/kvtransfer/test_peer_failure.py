"""What happens to a rank's KV when the process at the other end dies, stalls, lies or floods it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from transfer_house import LAYOUT, SHARD, TARGET, WAIT_S, TargetRankHouse, WriterProcess, eventually

from kvtransfer.errors import PeerGoneError, PushStoppedError
from kvtransfer.faults import FaultRule
from kvtransfer.framing import prove_as_client, prove_as_server, receive_frame, send_frame
from kvtransfer.messages import (
    PROTOCOL_VERSION,
    CloseLanding,
    ConnectPeer,
    Endpoint,
    LandingClosed,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    RankEndpoints,
    ReplicaIdentity,
    WriterGone,
)
from kvtransfer.transports import tcp
from kvtransfer.transports.base import HELLO_CODEC, ChannelHello, ChannelRefusal, ChannelWelcome, WriterRank

TRANSPORTS = ["shm", "tcp"]


@pytest.fixture
def house() -> Iterator[TargetRankHouse]:
    with TargetRankHouse() as house:
        yield house


def halted(house: TargetRankHouse, transport: str, action: str, folder: Path) -> tuple[WriterProcess, bytes]:
    """A writer that is stopped or killed in the middle of its second block; and the landing's id."""
    rule = FaultRule("push.half", action, str(folder / "marker"), after=2)
    writer = house.writer(faults=[rule])
    connection_id = writer.connected(house, transport)
    landing_id = house.open(writer, 1, 2, 3)
    writer.push(1, connection_id, landing_id, [(4, 1), (5, 2), (6, 3)])
    writer.await_state("T" if action == "stop" else "Z")
    return writer, landing_id


def reach(house: TargetRankHouse, transport: str) -> socket.socket:
    address = {each.transport: each.address for each in house.agent.endpoints().endpoints}[transport]
    if transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address}")
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


# ------------------------------------------------------------------------------------------- it dies


def test_a_one_sided_writer_killed_mid_write_is_proven_gone(house: TargetRankHouse, tmp_path: Path) -> None:
    writer, landing_id = halted(house, "shm", "kill", tmp_path)
    assert house.reports.take(WriterGone).writer == writer.identity
    assert house.close_landing(landing_id) is False
    assert house.block(1) == writer.block(4)
    half = LAYOUT.block_bytes // 2
    assert house.block(2) == writer.block(5)[:half] + bytes(half)


def test_a_two_sided_writer_killed_mid_write_leaves_nothing_behind(
    house: TargetRankHouse, tmp_path: Path
) -> None:
    _writer, landing_id = halted(house, "tcp", "kill", tmp_path)
    assert house.close_landing(landing_id) is False
    assert not house.reports.has(WriterGone)
    fresh = house.writer(name="fresh", seed=3)
    house.move(fresh, fresh.connected(house, "tcp"), 1, [(0, 2)])
    assert house.block(2) == fresh.block(0)


def test_each_mapping_of_a_writer_is_proven_gone_by_itself(house: TargetRankHouse) -> None:
    """A writer that reconnects before its old connection has ended must not hide the old one's end."""
    writer = house.writer()
    landing_id = house.open(writer, 1)
    writer.push(1, writer.connected(house, "shm"), landing_id, [(4, 1)])
    writer.reports.take(PushDone)
    second = house.writer()  # the same replica's identity from another process
    second.connected(house, "shm")
    house.agent.handle(CloseLanding(landing_id))
    closed = house.reports.take(LandingClosed)
    assert len(closed.connections) == 1
    assert writer.close() == 0
    gone = house.reports.take(WriterGone)
    assert (gone.writer, gone.connection) == (writer.identity, closed.connections[0])
    assert second.close() == 0
    assert house.reports.take(WriterGone).connection != gone.connection


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_target_is_reported_to_an_idle_writer(transport: str) -> None:
    with TargetRankHouse() as house:
        writer = house.writer()
        connection_id = writer.connected(house, transport)
        house.agent.close()
        lost = writer.reports.take(PeerLost)
        assert lost.connection_id == connection_id
        assert lost.reason
        writer.push(1, connection_id, bytes(16), [(0, 0)])
        assert writer.reports.take(PushFailed).push_id == 1


# ----------------------------------------------------------------------------------------- it stalls


def test_a_stopped_one_sided_writer_keeps_its_blocks_in_quarantine(
    house: TargetRankHouse, tmp_path: Path
) -> None:
    writer, landing_id = halted(house, "shm", "stop", tmp_path)
    assert house.close_landing(landing_id) is True
    assert not house.reports.has(WriterGone)
    writer.signal(signal.SIGKILL)
    assert house.reports.take(WriterGone).writer == writer.identity
    assert [type(each) for each in house.reports.all] == [LandingClosed, WriterGone]


def test_a_stopped_two_sided_writer_cannot_touch_reused_blocks(
    house: TargetRankHouse, tmp_path: Path
) -> None:
    writer, landing_id = halted(house, "tcp", "stop", tmp_path)
    assert house.close_landing(landing_id) is False
    for block_id in (1, 2, 3):
        start = block_id * LAYOUT.block_bytes
        house.memory.buffer[start : start + LAYOUT.block_bytes] = b"\xa5" * LAYOUT.block_bytes
    writer.signal(signal.SIGCONT)
    assert "does not accept" in writer.reports.take(PushFailed).reason
    for block_id in (1, 2, 3):
        assert house.block(block_id) == b"\xa5" * LAYOUT.block_bytes
    # The connection is in step again: a new landing goes through it.
    connection_id = writer.connected(house, "tcp")
    house.move(writer, connection_id, 2, [(7, 2)])
    assert house.block(2) == writer.block(7)


@contextlib.contextmanager
def silent_target(secret: bytes) -> Iterator[RankEndpoints]:
    """A rank that welcomes one writer over TCP and then neither reads nor answers."""
    ended = threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as sock:
            prove_as_server(sock, secret)
            receive_frame(sock)
            send_frame(sock, HELLO_CODEC.encode(ChannelWelcome(LAYOUT.block_bytes)))
            assert ended.wait(WAIT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        endpoint = Endpoint("tcp", f"127.0.0.1:{listener.getsockname()[1]}")
        yield RankEndpoints(0, SHARD, "", (endpoint,))
        ended.set()
        thread.join()


def test_a_stop_ends_all_waiting_for_a_two_sided_target(house: TargetRankHouse) -> None:
    """A frame cannot be left half sent, so the stop costs the connection; the writer goes on."""
    rank = WriterRank(ReplicaIdentity("here", 1), 0, LAYOUT, house.memory, house.secret)
    block = house.memory.buffer[: LAYOUT.block_bytes]
    with silent_target(house.secret) as target:
        reasons: list[str] = []
        channel = tcp.connect(rank, target, target.endpoints[0].address, bytes(16), reasons.append)
        with pytest.raises(PushStoppedError, match="did not answer"):
            channel.flush(bytes(16), lambda: True)

        def fill_its_buffers() -> None:
            while True:
                channel.write(bytes(16), 0, block, lambda: None, lambda: True)

        with pytest.raises(PeerGoneError, match="given up"):
            fill_its_buffers()
        assert "given up" in channel.lost
        channel.close()


# ------------------------------------------------------------------------------------ it lies, floods


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x04\0\0\0abcd"])
def test_garbage_closes_only_its_own_connection(
    house: TargetRankHouse, transport: str, garbage: bytes
) -> None:
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    with reach(house, transport) as sock:
        sock.settimeout(20)
        sock.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    house.move(writer, connection_id, 1, [(1, 1)])
    assert house.block(1) == writer.block(1)


def test_garbage_after_the_proof_does_not_lift_the_fence(house: TargetRankHouse) -> None:
    """Who holds the mapping may write, whatever it says: only the end of its socket proves otherwise."""
    stranger = ReplicaIdentity("stranger", 1)
    sock = reach(house, "shm")
    prove_as_client(sock, house.secret, "stranger")
    send_frame(sock, HELLO_CODEC.encode(hello(stranger)))
    receive_frame(sock)
    send_frame(sock, b"garbage")
    sock.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(100):
            pass
    assert not house.reports.has(WriterGone)
    sock.close()
    assert house.reports.take(WriterGone).writer == stranger


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_shape_of_block_is_refused_with_its_name(house: TargetRankHouse, transport: str) -> None:
    with reach(house, transport) as sock:
        prove_as_client(sock, house.secret, "stranger")
        odd = msgspec.structs.replace(hello(ReplicaIdentity("stranger", 1)), block_tokens=32)
        send_frame(sock, HELLO_CODEC.encode(odd))
        refusal = HELLO_CODEC.decode(receive_frame(sock))
    assert isinstance(refusal, ChannelRefusal)
    assert refusal.reason.startswith("block_tokens: 32 ")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flood_of_silent_connections_is_shed(house: TargetRankHouse, transport: str) -> None:
    """At most 64 wait for their proof; the next are closed at once, and proven ones go on."""
    writer = house.writer()
    connection_id = writer.connected(house, transport)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(reach(house, transport)) for _ in range(100)]
        for sock in socks:
            sock.settimeout(0.0)
        eventually(lambda: sum(is_closed(sock) for sock in socks) >= 36, "the shedding of the flood")
        house.move(writer, connection_id, 1, [(1, 1)])


# --------------------------------------------------------------------------------- choosing a path


def test_the_first_path_that_works_is_taken_and_the_reason_is_known(house: TargetRankHouse) -> None:
    writer = house.writer()
    writer.connect(house, "rdma", "shm", "tcp")
    assert writer.reports.take(PeerConnected).transport == "shm"
    elsewhere = msgspec.structs.replace(house.agent.endpoints(), host_id="elsewhere")
    writer.handle(ConnectPeer(b"2" * 16, writer.identity, TARGET, (elsewhere,), ("shm", "tcp"), 0.0))
    assert writer.reports.take(PeerConnected).transport == "tcp"
    writer.handle(ConnectPeer(b"3" * 16, writer.identity, TARGET, (elsewhere,), ("shm", "rdma"), 0.0))
    reason = writer.reports.take(PeerConnectFailed).reason
    assert "shm: another host" in reason
    assert "rdma: no such transport" in reason


def hello(identity: ReplicaIdentity) -> ChannelHello:
    return ChannelHello(
        PROTOCOL_VERSION,
        identity,
        bytes(16),
        SHARD,
        LAYOUT.head_dim,
        LAYOUT.block_tokens,
        LAYOUT.item_bytes,
    )


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
