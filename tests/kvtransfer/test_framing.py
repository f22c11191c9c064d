"""Frames on a pipe, and framed streams under the event loop of tests and under that of the service."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable

import pytest
import uvloop

from kvtransfer.codec import framed, read_frame
from kvtransfer.errors import PeerGoneError
from kvtransfer.rpc.stream import MOST_AT_ONCE, frame_stream


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


async def _close_a_connection_that_was_reset() -> None:
    """The reset has arrived, but the event loop has not had a turn to see it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setblocking(False)
    stream = await frame_stream(ours, "stream")
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    stream.close()
    assert await stream.receive() is None
    await stream.wait_closed()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_was_reset_is_closed_as_any_other(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_close_a_connection_that_was_reset())


@pytest.mark.parametrize("buffering", [0, -1])
def test_frames_of_a_pipe_are_read_to_its_end(buffering: int) -> None:
    """Longer ones than an unbuffered pipe gives at once, and empty ones."""
    frames = [b"first", b"", bytes(range(256)) * 1024]
    ours, theirs = os.pipe()

    def send() -> None:
        with os.fdopen(theirs, "wb") as writer:
            writer.write(b"".join(map(framed, frames)))

    sending = threading.Thread(target=send)
    sending.start()
    with os.fdopen(ours, "rb", buffering) as reader:
        assert [read_frame(reader) for _ in range(4)] == [*frames, None]
    sending.join()


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 8])
def test_a_frame_that_is_cut_short_is_an_error(num_bytes: int) -> None:
    with pytest.raises(PeerGoneError, match="before the end of a frame"):
        read_frame(io.BytesIO(framed(b"frame")[:num_bytes]))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_receiver_of_many_frames_lets_others_have_their_turns(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """They came together, as after a time in which this process did not run."""

    async def receive() -> tuple[list[bytes], list[int]]:
        ours, theirs = socket.socketpair()
        writer, reader = await frame_stream(ours, "writer"), await frame_stream(theirs, "reader")
        received: list[bytes] = []
        nums_received: list[int] = []

        async def other() -> None:
            while len(received) < 50:
                nums_received.append(len(received))
                await asyncio.sleep(0)

        writer.send(b"wait")
        await reader.receive()
        for number in range(50):
            writer.send(b"%d" % number)
        while reader.num_unread < 50:
            await asyncio.sleep(0)
        watching = asyncio.create_task(other())
        await asyncio.sleep(0)
        while len(received) < 50:
            frame = await reader.receive()
            assert frame is not None
            received.append(frame)
        await watching
        for stream in (writer, reader):
            stream.close()
            await stream.wait_closed()
        return received, nums_received

    with asyncio.Runner(loop_factory=new_loop) as runner:
        received, nums_received = runner.run(receive())
    assert received == [b"%d" % number for number in range(50)]
    steps = [after - before for before, after in itertools.pairwise(nums_received)]
    assert max(steps) <= MOST_AT_ONCE
