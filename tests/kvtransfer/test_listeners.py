"""What every kind of listener owes: who has not proven the secret costs little, and keeps nobody out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from inner_tls import TLS_FILES
from listeners import KINDS, ListenerProcess
from patience import WAIT_S
from trust_files import FILES

from kvtransfer.errors import ProofError
from kvtransfer.rpc.handshake import ClientHandshake, prove_as_client, receive_frame, send_frame
from kvtransfer.rpc.listener import MAX_UNPROVEN
from kvtransfer.rpc.trust import Trust

UNPROVEN_BYTES = 64 << 10
# What the process takes for other reasons meanwhile.
SLACK_BYTES = 2 << 20


@pytest.fixture(scope="module", params=[FILES, TLS_FILES], ids=["bare", "TLS"])
def listening(request: pytest.FixtureRequest) -> Iterator[ListenerProcess]:
    with ListenerProcess(request.param) as process:
        for kind in KINDS:  # what every first connection takes once
            prove_as_client(process.connect(kind), process.trust, "first").close()
        yield process


def send_much(sock: socket.socket, frame: bytes) -> bool:
    """Send 60 MiB as one frame; whether the connection was closed instead."""
    try:
        with sock:
            sock.sendall(len(frame).to_bytes(4, "little"))
            sock.sendall(frame)
            return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_with_large_frames_are_refused_and_cost_nothing(
    listening: ListenerProcess, kind: str
) -> None:
    """As a first frame, and as the answer to the challenge."""
    frame = bytes(60 << 20)
    listening.reset_peak()
    before = listening.peak_bytes
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        strangers = [stack.enter_context(listening.connect(kind)) for _ in range(8)]
        for stranger in strangers[:4]:
            send_frame(stranger, ClientHandshake(Trust.draw(), "stranger").hello())
            receive_frame(stranger)
        assert all(pool.map(send_much, strangers, [frame] * 8))
    assert listening.peak_bytes - before < SLACK_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_silent_strangers_keep_nobody_out_and_are_few(listening: ListenerProcess, kind: str) -> None:
    listening.reset_peak()
    before, num_before = listening.peak_bytes, listening.num_descriptors
    with ExitStack() as stack:
        strangers = [stack.enter_context(listening.connect(kind)) for _ in range(MAX_UNPROVEN * 4)]
        for stranger in strangers[-MAX_UNPROVEN:]:
            stranger.sendall((4000).to_bytes(4, "little") + bytes(3999))  # all but the last byte of a frame
        for _ in range(3):
            stack.enter_context(prove_as_client(listening.connect(kind), listening.trust, "peer"))
        assert strangers[0].recv(1) == b"", "the oldest was evicted"
        assert listening.num_descriptors <= num_before + MAX_UNPROVEN + 3
        assert listening.peak_bytes - before < MAX_UNPROVEN * UNPROVEN_BYTES


# What each kind of listener reads after the proof has at most so many bytes; "rank links" has no frames.
FIRST_FRAMES = {
    "links": b"link",
    "ranks": None,
    "store unix": None,
    "store tcp": None,
    "shm": None,
    "tcp": None,
}


@pytest.mark.parametrize("kind", FIRST_FRAMES)
def test_a_peer_that_announces_more_than_its_stream_carries_is_cut_off(
    listening: ListenerProcess, kind: str
) -> None:
    """Before any of it has come: no memory is taken for it."""
    listening.reset_peak()
    before = listening.peak_bytes
    with ExitStack() as stack:
        peers = [
            stack.enter_context(prove_as_client(listening.connect(kind), listening.trust, "peer"))
            for _ in range(8)
        ]
        for peer in peers:
            peer.settimeout(WAIT_S)
            if (first := FIRST_FRAMES[kind]) is not None:
                send_frame(peer, first)
            peer.sendall((60 << 20).to_bytes(4, "little"))
        for peer in peers:
            with suppress(ConnectionError):
                while peer.recv(1 << 12):
                    pass
    assert listening.peak_bytes - before < SLACK_BYTES


def test_what_is_announced_takes_memory_as_it_comes(listening: ListenerProcess) -> None:
    """Also where the stream may carry that much."""
    listening.reset_peak()
    before = listening.peak_bytes
    with ExitStack() as stack:
        for _ in range(8):
            peer = prove_as_client(listening.connect("links"), listening.trust, "peer")
            stack.enter_context(peer)
            send_frame(peer, b"link")
            peer.sendall((2 << 20).to_bytes(4, "little") + bytes(1000))
        for _ in range(2):  # which the listener serves after it has read those
            prove_as_client(listening.connect("links"), listening.trust, "peer").close()
        assert listening.peak_bytes - before < 8 << 20


# Hello frames whose name is not UTF-8: a byte that begins nothing, half a character, a surrogate.
NAMES_OF_NOBODY = (b"\xff", b"\xc3(", b"\xed\xa0\x80")


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_no_text_closes_only_its_own_connection(listening: ListenerProcess, kind: str) -> None:
    """It comes before the proof, so that anybody may send it."""
    for name in NAMES_OF_NOBODY:
        with listening.connect(kind) as sock:
            head = b"\x94\xa5Hello" + bytes([0xA0 + len(name)])
            send_frame(sock, head + name + b"\xc4\x10" + bytes(16) + b"\xc2")
            assert sock.recv(1) == b""
    prove_as_client(listening.connect(kind), listening.trust, "peer").close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_secret_is_refused_by_both_sides(listening: ListenerProcess, kind: str) -> None:
    with listening.connect(kind) as sock, pytest.raises(ProofError, match="does not know"):
        prove_as_client(sock, Trust.draw(), "stranger")
