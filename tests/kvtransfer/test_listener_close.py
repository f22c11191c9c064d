"""A listener that closes while a connection comes: whichever is first, the connection is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Coroutine

from trust_files import TRUST

from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.listener import ProvenListener


async def _refuse(sock: socket.socket, name: str) -> None:
    raise AssertionError(f"{name} has proven nothing")


def _spawn(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)


async def test_a_connection_that_comes_as_the_listener_closes_is_closed_too() -> None:
    """Both happen in one turn of the loop; a socket left open is a ResourceWarning, hence an error."""
    loop = asyncio.get_running_loop()
    for _ in range(20):
        accepting = socket.create_server(("127.0.0.1", 0))
        address = accepting.getsockname()
        listener = ProvenListener(accepting, TRUST, _refuse, _spawn, SystemClock(), "test")
        await asyncio.sleep(0)  # it waits for connections
        signal, closing = socket.socketpair()
        with signal, closing, socket.create_connection(address) as client:
            client.setblocking(False)
            closed = asyncio.Event()

            def close(listener: ProvenListener = listener, closed: asyncio.Event = closed) -> None:
                listener.close()
                closed.set()

            loop.add_reader(closing, close)
            signal.send(b"x")
            await closed.wait()
            loop.remove_reader(closing)
            with contextlib.suppress(ConnectionResetError):  # it was not accepted at all
                assert await asyncio.wait_for(loop.sock_recv(client, 1), 30) == b""
    gc.collect()
