"""Frames on asyncio streams, under the event loop of tests and under that of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from kvtransfer.errors import PeerGoneError
from kvtransfer.rpc.framing import read_frame, write_frame


async def _write_to_a_closed_connection() -> list[bytes]:
    """What the other side has read when its connection ended."""
    received: list[bytes] = []
    ended = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                received.append(await read_frame(reader))
        except PeerGoneError:
            ended.set()
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    write_frame(writer, b"before")
    writer.close()
    await writer.wait_closed()
    write_frame(writer, b"after")
    await ended.wait()
    server.close()
    await server.wait_closed()
    return received


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_written_to_a_connection_that_has_closed(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_write_to_a_closed_connection()) == [b"before"]
