"""The listener behind every port between processes: a connection is served once it has proven the secret.

A connection that has not proven the secret costs one of `MAX_UNPROVEN` slots, a socket and one frame of the
proof. A newcomer that finds all slots taken gets that of the oldest, which is closed: strangers who hold
connections open do not keep others out, and a peer that knows the secret needs its slot for milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.tasks import Spawn, SupervisedTasks
from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.rpc.handshake import prove_as_async_server
from kvtransfer.rpc.trust import Trust

MAX_UNPROVEN = 64
_ACCEPT_PAUSE_S = 0.1

_log = logging.getLogger("tandem.listener")

# Serves a proven connection (the non-blocking socket, the client's name), which is closed when it returns;
# to keep the connection, detach the socket.
Serve = Callable[[socket.socket, str], Awaitable[None]]


class ProvenListener:
    """Accepts connections on a listening socket, which it owns, and passes the proven ones to `serve`.

    `spawn(work, name)` starts a task and watches over its errors. A `TransferError` or an `OSError` of
    `serve` closes its connection only.
    """

    def __init__(
        self,
        sock: socket.socket,
        trust: Trust,
        serve: Serve,
        spawn: Spawn,
        clock: Clock,
        label: str,
    ) -> None:
        """Listen from now on, on the running loop. `label` names the listener in logs and tasks."""
        self._sock = sock
        self._trust = trust
        self._serve = serve
        self._spawn = spawn
        self._clock = clock
        self._label = label
        self._unproven: dict[socket.socket, None] = {}
        sock.setblocking(False)
        self._accepting = spawn(self._accept(), f"{label}-accept")
        self._accepting.add_done_callback(functools.partial(_close, sock))

    def close(self) -> None:
        """Accept no more connections, and end those that have not proven the secret."""
        self._accepting.cancel()
        for sock in list(self._unproven):
            self._evict(sock)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                await self._readable()
                continue
            except OSError as error:  # no descriptors left, or the connection is gone already
                _log.warning("%s: accept failed: %s", self._label, error)
                await self._clock.sleep(_ACCEPT_PAUSE_S)
                continue
            sock.setblocking(False)
            if len(self._unproven) >= MAX_UNPROVEN:
                self._evict(next(iter(self._unproven)))
            self._unproven[sock] = None
            running = self._spawn(self._run(sock), f"{self._label}-connection")
            running.add_done_callback(functools.partial(_close, sock))
            await _next_turn()  # a flood must not keep the loop from closing what was evicted

    async def _readable(self) -> None:
        """Wait for a connection. `loop.sock_accept` would lose one that comes as the wait is cancelled:
        it is never closed, and its client waits for the proof in vain."""
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self._sock, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._sock)

    async def _run(self, sock: socket.socket) -> None:
        try:
            try:
                name = await prove_as_async_server(sock, self._trust)
                if sock not in self._unproven:
                    raise PeerGoneError("it was evicted for newer connections before it was proven")
            finally:
                self._unproven.pop(sock, None)
            await self._serve(sock, name)
        except PeerGoneError as error:
            _log.debug("%s: a connection ended: %s", self._label, error)
        except (TransferError, OSError) as error:  # TimeoutError is an OSError
            _log.warning("%s: a connection was closed: %s", self._label, error or "not proven in time")

    def _evict(self, sock: socket.socket) -> None:
        """End a connection whose task then closes it."""
        del self._unproven[sock]
        shut_down(sock)


class ListeningThread:
    """A `ProvenListener` on a thread and a loop of its own, for ranks, whose threads block.

    `take(sock, name)` is called on that thread with each proven connection, a blocking socket that it owns
    from then on; it must not block.
    """

    def __init__(
        self, sock: socket.socket, trust: Trust, take: Callable[[socket.socket, str], None], label: str
    ) -> None:
        self._sock = sock
        self._trust = trust
        self._take = take
        self._label = label
        self._tasks = SupervisedTasks(self._broke)
        self._closing = asyncio.Event()
        self._error: BaseException | None = None
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._listen, name=f"{label}-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; return when no further connection is handed out."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this was called before
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _listen(self) -> None:
        with self._runner:
            self._runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        listener = ProvenListener(
            self._sock, self._trust, self._serve, self._tasks.spawn, SystemClock(), self._label
        )
        await self._closing.wait()
        listener.close()
        await self._tasks.wait()
        if self._error is not None:
            raise self._error  # for `threading.excepthook`

    async def _serve(self, sock: socket.socket, name: str) -> None:
        if self._closing.is_set():
            return
        taken = socket.socket(fileno=sock.detach())
        taken.setblocking(True)
        self._take(taken, name)

    def _broke(self, error: BaseException) -> None:
        self._error = self._error or error
        self._closing.set()


def shut_down(sock: socket.socket) -> None:
    """Wake every thread that waits for the socket, which ends for both sides."""
    with contextlib.suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)


def _close(sock: socket.socket, _: asyncio.Task[None]) -> None:
    """Close the resources of a task, also when it was cancelled before it began."""
    sock.close()


def _next_turn() -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(turn.set_result, None)
    return turn
