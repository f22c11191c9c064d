"""Links: what was sent before a close arrives, a reader that does not read is cut, a silent client too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from patience import WAIT_S

from kvtransfer.errors import TransferError
from kvtransfer.secret import draw_secret
from workers import links
from workers.links import FrameStream, LinkServer, open_stream

SECRET = draw_secret()


class Host:
    """A server whose streams a test holds."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[FrameStream] = asyncio.Queue()
        self.server = LinkServer(SECRET, self._hold, self._hold)
        self.received: list[bytes] = []
        self.ended = asyncio.Event()

    async def _hold(self, stream: FrameStream) -> None:
        self.streams.put_nowait(stream)
        while (frame := await stream.receive()) is not None:
            self.received.append(frame)
        self.ended.set()


@pytest_asyncio.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    await host.server.start("127.0.0.1")
    yield host
    await host.server.stop()


async def connected(host: Host) -> tuple[FrameStream, FrameStream]:
    client = await open_stream(f"127.0.0.1:{host.server.port}", "link", SECRET, "test")
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


async def test_a_reader_that_does_not_read_loses_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MAX_QUEUED_BYTES", 1000)

    async def never() -> bytes | None:
        await asyncio.Event().wait()
        return None

    stream = FrameStream("slow", never)
    writing = stream.outgoing()
    for _ in range(30):  # read as fast as they come: nothing piles up
        stream.send(bytes(100))
        assert len(await anext(writing)) == 100
    for _ in range(11):
        stream.send(bytes(100))
    assert stream.closed
    assert await stream.receive() is None
    assert [frame async for frame in writing] == []


async def test_a_wrong_secret_is_refused(host: Host) -> None:
    with pytest.raises(TransferError):
        await open_stream(f"127.0.0.1:{host.server.port}", "link", draw_secret(), "stranger")
    assert host.streams.empty()
