"""Links: what was sent before a close arrives, a reader that does not read is cut, a silent client too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from engine_fakes import LinkEnd
from hypothesis import given, settings
from hypothesis import strategies as st
from inner_tls import TLS_FILES
from patience import WAIT_S
from trust_files import FILES

from kvtransfer.codec import MAX_FRAME_BYTES
from kvtransfer.errors import TransferError
from kvtransfer.rpc import stream
from kvtransfer.rpc.handshake import prove_as_client, send_frame
from kvtransfer.rpc.stream import FrameStream, LinkServer, open_link
from kvtransfer.rpc.trust import Trust


class Host:
    """A server whose streams a test holds."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self.streams: asyncio.Queue[FrameStream] = asyncio.Queue()
        self.server = LinkServer(trust, self._hold, self._hold)
        self.clients: list[FrameStream] = []
        self.received: list[bytes] = []
        self.ended = asyncio.Event()

    async def _hold(self, stream: FrameStream) -> None:
        self.streams.put_nowait(stream)
        while (frame := await stream.receive()) is not None:
            self.received.append(frame)
        self.ended.set()


@pytest_asyncio.fixture(params=[FILES, TLS_FILES], ids=["bare", "TLS"])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    host = Host(Trust.read(request.param))
    await host.server.start("127.0.0.1")
    yield host
    for client in host.clients:
        client.abort()
        await client.wait_closed()
    await host.server.stop()


async def connected(host: Host) -> tuple[FrameStream, FrameStream]:
    client = await open_link(f"127.0.0.1:{host.server.port}", "link", host.trust, "test")
    host.clients.append(client)
    return client, await host.streams.get()


async def drained(stream: FrameStream) -> list[bytes]:
    frames = []
    async with asyncio.timeout(WAIT_S):
        while (frame := await stream.receive()) is not None:
            frames.append(frame)
    return frames


async def test_what_the_server_sent_before_it_closed_arrives(host: Host) -> None:
    client, server = await connected(host)
    frames = [bytes([number]) * 1000 for number in range(50)]
    for frame in frames:
        server.send(frame)
    server.close()
    assert await drained(client) == frames


async def test_what_a_client_sent_before_it_closed_arrives_although_it_was_reading(host: Host) -> None:
    client, _ = await connected(host)
    reading = asyncio.create_task(client.receive())
    frames = [bytes([number]) * 1000 for number in range(50)]
    client.send(frames[0])
    await asyncio.wait([reading], timeout=0.05)
    for frame in frames[1:]:
        client.send(frame)
    client.close()
    assert await reading is None
    async with asyncio.timeout(WAIT_S):
        await host.ended.wait()
    assert host.received == frames


async def test_stopping_the_server_tells_what_was_sent(host: Host) -> None:
    client, server = await connected(host)
    server.send(b"the last word")
    server.close()
    await host.server.stop()
    assert await drained(client) == [b"the last word"]


async def test_the_host_of_a_process_that_reads_nothing_acknowledges(host: Host) -> None:
    """As the kernel does for a stopped process, also when its buffer is full."""
    client, server = await connected(host)
    assert server.is_acknowledged
    for _ in range(40):
        server.send(bytes(1 << 20))
    server.ping()
    async with asyncio.timeout(WAIT_S):
        while not (server.num_unsent_bytes and server.is_acknowledged):
            await asyncio.sleep(0.01)
        for _ in range(40):
            assert await client.receive() == bytes(1 << 20)
    client.abort()
    await client.wait_closed()
    assert not client.is_acknowledged


async def test_a_reader_that_does_not_read_loses_the_stream(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_MAX_QUEUED_BYTES", 1 << 20)
    client, server = await connected(host)
    for _ in range(30):  # read as fast as they come: nothing piles up
        server.send(bytes(1 << 20))
        assert await client.receive() == bytes(1 << 20)
    for _ in range(100):
        server.send(bytes(1 << 20))
    assert server.closed
    assert await server.receive() is None
    assert len(await drained(client)) < 100


async def test_a_wrong_secret_is_refused(host: Host) -> None:
    with pytest.raises(TransferError):
        await open_link(f"127.0.0.1:{host.server.port}", "link", Trust.draw(), "stranger")
    assert host.streams.empty()


async def stranger_that_is_trusted(host: Host) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", host.server.port))
    return await asyncio.to_thread(prove_as_client, sock, host.trust, "test")


async def test_a_side_that_falls_silent_is_left(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stopped process is: its kernel still acknowledges what it is sent."""
    monkeypatch.setattr(stream, "_PING_S", 0.02)
    with await stranger_that_is_trusted(host) as sock:
        send_frame(sock, b"link")
        async with asyncio.timeout(20):
            await host.ended.wait()


async def test_an_idle_link_stays_open(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides let the other one hear of them."""
    monkeypatch.setattr(stream, "_PING_S", 0.02)
    client, server = await connected(host)
    await asyncio.wait([asyncio.create_task(host.ended.wait())], timeout=20 * 0.02)
    assert [client.closed, server.closed, host.ended.is_set()] == [False] * 3
    server.send(b"still there")
    assert await client.receive() == b"still there"


async def test_a_frame_beyond_the_limit_ends_its_stream_only(host: Host) -> None:
    client, _ = await connected(host)
    with await stranger_that_is_trusted(host) as sock:
        send_frame(sock, b"peer")
        await host.streams.get()
        sock.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        async with asyncio.timeout(20):
            await host.ended.wait()
    client.send(bytes(MAX_FRAME_BYTES + 1))
    assert client.closed, "nobody could read it"


async def test_a_link_of_an_unknown_kind_is_closed(host: Host) -> None:
    with await stranger_that_is_trusted(host) as sock:
        send_frame(sock, b"lunch")
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(sock.recv, 1) == b""
    assert host.streams.empty()


@pytest.mark.parametrize("size", [1, 100_000, MAX_FRAME_BYTES])
async def test_frames_of_any_size_arrive_whole(host: Host, size: int) -> None:
    client, server = await connected(host)
    frame = bytes(range(256)) * (size // 256) + bytes(size % 256)
    client.send(frame)
    client.send(b"after it")
    client.close()
    async with asyncio.timeout(60):
        await host.ended.wait()
    assert host.received == [frame, b"after it"]
    assert server.closed


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 10) | st.integers(65_500, 65_600) | st.integers(0, 200_000), max_size=8),
    cuts=st.lists(st.integers(1, 70_000), min_size=1, max_size=8),
)
def test_frames_arrive_whole_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    frames = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    arriving = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)

    async def receive_all() -> list[bytes]:
        end = LinkEnd("peer")
        end.arrive(arriving, [*cuts, 50_000])
        end.feed(None)
        return await drained(end.stream)

    # An empty frame is no message: an idle side sends it.
    assert asyncio.run(receive_all()) == [frame for frame in frames if frame]
