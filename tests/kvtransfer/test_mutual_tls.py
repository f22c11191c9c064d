"""Certificates on both sides: who is refused, by both kinds of sockets, and why; renewal; full duplex."""

from __future__ import annotations

import asyncio
import pickle
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from inner_tls import TLS_FILES, certified
from msgspec.structs import replace
from patience import WAIT_S
from trust_files import FILES

from kvtransfer.errors import PeerGoneError, ProofError, TransferError, TrustError
from kvtransfer.rpc.handshake import (
    prove_as_client,
    prove_as_server,
    receive_frame,
    secure,
    send_frame,
    wrapped,
)
from kvtransfer.rpc.listener import shut_down
from kvtransfer.rpc.mutual_tls import TlsContexts, TlsFiles
from kvtransfer.rpc.stream import FrameStream, LinkServer, open_link
from kvtransfer.rpc.tls_socket import TlsSocket
from kvtransfer.rpc.trust import Trust, TrustFiles

OTHER = Authority("outside")


# ------------------------------------------------------------------------------------------- refusals
#
# A server and a client, of which one has what the other refuses: the certificate of another authority, an
# expired one, or no TLS at all.


@pytest.fixture
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> TrustFiles:
    """The files of the side that is refused."""
    kinds: dict[str, Callable[[], TrustFiles]] = {
        "another authority": lambda: certified(tmp_path, signed_by=OTHER),
        "expired": lambda: certified(tmp_path, num_days=-0.5),
        "bare": lambda: FILES,
    }
    return kinds[request.param]()


# What the side says that refuses, and what the side says that is refused.
REFUSED = "inner_tls.cert_file here"
REASONS = [
    ("another authority", "unable to get local issuer certificate.* inner_tls.cert_file", REFUSED),
    ("expired", "certificate has expired.* inner_tls.cert_file", REFUSED),
    ("bare", "does not speak TLS and this side does.* inner_tls", "this side does not.* inner_tls"),
]


async def link_errors(server: Trust, client: Trust, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """What a client's link to a server fails with, and what the server logs."""

    async def hold(stream: FrameStream) -> None:
        await stream.receive()

    links = LinkServer(server, hold, hold)
    port = await links.start("127.0.0.1")
    try:
        with pytest.raises(TransferError) as refused:
            await open_link(f"127.0.0.1:{port}", "link", client, "test")
        async with asyncio.timeout(WAIT_S):
            while not caplog.messages:
                await asyncio.sleep(0.005)
    finally:
        await links.stop()
    return str(refused.value), caplog.text


@pytest.mark.parametrize(("odd", "reason", "own"), REASONS, indirect=["odd"], ids=[it[0] for it in REASONS])
@pytest.mark.parametrize("is_server_odd", [False, True])
async def test_a_link_to_or_from_whom_is_not_certified_is_refused(
    odd: TrustFiles, reason: str, own: str, is_server_odd: bool, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Trust.read(TLS_FILES), Trust.read(odd)
    server, client = (bad, good) if is_server_odd else (good, bad)
    said, logged = await link_errors(server, client, caplog)
    refuses, refused = (said, logged) if is_server_odd else (logged, said)
    assert_matches(reason, refuses)
    assert_matches(own, refused)


@pytest.mark.parametrize(("odd", "reason", "own"), REASONS, indirect=["odd"], ids=[it[0] for it in REASONS])
@pytest.mark.parametrize("is_server_odd", [False, True])
def test_a_blocking_socket_refuses_the_same(
    odd: TrustFiles, reason: str, own: str, is_server_odd: bool
) -> None:
    good, bad = Trust.read(TLS_FILES), Trust.read(odd)
    server, client = (bad, good) if is_server_odd else (good, bad)
    server_error, client_error = blocking_errors(server, client)
    refuses, refused = (client_error, server_error) if is_server_odd else (server_error, client_error)
    assert_matches(reason, str(refuses))
    assert_matches(own, str(refused))


def blocking_errors(server: Trust, client: Trust) -> tuple[TransferError, TransferError]:
    failed: list[TransferError] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            sock, _ = listening.accept()
            try:
                with secured_server(sock, server):
                    pass
            except TransferError as error:
                failed.append(error)

        serving = threading.Thread(target=serve)
        serving.start()
        with (
            socket.create_connection(listening.getsockname()) as sock,
            pytest.raises(TransferError) as refused,
        ):
            prove_as_client(sock, client, "test")
        serving.join(WAIT_S)
    assert isinstance(refused.value, ProofError | PeerGoneError)
    return failed[0], refused.value


def secured_server(sock: socket.socket, trust: Trust) -> socket.socket:
    with ExitStack() as failed:
        failed.enter_context(sock)
        name = prove_as_server(sock, trust)
        taken = failed.enter_context(wrapped(sock, trust.server_tls(sock)))
        secure(taken, name)
        taken.settimeout(None)
        failed.pop_all()
    return taken


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        raise ValueError(text)


async def test_a_side_without_a_certificate_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knows the secret and the authority, and has no key."""
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname = False
    without.load_verify_locations(TLS_FILES.tls.ca_file if TLS_FILES.tls else "")
    monkeypatch.setattr(TlsContexts, "client", without)
    trust = Trust.read(TLS_FILES)
    said, logged = await link_errors(trust, trust, caplog)
    assert_matches("certificate required|inner_tls.cert_file here", said)
    assert_matches("'test' shows no certificate; look at inner_tls.cert_file there|test shows no", logged)


# ------------------------------------------------------------------------------------------- renewal


async def test_certificates_are_renewed_under_load_without_a_failed_link(tmp_path: Path) -> None:
    """Links open all the time, while both sides' certificates are replaced, file by file, by ones of a new
    authority: first both authorities are accepted, then the certificates change, then the old one goes."""
    first, second = Authority("first"), Authority("second")
    files = [certified(tmp_path / side, signed_by=first, accepts=first) for side in ("server", "client")]
    server, client = map(Trust.read, files)

    async def echo(stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            stream.send(frame)

    links = LinkServer(server, echo, echo)
    port = await links.start("127.0.0.1")
    stop = asyncio.Event()
    num_opened = 0

    async def use() -> None:
        nonlocal num_opened
        while not stop.is_set():
            link = await open_link(f"127.0.0.1:{port}", "link", client, "test")
            link.send(b"hello")
            assert await link.receive() == b"hello"
            link.close()
            await link.wait_closed()
            num_opened += 1

    async def opened(num: int) -> None:
        wanted = num_opened + num
        while num_opened < wanted and not any(user.done() for user in users):
            await asyncio.sleep(0.001)

    users = [asyncio.create_task(use()) for _ in range(3)]
    kept = await open_link(f"127.0.0.1:{port}", "link", client, "kept")
    both = b"".join(each.write(tmp_path).read_bytes() for each in (first, second))
    try:
        async with asyncio.timeout(WAIT_S):
            for folder in (tmp_path / "server", tmp_path / "client"):
                (folder / "ca.crt").write_bytes(both)
                await opened(5)
            for folder in (tmp_path / "server", tmp_path / "client"):
                second.issue(folder, "process")
                await opened(5)
            for folder in (tmp_path / "server", tmp_path / "client"):
                second.write(folder)
                await opened(5)
            kept.send(b"still there")
            assert await kept.receive() == b"still there"
    finally:
        stop.set()
        await asyncio.gather(*users)
        kept.close()
        await kept.wait_closed()
        await links.stop()
    assert num_opened >= 30
    late = Trust.read(certified(tmp_path / "late", signed_by=first, accepts=second))
    assert_matches("unable to get local issuer certificate", str(blocking_errors(server, late)[0]))


def test_a_certificate_that_does_not_fit_its_key_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = certified(tmp_path / "a")
    assert files.tls is not None
    contexts = TlsContexts(files.tls)
    before = contexts.client
    other = certified(tmp_path / "b")
    assert other.tls is not None
    Path(files.tls.cert_file).write_bytes(Path(other.tls.cert_file).read_bytes())
    assert contexts.client is before
    assert contexts.client is before
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    assert "inner_tls.key_file" in caplog.text
    Path(files.tls.key_file).write_bytes(Path(other.tls.key_file).read_bytes())
    assert contexts.client is not before


@pytest.mark.parametrize("field", ["cert_file", "key_file", "ca_file"])
@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff" * 100])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, field: str, content: bytes | None) -> None:
    files = certified(tmp_path)
    assert files.tls is not None
    path = tmp_path / "odd"
    if content is not None:
        path.write_bytes(content)
    odd: TlsFiles = replace(files.tls, **{field: str(path)})
    with pytest.raises(TrustError, match=rf"inner_tls\.{field}: {path}"):
        Trust.read(replace(files, tls=odd))


def test_a_trust_stays_in_its_process(tmp_path: Path) -> None:
    trust = Trust.read(FILES)
    with pytest.raises(TypeError, match="TrustFiles"):
        pickle.dumps(trust)
    assert trust.secret.decode() not in f"{trust!r} {trust} {vars(trust).keys()}"
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(TrustError, match="secret_file: needs at least 16 bytes, has 5"):
        Trust.read(TrustFiles(str(tmp_path / "short")))
    with pytest.raises(TrustError, match=r"secret_file: .*nowhere.*; every host .* name it in secret_file"):
        Trust.read(TrustFiles(str(tmp_path / "nowhere")))


# ------------------------------------------------------------------------------------------ sockets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection with TLS."""
    trust = Trust.read(TLS_FILES)
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(
            target=lambda: accepted.append(secured_server(listening.accept()[0], trust))
        )
        serving.start()
        client = prove_as_client(socket.create_connection(listening.getsockname()), trust, "test")
        serving.join(WAIT_S)
    with closing(client), closing(accepted[0]):
        yield client, accepted[0]


def test_both_ends_send_and_receive_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    """Four threads on two sockets, with frames that fill every buffer."""
    assert all(isinstance(end, TlsSocket) for end in pair)
    sizes = [1, 100, 20_000, 3 << 20, 7] * 4
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]

    def send(end: socket.socket) -> None:
        for frame in frames:
            send_frame(end, frame)

    def receive(end: socket.socket) -> list[bytes]:
        return [receive_frame(end, max(sizes)) for _ in frames]

    for end in pair:
        end.settimeout(WAIT_S)
    with ThreadPoolExecutor(4) as threads:
        sending = [threads.submit(send, end) for end in pair]
        receiving = [threads.submit(receive, end) for end in pair]
        running: list[Future[Any]] = [*sending, *receiving]
        _, waiting = wait(running, return_when=FIRST_EXCEPTION)
        if waiting:  # one has failed: without it the others would wait for the limit
            for end in pair:
                shut_down(end)
    assert not [error for future in running if (error := future.exception())]
    assert [future.result() for future in receiving] == [frames, frames]


def test_a_shut_down_ends_who_receives_and_never_gives_out_what_is_encrypted(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    server.sendall(bytes(10_000))
    received = bytearray()
    ended = threading.Event()

    def receive() -> None:
        buffer = bytearray(100)
        try:
            while count := client.recv_into(buffer):
                received.extend(buffer[:count])
        except OSError:
            pass
        ended.set()

    receiving = threading.Thread(target=receive)
    shut_down(client)
    receiving.start()
    assert ended.wait(WAIT_S)
    receiving.join()
    assert bytes(received) == bytes(len(received))


def test_a_wait_is_bounded_by_the_timeout(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    client.settimeout(0.05)
    with pytest.raises(PeerGoneError, match="timed out"):
        receive_frame(client)


def test_what_goes_without_a_wait_goes_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    """As the transport `tcp` sends and receives: views of any size, tried again until they are through."""
    client, server = pair
    data = bytes(range(256)) * 40_000
    views = [memoryview(data)[start : start + 70_001] for start in range(0, len(data), 70_001)]
    received = bytearray(len(data))
    into = [memoryview(received)[start : start + 50_003] for start in range(0, len(data), 50_003)]
    with pytest.raises(BlockingIOError):
        server.recvmsg_into(into, 0, socket.MSG_DONTWAIT)
    sends = receives = 0
    while into:
        if views:
            try:
                consume(views, client.sendmsg(views, [], socket.MSG_DONTWAIT))
                sends += 1
            except BlockingIOError:
                pass
        try:
            consume(into, server.recvmsg_into(into, 0, socket.MSG_DONTWAIT)[0])
            receives += 1
        except BlockingIOError:
            pass
    assert bytes(received) == data
    client.close()
    assert server.recvmsg_into([memoryview(bytearray(1))], 0, socket.MSG_DONTWAIT)[0] == 0


def consume(views: list[memoryview], count: int) -> None:
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if count:
        views[0] = views[0][count:]
