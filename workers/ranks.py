"""The brain's side of its ranks: start them together, send plans and orders, receive reports, notice their
death.

A rank connects back to the brain over TCP and proves the secret; one framed connection carries `RankDown`
and `RankUp`. Who starts the process is a `RankLauncher`: Ray actors in the cluster, plain processes in tests
and benchmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from msgspec.structs import replace

from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.framing import prove_as_async_server, read_frame, write_frame
from kvtransfer.wire import MAX_FRAME_BYTES
from workers.errors import RankDiedError, WorkerError
from workers.messages import (
    RANK_DOWN_CODEC,
    RANK_SPEC_CODEC,
    RANK_UP_CODEC,
    FormGroup,
    RankDown,
    RankFailed,
    RankJoined,
    RankReady,
    RankSpec,
    RankUp,
    Shutdown,
)

LEAVE_S = 1.0
_CULPRIT_S = 0.5
"""How long the end of a connection waits for the news of who ended it."""

PlanStages = Callable[[Sequence[RankJoined]], tuple[tuple[int, int], ...]]
"""From what the ranks told when they joined, in rank order, to the layers [start, end) of each stage."""

_log = logging.getLogger("tandem.ranks")


class RankHandle(Protocol):
    """A started rank process."""

    async def wait(self) -> str:
        """Return when the process has ended, with the reason."""

    def kill(self) -> None:
        """End it at once, also when it is stopped or hangs in a kernel."""


class RankLauncher(Protocol):
    """Starts rank processes."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        """Start one rank; it will connect to `spec.brain_address`."""


class ProcessHandle:
    """A rank as a child process of the brain."""

    def __init__(self, process: asyncio.subprocess.Process, rank: int) -> None:
        self._process = process
        self._rank = rank

    async def wait(self) -> str:
        status = await self._process.wait()
        return f"rank {self._rank}, process {self._process.pid}, ended with status {status}"

    def kill(self) -> None:
        if self._process.returncode is None:  # after its end the number may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


class ProcessLauncher:
    """Starts ranks as child processes on this host."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec.num_threads)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.engine.rank", stdin=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        frame = RANK_SPEC_CODEC.encode(spec)
        process.stdin.write(struct.pack("<I", len(frame)) + frame)
        process.stdin.close()
        return ProcessHandle(process, spec.rank)


class RankGroup:
    """All ranks of one replica. `on_message(rank, message)` and `on_died(reason)` are called on the loop.

    A rank that dies takes its neighbours' connections with it, and they may say so first. So a report of
    a lost peer or of a closed channel waits `_CULPRIT_S` for a reason of its own from some rank.
    """

    def __init__(
        self,
        secret: bytes,
        launcher: RankLauncher,
        on_message: Callable[[int, RankUp], None],
        on_died: Callable[[str], None],
    ) -> None:
        self._secret = secret
        self._launcher = launcher
        self._on_message = on_message
        self._on_died = on_died
        self._num_ranks = 0
        self._joined: dict[int, RankJoined] = {}
        self._ready: dict[int, RankReady] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._handles: list[RankHandle] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel_ends: dict[int, asyncio.Event] = {}
        self._victims: set[int] = set()
        self._death = ""
        self._progress = asyncio.Event()
        self._serving = False
        self._killed = False
        self._stopping = False

    async def start(self, specs: Sequence[RankSpec], host: str, plan_stages: PlanStages) -> list[RankReady]:
        """Launch the ranks (their `brain_address` is filled in here), let `plan_stages` decide the layers of
        each stage when all have joined, and wait until all are ready.

        Raises `RankDiedError` with the rank's own reason when one cannot serve, and whatever `plan_stages`
        raises; then all ranks are killed.
        """
        self._num_ranks = len(specs)
        self._channel_ends = {spec.rank: asyncio.Event() for spec in specs}
        self._server = await asyncio.start_server(self._accept, host, 0)
        address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        try:
            located = [replace(spec, brain_address=address) for spec in specs]
            await asyncio.gather(*(self._launch(spec) for spec in located))
            await self._until(lambda: len(self._joined) == self._num_ranks)
            joined = [self._joined[spec.rank] for spec in specs]
            self.send(FormGroup(joined[0].store_address, plan_stages(joined)))
            await self._until(lambda: len(self._ready) == self._num_ranks)
            ready = [self._ready[spec.rank] for spec in specs]
            _refuse_unlike(ready)
            self._serving = True
        finally:
            if not self._serving:
                self.kill()
        return ready

    def send(self, message: RankDown) -> None:
        """Send to every rank."""
        frame = _encoded(message)
        for writer in self._writers.values():
            write_frame(writer, frame)

    def send_to(self, rank: int, message: RankDown) -> None:
        """Send to one rank; to one that has left, nothing."""
        if rank in self._writers:
            write_frame(self._writers[rank], _encoded(message))

    def kill(self) -> None:
        """End all rank processes at once."""
        self._killed = True
        for handle in self._handles:
            handle.kill()

    async def stop(self) -> None:
        """End the ranks without reporting their death: they are asked, and after `LEAVE_S` killed."""
        self._stopping = True
        self.send(Shutdown("the replica stops"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_S)
        self.kill()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ----------------------------------------------------------------------------------------- start

    async def _launch(self, spec: RankSpec) -> None:
        handle = await self._launcher.launch(spec)
        self._handles.append(handle)
        self._spawn(self._watch(spec.rank, handle), f"rank-watch {spec.rank}")
        if self._killed:  # another could not be launched
            handle.kill()

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if self._death:
                raise RankDiedError(self._death)
            self._progress.clear()
            await self._progress.wait()

    # ----------------------------------------------------------------------------------- connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        try:
            await prove_as_async_server(reader, writer, self._secret)
            while True:
                message = RANK_UP_CODEC.decode(await read_frame(reader))
                if isinstance(message, RankFailed):
                    self._failed(message)
                elif rank >= 0:
                    self._take(rank, message)
                elif isinstance(message, RankJoined) and self._is_expected(message.rank):
                    rank = message.rank
                    self._writers[rank] = writer
                    self._joined[rank] = message
                    self._progress.set()
        except PeerGoneError as error:
            if rank >= 0:
                self._suspect(f"rank {rank} left: {error}")
        except (TransferError, TimeoutError) as error:
            _log.warning("rank channel refused a connection: %s", error)
        finally:
            writer.close()
            if rank >= 0:
                self._channel_ends[rank].set()
                self._suspect(f"the channel of rank {rank} closed")

    def _is_expected(self, rank: int) -> bool:
        return 0 <= rank < self._num_ranks and rank not in self._joined

    def _take(self, rank: int, message: RankUp) -> None:
        if isinstance(message, RankReady):
            self._ready[rank] = message
            self._progress.set()
        else:
            self._on_message(rank, message)

    # ----------------------------------------------------------------------------------------- death

    async def _watch(self, rank: int, handle: RankHandle) -> None:
        reason = await handle.wait()
        with contextlib.suppress(TimeoutError):  # it may have said more than its status does
            await asyncio.wait_for(self._channel_ends[rank].wait(), _CULPRIT_S)
        if rank not in self._victims:
            self._died(reason)

    def _failed(self, message: RankFailed) -> None:
        reason = f"rank {message.rank}: {message.reason}"
        if message.lost_peer:
            self._victims.add(message.rank)
            self._suspect(reason)
        else:
            self._died(reason)

    def _suspect(self, reason: str) -> None:
        """Something has ended; if nothing better is heard, `reason` is why."""
        if not self._stopping and not self._death:
            asyncio.get_running_loop().call_later(_CULPRIT_S, self._died, reason)

    def _died(self, reason: str) -> None:
        if self._stopping or self._death:
            return
        self._death = reason
        self._progress.set()
        if self._serving:
            self._on_died(reason)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _encoded(message: RankDown) -> bytes:
    """Raise `WorkerError` rather than send what no rank would read: it would end them all."""
    frame = RANK_DOWN_CODEC.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WorkerError(
            f"a {type(message).__name__} of {len(frame)} bytes for the ranks exceeds {MAX_FRAME_BYTES}"
        )
    return frame


def _refuse_unlike(ready: Sequence[RankReady]) -> None:
    """`RankDiedError` when ranks, which may be on several hosts, have loaded unlike models."""
    for other in ready[1:]:
        if differences := ready[0].compatibility.differences(other.compatibility):
            raise RankDiedError(f"rank {other.rank} is not of rank 0's model: {'; '.join(differences)}")
