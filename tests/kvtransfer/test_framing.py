"""Framed streams under the event loop of tests and under that of the service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from kvtransfer.rpc.stream import frame_stream


async def _send_on_a_closed_connection() -> list[bytes]:
    """What the other side has read when its connection ended."""
    ours, theirs = socket.socketpair()
    writer, reader = await frame_stream(ours, "writer"), await frame_stream(theirs, "reader")
    writer.send(b"before")
    writer.close()
    writer.send(b"closing")
    received = []
    while (frame := await reader.receive()) is not None:
        received.append(frame)
    await writer.wait_closed()
    writer.send(b"after")
    await reader.wait_closed()
    return received


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_written_to_a_connection_that_has_closed(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_send_on_a_closed_connection()) == [b"before"]
