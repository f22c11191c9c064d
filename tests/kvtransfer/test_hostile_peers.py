"""Strangers that waste time or memory before their proof, and proven targets that lie to a writer."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from patience import WAIT_S
from service_harness import BOTH, LAYOUT, NUM_BLOCKS, TARGET, TRUST, WHOLE, WRITER, Rank

from kvtransfer.blocks.host_memory import mapping_bytes
from kvtransfer.common.host import host_id
from kvtransfer.messages import Endpoint, RankEndpoints
from kvtransfer.rpc.handshake import (
    HANDSHAKE_CODEC,
    Hello,
    prove_as_client,
    prove_as_server,
    receive_frame,
    send_frame,
)
from kvtransfer.transfer_orders import Lane
from kvtransfer.transfer_reports import PeerConnectFailed
from kvtransfer.transports.stream_sockets import HELLO_CODEC, ChannelWelcome

Serve = Callable[[socket.socket], object]


@pytest.fixture
def writer() -> Iterator[Rank]:
    with Rank(WRITER, seed=1) as rank:
        yield rank


def reach(target: Rank, transport: str) -> socket.socket:
    address = next(each.address for each in target.agent.endpoints().endpoints if each.transport == transport)
    if transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address}")
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(WAIT_S)
    return sock


@pytest.mark.parametrize("transport", BOTH)
def test_a_stranger_that_sends_byte_by_byte_is_cut_off_in_time(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes before the socket's own patience is over."""
    monkeypatch.setattr("kvtransfer.rpc.handshake.HANDSHAKE_TIMEOUT_S", 0.3)
    frame = HANDSHAKE_CODEC.encode(Hello("slow" * 50, bytes(16), False))
    pause = threading.Event()

    def send_slowly(sock: socket.socket) -> None:
        for byte in len(frame).to_bytes(4, "little") + frame:
            sock.send(bytes([byte]))
            pause.wait(0.02)

    with Rank(TARGET) as target, reach(target, transport) as sock, pytest.raises(OSError, match=r"ipe|reset"):
        send_slowly(sock)


@pytest.mark.parametrize("transport", BOTH)
def test_a_stranger_cannot_announce_a_large_frame(transport: str) -> None:
    """Its memory would be taken before a byte of it has come."""
    with Rank(TARGET) as target, reach(target, transport) as sock:
        sock.sendall((60 << 20).to_bytes(4, "little"))
        assert sock.recv(1) == b""


@pytest.mark.parametrize("transport", BOTH)
def test_a_listener_outlives_a_moment_without_threads(
    writer: Rank, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"{transport}-serve":
            raise RuntimeError("can't start new thread")
        start(thread)

    with Rank(TARGET) as target:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(65):  # more than there are slots
            with reach(target, transport) as sock:
                prove_as_client(sock, TRUST, "a writer")
                assert sock.recv(1) == b""
        monkeypatch.undo()
        writer.connect(target, transports=[transport])
        assert writer.paths()[0].transport == transport


@contextmanager
def lying_target(transport: str, serve: Serve) -> Iterator[RankEndpoints]:
    """A target that knows the secret and takes the writer's hello; the rest does `serve`."""
    if transport == "shm":
        address = f"lying-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{address}")
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.settimeout(WAIT_S)

    def accept() -> None:
        sock, _ = listener.accept()
        with sock:
            prove_as_server(sock, TRUST)
            receive_frame(sock)
            serve(sock)
            sock.settimeout(WAIT_S)
            while sock.recv(1 << 16):
                pass

    thread = threading.Thread(target=accept)
    thread.start()
    with listener:
        yield RankEndpoints(0, WHOLE, host_id(), (Endpoint(transport, address),))
        thread.join(WAIT_S)


def refusal(writer: Rank, endpoints: RankEndpoints) -> str:
    writer.connect(lanes=[Lane(endpoints, WHOLE)])
    return writer.reports.take(PeerConnectFailed).reason


def welcome(num_blocks: int) -> bytes:
    return HELLO_CODEC.encode(ChannelWelcome(num_blocks))


@pytest.mark.parametrize("num_blocks", [-1, 1 << 40])
@pytest.mark.parametrize("transport", BOTH)
def test_a_pool_of_an_impossible_size_is_refused(writer: Rank, transport: str, num_blocks: int) -> None:
    """A grant for a block beyond 32 bits must not reach the code that packs block ids."""
    with lying_target(transport, lambda sock: send_frame(sock, welcome(num_blocks))) as endpoints:
        assert "frame refused: Expected `int`" in refusal(writer, endpoints)


def test_memory_that_the_target_could_shrink_is_not_mapped(writer: Rank) -> None:
    """A write beyond its new end would kill this process with a bus error."""

    def offer(sock: socket.socket) -> None:
        send_frame(sock, welcome(NUM_BLOCKS))
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, mapping_bytes(NUM_BLOCKS * LAYOUT.block_bytes))
        socket.send_fds(sock, [b"F"], [fd])
        os.close(fd)

    with lying_target("shm", offer) as endpoints:
        assert "could shrink" in refusal(writer, endpoints)


def test_the_writers_own_frames_of_the_proof_are_short_enough() -> None:
    name = "replica-" + "x" * 200
    with Rank(TARGET) as target, Rank(msgspec.structs.replace(WRITER, replica_id=name)) as writer:
        writer.connect(target)
        assert len(writer.paths()) == 1
