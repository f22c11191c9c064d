"""Text of other processes in logs and errors: one line, printable, bounded."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trust_files import TRUST

from kvtransfer.errors import MAX_NAME_CHARS, ProofError, WireError, shown
from kvtransfer.rpc.handshake import HANDSHAKE_CODEC, ClientHandshake, Proof, ServerHandshake, prove_as_client
from kvtransfer.rpc.stream import LinkServer
from kvtransfer.rpc.trust import Trust

NASTY = "peer\nERROR forged line\x1b[2J\u202e\u2028" + "x" * 2000


@given(st.text(), st.integers(3, 200))
@example("\U0010ffff" * 300, 200)
def test_what_is_shown_is_one_bounded_printable_line(text: str, max_chars: int) -> None:
    given = shown(text, max_chars)
    assert len(given) <= max_chars
    assert given.isprintable()
    if text.isprintable() and len(text) <= max_chars:
        assert given == text


def test_the_name_of_a_client_is_shown_and_proves_all_the_same() -> None:
    client, server = ClientHandshake(TRUST, NASTY), ServerHandshake(TRUST)
    client.finish(server.welcome(client.answer(server.challenge(client.hello()))))
    assert server.client_name == shown(NASTY)
    assert len(server.client_name) == MAX_NAME_CHARS


def test_the_error_of_a_stranger_shows_its_name_alike() -> None:
    client, server = ClientHandshake(Trust.draw(), NASTY), ServerHandshake(TRUST)
    server.challenge(client.hello())
    with pytest.raises(ProofError) as refused:
        server.welcome(HANDSHAKE_CODEC.encode(Proof(bytes(32))))
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2 * MAX_NAME_CHARS


def test_the_error_of_a_frame_shows_what_it_holds_alike() -> None:
    tag = NASTY.encode()[:200]
    with pytest.raises(WireError) as refused:
        HANDSHAKE_CODEC.decode(b"\x91\xd9" + bytes([len(tag)]) + tag)
    assert "Invalid value" in str(refused.value)
    assert str(refused.value).isprintable()


async def test_a_log_has_one_line_of_a_peer_with_a_nasty_name(caplog: pytest.LogCaptureFixture) -> None:
    async def nobody(stream: object) -> None:
        raise AssertionError("no link was opened")

    server = LinkServer(TRUST, nobody, nobody)
    await server.start("127.0.0.1")
    with caplog.at_level(logging.WARNING), socket.create_connection(("127.0.0.1", server.port)) as sock:
        await asyncio.to_thread(prove_as_client, sock, TRUST, NASTY)
        sock.sendall((1 << 20).to_bytes(4, "little"))
        assert await asyncio.to_thread(sock.recv, 1) == b""
    await server.stop()
    (line,) = [it.getMessage() for it in caplog.records if "announced a frame" in it.getMessage()]
    assert line.isprintable()
    assert "forged line" in line
