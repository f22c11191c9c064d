"""A process of its own for work on strangers' input, with bounded memory and time, that may be killed.

`BoundedProcess` is the parent's side; `serve` is the life of the child, a module that is run with the number
of its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from kvtransfer.codec import MAX_FRAME_BYTES
from kvtransfer.errors import PeerGoneError
from kvtransfer.rpc.handshake import receive_frame, send_frame
from kvtransfer.rpc.stream import FrameStream, frame_stream

_START_TIMEOUT_S = 30.0


class BoundsBrokenError(Exception):
    """The child took too much time or memory, or could not be started, and was ended."""


class SlowProcessError(BoundsBrokenError):
    """The child could not be started, or did not end in time: it might, on a host with less to do."""


class PartyTurns:
    """Lets one of each party pass at a time. Whoever waits behind it, first come, first served, is so delayed
    by one of each other party, whatever these have waiting."""

    def __init__(self) -> None:
        self._party_to_lock: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn_of(self, party: str) -> AsyncIterator[None]:
        """Hold the party's turn."""
        lock = self._party_to_lock.get(party)
        if lock is None:
            lock = self._party_to_lock[party] = asyncio.Lock()
        async with lock:
            yield


class BoundedProcess:
    """A child, started when first needed and replaced when it breaks a bound; one order at a time."""

    def __init__(self, module: str, *arguments: str, timeout_s: float) -> None:
        """`module` calls `serve`; an order may take `timeout_s`."""
        self._command = (sys.executable, "-m", module)
        self._arguments = arguments
        self.timeout_s = timeout_s
        self._parties = PartyTurns()
        self._turn = asyncio.Lock()
        self._child: _Child | None = None

    async def exchange(self, order: bytes, party: str = "") -> bytes:
        """Return the child's answer to an order of a party; raise `BoundsBrokenError` where there is none.
        Parties take turns."""
        async with self._parties.turn_of(party), self._turn:
            child = await self._ready_child()
            self._child = None  # until the answer is there: an interrupted child is not used again
            try:
                async with asyncio.timeout(self.timeout_s):
                    child.stream.send(order)
                    answer = await child.stream.next_frame()
            except TimeoutError:
                raise SlowProcessError(f"it did not end within {self.timeout_s:g} s") from None
            except (PeerGoneError, OSError):
                what = "it broke the process that works on it (too much memory or time)"
                raise BoundsBrokenError(what) from None
            else:
                self._child = child
            finally:
                if self._child is None:
                    await child.kill()
            return answer

    async def start(self) -> None:
        """Start the child ahead of the first order."""
        async with self._turn:
            await self._ready_child()

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

    async def _ready_child(self) -> _Child:
        if self._child is None:
            self._child = await _Child.start((*self._command, *self._arguments))
        return self._child


class _Child:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, stream: FrameStream) -> None:
        self._process = process
        self.stream = stream

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failed:
            stream = await frame_stream(ours, "bounded process")
            failed.callback(stream.abort)
            process = await asyncio.create_subprocess_exec(
                *(*command, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
                env={},
            )
            failed.pop_all()
        child = cls(process, stream)  # nothing is awaited before `try`: it is ended in any case
        is_ready = False
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await child.stream.next_frame()
            is_ready = True
        except (TimeoutError, PeerGoneError) as error:
            raise SlowProcessError("the process that works on it did not start") from error
        finally:
            if not is_ready:  # it may be that nobody waits for it any more
                await child.kill()
        return child

    async def kill(self) -> None:
        self.stream.abort()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def serve(work: Callable[[bytes], bytes], *, max_memory_bytes: int, max_cpu_s: int) -> None:
    """Answer orders until the parent closes the socket, whose number is the last argument of the command."""
    sock = socket.socket(fileno=int(sys.argv[-1]))
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    send_frame(sock, b"ready")
    while True:
        try:
            order = receive_frame(sock, MAX_FRAME_BYTES)
        except PeerGoneError:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used_s = math.ceil(usage.ru_utime + usage.ru_stime)  # the limit counts whole seconds
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + max_cpu_s, resource.RLIM_INFINITY))
        send_frame(sock, work(order))
